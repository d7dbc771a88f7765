"""Who may still read which held blocks, and until when."""

import asyncio
import heapq
import logging
import math
import time
from collections.abc import Callable
from typing import Self

from mesh import metrics
from mesh.errors import KvLeaseExpired

logger = logging.getLogger(__name__)


class LeaseTable:
    """Live leases; calls `release_hold` exactly once for each, at release or at expiry.

    Inside its block leases end by themselves. A lease is over when its time is, whether
    or not anybody has noticed yet.
    """

    def __init__(
        self,
        release_hold: Callable[[str], None],
        *,
        lease_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._release_hold = release_hold
        self._lease_s = lease_s
        self._clock = clock
        self._expires_at: dict[str, float] = {}
        # One entry per lease. A renewal leaves it where it is: an entry that comes to
        # the top before its lease is over goes back in with the new time. Entries are
        # thus never later than their leases, so none that is over hides behind one
        # that is not.
        self._heap: list[tuple[float, str]] = []
        self._granted = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()

    async def __aenter__(self) -> Self:
        self._reaper = asyncio.create_task(self._reap_for_ever())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._reaper.cancel()
        await asyncio.wait({self._reaper})

    def __len__(self) -> int:
        return len(self._expires_at)

    def open(self, handle_id: str) -> float:
        """Start a lease whose time does not run yet; returns how long it will last then.

        While a prefill runs it is the holder itself who needs the blocks.
        """
        self._expires_at[handle_id] = math.inf
        self._empty.clear()
        return self._lease_s

    def is_live(self, handle_id: str) -> bool:
        self.expire()
        return handle_id in self._expires_at

    def grant(self, handle_id: str) -> float:
        """Start a lease, or the time of one that is open; returns its seconds."""
        expires_at = self._clock() + self._lease_s
        self._expires_at[handle_id] = expires_at
        heapq.heappush(self._heap, (expires_at, handle_id))
        self._granted.set()
        self._empty.clear()
        return self._lease_s

    def renew(self, handle_id: str) -> float:
        """Let a live lease last `lease_s` from now; raises KvLeaseExpired after its end."""
        self.expire()
        if handle_id not in self._expires_at:
            raise KvLeaseExpired(f"the lease of {handle_id} is over")
        if self._expires_at[handle_id] < math.inf:
            self._expires_at[handle_id] = self._clock() + self._lease_s
        return self._lease_s

    def release(self, handle_id: str) -> bool:
        """End a lease; whether it was live until now. Unknown handles are not."""
        self.expire()
        if handle_id not in self._expires_at:
            return False
        self._end(handle_id)
        return True

    def release_all(self, prefix: str) -> bool:
        """End every lease whose handle begins so; whether any was live until now."""
        handle_ids = [handle_id for handle_id in self._expires_at if handle_id.startswith(prefix)]
        return sum(self.release(handle_id) for handle_id in handle_ids) > 0

    def expire(self) -> None:
        """End every lease whose time is over."""
        now = self._clock()
        while self._heap and self._heap[0][0] <= now:
            _, handle_id = heapq.heappop(self._heap)
            expires_at = self._expires_at.get(handle_id)
            if expires_at is None:
                continue
            if expires_at > now:
                heapq.heappush(self._heap, (expires_at, handle_id))
                continue
            self._end(handle_id)
            metrics.LEASE_EXPIRIES.add(1)
            logger.warning("a lease expired", extra={"handle_id": handle_id})

    async def wait_until_empty(self) -> None:
        """For a drain: until nobody may read held blocks any more."""
        await self._empty.wait()

    async def _reap_for_ever(self) -> None:
        while True:
            self._granted.clear()
            self.expire()
            delay_s = self._heap[0][0] - self._clock() if self._heap else None
            try:
                async with asyncio.timeout(delay_s):
                    await self._granted.wait()
            except TimeoutError:
                continue

    def _end(self, handle_id: str) -> None:
        del self._expires_at[handle_id]
        if not self._expires_at:
            self._empty.set()
        self._release_hold(handle_id)
