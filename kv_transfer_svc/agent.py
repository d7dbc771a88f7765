"""Pulls: blocks from one attached engine to another, checked, timed and counted."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from kv_transfer_svc.runs import to_runs
from kv_transfer_svc.segments import Segment, SegmentSpec, SegmentTable
from kv_transfer_svc.transports.base import Transport
from mesh import metrics
from mesh.errors import InvalidRequest, KvTransferFailed, LayoutMismatch
from mesh.telemetry import Stopwatch


@dataclass(frozen=True, slots=True)
class Pull:
    """Blocks wanted: the n-th of the source becomes the n-th of the destination."""

    source_engine_id: str
    source_block_ids: Sequence[int]
    destination_engine_id: str
    destination_block_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Moved:
    """What a pull did."""

    num_bytes: int
    num_runs: int
    copy_s: float

    @property
    def gb_per_s(self) -> float:
        return self.num_bytes / self.copy_s / 1e9 if self.copy_s > 0 else 0.0


@dataclass(slots=True)
class TransferStats:
    """Counted since the start; `num_active_pulls` is of now."""

    num_active_pulls: int = 0
    num_pulls: int = 0
    num_bytes: int = 0
    copy_s: float = 0.0


class TransferAgent:
    """Owns the segments of this machine's engines and moves blocks between them."""

    def __init__(self, segments: SegmentTable, transport: Transport) -> None:
        self.segments = segments
        self.stats = TransferStats()
        self.draining = asyncio.Event()
        self._transport = transport
        self._idle = asyncio.Event()
        self._idle.set()

    async def drain(self) -> None:
        """Let the pulls in flight finish, then let go of the segments."""
        await self._idle.wait()
        self.draining.set()

    async def pull(self, pull: Pull) -> Moved:
        """Copy the blocks; returns, or raises, when no byte is being written any more."""
        # Counted before the first check, since callers ask for it to learn whether a pull that
        # they gave up could still write.
        self.stats.num_active_pulls += 1
        self._idle.clear()
        try:
            moved = await self._pull(pull)
        finally:
            self.stats.num_active_pulls -= 1
            if self.stats.num_active_pulls == 0:
                self._idle.set()
        self._count(moved)
        return moved

    async def _pull(self, pull: Pull) -> Moved:
        if pull.source_engine_id == pull.destination_engine_id:
            raise InvalidRequest("source and destination are the same engine")
        engine_ids = (pull.source_engine_id, pull.destination_engine_id)
        with self.segments.in_use(*engine_ids) as (source, destination):
            check_layouts(source.spec, destination.spec)
            runs = to_runs(
                pull.source_block_ids,
                pull.destination_block_ids,
                source.spec.num_blocks,
                destination.spec.num_blocks,
            )
            for segment in (source, destination):
                segment.check_size()
            stopwatch = Stopwatch()
            num_bytes = await self._transport.copy(source, destination, runs)
            _check_complete(num_bytes, len(pull.source_block_ids), source)
            return Moved(num_bytes, len(runs), stopwatch.elapsed_s)

    def _count(self, moved: Moved) -> None:
        self.stats.num_pulls += 1
        self.stats.num_bytes += moved.num_bytes
        self.stats.copy_s += moved.copy_s
        metrics.KV_TRANSFER_BYTES.add(moved.num_bytes)
        metrics.KV_TRANSFER_DURATION.record(moved.copy_s)


def check_layouts(source: SegmentSpec, destination: SegmentSpec) -> None:
    """Raise LayoutMismatch if a block of one engine means something else to the other."""
    if source.layout_fingerprint != destination.layout_fingerprint:
        raise LayoutMismatch(
            f"engine {source.engine_id!r} has layout {source.layout_fingerprint}, engine "
            f"{destination.engine_id!r} has layout {destination.layout_fingerprint}"
        )
    if source.block_bytes != destination.block_bytes:
        raise LayoutMismatch(
            f"blocks of engine {source.engine_id!r} have {source.block_bytes} bytes, those of "
            f"engine {destination.engine_id!r} have {destination.block_bytes}"
        )


def _check_complete(num_bytes: int, num_blocks: int, source: Segment) -> None:
    expected = num_blocks * source.spec.block_bytes
    if num_bytes != expected:
        raise KvTransferFailed(f"{num_bytes} of {expected} bytes arrived")
