"""Requests being answered: counted for metrics, waited for and ended at shutdown."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from gateway.choices import Choices
from mesh import metrics
from mesh.errors import Draining, QueueFull

_RETRY_AFTER_S = 1.0


class InFlight:
    """Every request from its first byte to its last."""

    def __init__(self, max_requests: int) -> None:
        self._max_requests = max_requests
        self._num_requests = 0
        self._is_draining = False
        self._choices: set[Choices] = set()
        self._failure: Exception | None = None
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    @property
    def num_requests(self) -> int:
        return self._num_requests

    @contextmanager
    def request(self) -> Iterator[None]:
        """Count a request while it is answered."""
        self._num_requests += 1
        self._is_idle.clear()
        try:
            yield
        finally:
            self._num_requests -= 1
            if self._num_requests == 0:
                self._is_idle.set()

    def check_room(self) -> None:
        """Raise QueueFull when this request, already counted, is one too many; or Draining."""
        if self._is_draining:
            raise Draining("the gateway is draining")
        if self._num_requests > self._max_requests:
            metrics.REFUSALS.add(1, {"reason": "too_many_requests"})
            raise QueueFull(
                f"{self._max_requests} requests are being answered", retry_after_s=_RETRY_AFTER_S
            )

    @contextmanager
    def running(self, choices: Choices) -> Iterator[Choices]:
        """Let `fail` reach these choices while they run."""
        self._choices.add(choices)
        if self._failure is not None:
            choices.fail(self._failure)
        try:
            yield choices
        finally:
            self._choices.discard(choices)

    def drain(self) -> None:
        """Refuse whoever comes from now on, over connections that others still use."""
        self._is_draining = True

    async def wait_idle(self) -> None:
        await self._is_idle.wait()

    def fail(self, error: Exception) -> None:
        """End every request that runs, and those that are about to, with `error`."""
        self._failure = error
        for choices in self._choices:
            choices.fail(error)
