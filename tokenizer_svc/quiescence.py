"""Knows when nothing is in flight."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class Quiescence:
    """Counts pieces of work from their beginning to their end."""

    def __init__(self) -> None:
        self._num_busy = 0
        self._is_quiet = asyncio.Event()
        self._is_quiet.set()

    def begin(self) -> None:
        self._num_busy += 1
        self._is_quiet.clear()

    def end(self) -> None:
        self._num_busy -= 1
        if self._num_busy == 0:
            self._is_quiet.set()

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Count a block of work."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    async def wait(self) -> None:
        """Return at a moment in which nothing is in flight."""
        await self._is_quiet.wait()
