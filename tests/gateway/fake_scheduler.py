"""A scripted scheduler."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field

from mesh.errors import MeshError, QueueFull, WorkerUnavailable
from mesh.v1 import scheduler_pb2, scheduler_pb2_grpc, types_pb2
from tests.gateway.fake_tokenizer import EOS, Context
from tests.gateway.fake_workers import FakeDecode, FakePrefill


@dataclass
class FakeScheduler(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Places on the first workers that are not excluded."""

    prefills: list[FakePrefill] = field(default_factory=list)
    decodes: list[FakeDecode] = field(default_factory=list)
    local: bool = False
    # Raised instead of placing.
    error: MeshError | None = None
    # By the prompt's text: how many times the mesh is full for it.
    full: dict[bytes, int] = field(default_factory=dict)
    gate: asyncio.Event | None = None
    # Set to hold GetState back, as a frozen process does.
    state_gate: asyncio.Event | None = None
    num_open: int = 0
    lease_ms: int = 15_000
    admits: list[scheduler_pb2.PlaceRequest.Admit] = field(default_factory=list)
    num_prefill_done: int = 0
    # What callers said after `admit`.
    told: list[scheduler_pb2.PlaceRequest] = field(default_factory=list)
    was_asked: asyncio.Event = field(default_factory=asyncio.Event)
    was_renewed: asyncio.Event = field(default_factory=asyncio.Event)
    is_idle: asyncio.Event = field(default_factory=asyncio.Event)
    loads: dict[str, types_pb2.EngineLoad] = field(default_factory=dict)
    metadata: list[dict[str, str]] = field(default_factory=list)

    async def Place(
        self, request_iterator: AsyncIterator[scheduler_pb2.PlaceRequest], context: Context
    ) -> AsyncGenerator[scheduler_pb2.PlaceResponse, None]:
        self.num_open += 1
        self.is_idle.clear()
        self.metadata.append({k: str(v) for k, v in context.invocation_metadata() or ()})
        try:
            admit = (await anext(request_iterator)).admit
            self.admits.append(admit)
            self.was_asked.set()
            if self.gate is not None:
                await self.gate.wait()
            if self.error is not None:
                raise self.error
            self._refuse_if_full(bytes(one for one in admit.prompt_token_ids if one < EOS))
            yield scheduler_pb2.PlaceResponse(placement=self._place(admit))
            async for message in request_iterator:
                self.num_prefill_done += message.HasField("prefill_done")
                self.told.append(message)
                if message.HasField("renew"):
                    self.was_renewed.set()
        finally:
            self.num_open -= 1
            if self.num_open == 0:
                self.is_idle.set()

    async def GetState(
        self, request: scheduler_pb2.GetStateRequest, context: Context
    ) -> scheduler_pb2.GetStateResponse:
        if self.state_gate is not None:
            await self.state_gate.wait()
        return scheduler_pb2.GetStateResponse(
            workers=[
                scheduler_pb2.WorkerState(
                    worker_id=worker.worker_id,
                    role=role,
                    incarnation="1",
                    load=self.loads.get(worker.worker_id),
                )
                for role, workers in (("prefill", self.prefills), ("decode", self.decodes))
                for worker in workers
            ]
        )

    def _refuse_if_full(self, prompt: bytes) -> None:
        if self.full.get(prompt, 0) > 0:
            self.full[prompt] -= 1
            raise QueueFull("full", retry_after_s=1)

    def _place(self, admit: scheduler_pb2.PlaceRequest.Admit) -> scheduler_pb2.Placement:
        excluded = set(admit.excluded_worker_ids)
        decode = next((one for one in self.decodes if one.worker_id not in excluded), None)
        prefill = next((one for one in self.prefills if one.worker_id not in excluded), None)
        if decode is None:
            raise WorkerUnavailable("no decode worker is alive")
        placement = scheduler_pb2.Placement(
            placement_id=f"p{len(self.admits)}",
            lease_ms=self.lease_ms,
            mode=scheduler_pb2.PLACEMENT_MODE_LOCAL,
            decode=scheduler_pb2.WorkerRef(worker_id=decode.worker_id, address=decode.address),
        )
        if prefill is not None and not self.local:
            placement.mode = scheduler_pb2.PLACEMENT_MODE_DISAGGREGATED
            placement.prefill.worker_id = prefill.worker_id
            placement.prefill.address = prefill.address
        return placement
