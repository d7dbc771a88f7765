"""Fills an engine's blocks from where the tiers have them, in several threads."""

import threading
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from contextlib import ExitStack

import numpy as np

from kv_transfer_svc.segments import Segment
from kv_transfer_svc.tiers.block_file import BlockReader, DamagedFile
from kv_transfer_svc.tiers.disk_store import DiskBlock, report_damage
from kv_transfer_svc.tiers.host_pool import TierBlock

Source = TierBlock | DiskBlock

# Half of a load is the system's copying; the checksums are made under the interpreter's lock.
NUM_THREADS = 2
# Fewer are not worth waking a thread for.
_FEWEST_BLOCKS = 8


class BlockLoad:
    """Blocks on their way from the tiers into a segment. Each thread stops where it fails."""

    def __init__(
        self, segment: Segment, block_ids: Sequence[int], sources: Sequence[Source]
    ) -> None:
        num_parts = max(1, min(NUM_THREADS, len(sources) // _FEWEST_BLOCKS))
        # Each thread has neighbours, which mostly are in the same files.
        size = -(-len(sources) // num_parts)
        self._parts = [
            _Part(segment, block_ids[start : start + size], sources[start : start + size])
            for start in range(0, len(sources), size)
        ]
        self._work: list[Future[int]] = []

    def start(self, threads: Executor) -> list["Future[int]"]:
        self._work = [threads.submit(part.fill) for part in self._parts]
        return self._work

    def stop(self) -> None:
        """Let each thread end with the block that it is filling."""
        for part, work in zip(self._parts, self._work, strict=True):
            part.stopping.set()
            work.cancel()

    @property
    def num_leading(self) -> int:
        """How many blocks were filled before the first that was not."""
        num_blocks = 0
        for part in self._parts:
            num_blocks += part.num_filled
            if part.num_filled < len(part.sources):
                break
        return num_blocks

    @property
    def damaged(self) -> list[DiskBlock]:
        return [part.damaged for part in self._parts if part.damaged is not None]


class _Part:
    def __init__(
        self, segment: Segment, block_ids: Sequence[int], sources: Sequence[Source]
    ) -> None:
        self.sources = sources
        self.num_filled = 0
        self.damaged: DiskBlock | None = None
        self.stopping = threading.Event()
        self._segment = segment
        self._block_ids = block_ids
        self._reader: BlockReader | None = None

    def fill(self) -> int:
        with ExitStack() as files:
            for block_id, source in zip(self._block_ids, self.sources, strict=True):
                if self.stopping.is_set():
                    break
                try:
                    self._fill_one(block_id, source, files)
                except DamagedFile as error:
                    assert isinstance(source, DiskBlock), "host memory has no files"
                    report_damage(error)
                    self.damaged = source
                    break
                self.num_filled += 1
        return self.num_filled

    def _fill_one(self, block_id: int, source: Source, files: ExitStack) -> None:
        segment = self._segment
        segment.make_resident(block_id, 1)
        if isinstance(source, TierBlock):
            np.copyto(segment.blocks[block_id], source.data)
            return
        if self._reader is None or self._reader.file is not source.file:
            self._reader = files.enter_context(BlockReader(source.file))
        self._reader.read(source.index, segment.bytes_of(slice(block_id, block_id + 1)))
