"""The bounded queue before placement: who may go next, and when to say no."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count
from typing import Generic, TypeVar

from mesh.errors import DeadlineExceeded, MeshError, QueueFull

RequestT = TypeVar("RequestT")
GrantT = TypeVar("GrantT")

_MIN_RETRY_AFTER_S = 1.0
_MAX_RETRY_AFTER_S = 60.0


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """Bounds of the queue."""

    max_num_waiting: int = 256
    # A request that has waited this long goes before all younger ones, whatever their priority.
    max_overtaken_s: float = 30.0


class AdmissionQueue(Generic[RequestT, GrantT]):
    """Gives requests what they ask for, in order, as far as there is room.

    `grant` answers None when there is no room now and raises when waiting is in vain; `release`
    takes a grant back. Smaller priorities go first, equal ones in order of arrival. Requests of
    one lane never overtake each other, so that a large one is not starved by small ones; lanes
    do not wait for each other.
    """

    def __init__(
        self,
        grant: Callable[[RequestT], GrantT | None],
        release: Callable[[GrantT], None],
        settings: QueueSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._grant = grant
        self._release = release
        self._settings = settings
        self._clock = clock
        self._arrivals = count()
        # In order of arrival.
        self._waiting: dict[int, _Entry[RequestT, GrantT]] = {}
        self._num_admitted = 0
        self._ended_at: deque[float] = deque(maxlen=64)
        self._closed: MeshError | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_admitted(self) -> int:
        return self._num_admitted

    @asynccontextmanager
    async def admitted(
        self, request: RequestT, *, lane: Hashable, priority: int, timeout_s: float
    ) -> AsyncIterator[GrantT]:
        """Wait for a grant and hold it for the block. Whoever leaves, in whichever state, gives
        back what it had, and its room goes to the next at once."""
        entry = self._enter(request, lane, priority)
        try:
            try:
                async with asyncio.timeout(timeout_s):
                    grant = await entry.answer
            except TimeoutError:
                raise DeadlineExceeded(f"no placement within {timeout_s:.1f} s") from None
            yield grant
        finally:
            self._leave(entry)

    def wake(self) -> None:
        """There may be more room than before: serve whoever fits, in order."""
        blocked_lanes: set[Hashable] = set()
        for entry in sorted(self._waiting.values(), key=self._rank):
            # An answered entry is that of a waiter who was cancelled and has yet to leave.
            if entry.lane in blocked_lanes or entry.answer.done():
                continue
            try:
                grant = self._grant(entry.request)
            except Exception as error:
                self._refuse(entry, error)
                continue
            if grant is None:
                blocked_lanes.add(entry.lane)
            else:
                self._admit(entry, grant)

    def close(self, error: MeshError) -> None:
        """Answer everyone who waits, and everyone who comes, with `error`."""
        self._closed = error
        for entry in list(self._waiting.values()):
            if not entry.answer.done():
                self._refuse(entry, error)

    async def wait_idle(self) -> None:
        """Until nobody waits and nothing is granted."""
        await self._idle.wait()

    def _enter(
        self, request: RequestT, lane: Hashable, priority: int
    ) -> "_Entry[RequestT, GrantT]":
        if self._closed is not None:
            raise self._closed
        entry: _Entry[RequestT, GrantT] = _Entry(
            request, lane, priority, next(self._arrivals), self._clock()
        )
        self._waiting[entry.arrival] = entry
        self._idle.clear()
        self.wake()
        # Only now: the bound is on those that must wait, and a lane with room never waits.
        if self.num_waiting > self._settings.max_num_waiting and not entry.answer.done():
            self._leave(entry)
            raise QueueFull(
                f"{self.num_waiting} requests are waiting for a place",
                retry_after_s=self._retry_after_s(),
            )
        return entry

    def _rank(self, entry: "_Entry[RequestT, GrantT]") -> tuple[int, int, int]:
        is_aged = self._clock() - entry.entered_at >= self._settings.max_overtaken_s
        return (0, 0, entry.arrival) if is_aged else (1, entry.priority, entry.arrival)

    def _admit(self, entry: "_Entry[RequestT, GrantT]", grant: GrantT) -> None:
        del self._waiting[entry.arrival]
        entry.grant = grant
        entry.answer.set_result(grant)
        self._num_admitted += 1

    def _refuse(self, entry: "_Entry[RequestT, GrantT]", error: Exception) -> None:
        del self._waiting[entry.arrival]
        entry.answer.set_exception(error)

    def _leave(self, entry: "_Entry[RequestT, GrantT]") -> None:
        """A grant is the entry's, not its waiter's: one that arrives together with the waiter's
        cancellation is still given back."""
        self._waiting.pop(entry.arrival, None)
        entry.withdraw()
        grant, entry.grant = entry.grant, None
        if grant is not None:
            self._num_admitted -= 1
            self._ended_at.append(self._clock())
            self._release(grant)
        # Also after one that only waited: it may have been the head that blocked its lane.
        self.wake()
        if not self._waiting and self._num_admitted == 0:
            self._idle.set()

    def _retry_after_s(self) -> float:
        """When the queue of now will have drained, at the pace of late."""
        if len(self._ended_at) < 2:
            return _MIN_RETRY_AFTER_S
        period_s = (self._clock() - self._ended_at[0]) / (len(self._ended_at) - 1)
        estimate = (self.num_waiting + 1) * period_s
        return min(max(estimate, _MIN_RETRY_AFTER_S), _MAX_RETRY_AFTER_S)


class _Entry(Generic[RequestT, GrantT]):
    """One request in the queue, and then what it was given."""

    def __init__(
        self, request: RequestT, lane: Hashable, priority: int, arrival: int, entered_at: float
    ) -> None:
        self.request = request
        self.lane = lane
        self.priority = priority
        self.arrival = arrival
        self.entered_at = entered_at
        self.grant: GrantT | None = None
        self.answer: asyncio.Future[GrantT] = asyncio.get_running_loop().create_future()

    def withdraw(self) -> None:
        """Nobody will read the answer any more."""
        if not self.answer.cancel() and not self.answer.cancelled():
            # Marks an error as seen, so that asyncio does not report it as lost.
            self.answer.exception()
