"""Blocks from another machine by Mooncake's Transfer Engine: one-sided reads, over RDMA or TCP.

The engine reads the source's memory without its agent. Two things follow:

- The reader compares generations itself, by reading them from the source's segment before and
  after the blocks, as the source's agent does where it sends them.
- A read that timed out cannot be called back: a peer that was frozen writes when it thaws. So
  blocks are read into staging memory of ours and copied from there once they are whole. What a
  read that was given up may still write to is not used before that read has ended.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from kv_transfer_svc.runs import BlockRun
from kv_transfer_svc.segments import Segment
from kv_transfer_svc.transports.base import RemoteSource, to_their_end
from mesh.errors import InvalidRequest, KvTransferFailed

logger = logging.getLogger(__name__)

INSTALL = "pip install 'pdmesh[mooncake]', and libibverbs (Debian: apt-get install libibverbs1)"
_STAGING_BYTES = 16 << 20
# Staging areas to which reads that were given up may yet write. With so many, TCP takes over.
_MAX_SPOILT = 16
# A read that was refused or cut off writes no more; what else was in flight with it ends soon.
_QUARANTINE_S = 60.0
_GENERATION = np.dtype("<u4")


class MooncakeMissing(Exception):
    """The Transfer Engine is not installed, or not able to start."""


class TransferEngine(Protocol):
    """The part of `mooncake.engine.TransferEngine` that is used; 0 is success."""

    def initialize(self, hostname: str, metadata: str, protocol: str, device: str) -> int: ...

    def get_rpc_port(self) -> int: ...

    def register_memory(self, address: int, num_bytes: int) -> int: ...

    def unregister_memory(self, address: int) -> int: ...

    def batch_transfer_sync_read(
        self, peer: str, addresses: list[int], peer_addresses: list[int], lengths: list[int]
    ) -> int: ...


@dataclass(frozen=True, slots=True)
class _Piece:
    """Blocks that are read at once, as they lie in source and destination."""

    runs: tuple[BlockRun, ...]
    num_blocks: int


class MooncakeTransport:
    """Owns a Transfer Engine, what it may read of ours, and the staging memory for its reads."""

    def __init__(
        self, engine: TransferEngine, *, num_reads: int = 4, stall_timeout_s: float = 5.0
    ) -> None:
        self._engine = engine
        self._stall_timeout_s = stall_timeout_s
        self._threads = ThreadPoolExecutor(num_reads + _MAX_SPOILT, thread_name_prefix="kv-read")
        self._reads = asyncio.Semaphore(num_reads)
        self._idle: list[NDArray[np.uint8]] = []
        # Of reads that were given up and go on: not ours until they end.
        self._spoilt: dict[Future[int], NDArray[np.uint8]] = {}
        self._exposed: dict[str, Segment] = {}

    @property
    def is_usable(self) -> bool:
        """Not while many reads that were given up go on, as those from frozen peers do."""
        return len(self._spoilt) < _MAX_SPOILT

    @property
    def rpc_port(self) -> int:
        """Where other engines learn of what is exposed here."""
        return self._engine.get_rpc_port()

    def expose(self, segment: Segment) -> int:
        """Let others read a segment while it is attached; its address in this process."""
        engine_id = segment.spec.engine_id
        if self._exposed.get(engine_id) is not segment:
            self.conceal(engine_id)
            segment.acquire()
            if self._engine.register_memory(segment.address, segment.spec.file_bytes) != 0:
                segment.release()
                raise KvTransferFailed(f"the segment of engine {engine_id!r} is not readable")
            self._exposed[engine_id] = segment
        return segment.address

    def conceal(self, engine_id: str) -> None:
        """Its engine is gone. The mapping lives for as long as a read that has begun may take."""
        segment = self._exposed.pop(engine_id, None)
        if segment is not None:
            self._engine.unregister_memory(segment.address)
            asyncio.get_running_loop().call_later(2 * self._stall_timeout_s, segment.release)

    async def read(
        self,
        source: RemoteSource,
        destination: Segment,
        runs: Sequence[BlockRun],
        generations: NDArray[np.uint32],
    ) -> int:
        """Return the bytes that were written, when the last of them is.

        The destination is written to by this process's threads alone, and not any more once
        the call has ended. Raises KvTransferFailed when not everything arrived, or when blocks
        had been reused.
        """
        async with self._reads:
            await self._check_generations(source, runs, generations)
            num_bytes = 0
            for piece in _pieces(runs, max(1, _STAGING_BYTES // source.block_bytes)):
                num_bytes += await self._read_piece(source, destination, piece)
            await self._check_generations(source, runs, generations)
            return num_bytes

    def close(self) -> None:
        for segment in self._exposed.values():
            self._engine.unregister_memory(segment.address)
            segment.release()
        self._exposed.clear()
        # A thread that waits for a frozen peer is left to the end of the process.
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _read_piece(self, source: RemoteSource, destination: Segment, piece: _Piece) -> int:
        size = source.block_bytes
        staging = await self._fetch(
            source,
            [(run.source * size, run.num_blocks * size) for run in piece.runs],
            piece.num_blocks * size,
        )
        blocks = staging[: piece.num_blocks * size].reshape(-1, size)

        def copy() -> int:
            start = 0
            for run in piece.runs:
                destination.make_resident(run.destination, run.num_blocks)
                written = destination.blocks[run.destination : run.destination + run.num_blocks]
                np.copyto(written, blocks[start : start + run.num_blocks])
                start += run.num_blocks
            return int(blocks.nbytes)

        try:
            return await to_their_end([self._threads.submit(copy)], stop=lambda: None)
        finally:
            self._idle.append(staging)

    async def _check_generations(
        self, source: RemoteSource, runs: Sequence[BlockRun], generations: NDArray[np.uint32]
    ) -> None:
        if not len(generations):
            return
        assert source.mooncake is not None, "asked for by whoever chose this transport"
        offset = source.mooncake.generations_offset
        if offset is None:
            raise InvalidRequest(f"engine {source.engine_id!r} keeps no generations")
        num_bytes = source.num_blocks * _GENERATION.itemsize
        staging = await self._fetch(source, [(offset, num_bytes)], num_bytes)
        found = staging[:num_bytes].view(_GENERATION)
        block_ids = np.concatenate(
            [np.arange(run.source, run.source + run.num_blocks) for run in runs]
        )
        num_changed = int(np.count_nonzero(found[block_ids] != generations))
        self._idle.append(staging)
        if num_changed:
            raise KvTransferFailed(
                f"engine {source.engine_id!r} has reused {num_changed} of the blocks"
            )

    async def _fetch(
        self, source: RemoteSource, ranges: Sequence[tuple[int, int]], num_bytes: int
    ) -> NDArray[np.uint8]:
        """Ranges of the source's segment, one behind another in staging memory, which the
        caller gives back."""
        assert source.mooncake is not None, "asked for by whoever chose this transport"
        host, _ = source.data_address
        peer = f"{host}:{source.mooncake.rpc_port}"
        staging = self._take(num_bytes)
        lengths = [length for _, length in ranges]
        starts = np.cumsum([0, *lengths[:-1]]) + staging.ctypes.data
        peer_addresses = [source.mooncake.address + start for start, _ in ranges]
        reading = self._threads.submit(
            self._engine.batch_transfer_sync_read, peer, starts.tolist(), peer_addresses, lengths
        )
        try:
            async with asyncio.timeout(self._stall_timeout_s):
                result = await asyncio.wrap_future(reading)
        except TimeoutError as error:
            self._give_up(reading, staging)
            raise KvTransferFailed(
                f"reading from {peer}: nothing for {self._stall_timeout_s:g} s"
            ) from error
        except BaseException:
            self._give_up(reading, staging)
            raise
        if result != 0:
            self._quarantine(staging)
            raise KvTransferFailed(f"reading from {peer}: the Transfer Engine says {result}")
        return staging

    def _give_up(self, reading: "Future[int]", staging: NDArray[np.uint8]) -> None:
        """Have a read's staging memory back when the read ends, if it ever does."""
        loop = asyncio.get_running_loop()
        self._spoilt[reading] = staging

        def take_back() -> None:
            del self._spoilt[reading]
            if reading.cancelled() or (reading.exception() is None and reading.result() == 0):
                self._idle.append(staging)
            else:
                self._quarantine(staging)

        def has_ended(_: "Future[int]") -> None:
            # In the thread that read; the loop may be closed by now.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(take_back)

        reading.add_done_callback(has_ended)

    def _quarantine(self, staging: NDArray[np.uint8]) -> None:
        asyncio.get_running_loop().call_later(_QUARANTINE_S, self._idle.append, staging)

    def _take(self, num_bytes: int) -> NDArray[np.uint8]:
        for index, staging in enumerate(self._idle):
            if staging.nbytes >= num_bytes:
                return self._idle.pop(index)
        if not self.is_usable:
            raise KvTransferFailed("too many reads that were given up still go on")
        made = np.zeros(max(num_bytes, _STAGING_BYTES), np.uint8)
        if self._engine.register_memory(made.ctypes.data, made.nbytes) != 0:
            raise KvTransferFailed("the Transfer Engine takes no more memory")
        return made


