"""Pulls: blocks from one engine to another, checked, timed and counted."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import numpy as np

from kv_transfer_svc.filling import Filling
from kv_transfer_svc.network import Network
from kv_transfer_svc.pulls import (
    Moved,
    Pull,
    check_complete,
    check_layouts,
    generations_of,
    to_pull_runs,
)
from kv_transfer_svc.segments import Segment, SegmentTable
from kv_transfer_svc.tiers.cold_tiers import ColdTiers, Loaded
from kv_transfer_svc.transports.base import Transport
from kv_transfer_svc.transports.segment_copy import CopyProgress, FollowingCopy
from mesh import metrics
from mesh.errors import InvalidRequest, KvTransferFailed, WorkerUnavailable
from mesh.telemetry import Stopwatch


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
        # Of the copies that run.
        self._limits: set[asyncio.Timeout] = set()
        self._is_ending = False

    async def drain(self) -> None:
        """Let the copies in flight finish, then let go of the segments.

        Cancelled, it ends the copies first. Behind it nothing writes any more: the port is closed
        then, and a worker that sees that gives the blocks it waited for to others.
        """
        try:
            await self._idle.wait()
            self._is_ending = True
            # For those that have begun meanwhile.
            await self._idle.wait()
        except asyncio.CancelledError:
            self._is_ending = True
            for limit in self._limits:
                limit.reschedule(asyncio.get_running_loop().time())
            await self._idle.wait()
            raise
        self.draining.set()
        if self.tiers is not None:
            await self.tiers.flush()

    async def pull(self, pull: Pull) -> Moved:
        """Copy the blocks; returns, or raises, when no byte is being written any more."""
        async with self._copying(pull.request_id):
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
        async with self._copying(request_id):
            with self.segments.in_use(engine_id) as (segment,):
                return await self.tiers.load(segment, keys, block_ids)

    @property
    def num_bytes(self) -> int:
        """Moved since the start, by pulls that still run too."""
        return self.stats.num_bytes + sum(one.num_bytes for one in self._unfinished)

    def num_active_pulls(self, request_id: str) -> int:
        """Of a request, or of all where none is named."""
        return self._active[request_id] if request_id else self.stats.num_active_pulls

    @asynccontextmanager
    async def _copying(self, request_id: str) -> AsyncIterator[None]:
        """Counted before the first check: callers ask for it to learn whether a call that they
        gave up could still write. Raises WorkerUnavailable at the agent's end."""
        if self._is_ending:
            raise WorkerUnavailable("the transfer agent is stopping")
        limit = asyncio.timeout(None)
        self._limits.add(limit)
        self.stats.num_active_pulls += 1
        self._active[request_id] += 1
        self._idle.clear()
        try:
            async with limit:
                yield
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise WorkerUnavailable("the transfer agent stopped in the middle") from error
        finally:
            self._limits.discard(limit)
            self.stats.num_active_pulls -= 1
            self._active -= Counter((request_id,))
            if self.stats.num_active_pulls == 0:
                self._idle.set()

    async def _pull(self, pull: Pull) -> Moved:
        if pull.source_engine_id == pull.destination_engine_id:
            raise InvalidRequest("source and destination are the same engine")
        if pull.follows and not pull.source_block_ids:
            raise InvalidRequest("there is no block to follow")
        if pull.follows and not pull.source_generations:
            raise KvTransferFailed(
                f"engine {pull.source_engine_id!r} does not tell which blocks are filled"
            )
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
            runs = to_pull_runs(pull, source.spec, destination)
            for segment in (source, destination):
                segment.check_size()
            block_ids = np.asarray(pull.source_block_ids, np.int64)
            generations = generations_of(pull)
            source.check_generations(block_ids, generations)
            if pull.follows:
                moved = await self._follow(pull, source, destination)
            else:
                stopwatch = Stopwatch()
                num_bytes = await self._transport.copy(source, destination, runs)
                moved = Moved(num_bytes, len(runs), stopwatch.elapsed_s)
            # Blocks that were reused meanwhile may have been read half old, half new.
            source.check_generations(block_ids, generations)
            check_complete(moved.num_bytes, pull, destination)
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
        with self.segments.in_use(pull.destination_engine_id) as (destination,):
            with self._watched() as progress:
                name = await network.pull(pull, destination, progress)
            check_complete(progress.num_bytes, pull, destination)
            return Moved.of(progress, name)

    def _count(self, moved: Moved) -> None:
        self.stats.num_pulls += 1
        self.stats.num_bytes += moved.num_bytes
        self.stats.copy_s += moved.copy_s
        labels = {"transport": moved.transport}
        metrics.KV_TRANSFER_BYTES.record(moved.num_bytes, labels)
        metrics.KV_TRANSFER_RUNS.record(moved.num_runs, labels)
        metrics.KV_TRANSFER_DURATION.record(moved.copy_s, labels)
