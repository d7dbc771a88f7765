"""One timer for waits that follow each other."""

import asyncio
import time
from contextlib import suppress

import pytest

from gateway.patience import Patience


async def forever() -> None:
    await asyncio.Event().wait()


async def test_a_wait_that_lasts_too_long_ends() -> None:
    patience = Patience()
    with pytest.raises(TimeoutError), patience.for_(0.01):
        await forever()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_a_later_wait_has_a_bound_of_its_own() -> None:
    patience = Patience()
    loop = asyncio.get_running_loop()
    with patience.for_(0.03):
        await asyncio.sleep(0)
    begun_at = loop.time()
    with pytest.raises(TimeoutError), patience.for_(0.1):
        await forever()
    assert loop.time() - begun_at >= 0.09


async def test_a_shorter_bound_after_a_longer_one_holds() -> None:
    patience = Patience()
    loop = asyncio.get_running_loop()
    begun_at = loop.time()
    with patience.for_(60):
        await asyncio.sleep(0)
    with pytest.raises(TimeoutError), patience.for_(0.01):
        await asyncio.wait_for(forever(), 5)
    assert loop.time() - begun_at < 5
    patience.close()


async def test_between_waits_nothing_ends() -> None:
    patience = Patience()
    with patience.for_(0.01):
        await asyncio.sleep(0)
    await asyncio.sleep(0.03)
    with patience.for_(5):
        await asyncio.sleep(0)
    patience.close()


async def test_somebody_elses_cancellation_stays_one() -> None:
    patience = Patience()
    outcome: list[BaseException] = []

    async def wait() -> None:
        try:
            with patience.for_(60):
                await forever()
        except BaseException as error:
            outcome.append(error)
            raise

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
    patience.close()
    assert isinstance(outcome[0], asyncio.CancelledError)


async def test_a_process_that_was_frozen_reads_what_came_meanwhile() -> None:
    patience = Patience()
    loop = asyncio.get_running_loop()
    answer = loop.create_future()

    with patience.for_(0.05):
        # The loop stands still for longer than that, and the answer takes some turns to be read.
        loop.call_soon(time.sleep, 1.2)
        loop.call_later(0.01, lambda: loop.call_later(0.1, answer.set_result, "here"))
        assert await answer == "here"

    with pytest.raises(TimeoutError), patience.for_(0.05):
        await forever()