def open_transport(
    host: str, protocol: str, device: str, *, num_reads: int, stall_timeout_s: float
) -> MooncakeTransport:
    """Start a Transfer Engine; raises MooncakeMissing with what to do."""
    try:
        make: Callable[[], Any] = import_module("mooncake.engine").TransferEngine
    except ImportError as error:
        raise MooncakeMissing(f"no Mooncake Transfer Engine ({error}): {INSTALL}") from error
    engine: TransferEngine = make()
    # Peers find each other by address: no metadata server is asked.
    if engine.initialize(host, "P2PHANDSHAKE", protocol, device) != 0:
        raise MooncakeMissing(f"the Mooncake Transfer Engine does not start with {protocol!r}")
    return MooncakeTransport(engine, num_reads=num_reads, stall_timeout_s=stall_timeout_s)


def _pieces(runs: Sequence[BlockRun], max_blocks: int) -> Iterator[_Piece]:
    """Runs cut and gathered so that each piece fits into staging memory."""
    gathered: list[BlockRun] = []
    num_blocks = 0
    for run in runs:
        start = 0
        while start < run.num_blocks:
            count = min(run.num_blocks - start, max_blocks - num_blocks)
            gathered.append(BlockRun(run.source + start, run.destination + start, count))
            num_blocks += count
            start += count
            if num_blocks == max_blocks:
                yield _Piece(tuple(gathered), num_blocks)
                gathered, num_blocks = [], 0
    if gathered:
        yield _Piece(tuple(gathered), num_blocks)
