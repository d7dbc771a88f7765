"""A local copy of the block index, so that Redis is off the request's path."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from redis.exceptions import RedisError

from mesh.block_index import BATCH, BlockEvent, IndexState, PrefixHit
from scheduler_svc.block_table import BlockTable

logger = logging.getLogger(__name__)

_CHUNK = 4096


class IndexFeed(Protocol):
    """The part of `mesh.block_index.BlockIndex` that a copy is made from."""

    async def state(self, model: str) -> IndexState: ...

    async def events_after(self, model: str, event_id: str, limit: int) -> list[BlockEvent]: ...

    async def wait_for_event(self, model: str, event_id: str, wait_s: float) -> None: ...

    async def blocks_of(self, model: str, shelf: str, cursor: int) -> tuple[int, list[bytes]]: ...


class BlockReplica:
    """Follows the events of one model's index.

    The events of a shelf are numbered without gaps. A number that is not the next one, or an
    audit that finds a number further on than ours, means that something was missed: the shelf
    is loaded again as a whole. While Redis is away the copy stands as it is; if Redis comes back
    without its data, a shelf counts until it is published again, at most for `forget_s`.
    """

    def __init__(
        self,
        feed: IndexFeed,
        model: str,
        *,
        table: BlockTable | None = None,
        interval_s: float = 0.1,
        audit_s: float = 1.0,
        idle_audit_s: float = 4.0,
        max_wait_s: float = 1.0,
        forget_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._feed = feed
        self._model = model
        self._table = table or BlockTable()
        self._interval_s = interval_s
        self._audit_s = audit_s
        self._idle_audit_s = idle_audit_s
        self._max_wait_s = max_wait_s
        self._forget_s = forget_s
        self._clock = clock
        self._run_id: str | None = None
        self._last_event_id = "0-0"
        self._audit_at = float("-inf")
        # The number of the last event that the copy contains, by shelf.
        self._seqs: dict[str, int] = {}
        # Events up to this one are contained in a shelf that was loaded as a whole.
        self._loaded_at: dict[str, tuple[int, int]] = {}
        self._stale: set[str] = set()
        self._missing_since: dict[str, float] = {}
        self._heard_something = False
        self.is_ready = False

    @property
    def num_blocks(self) -> int:
        return self._table.num_blocks

    def longest_prefix(self, keys: Sequence[bytes]) -> dict[str, PrefixHit]:
        return self._table.longest_prefix(keys)

    async def run(self) -> None:
        """Follow until cancelled; an outage of Redis is told once and survived."""
        is_out = False
        while True:
            try:
                has_more = await self.catch_up()
                if not has_more:
                    # Events that follow each other closely are read together.
                    await asyncio.sleep(self._interval_s)
                    if not self._heard_something:
                        await self._wait()
            except (RedisError, OSError) as error:
                if not is_out:
                    logger.warning("block index does not answer", extra={"error": repr(error)})
                is_out = True
                await asyncio.sleep(self._interval_s)
            else:
                if is_out:
                    logger.info("block index is followed again", extra={"model": self._model})
                is_out = False

    async def catch_up(self) -> bool:
        """One round; True when there is more to do at once."""
        num_events = 0
        if self._clock() >= self._audit_at:
            # Events that were lost are followed by others, which tell.
            is_idle = await self._audit()
            self._audit_at = self._clock() + (self._idle_audit_s if is_idle else self._audit_s)
        else:
            num_events = await self._follow()
        # Where there was something, there is something again: to ask costs less than to wait.
        self._heard_something = num_events > 0
        while self._stale:
            await self._load(next(iter(self._stale)))
        self.is_ready = True
        has_orphans = self._table.sweep()
        return num_events == BATCH or has_orphans

    async def _wait(self) -> None:
        """Until there is something to do."""
        wait_s = min(self._audit_at - self._clock(), self._max_wait_s)
        if wait_s > 0:
            await self._feed.wait_for_event(self._model, self._last_event_id, wait_s)

    async def _audit(self) -> bool:
        """Find what events cannot tell: lost events, lost data, and shelves that have ended.

        True if nothing at all has happened.
        """
        state = await self._feed.state(self._model)
        if state.run_id != self._run_id:
            self._run_id = state.run_id
            self._last_event_id = state.last_event_id
            self._seqs = dict.fromkeys(self._seqs, -1)
            self._loaded_at.clear()
        # What the numbers cover is in the stream, unless it was cut off.
        is_idle = state.last_event_id == self._last_event_id
        if not is_idle:
            while await self._follow() == BATCH:
                pass
        for shelf, seq in state.seqs.items():
            if self._seqs.get(shelf, 0) < seq:
                self._stale.add(shelf)
        self._forget_the_missing(state.seqs)
        return is_idle and not self._stale and not self._missing_since

    def _forget_the_missing(self, seqs: Mapping[str, int]) -> None:
        now = self._clock()
        for shelf in [shelf for shelf in self._seqs if shelf not in seqs]:
            if now - self._missing_since.setdefault(shelf, now) >= self._forget_s:
                self._drop(shelf)
        for shelf in [shelf for shelf in self._missing_since if shelf in seqs]:
            del self._missing_since[shelf]

    async def _follow(self) -> int:
        events = await self._feed.events_after(self._model, self._last_event_id, BATCH)
        for event in events:
            if event.run_id != self._run_id:
                # Redis has restarted: an audit finds out where we are.
                self._audit_at = float("-inf")
                break
            self._last_event_id = event.event_id
            self._apply(event)
        return len(events)

    def _apply(self, event: BlockEvent) -> None:
        shelf = event.shelf
        if _order(event.event_id) <= self._loaded_at.get(shelf, (0, 0)):
            return
        if event.is_drop:
            self._drop(shelf)
        elif shelf in self._stale or event.seq != self._seqs.get(shelf, 0) + 1:
            self._stale.add(shelf)
        else:
            self._seqs[shelf] = event.seq
            self._table.remove(shelf, event.removed)
            self._table.add(shelf, event.stored)

    async def _load(self, shelf: str) -> None:
        # First where we are, then the blocks: events in between are applied twice, which
        # changes nothing.
        state = await self._feed.state(self._model)
        if state.run_id != self._run_id or shelf not in state.seqs:
            self._stale.discard(shelf)
            if state.run_id == self._run_id:
                self._drop(shelf)
            else:
                self._audit_at = float("-inf")
            return
        keys: list[bytes] = []
        cursor: int | None = None
        while cursor != 0:
            cursor, page = await self._feed.blocks_of(self._model, shelf, cursor or 0)
            keys += page
        self._table.drop(shelf)
        for start in range(0, len(keys), _CHUNK):
            self._table.add(shelf, keys[start : start + _CHUNK])
            await asyncio.sleep(0)
        self._seqs[shelf] = state.seqs[shelf]
        self._loaded_at[shelf] = _order(state.last_event_id)
        self._stale.discard(shelf)

    def _drop(self, shelf: str) -> None:
        self._table.drop(shelf)
        self._seqs.pop(shelf, None)
        self._loaded_at.pop(shelf, None)
        self._missing_since.pop(shelf, None)
        self._stale.discard(shelf)


def _order(event_id: str) -> tuple[int, int]:
    milliseconds, _, number = event_id.partition("-")
    return int(milliseconds), int(number)
