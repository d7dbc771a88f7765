"""A worker process: an engine, its place in the mesh, and one service on top."""

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, fields
from typing import Literal

from engine.loop import EngineLoop
from engine.request import EngineStopped
from mesh.block_publisher import BlockPublisher
from mesh.client import Channels
from mesh.registry import (
    BlockIndex,
    Heartbeat,
    WorkerLoad,
    WorkerRecord,
    WorkerRegistry,
    connect_redis,
    new_incarnation,
)
from mesh.scheduling import answer_soon, compute_behind
from mesh.server import MeshServer, serve
from mesh.v1 import kv_transfer_pb2
from worker.block_events import BlockEventRelay
from worker.config import WorkerConfig
from worker.engine_loading import LoadedEngine, load_engine
from worker.engine_metrics import watched_engine
from worker.engine_port import EnginePort
from worker.progress import ProgressMonitor
from worker.segment_attachment import SegmentAttachment
from worker.stale_segments import remove_stale_segments
from worker.streams import ActiveStreams
from worker.tiered_kv import TieredKv, TierOwner
from worker.transfer_agent import TransferAgent

logger = logging.getLogger(__name__)

Role = Literal["prefill", "decode"]


@dataclass(frozen=True)
class Worker:
    """What a service is built from."""

    engine: EngineLoop
    # The same engine for requests: it looks into colder tiers where there are any.
    requests: EnginePort
    loaded: LoadedEngine
    channels: Channels
    streams: ActiveStreams
    server: MeshServer
    config: WorkerConfig

    @property
    def address(self) -> str:
        """Where others reach this worker; known once its server listens."""
        host, _, port = self.server.address.rpartition(":")
        return f"{self.config.advertise_host or host}:{port}"


# What a drain waits for when no stream is running any more.
Quiescence = Callable[[], Awaitable[None]]

# Adds a servicer to the worker's server and keeps what belongs to it while its block lasts.
Service = Callable[[Worker], AbstractAsyncContextManager[Quiescence]]


async def run_worker(config: WorkerConfig, role: Role, service: Service) -> None:
    """Serve until told to stop; raises EngineStopped when the engine crashed.

    What was made last goes first: the engine outlives its calls.
    """
    os.nice(config.os_priority)
    remove_stale_segments(config.segment_dir, config.own_segment_prefix)
    incarnation = new_incarnation()
    async with AsyncExitStack() as stack:
        redis = connect_redis(config.redis_url)
        stack.push_async_callback(redis.aclose)
        channels = await stack.enter_async_context(Channels())
        block_events = BlockEventRelay()
        publisher = await stack.enter_async_context(
            BlockPublisher(BlockIndex(redis), config.model, config.worker_id, incarnation)
        )
        block_events.add(publisher.offer)
        loaded = await _load(config, incarnation)
        engine = EngineLoop(loaded.engine, block_events.offer, on_thread_start=compute_behind)
        engine.start()
        # The engine's own threads exist by now, and keep their long turns.
        answer_soon()
        stack.push_async_callback(engine.stop)
        stack.enter_context(watched_engine(engine, config.model, config.block_size))
        server = MeshServer(config.listen)
        requests: EnginePort = engine
        if loaded.segment is not None:
            requests = await stack.enter_async_context(
                attached_engine(engine, loaded.segment, channels, config)
            )
            if isinstance(requests, TieredKv):
                block_events.add(requests.offer)
        worker = Worker(engine, requests, loaded, channels, ActiveStreams(), server, config)
        wait_until_quiescent = await stack.enter_async_context(service(worker))
        membership = _Membership(worker, role, incarnation, WorkerRegistry(redis))
        stack.push_async_callback(membership.leave)

        async def drain() -> None:
            worker.streams.refuse_new()
            await membership.leave()
            try:
                await worker.streams.wait_until_idle()
                await wait_until_quiescent()
            finally:
                # Out of time: whoever still waits for tokens gets them elsewhere.
                worker.streams.cut()

        await serve(
            server,
            drain=drain,
            drain_timeout_s=config.drain_timeout_s,
            on_started=membership.join,
            parent_pid=config.parent_pid,
        )
        if not engine.is_running:
            raise EngineStopped("the engine crashed")


async def _load(config: WorkerConfig, incarnation: str) -> LoadedEngine:
    """In a thread of its own: those that compute are made by it and are what it is."""
    with ThreadPoolExecutor(1, "load", initializer=compute_behind) as thread:
        return await asyncio.get_running_loop().run_in_executor(
            thread, load_engine, config, incarnation
        )


@asynccontextmanager
async def attached_engine(
    engine: EngineLoop,
    segment: kv_transfer_pb2.AttachSegmentRequest,
    channels: Channels,
    config: WorkerConfig,
) -> AsyncIterator[EnginePort]:
    """The engine with its segment known to the machine's agent, and the agent's tiers to it."""
    address = config.kv_transfer_address
    async with SegmentAttachment(channels.get(address), segment) as attachment:
        if not config.use_kv_tiers:
            yield engine
            return
        owner = TierOwner(segment.engine_id, config.model, lambda: attachment.has_tiers)
        async with TieredKv(engine, TransferAgent(channels, address), owner) as tiered:
            yield tiered


class _Membership:
    """A worker's record in the registry, and its health, while it may get requests."""

    def __init__(
        self, worker: Worker, role: Role, incarnation: str, registry: WorkerRegistry
    ) -> None:
        self._worker = worker
        self._role = role
        self._incarnation = incarnation
        self._registry = registry
        self._stack = AsyncExitStack()

    async def join(self, _: str) -> None:
        monitor = ProgressMonitor(
            lambda: self._worker.engine.last_step_age_s,
            self._set_health,
            timeout_s=self._worker.config.stall_timeout_s,
        )
        await self._stack.enter_async_context(monitor)
        await self._stack.enter_async_context(Heartbeat(self._registry, self._record(), self._load))

    async def leave(self) -> None:
        await self._stack.aclose()

    async def _set_health(self, makes_progress: bool) -> None:
        await self._worker.server.set_serving(makes_progress)
        if not self._worker.engine.is_running:
            # Nothing brings a crashed engine back but a new process.
            logger.error("the engine is gone, stopping")
            signal.raise_signal(signal.SIGTERM)

    def _record(self) -> WorkerRecord:
        config, loaded = self._worker.config, self._worker.loaded
        cpus = tuple(sorted(os.sched_getaffinity(0))) if config.device == "cpu" else ()
        return WorkerRecord(
            worker_id=config.worker_id,
            incarnation=self._incarnation,
            role=self._role,
            address=self._worker.address,
            model=config.model,
            engine_id=loaded.engine_id,
            transfer_address=config.kv_transfer_address,
            layout_fingerprint=loaded.layout_fingerprint,
            block_size=config.block_size,
            num_blocks=self._worker.engine.load().num_blocks,
            max_model_len=loaded.engine.max_model_len,
            max_num_batched_tokens=config.max_num_batched_tokens,
            layout=loaded.layout,
            cpus=cpus,
            num_threads=config.num_threads or len(cpus),
        )

    def _load(self) -> WorkerLoad:
        stats = self._worker.engine.load()
        return WorkerLoad(**{one.name: getattr(stats, one.name) for one in fields(WorkerLoad)})
