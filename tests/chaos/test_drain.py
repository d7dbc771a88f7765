"""A worker that is told to stop lets streams finish or moves them, in the time that it has."""

import asyncio
import signal
import time

import httpx
import pytest

from mesh.home import ServiceRecord
from mesh.supervisor import find_process
from tests.chaos.cells import CLEAN_WITHIN_S, gateway_urls
from tests.chaos.conftest import DRAIN_TIMEOUT_S
from tests.chaos.probe import MeshProbe, signal_service
from tests.chaos.streams import Answer, ask_one, body

# It may take as long again to end what is left, at worst.
_STOPPED_WITHIN_S = DRAIN_TIMEOUT_S + 3


async def has_running(probe: MeshProbe) -> ServiceRecord | None:
    for name, load in (await probe.loads("decode")).items():
        if load.num_running:
            return probe.service(name)
    return None


@pytest.mark.timeout(120)
async def test_a_stream_longer_than_the_drain_moves_and_is_whole(probe: MeshProbe) -> None:
    url = gateway_urls(probe)[0]
    long = {"max_tokens": 400}
    async with httpx.AsyncClient(timeout=90) as http:
        undisturbed = Answer()
        await ask_one(http, url, body(9, "drain-undisturbed") | long, undisturbed)
        assert undisturbed.error is None

        answer = Answer()
        asking = asyncio.create_task(ask_one(http, url, body(9, "drain-moved") | long, answer))
        while (victim := await has_running(probe)) is None:
            assert not asking.done()
        signal_service(victim, signal.SIGTERM)
        told = time.monotonic()
        # Other processes have no event to wait for.
        while find_process(victim) is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        stopped_after_s = time.monotonic() - told
        was_running = not asking.done()
        await asking

    assert answer.differs_from(undisturbed) is None
    assert was_running, "the stream ended before it had to move"
    assert DRAIN_TIMEOUT_S * 0.9 < stopped_after_s < _STOPPED_WITHIN_S
    assert await probe.wait_until_clean(CLEAN_WITHIN_S, but_for={victim.name}) == {}
    assert await probe.wait_until_whole(60, replaced=victim) == {}
