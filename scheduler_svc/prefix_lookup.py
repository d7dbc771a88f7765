"""Which workers hold how much of a prompt: asked for once before each placement."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from redis.exceptions import RedisError

from mesh.block_keys import BlockKeys
from scheduler_svc.workers import Hits, PrefixHit

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """What block keys depend on, besides the tokens."""

    layout_fingerprint: str
    block_size: int


@dataclass(frozen=True, slots=True)
class PrefixQuery:
    """A prompt, and the layouts of the workers that could serve it."""

    model: str
    token_ids: Sequence[int]
    cache_salt: str
    layouts: frozenset[BlockLayout]


class PrefixLookup(Protocol):
    """Never raises for want of an answer: without one, placement goes by load alone."""

    async def hits(self, query: PrefixQuery) -> Hits: ...


class BlockIndexReader(Protocol):
    """The part of `mesh.registry.BlockIndex` that placement reads."""

    async def longest_prefix(self, model: str, keys: list[bytes]) -> dict[str, PrefixHit]: ...


class IndexLookup:
    """Asks the block index in Redis, for a bounded time.

    After `max_failures` in a row it does not ask again for `pause_s`: an outage costs a few
    requests the timeout, and the others nothing; one slow answer costs no affinity.
    """

    def __init__(
        self,
        index: BlockIndexReader,
        *,
        timeout_s: float = 0.05,
        max_failures: int = 3,
        pause_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._index = index
        self._timeout_s = timeout_s
        self._max_failures = max_failures
        self._pause_s = pause_s
        self._clock = clock
        self._paused_until = float("-inf")
        self._num_failures = 0

    async def hits(self, query: PrefixQuery) -> Hits:
        if self._clock() < self._paused_until:
            return {}
        try:
            async with asyncio.timeout(self._timeout_s):
                found = await asyncio.gather(
                    *(self._ask(query, layout) for layout in query.layouts)
                )
        except (RedisError, OSError, TimeoutError) as error:
            self._failed(error)
            return {}
        self._num_failures = 0
        return {holder_id: hit for holders in found for holder_id, hit in holders.items()}

    async def _ask(self, query: PrefixQuery, layout: BlockLayout) -> dict[str, PrefixHit]:
        # The last token is computed anyway: a block that it fills is never looked up.
        token_ids = query.token_ids[:-1]
        keys = BlockKeys(layout.layout_fingerprint).chain(
            token_ids, layout.block_size, query.cache_salt
        )
        return await self._index.longest_prefix(query.model, keys) if keys else {}

    def _failed(self, error: Exception) -> None:
        self._num_failures += 1
        if self._num_failures < self._max_failures:
            return
        if self._num_failures == self._max_failures:
            logger.warning("no prefix lookup, placing by load", extra={"error": repr(error)})
        self._paused_until = self._clock() + self._pause_s
