"""Real workers and a real transfer agent in one process, on loopback ports, with a tiny model."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from decode_svc.config import DecodeConfig
from decode_svc.service import decode_service
from engine.loop import EngineLoop
from kv_transfer_svc.agent import TransferAgent as Agent
from kv_transfer_svc.runs import BlockRun
from kv_transfer_svc.segments import Segment, SegmentTable
from kv_transfer_svc.service import KvTransferServicer
from kv_transfer_svc.transports.segment_copy import FollowingCopy
from kv_transfer_svc.transports.shared_memory import SharedMemoryTransport
from mesh.client import Channels, connect
from mesh.registry import new_incarnation
from mesh.server import MeshServer
from mesh.v1 import (
    decode_pb2_grpc,
    kv_transfer_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    types_pb2,
)
from prefill_svc.config import PrefillConfig
from prefill_svc.service import prefill_service
from tests.worker_wire import MODEL, decode_request, prefill_request, wait_until
from worker.engine_loading import load_engine
from worker.host import Service, Worker
from worker.segment_attachment import SegmentAttachment
from worker.streams import ActiveStreams
from worker.tiered_kv import TieredKv, TierOwner
from worker.transfer_agent import TransferAgent

if TYPE_CHECKING:
    from mesh.v1.decode_pb2_grpc import DecodeServiceAsyncStub
    from mesh.v1.prefill_pb2_grpc import PrefillServiceAsyncStub

BLOCK_SIZE = 4


class GatedTransport:
    """The real transport, behind a gate that the test may hold shut."""

    def __init__(self, transport: SharedMemoryTransport) -> None:
        self._transport = transport
        self.gate = asyncio.Event()
        self.gate.set()
        self.arrived = asyncio.Event()

    async def copy(self, source: Segment, destination: Segment, runs: Sequence[BlockRun]) -> int:
        self.arrived.set()
        copying = asyncio.ensure_future(self._copy_later(source, destination, runs))
        try:
            return await asyncio.shield(copying)
        except asyncio.CancelledError:
            # Like a copy in flight, which cannot be stopped.
            await copying
            raise

    async def follow(self, copy: FollowingCopy) -> int:
        return await self._transport.follow(copy)

    async def _copy_later(
        self, source: Segment, destination: Segment, runs: Sequence[BlockRun]
    ) -> int:
        await self.gate.wait()
        return await self._transport.copy(source, destination, runs)


@dataclass
class Answer:
    """What a request came to."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[types_pb2.TokenLogprobs] = field(default_factory=list)
    finish_reason: int = types_pb2.FINISH_REASON_UNSPECIFIED
    kv_transfer_bytes: int = 0

    def take(self, chunk: types_pb2.TokenChunk) -> None:
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs


class RunningWorker:
    """One worker of the mesh in this process."""

    def __init__(self, worker: Worker, channel: grpc.aio.Channel, stack: AsyncExitStack) -> None:
        self.worker = worker
        self.channel = channel
        self._stack = stack

    @property
    def engine(self) -> EngineLoop:
        return self.worker.engine

    @property
    def block_bytes(self) -> int:
        assert self.worker.loaded.segment is not None
        return self.worker.loaded.segment.block_bytes

    async def stop(self) -> None:
        await self._stack.aclose()

    async def wait_until_all_blocks_are_free(self) -> None:
        """A cancelled request gives everything back within a second."""

        def is_free() -> bool:
            load = self.engine.load()
            return load.num_free_blocks == load.num_blocks and load.num_leases == 0

        await wait_until(is_free)


