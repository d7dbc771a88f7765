"""Keeps the block index in Redis equal to what an engine's prefix cache holds."""

import asyncio
import logging
from itertools import islice
from typing import Protocol, Self

from redis.exceptions import RedisError

from engine.block_pool import BlockEvents

logger = logging.getLogger(__name__)

_MAX_KEYS_PER_CALL = 512
_DROP_TIMEOUT_S = 2.0


class Index(Protocol):
    """What the publisher needs of mesh.registry.BlockIndex."""

    async def publish(
        self,
        model: str,
        worker_id: str,
        incarnation: str,
        stored: list[bytes],
        removed: list[bytes],
    ) -> None: ...

    async def drop_worker(self, model: str, worker_id: str, incarnation: str) -> None: ...


class BlockPublisher:
    """Publishes an engine's block events while its block lasts, and forgets them at its end.

    It queues no events: it knows which keys the engine holds and which of them Redis
    has yet to learn or to forget. After a failed call it stops counting differences;
    once Redis answers, perhaps empty, it starts over from what the engine holds then.
    So memory stays bounded however long Redis is away.
    """

    def __init__(
        self,
        index: Index,
        model: str,
        worker_id: str,
        incarnation: str,
        *,
        refresh_s: float = 30.0,
        retry_delay_s: float = 1.0,
        max_pending: int = 65_536,
    ) -> None:
        self._index = index
        self._holder = (model, worker_id, incarnation)
        self._refresh_s = refresh_s
        self._retry_delay_s = retry_delay_s
        self._max_pending = max_pending
        # Dicts serve as ordered sets: a chain's parents are published before its children.
        self._held: dict[bytes, None] = {}
        self._to_store: dict[bytes, None] = {}
        self._to_remove: dict[bytes, None] = {}
        self._must_start_over = False
        self._changed = asyncio.Event()

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._publish_for_ever())
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})
        try:
            async with asyncio.timeout(_DROP_TIMEOUT_S):
                await self._index.drop_worker(*self._holder)
        except (RedisError, TimeoutError) as error:
            # Harmless: nobody credits blocks to an incarnation that has ended.
            logger.warning("block index entries stay behind", extra={"reason": repr(error)})

    def offer(self, events: BlockEvents) -> None:
        """Note what an engine step changed, without waiting for Redis."""
        for key in events.removed:
            self._held.pop(key, None)
            self._to_store.pop(key, None)
            # Redis may know the key from a call in flight; to forget what it never
            # knew costs nothing.
            self._to_remove[key] = None
        for key in events.stored:
            self._held[key] = None
            self._to_remove.pop(key, None)
            self._to_store[key] = None
        if self._must_start_over or len(self._to_remove) > self._max_pending:
            self._forget_differences()
        self._changed.set()

    async def _publish_for_ever(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._refresh_s):
                    await self._changed.wait()
            except TimeoutError:
                # Redis may have restarted or evicted keys unnoticed: tell it again.
                self._to_store = dict(self._held)
            self._changed.clear()
            await self._publish_pending()

    async def _publish_pending(self) -> None:
        is_reported = False
        while self._must_start_over or self._to_store or self._to_remove:
            try:
                await self._publish_some()
            except (RedisError, TimeoutError) as error:
                self._forget_differences()
                if not is_reported:
                    logger.warning("block index is unreachable", extra={"reason": repr(error)})
                    is_reported = True
                await asyncio.sleep(self._retry_delay_s)
        if is_reported:
            logger.info("block index is up to date again")

    async def _publish_some(self) -> None:
        if self._must_start_over:
            await self._index.drop_worker(*self._holder)
            self._to_store = dict(self._held)
            self._must_start_over = False
        stored = _pop_first(self._to_store, _MAX_KEYS_PER_CALL)
        removed = _pop_first(self._to_remove, _MAX_KEYS_PER_CALL)
        await self._index.publish(*self._holder, stored, removed)

    def _forget_differences(self) -> None:
        self._must_start_over = True
        self._to_store.clear()
        self._to_remove.clear()


def _pop_first(keys: dict[bytes, None], limit: int) -> list[bytes]:
    first = list(islice(keys, limit))
    for key in first:
        del keys[key]
    return first
