"""A clock for bounds of time that a machine which stands still must not break."""

import asyncio
from contextlib import suppress
from typing import Self

_TICK_S = 0.01


class LoopClock:
    """Goes on by a tick with each turn that the event loop makes, a tick apart at least.

    Whoever waits for a timeout lets the loop turn all the while, and is seen to wait. A process
    that gets no processor makes no turns: however long that was, it is a single tick here.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._ticking: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._ticking = asyncio.create_task(self._tick())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._ticking is not None
        self._ticking.cancel()
        with suppress(asyncio.CancelledError):
            await self._ticking

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(_TICK_S)
            self.now_s += _TICK_S
