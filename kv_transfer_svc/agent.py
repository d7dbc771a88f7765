"""Pulls: blocks from one engine to another, checked, timed and counted."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from kv_transfer_svc.fill_watch import Filled, FillWatch
from kv_transfer_svc.filling import Filling
from kv_transfer_svc.peers import Peers
from kv_transfer_svc.runs import BlockRun, to_runs
from kv_transfer_svc.segments import Segment, SegmentTable
from kv_transfer_svc.tiers.cold_tiers import ColdTiers, Loaded
from kv_transfer_svc.transports.base import RemoteSource, RemoteTransport, Transport
from kv_transfer_svc.transports.block_server import BlockServer
from kv_transfer_svc.transports.mooncake import MooncakeTransport
from kv_transfer_svc.transports.segment_copy import CopyProgress, FollowingCopy
from kv_transfer_svc.transports.tcp import TcpTransport
from mesh import metrics
from mesh.block_keys import layout_difference
from mesh.errors import InvalidRequest, KvTransferFailed, LayoutMismatch
from mesh.telemetry import Stopwatch

_ALL = slice(None)

TransportName = Literal["shared_memory", "tcp", "mooncake"]


@dataclass(frozen=True, slots=True)
class Pull:
    """Blocks wanted: the n-th of the source becomes the n-th of the destination."""

    source_engine_id: str
    source_block_ids: Sequence[int]
    destination_engine_id: str
    destination_block_ids: Sequence[int]
    # One for each source block, or none if the source keeps none.
    source_generations: Sequence[int] = ()
    # The agent of the source, for when that is not this one.
    source_address: str = ""
    # Whoever wants them can ask whether that still goes on.
    request_id: str = ""
    # The source is still filling them, in this order.
    follows: bool = False


@dataclass(frozen=True, slots=True)
class Moved:
    """What a pull did."""

    num_bytes: int
    num_runs: int
    copy_s: float
    transport: TransportName = "shared_memory"
    # What the source sampled after the last block, where the pull followed it.
    next_token_id: int | None = None

    @classmethod
    def of(cls, progress: CopyProgress, transport: TransportName) -> Self:
        return cls(
            progress.num_bytes,
            progress.num_runs,
            progress.copy_s,
            transport,
            progress.next_token_id,
        )

    @property
    def gb_per_s(self) -> float:
        return self.num_bytes / self.copy_s / 1e9 if self.copy_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Store:
    """Full blocks of an engine, and what they contain for as long as they have a generation."""

    engine_id: str
    model: str
    keys: Sequence[bytes]
    block_ids: Sequence[int]
    generations: Sequence[int]


@dataclass(slots=True)
class TransferStats:
    """Counted since the start; `num_active_pulls` is of now."""

    num_active_pulls: int = 0
    num_pulls: int = 0
    num_bytes: int = 0
    copy_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Network:
    """The way to blocks of other machines, and theirs to ours."""

    peers: Peers
    tcp: TcpTransport
    block_server: BlockServer
    fill_watch: FillWatch
    # Used where the other side has it too.
    mooncake: MooncakeTransport | None = None

    def transport(self, source: RemoteSource) -> tuple[RemoteTransport, TransportName]:
        mooncake = self.mooncake
        if mooncake is not None and mooncake.is_usable and source.mooncake is not None:
            return mooncake, "mooncake"
        return self.tcp, "tcp"


class TransferAgent:
    """Owns the segments of this machine's engines and moves blocks into them."""

    def __init__(
        self,
        segments: SegmentTable,
        transport: Transport,
        network: Network | None = None,
        tiers: ColdTiers | None = None,
    ) -> None:
        self.segments = segments
        self.stats = TransferStats()
        self.draining = asyncio.Event()
        self._transport = transport
        self.network = network
        self.tiers = tiers
        # Those that run, by the id of their request.
        self._active: Counter[str] = Counter()
        self._unfinished: set[CopyProgress] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    async def drain(self) -> None:
        """Let the copies in flight finish, then let go of the segments."""
        await self._idle.wait()
        self.draining.set()
        if self.tiers is not None:
            await self.tiers.flush()

    async def pull(self, pull: Pull) -> Moved:
        """Copy the blocks; returns, or raises, when no byte is being written any more."""
        with self._copying(pull.request_id):
            moved = await self._pull(pull)
        self._count(moved)
        return moved

    async def store(self, stored: Store) -> int:
        """Copy blocks into the colder tiers; returns how many were new and intact."""
        if self.tiers is None:
            return 0
        with self.segments.in_use(stored.engine_id) as (segment,):
            return await self.tiers.store(
                segment, stored.model, stored.keys, stored.block_ids, stored.generations
            )

    async def load(
        self, engine_id: str, keys: Sequence[bytes], block_ids: Sequence[int], request_id: str = ""
    ) -> Loaded:
        """Fill blocks from the colder tiers, as many of the leading ones as they have."""
        if self.tiers is None:
            return Loaded()
        with self._copying(request_id), self.segments.in_use(engine_id) as (segment,):
            return await self.tiers.load(segment, keys, block_ids)

    @property
    def num_bytes(self) -> int:
        """Moved since the start, by pulls that still run too."""
        return self.stats.num_bytes + sum(one.num_bytes for one in self._unfinished)

    def num_active_pulls(self, request_id: str) -> int:
        """Of a request, or of all where none is named."""
        return self._active[request_id] if request_id else self.stats.num_active_pulls

    @contextmanager
    def _copying(self, request_id: str) -> Iterator[None]:
        """Counted before the first check: callers ask for it to learn whether a call that they
        gave up could still write."""
        self.stats.num_active_pulls += 1
        self._active[request_id] += 1
        self._idle.clear()
        try:
            yield
        finally:
            self.stats.num_active_pulls -= 1
            self._active -= Counter((request_id,))
            if self.stats.num_active_pulls == 0:
                self._idle.set()

    async def _pull(self, pull: Pull) -> Moved:
        if pull.source_engine_id == pull.destination_engine_id:
            raise InvalidRequest("source and destination are the same engine")
        # Where the source is attached decides, not what the caller believes about it.
        if self.segments.knows(pull.source_engine_id) or not pull.source_address:
            return await self._pull_here(pull)
        if self.network is None:
            raise KvTransferFailed("this agent does not read from other machines")
        try:
            return await self._pull_from_afar(pull, self.network)
        except KvTransferFailed:
            self.network.peers.forget(pull.source_address, pull.source_engine_id)
            raise

    async def _pull_here(self, pull: Pull) -> Moved:
        engine_ids = (pull.source_engine_id, pull.destination_engine_id)
        with self.segments.in_use(*engine_ids) as (source, destination):
            check_layouts(source.spec, destination.spec)
            runs = _runs(pull, source.spec, destination)
            for segment in (source, destination):
                segment.check_size()
            block_ids = np.asarray(pull.source_block_ids, np.int64)
            generations = _generations(pull)
            source.check_generations(block_ids, generations)
            if pull.follows:
                moved = await self._follow(pull, source, destination)
            else:
                stopwatch = Stopwatch()
                num_bytes = await self._transport.copy(source, destination, runs)
                moved = Moved(num_bytes, len(runs), stopwatch.elapsed_s)
            # Blocks that were reused meanwhile may have been read half old, half new.
            source.check_generations(block_ids, generations)
            _check_complete(moved.num_bytes, pull, destination)
            return moved

    async def _follow(self, pull: Pull, source: Segment, destination: Segment) -> Moved:
        filling = Filling(source, pull.source_block_ids, pull.source_generations)
        with self._watched() as progress:
            copy = FollowingCopy(
                source,
                destination,
                pull.source_block_ids,
                pull.destination_block_ids,
                filling,
                progress,
            )
            await self._transport.follow(copy)
        return Moved.of(progress, "shared_memory")

    @contextmanager
    def _watched(self) -> Iterator[CopyProgress]:
        """Count what a copy moves while it runs: it may take as long as a prefill."""
        progress = CopyProgress()
        self._unfinished.add(progress)
        try:
            yield progress
        finally:
            self._unfinished.discard(progress)

    async def _pull_from_afar(self, pull: Pull, network: Network) -> Moved:
        """The source's agent does the checks of the source, or the transport for it."""
        source = await network.peers.locate(pull.source_address, pull.source_engine_id)
        with self.segments.in_use(pull.destination_engine_id) as (destination,):
            check_layouts(source, destination.spec)
            _runs(pull, source, destination)
            destination.check_size()
            transport, name = network.transport(source)
            num_read = 0
            async with aclosing(_filled(pull, network)) as changes:
                with self._watched() as progress:
                    async for filled in changes:
                        part = slice(num_read, filled.num_blocks)
                        runs = _runs(pull, source, destination, part)
                        stopwatch = Stopwatch()
                        progress.num_bytes += await transport.read(
                            source, destination, runs, _generations(pull)[part]
                        )
                        progress.copy_s += stopwatch.elapsed_s
                        progress.num_runs += len(runs)
                        progress.next_token_id = filled.next_token_id
                        num_read = filled.num_blocks
            _check_complete(progress.num_bytes, pull, destination)
            if destination.fill_marks is not None and progress.next_token_id is not None:
                destination.fill_marks.announce(pull.destination_block_ids, progress.next_token_id)
            return Moved.of(progress, name)

    def _count(self, moved: Moved) -> None:
        self.stats.num_pulls += 1
        self.stats.num_bytes += moved.num_bytes
        self.stats.copy_s += moved.copy_s
        labels = {"transport": moved.transport}
        metrics.KV_TRANSFER_BYTES.record(moved.num_bytes, labels)
        metrics.KV_TRANSFER_RUNS.record(moved.num_runs, labels)
        metrics.KV_TRANSFER_DURATION.record(moved.copy_s, labels)


