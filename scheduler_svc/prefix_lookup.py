"""Which workers hold how much of a prompt: asked for once before each placement."""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol

from redis.exceptions import RedisError

from mesh.block_index import machine_of
from mesh.block_keys import BlockKeys
from scheduler_svc.predicted_blocks import PredictedBlocks
from scheduler_svc.workers import NO_HIT, Hits, PrefixHit

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """What block keys depend on, besides the tokens."""

    layout_fingerprint: str
    block_size: int


@dataclass(frozen=True)
class PrefixQuery:
    """A prompt, and the layouts of the workers that could serve it."""

    model: str
    token_ids: Sequence[int]
    cache_salt: str
    layouts: frozenset[BlockLayout]

    @cached_property
    def chains(self) -> Mapping[BlockLayout, list[bytes]]:
        """The keys of the prompt's blocks in each layout.

        The last token is computed anyway: a block that it fills is never looked up.
        """
        return {
            layout: BlockKeys(layout.layout_fingerprint).chain(
                self.token_ids[:-1], layout.block_size, self.cache_salt
            )
            for layout in self.layouts
        }


class PrefixLookup(Protocol):
    """Never raises for want of an answer: without one, placement goes by load alone."""

    async def hits(self, query: PrefixQuery) -> Hits:
        """May ask Redis, for a bounded time."""
        ...

    def latest(self, query: PrefixQuery, known: Hits) -> Hits:
        """What is known by now, for a request that has waited since `known`."""
        ...

    def placed(self, query: PrefixQuery, holder_ids: Collection[str]) -> None:
        """A request is about to leave its blocks on these workers."""
        ...

    def is_complete(self, model: str) -> bool:
        """Whether `latest` knows all that the index does: whoever it leaves out has nothing."""
        ...


class BlockIndexReader(Protocol):
    """The part of `mesh.block_index.BlockIndex` that a placement may ask itself."""

    async def longest_prefix(self, model: str, keys: list[bytes]) -> dict[str, PrefixHit]: ...


class Replica(Protocol):
    """The part of `BlockReplica` that placement reads."""

    @property
    def is_ready(self) -> bool: ...

    def longest_prefix(self, keys: Sequence[bytes]) -> dict[str, PrefixHit]: ...


class LocalLookup:
    """Answers from the local copies of the index and from what was placed of late.

    While there is no copy of a model's blocks yet, the index itself is asked.
    """

    def __init__(
        self, replicas: Mapping[str, Replica], fallback: "IndexLookup", predicted: PredictedBlocks
    ) -> None:
        self._replicas = replicas
        self._fallback = fallback
        self._predicted = predicted

    async def hits(self, query: PrefixQuery) -> Hits:
        if self._replica(query.model) is None:
            return self.latest(query, _by_machine(await self._fallback.hits(query)))
        return self.latest(query, {})

    def latest(self, query: PrefixQuery, known: Hits) -> Hits:
        replica = self._replica(query.model)
        hits = dict(known if replica is None else {})
        for keys in query.chains.values():
            if replica is not None:
                hits.update(_by_machine(replica.longest_prefix(keys)))
            for holder_id, num_blocks in self._predicted.longest_prefix(keys).items():
                hit = hits.get(holder_id, PrefixHit())
                if num_blocks > hit.num_blocks:
                    device_blocks = hit.device_blocks + num_blocks - hit.num_blocks
                    hits[holder_id] = replace(hit, device_blocks=device_blocks)
        return hits

    def placed(self, query: PrefixQuery, holder_ids: Collection[str]) -> None:
        for keys in query.chains.values():
            self._predicted.add(keys, holder_ids)

    def is_complete(self, model: str) -> bool:
        return self._replica(model) is not None

    def _replica(self, model: str) -> Replica | None:
        replica = self._replicas.get(model)
        return replica if replica is not None and replica.is_ready else None


def _by_machine(found: Hits) -> Hits:
    """What machines hold goes by their address, for their incarnation concerns nobody."""
    if not any(machine_of(holder) for holder in found):
        return found
    hits: dict[str, PrefixHit] = {}
    for holder, hit in found.items():
        name = machine_of(holder) or holder
        if hit.num_blocks > hits.get(name, NO_HIT).num_blocks:
            hits[name] = hit
    return hits


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
                    *(
                        self._index.longest_prefix(query.model, keys)
                        for keys in query.chains.values()
                        if keys
                    )
                )
        except (RedisError, OSError, TimeoutError) as error:
            self._failed(error)
            return {}
        self._num_failures = 0
        return {holder_id: hit for holders in found for holder_id, hit in holders.items()}

    def _failed(self, error: Exception) -> None:
        self._num_failures += 1
        if self._num_failures < self._max_failures:
            return
        if self._num_failures == self._max_failures:
            logger.warning("no prefix lookup, placing by load", extra={"error": repr(error)})
        self._paused_until = self._clock() + self._pause_s
