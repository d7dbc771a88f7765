"""Machines in one process: two agents on loopback know nothing of each other's segments."""

import asyncio
import random
import threading
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from engine.batcher import ScheduledRequest
from engine.model_runner import Runner
from kv_transfer_svc.transports.base import Transport
from mesh.errors import from_rpc_error
from mesh.v1 import decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, types_pb2
from tests.transfer_agents import RunningAgent, start_agent
from tests.worker_mesh import Answer, RunningWorker, WorkerMesh
from tests.worker_wire import decode_request, prefill_request, sampling

if TYPE_CHECKING:
    from mesh.v1.decode_pb2_grpc import DecodeServiceAsyncStub
    from mesh.v1.prefill_pb2_grpc import PrefillServiceAsyncStub

BLOCK_SIZE = 4
CHUNK = 16
GREEDY = sampling(12, temperature=0.0, ignore_eos=True)
SEEDED = sampling(12, temperature=0.9, seed=7, ignore_eos=True, frequency_penalty=0.5)


def make_prompt(num_tokens: int, seed: int = 0) -> list[int]:
    drawn = random.Random(1000 * num_tokens + seed)
    return [drawn.randrange(3, 96) for _ in range(num_tokens)]


class Machines:
    """Agents and workers; what is started is stopped with the test."""

    def __init__(self, model_path: Path, segment_dir: Path, stack: AsyncExitStack) -> None:
        self._workers = WorkerMesh(model_path, segment_dir, stack)
        self._stack = stack

    async def start_agent(self, transport: Transport | None = None, **options: Any) -> RunningAgent:
        agent = await start_agent(transport, **options)
        self._stack.push_async_callback(agent.stop)
        return agent

    async def start_prefill(self, agent: RunningAgent, **settings: Any) -> RunningWorker:
        return await self._workers.start_prefill(kv_transfer_address=agent.address, **settings)

    async def start_decode(self, agent: RunningAgent, **settings: Any) -> RunningWorker:
        return await self._workers.start_decode(kv_transfer_address=agent.address, **settings)

    async def start_pair(self, num_machines: int, **settings: Any) -> "Pair":
        here = await self.start_agent()
        there = here if num_machines == 1 else await self.start_agent()
        return Pair(
            await self.start_prefill(there, **settings),
            await self.start_decode(here, **settings),
            there,
            here,
        )


@dataclass
class Pair:
    """A prefill and a decode worker, and the agents of their machines."""

    producer: RunningWorker
    consumer: RunningWorker
    source_agent: RunningAgent
    agent: RunningAgent

    async def wait_until_free(self) -> None:
        for worker in (self.producer, self.consumer):
            await worker.wait_until_all_blocks_are_free()


class GatedRunner:
    """Lets a prefill's steps through one by one."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self.steps = threading.Semaphore(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def execute(
        self,
        scheduled: Sequence[ScheduledRequest],
        on_kv_written: Callable[[], None] | None = None,
    ) -> Any:
        assert self.steps.acquire(timeout=20), "nobody let the step through"
        return self._runner.execute(scheduled, on_kv_written)


def gate(worker: RunningWorker) -> GatedRunner:
    engine = worker.worker.loaded.engine
    gated = GatedRunner(engine._runner)
    engine._runner = gated
    return gated


@dataclass
class Handover:
    """A request as the gateway runs it: decode is called as soon as there is a handle."""

    producer: RunningWorker
    consumer: RunningWorker
    prompt: list[int]
    params: types_pb2.SamplingParams
    request_id: str = "r"
    handle: types_pb2.KvHandle | None = None
    has_handle: asyncio.Event = field(default_factory=asyncio.Event)
    was_early: bool = False
    answer: Answer = field(default_factory=Answer)

    async def run(self) -> Answer:
        """Raises MeshError as either side does; leaving ends both calls."""
        decoding: asyncio.Task[None] | None = None
        first: list[int] = []
        stub: PrefillServiceAsyncStub = prefill_pb2_grpc.PrefillServiceStub(self.producer.channel)
        request = prefill_request(self.request_id, self.prompt, None, self.params)
        call = stub.Prefill(request, timeout=30)
        try:
            async for event in call:
                if event.progress.HasField("kv_handle"):
                    self.was_early = True
                    self._take(event.progress.kv_handle)
                    decoding = asyncio.create_task(self._decode([], awaits_first_token=True))
                elif event.HasField("finished"):
                    first = list(event.finished.first_token.token_ids)
                    if decoding is None:
                        self._take(event.finished.kv_handle)
            if decoding is None:
                decoding = asyncio.create_task(self._decode(first, awaits_first_token=False))
            await decoding
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        finally:
            call.cancel()
            if decoding is not None:
                decoding.cancel()
                await asyncio.wait([decoding])
        self.answer.token_ids[:0] = first
        return self.answer

    def _take(self, handle: types_pb2.KvHandle) -> None:
        self.handle = handle
        self.has_handle.set()

    async def _decode(self, output: list[int], *, awaits_first_token: bool) -> None:
        stub: DecodeServiceAsyncStub = decode_pb2_grpc.DecodeServiceStub(self.consumer.channel)
        request = decode_request(self.request_id, self.prompt, output, self.params, self.handle)
        request.awaits_first_token = awaits_first_token
        async for event in stub.Decode(request, timeout=30):
            if event.HasField("tokens"):
                self.answer.take(event.tokens)
            else:
                self.answer.finish_reason = event.finished.finish_reason
                self.answer.kv_transfer_bytes = event.finished.kv_transfer_bytes
                self.stages_ms = {t.stage: t.duration_ms for t in event.finished.timings}

    stages_ms: dict[int, float] = field(default_factory=dict)


async def release(worker: RunningWorker, request_id: str) -> None:
    """What a gateway sends when it leaves a request."""
    stub: PrefillServiceAsyncStub = prefill_pb2_grpc.PrefillServiceStub(worker.channel)
    await stub.ReleaseKv(prefill_pb2.ReleaseKvRequest(request_id=request_id))
