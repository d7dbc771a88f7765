"""A question that is asked again and again, beside everything else."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Self

logger = logging.getLogger(__name__)


class Poller:
    """Calls `check` every `interval_s`, and at once when poked, until it is left."""

    def __init__(self, name: str, check: Callable[[], Awaitable[object]], interval_s: float):
        self._name = name
        self._check = check
        self._interval_s = interval_s
        self._poked = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run(), name=self._name)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    def poke(self) -> None:
        """Check now."""
        self._poked.set()

    async def _run(self) -> None:
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._interval_s):
                    await self._poked.wait()
            self._poked.clear()
            try:
                await self._check()
            except Exception:
                # A bug in one check must not end all that follow.
                logger.exception("check failed", extra={"check": self._name})
