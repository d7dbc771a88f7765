"""What a running mesh holds, asked of its processes over gRPC and of the kernel."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from typing import Any, Self

import grpc

from mesh.home import Home, ServiceRecord
from mesh.supervisor import find_process
from mesh.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    kv_transfer_pb2,
    kv_transfer_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
    types_pb2,
)

_CALL_TIMEOUT_S = 1.0
# Other processes have no event to wait for.
_POLL_S = 0.02


@dataclass(frozen=True)
class Held:
    """What one process holds, by name; what an idle one holds is not in it."""

    counts: dict[str, int]

    def __str__(self) -> str:
        return ", ".join(f"{name} {count}" for name, count in self.counts.items() if count)


class MeshProbe:
    """Channels to every service of a home, for as long as the block lasts."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for channel in self._channels.values():
            await channel.close()

    @property
    def supervisor_pid(self) -> int:
        state = self.home.read_state()
        assert state is not None, "the mesh runs"
        return state.pid

    def services(self, role: str | None = None) -> list[ServiceRecord]:
        state = self.home.read_state()
        assert state is not None, "the mesh runs"
        return [one for one in state.services if role is None or one.role == role]

    def service(self, name: str) -> ServiceRecord:
        [found] = [one for one in self.services() if one.name == name]
        return found

    async def loads(self, role: str) -> dict[str, types_pb2.EngineLoad]:
        """Of every worker of a role; one that does not answer has nothing."""
        loads: dict[str, types_pb2.EngineLoad] = {}
        for service in self.services(role):
            try:
                loads[service.name] = await self._load(service)
            except grpc.aio.AioRpcError:
                loads[service.name] = types_pb2.EngineLoad()
        return loads

    async def num_waiting(self) -> int:
        """Requests that wait for a placement, over all schedulers that answer."""
        waiting = 0
        for service in self.services("scheduler"):
            try:
                waiting += (await self._scheduler_state(service)).num_waiting
            except grpc.aio.AioRpcError:
                continue
        return waiting

    async def left_behind(self, but_for: Collection[str] = ()) -> dict[str, str]:
        """What is held by whom in a mesh without requests; nobody answering counts too."""
        found: dict[str, str] = {}
        for service in self.services():
            if service.name in but_for:
                continue
            try:
                if held := str(await self._held(service)):
                    found[service.name] = held
            except grpc.aio.AioRpcError as error:
                found[service.name] = f"does not answer: {error.code().name}"
        return found

    async def wait_until_clean(
        self, timeout_s: float, but_for: Collection[str] = ()
    ) -> dict[str, str]:
        """What is left when nothing is any more, or after `timeout_s`."""
        return await _until_empty(lambda: self.left_behind(but_for), timeout_s)

    async def wait_until_whole(
        self, timeout_s: float, replaced: ServiceRecord | None = None
    ) -> dict[str, str]:
        """Until every service serves, is known where it should be, and has left no files.

        `replaced` is a process that has ended, or is about to.
        """
        return await _until_empty(lambda: self._missing(replaced), timeout_s)

    async def _missing(self, replaced: ServiceRecord | None) -> dict[str, str]:
        missing: dict[str, str] = {}
        if replaced is not None and self.service(replaced.name).pid == replaced.pid:
            missing[replaced.name] = "not replaced"
        for service in self.services():
            if service.state != "running" or find_process(service) is None:
                missing[service.name] = service.state
        workers = {one.name for role in ("prefill", "decode") for one in self.services(role)}
        for service in self.services("scheduler"):
            try:
                state = await self._scheduler_state(service)
            except grpc.aio.AioRpcError as error:
                missing[service.name] = error.code().name
                continue
            known = {worker.worker_id for worker in state.workers}
            if known != workers:
                missing[service.name] = f"knows {sorted(known)}"
        for service in self.services("kv_transfer"):
            try:
                stats = await self._transfer_stats(service)
            except grpc.aio.AioRpcError as error:
                missing[service.name] = error.code().name
                continue
            num_workers = len(workers) // len(self.services("kv_transfer"))
            if stats.num_segments != num_workers:
                missing[service.name] = f"{stats.num_segments} segments attached"
        segments = [path.name for path in self.home.segments()]
        if len(segments) != len(workers):
            missing["/dev/shm"] = f"{sorted(segments)}"
        return missing

    async def _load(self, service: ServiceRecord) -> types_pb2.EngineLoad:
        channel = self._channel(service)
        stub: Any
        request: Any
        if service.role == "prefill":
            stub = prefill_pb2_grpc.PrefillServiceStub(channel)
            request = prefill_pb2.PrefillServiceGetLoadRequest()
        else:
            stub = decode_pb2_grpc.DecodeServiceStub(channel)
            request = decode_pb2.DecodeServiceGetLoadRequest()
        response = await stub.GetLoad(request, timeout=_CALL_TIMEOUT_S)
        load: types_pb2.EngineLoad = response.load
        return load

    async def _scheduler_state(self, service: ServiceRecord) -> scheduler_pb2.GetStateResponse:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(self._channel(service))
        return await stub.GetState(scheduler_pb2.GetStateRequest(), timeout=_CALL_TIMEOUT_S)

    async def _transfer_stats(self, service: ServiceRecord) -> kv_transfer_pb2.GetStatsResponse:
        stub = kv_transfer_pb2_grpc.KvTransferServiceStub(self._channel(service))
        return await stub.GetStats(kv_transfer_pb2.GetStatsRequest(), timeout=_CALL_TIMEOUT_S)

    async def _held(self, service: ServiceRecord) -> Held:
        match service.role:
            case "prefill" | "decode":
                load = await self._load(service)
                used = load.num_blocks - load.num_free_blocks
                counts = {
                    "blocks": used,
                    "leases": load.num_leases,
                    "running": load.num_running,
                    "waiting": load.num_waiting,
                }
            case "scheduler":
                state = await self._scheduler_state(service)
                counts = {
                    "waiting": state.num_waiting,
                    "placements": state.num_placements,
                    "charges": sum(worker.num_placements for worker in state.workers),
                }
            case "kv_transfer":
                counts = {"pulls": (await self._transfer_stats(service)).num_active_pulls}
            case _:
                counts = {}
        return Held(counts)

    def _channel(self, service: ServiceRecord) -> grpc.aio.Channel:
        # One for each process: a channel to its predecessor would be in backoff.
        key = f"{service.address} {service.pid}"
        if key not in self._channels:
            self._channels[key] = grpc.aio.insecure_channel(
                service.address, options=[("grpc.use_local_subchannel_pool", 1)]
            )
        return self._channels[key]


async def _until_empty(
    look: Callable[[], Awaitable[dict[str, str]]], timeout_s: float
) -> dict[str, str]:
    deadline = time.monotonic() + timeout_s
    while True:
        found = await look()
        if not found or time.monotonic() > deadline:
            return found
        await asyncio.sleep(_POLL_S)


def signal_service(service: ServiceRecord, number: int) -> None:
    assert service.pid is not None, f"{service.name} runs"
    os.kill(service.pid, number)
