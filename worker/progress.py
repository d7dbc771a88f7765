"""Forward progress as health: a worker whose engine is stuck says so."""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Progress:
    """What the engine has to do, and how many steps it has finished."""

    has_work: bool
    num_steps: int


class ProgressMonitor:
    """Calls `on_change` with False when there is work but no step for `timeout_s`, and back."""

    def __init__(
        self,
        observe: Callable[[], Progress],
        on_change: Callable[[bool], None],
        *,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._observe = observe
        self._on_change = on_change
        self._timeout_s = timeout_s
        self._clock = clock
        self._num_steps = -1
        self._last_progress = clock()
        self.is_making_progress = True

    def check(self) -> None:
        progress = self._observe()
        now = self._clock()
        if not progress.has_work or progress.num_steps != self._num_steps:
            self._num_steps = progress.num_steps
            self._last_progress = now
        is_making_progress = now - self._last_progress < self._timeout_s
        if is_making_progress != self.is_making_progress:
            self.is_making_progress = is_making_progress
            level = logging.INFO if is_making_progress else logging.ERROR
            logger.log(
                level,
                "the engine makes progress again" if is_making_progress else "the engine is stuck",
                extra={"num_steps": progress.num_steps},
            )
            self._on_change(is_making_progress)

    async def run(self) -> None:
        """Check often enough to be at most a tenth of the timeout late, until cancelled."""
        while True:
            self.check()
            await asyncio.sleep(self._timeout_s / 10)