class WorkerMesh:
    """A transfer agent, and prefill and decode workers that come and go."""

    def __init__(self, model_path: Path, segment_dir: Path, stack: AsyncExitStack) -> None:
        self._model_path = model_path
        self._segment_dir = segment_dir
        self._stack = stack
        self.agent_server = MeshServer()
        self.transport: GatedTransport

    async def start_agent(self) -> None:
        transport = SharedMemoryTransport(1)
        self._stack.callback(transport.close)
        self.transport = GatedTransport(transport)
        servicer = KvTransferServicer(Agent(SegmentTable(), self.transport))
        self.agent_server.add(
            kv_transfer_pb2_grpc.add_KvTransferServiceServicer_to_server,
            servicer,
            "mesh.v1.KvTransferService",
        )
        await self.agent_server.start()
        self._stack.push_async_callback(self.agent_server.stop, 0)

    async def start_prefill(self, **settings: Any) -> RunningWorker:
        config = PrefillConfig(**self._settings(settings))
        return await self._start(config, prefill_service(config))

    async def start_decode(self, **settings: Any) -> RunningWorker:
        config = DecodeConfig(**self._settings(settings))
        return await self._start(config, decode_service(config))

    def _settings(self, settings: dict[str, Any]) -> dict[str, Any]:
        return {
            "model": MODEL,
            "model_path": self._model_path,
            "block_size": BLOCK_SIZE,
            "num_blocks": 64,
            "max_num_batched_tokens": 16,
            "max_num_seqs": 8,
            "segment_dir": self._segment_dir,
            # A test may have agents of its own.
            "kv_transfer_address": settings.get("kv_transfer_address") or self.agent_server.address,
            **settings,
        }

    async def _start(self, config: PrefillConfig | DecodeConfig, service: Service) -> RunningWorker:
        async with AsyncExitStack() as stack:
            loaded = load_engine(config, new_incarnation())
            engine = EngineLoop(loaded.engine, lambda events: tiered.offer(events))
            engine.start()
            stack.push_async_callback(engine.stop)
            channels = await stack.enter_async_context(Channels())
            server = MeshServer(config.listen)
            assert loaded.segment is not None
            attachment = await stack.enter_async_context(
                SegmentAttachment(channels.get(config.kv_transfer_address), loaded.segment)
            )
            agent = TransferAgent(channels, config.kv_transfer_address)
            owner = TierOwner(loaded.engine_id, config.model, lambda: attachment.has_tiers)
            tiered = await stack.enter_async_context(TieredKv(engine, agent, owner))
            worker = Worker(engine, tiered, loaded, channels, ActiveStreams(), server, config)
            await stack.enter_async_context(service(worker))
            channel = connect(await server.start())
            stack.push_async_callback(server.stop, 0)
            stack.push_async_callback(channel.close)
            async with asyncio.timeout(20):
                await attachment.attached.wait()
            running = RunningWorker(worker, channel, stack.pop_all())
        self._stack.push_async_callback(running.stop)
        return running


@asynccontextmanager
async def worker_mesh(model_path: Path, segment_dir: Path) -> AsyncIterator[WorkerMesh]:
    async with AsyncExitStack() as stack:
        mesh = WorkerMesh(model_path, segment_dir, stack)
        await mesh.start_agent()
        yield mesh


async def prefill(
    worker: RunningWorker,
    prompt: list[int],
    params: types_pb2.SamplingParams,
    output: list[int] | None = None,
) -> prefill_pb2.PrefillFinished:
    stub: PrefillServiceAsyncStub = prefill_pb2_grpc.PrefillServiceStub(worker.channel)
    request = prefill_request("r", prompt, output, params)
    finished: prefill_pb2.PrefillFinished | None = None
    async for event in stub.Prefill(request, timeout=30):
        if event.HasField("finished"):
            finished = event.finished
    assert finished is not None
    return finished


async def decode(
    worker: RunningWorker,
    prompt: list[int],
    params: types_pb2.SamplingParams,
    output: list[int] | None = None,
    kv_handle: types_pb2.KvHandle | None = None,
) -> Answer:
    stub: DecodeServiceAsyncStub = decode_pb2_grpc.DecodeServiceStub(worker.channel)
    answer = Answer()
    request = decode_request("r", prompt, output, params, kv_handle)
    async for event in stub.Decode(request, timeout=30):
        if event.HasField("tokens"):
            answer.take(event.tokens)
        else:
            answer.finish_reason = event.finished.finish_reason
            answer.kv_transfer_bytes = event.finished.kv_transfer_bytes
    return answer


async def decode_disaggregated(
    producer: RunningWorker,
    consumer: RunningWorker,
    prompt: list[int],
    params: types_pb2.SamplingParams,
    output: list[int] | None = None,
) -> Answer:
    """As the gateway does it; `output` is what other workers had already produced."""
    first = await prefill(producer, prompt, params, output)
    so_far = [*(output or []), *first.first_token.token_ids]
    if first.HasField("finish_reason"):
        answer = Answer(finish_reason=first.finish_reason)
        answer.take(first.first_token)
        return answer
    rest = await decode(consumer, prompt, params, so_far, first.kv_handle)
    rest.token_ids[:0] = first.first_token.token_ids
    rest.logprobs[:0] = first.first_token.logprobs
    return rest
