"""A breaker per worker: who failed gets no placements for a while, then one, then all."""

import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum

from mesh import metrics

logger = logging.getLogger(__name__)

# A process that comes back from the dead after longer than this starts with a clean record.
_REMEMBERED_S = 600.0


class Failure(StrEnum):
    """How a worker failed a request, as its caller saw it."""

    LOST = "lost"
    FAULTY = "faulty"


class BreakerState(StrEnum):
    """Half open is open whose time is over: one placement finds out."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


@dataclass(frozen=True, slots=True)
class BreakerSettings:
    """When a breaker opens, and for how long."""

    # Consecutive faults. A lost connection needs no second: the next request would break too.
    max_failures: int = 3
    first_open_s: float = 1.0
    max_open_s: float = 30.0


@dataclass(slots=True)
class _Breaker:
    num_failures: int = 0
    # 0: closed. Doubles with each probe that fails.
    open_s: float = 0.0
    opened_at: float = 0.0
    # The placement that finds out.
    probe: object | None = None
    # Since when its process is not registered.
    gone_since: float | None = None


class Breakers:
    """By the holder id of a worker, so that a new process starts with a clean record.

    An open breaker takes no notice of reports: they are of requests that were placed before it
    opened, and tell nothing new. A half-open one listens to its probe alone.
    """

    def __init__(
        self, settings: BreakerSettings, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._settings = settings
        self._clock = clock
        # Of those who have failed since they last succeeded.
        self._breakers: dict[str, _Breaker] = {}

    def state(self, holder_id: str) -> BreakerState:
        breaker = self._breakers.get(holder_id)
        if breaker is None or not breaker.open_s:
            return BreakerState.CLOSED
        is_over = self._clock() - breaker.opened_at >= breaker.open_s
        return BreakerState.HALF_OPEN if is_over else BreakerState.OPEN

    @property
    def states(self) -> Mapping[str, BreakerState]:
        """Of registered workers that are not simply closed, and perhaps of some that are."""
        return {
            holder_id: self.state(holder_id)
            for holder_id, breaker in self._breakers.items()
            if breaker.gone_since is None
        }

    def next_probe_in_s(self) -> float | None:
        """When the first open breaker will be half open; None while none is open."""
        now = self._clock()
        ends = [one.opened_at + one.open_s for one in self._breakers.values() if one.open_s]
        return min((end - now for end in ends if end > now), default=None)

    def admits(self, holder_id: str) -> bool:
        """Whether a worker may get a placement now."""
        if not self._breakers:
            return True
        state = self.state(holder_id)
        if state is BreakerState.HALF_OPEN:
            return self._breakers[holder_id].probe is None
        return state is BreakerState.CLOSED

    def placed(self, holder_id: str, placement: object) -> None:
        """A half-open breaker has found its probe."""
        if self.state(holder_id) is BreakerState.HALF_OPEN:
            self._breakers[holder_id].probe = placement

    def left(self, holder_id: str, placement: object) -> None:
        """A placement is over; if nobody said how it went, another one has to find out."""
        breaker = self._breakers.get(holder_id)
        if breaker is not None and breaker.probe is placement:
            breaker.probe = None

    def succeeded(self, holder_id: str, placement: object) -> None:
        """The worker did its part of a placement."""
        breaker = self._breakers.get(holder_id)
        if breaker is None or (breaker.open_s and breaker.probe is not placement):
            return
        if breaker.open_s:
            logger.info("worker gets placements again", extra={"holder_id": holder_id})
        del self._breakers[holder_id]

    def failed(self, holder_id: str, placement: object, failure: Failure) -> None:
        """The worker failed a placement."""
        breaker = self._breakers.setdefault(holder_id, _Breaker())
        if breaker.open_s and breaker.probe is not placement:
            return
        breaker.num_failures += 1
        is_lost = failure is Failure.LOST
        if breaker.open_s or is_lost or breaker.num_failures >= self._settings.max_failures:
            self._open(holder_id, breaker, failure)

    def registered(self, holder_ids: Collection[str]) -> None:
        """Who is there now. The breaker of a process that is not stays as it is: one that was
        frozen or cut off may come back, no better than before. Only a new process with the same
        worker id, or a long absence, ends it.
        """
        now = self._clock()
        replaced = {_worker_id(holder_id) for holder_id in holder_ids}
        for holder_id, breaker in list(self._breakers.items()):
            if holder_id in holder_ids:
                breaker.gone_since = None
                continue
            if breaker.gone_since is None:
                breaker.gone_since = now
            if _worker_id(holder_id) in replaced or now - breaker.gone_since > _REMEMBERED_S:
                del self._breakers[holder_id]

    def _open(self, holder_id: str, breaker: _Breaker, failure: Failure) -> None:
        longer_s = 2 * breaker.open_s or self._settings.first_open_s
        breaker.open_s = min(longer_s, self._settings.max_open_s)
        breaker.opened_at = self._clock()
        breaker.probe = None
        metrics.BREAKER_OPENINGS.add(1, {"failure": failure})
        logger.warning(
            "worker gets no placements for a while",
            extra={
                "holder_id": holder_id,
                "failure": failure,
                "num_failures": breaker.num_failures,
                "open_s": breaker.open_s,
            },
        )


def _worker_id(holder_id: str) -> str:
    return holder_id.rpartition("@")[0]