class BlockLayout(Protocol):
    """What two engines must have in common, and how many blocks one has."""

    @property
    def engine_id(self) -> str: ...
    @property
    def block_bytes(self) -> int: ...
    @property
    def num_blocks(self) -> int: ...
    @property
    def layout_fingerprint(self) -> str: ...
    @property
    def layout(self) -> Mapping[str, str]: ...


def check_layouts(source: BlockLayout, destination: BlockLayout) -> None:
    """Raise LayoutMismatch if a block of one engine means something else to the other."""
    if source.layout_fingerprint != destination.layout_fingerprint:
        difference = layout_difference(destination.layout, source.layout)
        raise LayoutMismatch(
            f"engine {destination.engine_id!r} here cannot use blocks of engine "
            f"{source.engine_id!r} there: "
            + (
                difference
                or f"their layouts are {destination.layout_fingerprint} and "
                f"{source.layout_fingerprint}"
            )
        )
    if source.block_bytes != destination.block_bytes:
        raise LayoutMismatch(
            f"blocks of engine {source.engine_id!r} have {source.block_bytes} bytes, those of "
            f"engine {destination.engine_id!r} have {destination.block_bytes}"
        )


async def _filled(pull: Pull, network: Network) -> AsyncGenerator[Filled, None]:
    """How many of the blocks of a pull can be read on another machine, to the last one."""
    if not pull.follows:
        yield Filled(len(pull.source_block_ids))
        return
    progress = network.peers.watch(
        pull.source_address, pull.source_engine_id, pull.source_block_ids, pull.source_generations
    )
    async with aclosing(progress):
        async for filled in progress:
            yield filled


def _runs(
    pull: Pull, source: BlockLayout, destination: Segment, part: slice = _ALL
) -> list[BlockRun]:
    return to_runs(
        pull.source_block_ids[part],
        pull.destination_block_ids[part],
        source.num_blocks,
        destination.spec.num_blocks,
    )


def _generations(pull: Pull) -> NDArray[np.uint32]:
    if pull.source_generations and len(pull.source_generations) != len(pull.source_block_ids):
        raise InvalidRequest(
            f"{len(pull.source_generations)} generations for {len(pull.source_block_ids)} blocks"
        )
    return np.asarray(pull.source_generations, np.uint32)


def _check_complete(num_bytes: int, pull: Pull, destination: Segment) -> None:
    expected = len(pull.destination_block_ids) * destination.spec.block_bytes
    if num_bytes != expected:
        raise KvTransferFailed(f"{num_bytes} of {expected} bytes arrived")
