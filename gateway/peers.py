"""Questions that any of several equal services can answer, such as schedulers and tokenizers."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from mesh.client import is_connection_lost
from mesh.errors import DeadlineExceeded, Draining, MeshError

logger = logging.getLogger(__name__)

Answer = TypeVar("Answer")

_FIRST_DELAY_S = 0.02
_MAX_DELAY_S = 0.5
# A service that has said nothing for so long may be frozen.
_SILENCE_S = 0.25
# Failures after which nobody else is likely to do better.
_MAX_FAILURES = 3


async def ask_any(ask: Callable[[], Awaitable[Answer]], *, patience_s: float) -> Answer:
    """The answer of whichever service gives one; their refusals are answers too.

    One that is lost or drains is not asked again, since the channel to all of them knows who is
    connected. While none is, for `patience_s` from the first failure on, the question is repeated.
    """
    delay_s = _FIRST_DELAY_S
    give_up_at: float | None = None
    while True:
        try:
            return await ask()
        except MeshError as error:
            if not isinstance(error, Draining) and not is_connection_lost(error):
                raise
            now = time.monotonic()
            give_up_at = give_up_at or now + patience_s
            if now >= give_up_at:
                raise
            logger.warning("asking another service", extra={"reason": str(error)})
        await asyncio.sleep(delay_s)
        delay_s = min(2 * delay_s, _MAX_DELAY_S)


async def first_answer(ask: Callable[[float], Awaitable[Answer]], *, timeout_s: float) -> Answer:
    """What the first service says that says anything, for questions that cost nothing.

    A frozen service looks connected for seconds. As long as nobody answers, one more is asked
    every quarter of a second; the channel to all of them takes them in turn.
    """
    gives_up_at = time.monotonic() + timeout_s
    asked: set[asyncio.Task[Answer]] = set()
    failures: list[MeshError] = []
    try:
        while (left_s := gives_up_at - time.monotonic()) > 0:
            asked.add(asyncio.ensure_future(ask(left_s)))
            next_at = time.monotonic() + min(left_s, _SILENCE_S)
            while asked and (silent_s := next_at - time.monotonic()) > 0:
                done, asked = await asyncio.wait(
                    asked, timeout=silent_s, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    try:
                        return task.result()
                    except MeshError as error:
                        failures.append(error)
            if len(failures) >= _MAX_FAILURES:
                break
    finally:
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
    raise failures[-1] if failures else DeadlineExceeded(f"no answer within {timeout_s:.3g} s")
