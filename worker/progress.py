"""Forward progress as health: a worker whose engine is stuck or gone says so."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Self

logger = logging.getLogger(__name__)


class ProgressMonitor:
    """Calls `on_change` with False when a step takes longer than `timeout_s`, and back.

    It looks once a second, or ten times in `timeout_s` if that is more often.
    """

    def __init__(
        self,
        step_age_s: Callable[[], float],
        on_change: Callable[[bool], Awaitable[None]],
        *,
        timeout_s: float,
    ) -> None:
        self._step_age_s = step_age_s
        self._on_change = on_change
        self._timeout_s = timeout_s
        self._makes_progress = True

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._check_for_ever())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})

    async def check(self) -> None:
        age_s = self._step_age_s()
        makes_progress = age_s < self._timeout_s
        if makes_progress == self._makes_progress:
            return
        self._makes_progress = makes_progress
        if makes_progress:
            logger.info("the engine makes progress again")
        else:
            logger.error("the engine is stuck", extra={"step_age_s": round(age_s, 3)})
        await self._on_change(makes_progress)

    async def _check_for_ever(self) -> None:
        while True:
            await self.check()
            await asyncio.sleep(min(1.0, self._timeout_s / 10))
