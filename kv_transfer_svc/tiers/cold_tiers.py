"""Colder tiers for the blocks of a machine's engines: host memory, and disk behind it.

Blocks are copied when engines have filled them, not when they evict them: an eviction leaves no
time, since the next forward pass overwrites the block, and a copy made early survives the engine.
The engine is not asked to wait. A block that it reuses during the copy has another generation
afterwards, and the copy is thrown away.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from kv_transfer_svc.segments import Segment
from kv_transfer_svc.tiers import block_file
from kv_transfer_svc.tiers.disk_store import DiskBlock, DiskStore
from kv_transfer_svc.tiers.disk_writer import DiskWriter
from kv_transfer_svc.tiers.host_pool import HostPool, TierBlock
from kv_transfer_svc.tiers.loading import NUM_THREADS, BlockLoad, Source
from kv_transfer_svc.transports.base import to_their_end
from mesh import metrics
from mesh.block_index import Tier
from mesh.errors import InvalidRequest, KvTransferFailed
from mesh.scheduling import compute_behind

# A model's keys that a tier gained and lost.
OnChange = Callable[[str, Tier, Sequence[bytes], Sequence[bytes]], None]


@dataclass(frozen=True, slots=True)
class Loaded:
    """How many leading blocks were there."""

    num_blocks: int = 0
    num_disk_blocks: int = 0


@dataclass(slots=True)
class TierStats:
    """Blocks that came back since the start."""

    num_host_hits: int = 0
    num_disk_hits: int = 0


class ColdTiers:
    """Owns both tiers inside its block. Indexes belong to the event loop, bytes to threads."""

    def __init__(
        self, host: HostPool, disk: DiskStore | None, on_change: OnChange, *, num_threads: int = 2
    ) -> None:
        self.host = host
        self.disk = disk
        self.stats = TierStats()
        self._on_change = on_change
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="kv-tier")
        # Of their own: a request waits for these, and for what is stored nobody does.
        self._load_threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="kv-load")
        self._reading_ahead: ThreadPoolExecutor | None = None
        self._writer: DiskWriter | None = None

    async def __aenter__(self) -> Self:
        if self.disk is not None:
            for file in await asyncio.to_thread(self.disk.open):
                self._on_change(file.model, "disk", file.keys, ())
            self._read_ahead(self.disk)
            self._writer = DiskWriter(self.disk, self._on_change)
            await self._writer.start()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._writer is not None:
            await self._writer.stop()
        if self._reading_ahead is not None:
            self._reading_ahead.shutdown(cancel_futures=True)
        for threads in (self._load_threads, self._threads):
            threads.shutdown()

    def _read_ahead(self, disk: DiskStore) -> None:
        """Warm up what a restart has left cold, while the engines load and behind them.

        It takes no more memory than the host tier may, and only as long as nobody else wants it.
        """
        thread = ThreadPoolExecutor(1, thread_name_prefix="kv-ahead", initializer=compute_behind)
        for file in disk.latest(self.host.max_bytes):
            thread.submit(block_file.read_ahead, file)
        thread.shutdown(wait=False)
        self._reading_ahead = thread

    async def flush(self) -> None:
        """Until everything that was stored so far is on disk."""
        if self._writer is not None:
            await self._writer.flush()

    async def store(
        self,
        segment: Segment,
        model: str,
        keys: Sequence[bytes],
        block_ids: Sequence[int],
        generations: Sequence[int],
    ) -> int:
        """Copy blocks that are not there yet; returns how many of them were intact."""
        _check(segment, keys, block_ids)
        if len(generations) != len(keys):
            raise InvalidRequest(f"{len(generations)} generations for {len(keys)} keys")
        wanted = [
            (key, block_id, generation)
            for key, block_id, generation in zip(keys, block_ids, generations, strict=True)
            # What is asked for again is in use.
            if self.host.get(key) is None and not self._waits_for_disk(key)
        ]
        copied: list[TierBlock] = []

        def copy() -> int:
            for key, block_id, generation in wanted:
                data = _copy(segment, block_id, generation)
                if data is not None:
                    fingerprint = segment.spec.layout_fingerprint
                    copied.append(TierBlock(key, model, fingerprint, data))
            return len(copied)

        copying = self._threads.submit(copy)
        num_copied = await to_their_end([copying], stop=copying.cancel)
        self._keep(copied)
        return num_copied

    async def load(
        self, segment: Segment, keys: Sequence[bytes], block_ids: Sequence[int]
    ) -> Loaded:
        """Fill the blocks of the longest run of leading keys.

        The segment is not written to any more once the call has ended, in whichever way.
        """
        _check(segment, keys, block_ids)
        sources = self._leading(segment, keys)
        if not sources:
            return Loaded()
        filling = BlockLoad(segment, block_ids[: len(sources)], sources)
        await to_their_end(filling.start(self._load_threads), filling.stop)
        for block in filling.damaged:
            self._drop(block)
        num_blocks = filling.num_leading
        self._count(sources[:num_blocks])
        return Loaded(
            num_blocks, sum(isinstance(source, DiskBlock) for source in sources[:num_blocks])
        )

    def _leading(self, segment: Segment, keys: Sequence[bytes]) -> list[Source]:
        """Where the blocks of the longest run of leading keys are, in the warmest tier each."""
        sources: list[Source] = []
        spec = segment.spec
        for key in keys:
            source: Source
            if (in_memory := self.host.get(key)) is not None:
                source = in_memory
                layout = (in_memory.layout_fingerprint, in_memory.data.nbytes)
            elif self.disk is not None and (on_disk := self.disk.find(key)) is not None:
                source = on_disk
                layout = (on_disk.file.layout_fingerprint, on_disk.file.block_bytes)
            else:
                break
            # Keys of different layouts differ. Should they not, the bytes are of no use.
            if layout != (spec.layout_fingerprint, spec.block_bytes):
                break
            sources.append(source)
        return sources

    def _keep(self, blocks: Sequence[TierBlock]) -> None:
        num_stored = 0
        for block in blocks:
            evicted = self.host.put(block)
            if block in evicted:
                # It is larger than the tier, and alone.
                continue
            self._on_change(block.model, "host", [block.key], ())
            num_stored += 1
            for old in evicted:
                self._on_change(old.model, "host", (), [old.key])
        if num_stored:
            metrics.KV_TIER_STORED.add(num_stored, {"tier": "host"})
        if self._writer is not None:
            self._writer.offer(blocks)

    def _waits_for_disk(self, key: bytes) -> bool:
        """Without a host tier, what is on disk or on its way there needs no second copy."""
        if self.host.max_bytes or self.disk is None or self._writer is None:
            return False
        return key in self.disk or key in self._writer

    def _drop(self, block: DiskBlock) -> None:
        assert self.disk is not None
        for file in self.disk.drop(block.file.path):
            self._on_change(file.model, "disk", (), file.keys)

    def _count(self, sources: Sequence[Source]) -> None:
        files = {
            source.file.path: source.file for source in sources if isinstance(source, DiskBlock)
        }
        num_disk_blocks = sum(isinstance(source, DiskBlock) for source in sources)
        self.stats.num_disk_hits += num_disk_blocks
        self.stats.num_host_hits += len(sources) - num_disk_blocks
        metrics.KV_TIER_HITS.add(num_disk_blocks, {"tier": "disk"})
        metrics.KV_TIER_HITS.add(len(sources) - num_disk_blocks, {"tier": "host"})
        for file in files.values():
            assert self.disk is not None
            self._threads.submit(self.disk.touch, file)


def _copy(segment: Segment, block_id: int, generation: int) -> NDArray[np.uint8] | None:
    """A block's content, if it is still what `generation` stands for when it is copied."""
    ids = np.array([block_id], np.int64)
    generations = np.array([generation], np.uint32)
    try:
        segment.check_generations(ids, generations)
        data: NDArray[np.uint8] = segment.blocks[block_id].copy()
        segment.check_generations(ids, generations)
    except KvTransferFailed:
        return None
    return data


def _check(segment: Segment, keys: Sequence[bytes], block_ids: Sequence[int]) -> None:
    if len(keys) != len(block_ids):
        raise InvalidRequest(f"{len(block_ids)} blocks for {len(keys)} keys")
    if len(set(block_ids)) != len(block_ids):
        raise InvalidRequest("a block is named twice")
    if any(block_id >= segment.spec.num_blocks for block_id in block_ids):
        raise InvalidRequest(f"a block is outside a segment of {segment.spec.num_blocks} blocks")
    segment.check_size()
