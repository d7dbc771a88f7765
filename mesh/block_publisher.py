"""Keeps the block index in Redis equal to what one cache holds."""

import asyncio
import logging
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Protocol, Self

from redis.exceptions import RedisError

from mesh.block_index import BATCH, Tier, batches

logger = logging.getLogger(__name__)

_DROP_TIMEOUT_S = 2.0


class Index(Protocol):
    """What the publisher needs of mesh.block_index.BlockIndex."""

    async def publish(
        self,
        model: str,
        worker_id: str,
        incarnation: str,
        stored: Sequence[bytes],
        removed: Sequence[bytes],
        tier: Tier,
    ) -> int: ...

    async def renew(self, model: str, worker_id: str, incarnation: str, tier: Tier) -> int: ...

    async def drop_worker(
        self, model: str, worker_id: str, incarnation: str, tier: Tier
    ) -> None: ...


class BlockChanges(Protocol):
    """Keys that a cache gained and lost; one in both lists is held."""

    @property
    def stored(self) -> Sequence[bytes]: ...

    @property
    def removed(self) -> Sequence[bytes]: ...


class BlockPublisher:
    """Publishes a cache's changes while its block lasts, and forgets them at its end.

    It queues no events: it knows which keys the cache holds and which of them Redis has yet to
    learn or to forget. After a failed call, or when Redis answers with another event number
    than the one that is next, it stops counting differences and starts over from what the cache
    holds then. So memory stays bounded however long Redis is away, and a Redis that restarted
    empty is told everything within `renew_s` of its return.

    A change is published at once, and what changes within `gather_s` after it together: a batch
    of streams fills a block with nearly every step, and each call costs the same as one for all.
    """

    def __init__(
        self,
        index: Index,
        model: str,
        worker_id: str,
        incarnation: str,
        *,
        tier: Tier = "device",
        renew_s: float = 1.0,
        refresh_s: float = 600.0,
        retry_delay_s: float = 0.5,
        gather_s: float = 0.1,
        max_pending: int = 65_536,
    ) -> None:
        self._index = index
        self._holder = (model, worker_id, incarnation)
        self._tier: Tier = tier
        self._renew_s = renew_s
        self._refresh_s = refresh_s
        self._retry_delay_s = retry_delay_s
        self._gather_s = gather_s
        self._max_pending = max_pending
        # Dicts serve as ordered sets: a chain's parents are published before its children.
        self._held: dict[bytes, None] = {}
        self._to_store: dict[bytes, None] = {}
        self._to_remove: dict[bytes, None] = {}
        # What is published again before Redis forgets it by itself.
        self._to_refresh: Iterator[Sequence[bytes]] = iter(())
        # The number of the last event that Redis has of this cache.
        self._seq = 0
        self._must_start_over = False
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Self:
        # By the event loop's clock.
        self._renew_at = asyncio.get_running_loop().time() + self._renew_s
        self._task = asyncio.create_task(self._publish_for_ever(), name="block-publisher")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})
        try:
            async with asyncio.timeout(_DROP_TIMEOUT_S):
                await self._index.drop_worker(*self._holder, self._tier)
        except (RedisError, TimeoutError) as error:
            # Harmless: nobody credits blocks to an incarnation that has ended.
            logger.warning("block index entries stay behind", extra={"reason": repr(error)})

    def offer(self, changes: BlockChanges) -> None:
        """Note what changed, without waiting for Redis."""
        for key in changes.removed:
            self._held.pop(key, None)
            self._to_store.pop(key, None)
            # Redis may know the key from a call in flight; to forget what it never
            # knew costs nothing.
            self._to_remove[key] = None
        for key in changes.stored:
            self._held[key] = None
            self._to_remove.pop(key, None)
            self._to_store[key] = None
        if self._must_start_over or len(self._to_remove) > self._max_pending:
            self._forget_differences()
        self._changed.set()

    async def _publish_for_ever(self) -> None:
        is_reported = False
        while True:
            try:
                await self._wait_for_changes()
                has_published = self._has_changes
                while self._has_changes:
                    await self._publish_some()
                if has_published:
                    await asyncio.sleep(self._gather_s)
            except (RedisError, TimeoutError) as error:
                self._forget_differences()
                if not is_reported:
                    logger.warning("block index is unreachable", extra={"reason": repr(error)})
                    is_reported = True
                await asyncio.sleep(self._retry_delay_s)
            else:
                if is_reported:
                    logger.info("block index is up to date again")
                    is_reported = False

    @property
    def _has_changes(self) -> bool:
        return bool(self._must_start_over or self._to_store or self._to_remove)

    async def _wait_for_changes(self) -> None:
        """Until there is something to publish; the lease is renewed meanwhile.

        Changes renew it too. But what has not changed is published again by renewals alone, and
        has to be while others change all the time.
        """
        if self._must_start_over:
            return
        loop = asyncio.get_running_loop()
        with suppress(TimeoutError):
            async with asyncio.timeout_at(self._renew_at):
                await self._changed.wait()
        if loop.time() >= self._renew_at:
            self._renew_at = loop.time() + self._renew_s
            await self._renew()
        self._changed.clear()

    async def _renew(self) -> None:
        if not self._held and self._seq == 0:
            return
        if await self._index.renew(*self._holder, self._tier) != self._seq:
            self._lost()
        else:
            self._refresh_some()

    async def _publish_some(self) -> None:
        if self._must_start_over:
            await self._index.drop_worker(*self._holder, self._tier)
            self._to_store = dict(self._held)
            self._to_remove.clear()
            self._seq = 0
            self._must_start_over = False
        stored = _pop_first(self._to_store, BATCH)
        removed = _pop_first(self._to_remove, BATCH - len(stored))
        if not stored and not removed:
            return
        self._seq += 1
        if await self._index.publish(*self._holder, stored, removed, self._tier) != self._seq:
            self._lost()

    def _refresh_some(self) -> None:
        """Publish the next part again, so that all is within `refresh_s`.

        Redis may have evicted keys to save memory, and what is left alone ends by itself.
        """
        part = next(self._to_refresh, None)
        if part is None:
            num_rounds = max(1.0, self._refresh_s / self._renew_s)
            size = max(1, -(-len(self._held) // int(num_rounds)))
            self._to_refresh = batches(list(self._held), size)
            part = next(self._to_refresh, ())
        for key in part:
            if key in self._held:
                self._to_store[key] = None

    def _lost(self) -> None:
        logger.info("Redis has lost our blocks, publishing them again")
        self._forget_differences()

    def _forget_differences(self) -> None:
        self._must_start_over = True
        self._to_store.clear()
        self._to_remove.clear()


def _pop_first(keys: dict[bytes, None], limit: int) -> list[bytes]:
    first = list(islice(keys, limit))
    for key in first:
        del keys[key]
    return first
