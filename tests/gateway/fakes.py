"""A mesh of scripted services on real sockets, one byte a token."""

from contextlib import AsyncExitStack
from typing import Any, Self

from mesh.server import MeshServer
from mesh.v1 import decode_pb2_grpc, prefill_pb2_grpc, scheduler_pb2_grpc, tokenizer_pb2_grpc
from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.fake_tokenizer import FakeTokenizer
from tests.gateway.fake_workers import FakeDecode, FakeModel, FakePrefill


class FakeMesh:
    """All services of a mesh, each behind its own server."""

    def __init__(self, num_prefill: int = 1, num_decode: int = 2) -> None:
        self.model = FakeModel()
        self.tokenizer = FakeTokenizer()
        self.prefills = [FakePrefill(self.model, f"prefill-{i}") for i in range(num_prefill)]
        self.decodes = [
            FakeDecode(self.model, self.prefills[0], f"decode-{i}") for i in range(num_decode)
        ]
        self.scheduler = FakeScheduler([*self.prefills], [*self.decodes])
        self.tokenizer_address = ""
        self.scheduler_address = ""
        self._servers: dict[str, MeshServer] = {}
        self._stack = AsyncExitStack()

    @property
    def prefill(self) -> FakePrefill:
        return self.prefills[0]

    @property
    def decode(self) -> FakeDecode:
        return self.decodes[0]

    async def __aenter__(self) -> Self:
        self.tokenizer_address = await self.start_tokenizer()
        self.scheduler_address = await self._start(
            "scheduler", scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server, self.scheduler
        )
        for prefill in self.prefills:
            prefill.address = await self._start(
                prefill.worker_id, prefill_pb2_grpc.add_PrefillServiceServicer_to_server, prefill
            )
        for decode in self.decodes:
            decode.address = await self._start(
                decode.worker_id, decode_pb2_grpc.add_DecodeServiceServicer_to_server, decode
            )
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for name in list(self._servers):
            await self.kill(name)

    async def start_tokenizer(self, address: str = "127.0.0.1:0") -> str:
        return await self._start(
            "tokenizer",
            tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server,
            self.tokenizer,
            address,
        )

    def reset(self) -> None:
        """Forget scripts and recordings; what is counted as held stays."""
        tokenizer, scheduler = self.tokenizer, self.scheduler
        tokenizer.encode_gate = tokenizer.decode_gate = None
        tokenizer.break_after = tokenizer.error_from = None
        tokenizer.encode_error = None
        tokenizer.num_encodes = 0
        tokenizer.chats.clear()
        tokenizer.traceparents.clear()
        scheduler.error = scheduler.gate = None
        scheduler.lease_ms = 15_000
        scheduler.was_renewed.clear()
        scheduler.full.clear()
        self.model.failing.clear()
        scheduler.local = False
        scheduler.num_prefill_done = 0
        scheduler.told.clear()
        scheduler.was_asked.clear()
        scheduler.admits.clear()
        scheduler.loads.clear()
        scheduler.metadata.clear()
        self.model.answers.clear()
        self.model.default = FakeModel.default
        for worker in (*self.prefills, *self.decodes):
            worker.reset()

    async def kill(self, name: str) -> None:
        """Stop a server at once, cutting its calls."""
        await self._servers.pop(name).stop(0)

    async def quiet(self) -> None:
        """Return when nothing runs and nothing is held; the tests' time limit is the bound."""
        for worker in (*self.prefills, *self.decodes):
            if worker.num_active:
                await worker.is_idle.wait()
        if self.scheduler.num_open:
            await self.scheduler.is_idle.wait()

    async def _start(self, name: str, add: Any, servicer: Any, address: str = "127.0.0.1:0") -> str:
        server = MeshServer(address)
        server.add(add, servicer, f"mesh.v1.{name}")
        self._servers[name] = server
        return await server.start()
