"""The bounded queue before placement: who may go next, and when to say no."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from enum import StrEnum
from itertools import count
from typing import Generic, TypeVar

from mesh import metrics
from mesh.errors import DeadlineExceeded, MeshError, QueueFull
from scheduler_svc.fair_queue import FairQueue

RequestT = TypeVar("RequestT")
GrantT = TypeVar("GrantT")

MIN_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 60.0


class PriorityClass(StrEnum):
    """Offline requests are served while no online one waits, or after they have waited long."""

    ONLINE = "online"
    OFFLINE = "offline"


@dataclass(frozen=True, slots=True)
class QueueSettings:
    """Bounds of the queue."""

    max_num_waiting: int = 256
    # A request that has waited this long goes before all younger ones of its tenant, whatever
    # their priority, and as if it were online.
    max_overtaken_s: float = 30.0
    # Tokens that a tenant may have served before the turn of the next one comes.
    quantum: int = 2048


@dataclass(frozen=True, slots=True)
class Claim:
    """What the queue knows of a request."""

    # Requests of one lane never overtake each other because there is more room for small ones;
    # lanes do not wait for each other.
    lane: Hashable
    tenant: str = ""
    priority_class: PriorityClass = PriorityClass.ONLINE
    # Smaller is sooner.
    priority: int = 0
    num_tokens: int = 1


class AdmissionQueue(Generic[RequestT, GrantT]):
    """Gives requests what they ask for, in fair turns, as far as there is room.

    `grant` answers None when there is no room now and raises when waiting is in vain; `release`
    takes a grant back. A request that `may_start` holds back does not hold back the others.
    """

    def __init__(
        self,
        grant: Callable[[RequestT], GrantT | None],
        release: Callable[[GrantT], None],
        settings: QueueSettings,
        clock: Callable[[], float] = time.monotonic,
        may_start: Callable[[RequestT], bool] = lambda request: True,
    ) -> None:
        self._grant = grant
        self._release = release
        self._settings = settings
        self._clock = clock
        self._may_start = may_start
        self._arrivals = count()
        self._lanes: dict[Hashable, _Lane[RequestT, GrantT]] = {}
        self._num_waiting = 0
        self._num_admitted = 0
        # How long the last grants were held.
        self._held_s: deque[float] = deque(maxlen=64)
        self._closed: MeshError | None = None
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    @property
    def num_admitted(self) -> int:
        return self._num_admitted

    def waiting(self) -> Iterator[tuple[Claim, RequestT]]:
        """Those who wait, in no order."""
        for lane in self._lanes.values():
            for entry in lane:
                yield entry.claim, entry.request

    @asynccontextmanager
    async def admitted(
        self, request: RequestT, claim: Claim, timeout_s: float
    ) -> AsyncIterator[GrantT]:
        """Wait for a grant and hold it for the block. Whoever leaves, in whichever state, gives
        back what it had, and its room goes to the next at once."""
        entry = self._enter(request, claim)
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
        """There may be more room than before: serve whoever fits, in fair turns."""
        # Lanes that have waited longest come first.
        for lane in sorted(self._lanes.values(), key=_Lane.oldest_arrival):
            self._serve(lane)

    def close(self, error: MeshError) -> None:
        """Answer everyone who waits, and everyone who comes, with `error`."""
        self._closed = error
        for lane in list(self._lanes.values()):
            for entry in list(lane):
                self._refuse(entry, error)

    async def wait_idle(self) -> None:
        """Until nobody waits and nothing is granted."""
        await self._idle.wait()

    def retry_after_s(self) -> float:
        """When the queue of now will have drained, at the pace at which grants of late ended.

        By how long they were held: the time between their ends is long after a quiet hour too.
        """
        if not self._held_s:
            return MIN_RETRY_AFTER_S
        mean_s = sum(self._held_s) / len(self._held_s)
        estimate = self.num_waiting * mean_s / max(1, self._num_admitted)
        return min(max(estimate, MIN_RETRY_AFTER_S), MAX_RETRY_AFTER_S)

    def _enter(self, request: RequestT, claim: Claim) -> "_Entry[RequestT, GrantT]":
        if self._closed is not None:
            raise self._closed
        entry: _Entry[RequestT, GrantT] = _Entry(
            request, claim, next(self._arrivals), self._clock()
        )
        lane = self._lanes.get(claim.lane)
        if lane is None:
            lane = self._lanes[claim.lane] = _Lane(self._settings)
        lane.add(entry)
        self._num_waiting += 1
        self._idle.clear()
        self._serve(lane)
        # Only now: the bound is on those that must wait, and a lane with room never waits.
        if self._num_waiting > self._settings.max_num_waiting and not entry.answer.done():
            self._make_room(entry)
        return entry

    def _serve(self, lane: "_Lane[RequestT, GrantT]") -> None:
        while (entry := lane.next(self._clock(), self._is_eligible)) is not None:
            try:
                grant = self._grant(entry.request)
            except Exception as error:
                self._refuse(entry, error)
                continue
            if grant is None:
                return
            lane.charge(entry)
            self._remove(entry)
            entry.grant = grant
            entry.granted_at = self._clock()
            entry.answer.set_result(grant)
            self._num_admitted += 1

    def _is_eligible(self, entry: "_Entry[RequestT, GrantT]") -> bool:
        # An answered entry is that of a waiter who was cancelled and has yet to leave.
        return not entry.answer.done() and self._may_start(entry.request)

    def _make_room(self, newcomer: "_Entry[RequestT, GrantT]") -> None:
        """Turn one away, so that neither an offline job nor one tenant can keep others out."""
        metrics.REJECTIONS.add(1, {"reason": "queue_full"})
        error = QueueFull(
            f"{self._num_waiting - 1} requests are waiting for a place",
            retry_after_s=self.retry_after_s(),
        )
        self._refuse(self._lanes[newcomer.claim.lane].least_entitled(), error)
        if newcomer.answer.done():
            newcomer.withdraw()
            self._settle()
            raise error

    def _refuse(self, entry: "_Entry[RequestT, GrantT]", error: Exception) -> None:
        self._remove(entry)
        if not entry.answer.done():
            entry.answer.set_exception(error)

    def _remove(self, entry: "_Entry[RequestT, GrantT]") -> None:
        lane = self._lanes[entry.claim.lane]
        lane.remove(entry)
        self._num_waiting -= 1
        entry.is_waiting = False
        if not len(lane):
            del self._lanes[entry.claim.lane]

    def _leave(self, entry: "_Entry[RequestT, GrantT]") -> None:
        """A grant is the entry's, not its waiter's: one that arrives together with the waiter's
        cancellation is still given back."""
        if entry.is_waiting:
            self._remove(entry)
        entry.withdraw()
        grant, entry.grant = entry.grant, None
        if grant is not None:
            self._num_admitted -= 1
            self._held_s.append(self._clock() - entry.granted_at)
            self._release(grant)
        # Also after one that only waited: it may have been the head that blocked its lane.
        self.wake()
        self._settle()

    def _settle(self) -> None:
        if not self._num_waiting and self._num_admitted == 0:
            self._idle.set()


class _Lane(Generic[RequestT, GrantT]):
    """Those who compete for the same room: the online ones, and the others after them."""

    def __init__(self, settings: QueueSettings) -> None:
        self._max_overtaken_s = settings.max_overtaken_s
        self._classes: dict[PriorityClass, FairQueue[_Entry[RequestT, GrantT]]] = {
            one: FairQueue(quantum=settings.quantum, max_overtaken_s=settings.max_overtaken_s)
            for one in PriorityClass
        }

    def __len__(self) -> int:
        return sum(map(len, self._classes.values()))

    def __iter__(self) -> "Iterator[_Entry[RequestT, GrantT]]":
        for queue in self._classes.values():
            yield from queue

    def oldest_arrival(self) -> int:
        return min(entry.arrival for entry in self)

    def add(self, entry: "_Entry[RequestT, GrantT]") -> None:
        entry.served_as = entry.claim.priority_class
        self._classes[entry.served_as].add(entry)

    def remove(self, entry: "_Entry[RequestT, GrantT]") -> None:
        self._classes[entry.served_as].remove(entry)

    def charge(self, entry: "_Entry[RequestT, GrantT]") -> None:
        self._classes[entry.served_as].charge(entry)

    def next(
        self, now: float, is_eligible: "Callable[[_Entry[RequestT, GrantT]], bool]"
    ) -> "_Entry[RequestT, GrantT] | None":
        self._promote(now)
        for queue in self._classes.values():
            entry = queue.next(now, is_eligible)
            if entry is not None:
                return entry
        return None

    def least_entitled(self) -> "_Entry[RequestT, GrantT]":
        """The youngest of the tenant that has most waiting, offline before online."""
        queue = self._classes[PriorityClass.OFFLINE] or self._classes[PriorityClass.ONLINE]
        by_tenant = queue.num_queued_by_tenant
        return queue.youngest_of(max(by_tenant, key=lambda tenant: by_tenant[tenant]))

    def _promote(self, now: float) -> None:
        offline = self._classes[PriorityClass.OFFLINE]
        for entry in [one for one in offline if now - one.entered_at >= self._max_overtaken_s]:
            offline.remove(entry)
            entry.served_as = PriorityClass.ONLINE
            self._classes[PriorityClass.ONLINE].add(entry)


class _Entry(Generic[RequestT, GrantT]):
    """One request in the queue, and then what it was given."""

    def __init__(self, request: RequestT, claim: Claim, arrival: int, entered_at: float) -> None:
        self.request = request
        self.claim = claim
        self.tenant = claim.tenant
        self.priority = claim.priority
        self.num_tokens = claim.num_tokens
        self.arrival = arrival
        self.entered_at = entered_at
        self.served_as = claim.priority_class
        self.is_waiting = True
        self.grant: GrantT | None = None
        self.granted_at = entered_at
        self.answer: asyncio.Future[GrantT] = asyncio.get_running_loop().create_future()

    def withdraw(self) -> None:
        """Nobody will read the answer any more."""
        if not self.answer.cancel() and not self.answer.cancelled():
            # Marks an error as seen, so that asyncio does not report it as lost.
            self.answer.exception()
