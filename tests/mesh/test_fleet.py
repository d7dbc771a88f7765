"""Workers that leave and join, with processes that only say so."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc
import pytest

from mesh.client import mesh_errors
from mesh.errors import InvalidRequest, WorkerUnavailable
from mesh.fleet import Fleet, serving_fleet
from mesh.home import MeshState, ServiceRecord
from mesh.ports import find_free_ports
from mesh.supervisor import ServiceSpec, StartFailed
from mesh.v1 import supervisor_pb2, supervisor_pb2_grpc


@dataclass
class FakeProcesses:
    """Keeps names; a removal waits for `may_end`."""

    names: list[str]
    may_end: asyncio.Event = field(default_factory=asyncio.Event)
    ending: asyncio.Event = field(default_factory=asyncio.Event)
    ends_by_itself: bool = True
    starts: bool = True
    grace_s: float | None = None

    def state(self) -> MeshState:
        services = tuple(
            ServiceRecord(name, name.split("-")[0], name, None, None, "", "running", 0)
            for name in self.names
        )
        return MeshState(1, 0.0, True, "", "", "m", services)

    async def add(self, spec: ServiceSpec, timeout_s: float) -> None:
        if not self.starts:
            raise StartFailed(f"{spec.name} ended with status 2")
        self.names.append(spec.name)

    async def remove(self, name: str, grace_s: float) -> bool:
        self.grace_s = grace_s
        self.ending.set()
        await self.may_end.wait()
        self.names.remove(name)
        return self.ends_by_itself


class FakeSource:
    def worker(self, role: str, index: int) -> ServiceSpec:
        async def ready() -> bool:
            return True

        async def is_alive(timeout_s: float) -> bool:
            return True

        name = f"{role}-{index}"
        return ServiceSpec(name, role, name, (), {}, "", ready, is_alive)

    def drain_timeout_s(self, role: str) -> float:
        return {"prefill": 1.0, "decode": 20.0}[role]


def fleet_of(*names: str, can_end: bool = True) -> tuple[Fleet, FakeProcesses]:
    processes = FakeProcesses(list(names))
    if can_end:
        processes.may_end.set()
    return Fleet(processes, FakeSource()), processes


async def test_a_drained_worker_does_not_come_back() -> None:
    fleet, processes = fleet_of("prefill-0", "decode-0", "decode-1")

    drained = await fleet.drain("decode-0", restart=False, force=False)

    assert not drained.was_killed
    assert processes.names == ["prefill-0", "decode-1"]
    assert processes.grace_s is not None
    assert processes.grace_s > 20.0  # its streams' time, and some to end


async def test_a_worker_that_is_to_restart_keeps_its_name() -> None:
    fleet, processes = fleet_of("prefill-0", "decode-0", "decode-1")

    await fleet.drain("decode-0", restart=True, force=False)

    assert processes.names == ["prefill-0", "decode-1", "decode-0"]


async def test_a_worker_that_had_to_be_killed_is_told_as_such() -> None:
    fleet, processes = fleet_of("prefill-0", "decode-0")
    processes.ends_by_itself = False

    assert (await fleet.drain("prefill-0", restart=False, force=False)).was_killed


async def test_the_last_decode_worker_is_drained_by_force_only() -> None:
    fleet, processes = fleet_of("prefill-0", "decode-0")

    with pytest.raises(InvalidRequest, match="last decode worker here: say --force"):
        await fleet.drain("decode-0", restart=False, force=False)
    await fleet.drain("decode-0", restart=False, force=True)

    assert processes.names == ["prefill-0"]


async def test_an_unknown_worker_is_refused_with_those_that_there_are() -> None:
    fleet, _ = fleet_of("gateway-0", "prefill-0", "decode-0")

    with pytest.raises(InvalidRequest, match=r"'gateway-0'.*there are prefill-0, decode-0\."):
        await fleet.drain("gateway-0", restart=False, force=False)


async def test_scaling_up_takes_the_lowest_free_numbers() -> None:
    fleet, processes = fleet_of("prefill-0", "decode-1")

    scaled = await fleet.scale("decode", 3)

    assert scaled.started == ("decode-0", "decode-2")
    assert sorted(processes.names) == ["decode-0", "decode-1", "decode-2", "prefill-0"]


async def test_scaling_down_drains_the_highest_numbers() -> None:
    fleet, processes = fleet_of("decode-0", "decode-2", "decode-10")

    scaled = await fleet.scale("decode", 1)

    assert scaled.drained == ("decode-2", "decode-10")
    assert processes.names == ["decode-0"]


@pytest.mark.parametrize(
    ("role", "number"), [("decode", 0), ("decode", 65), ("prefill", 65), ("gateway", 1)]
)
async def test_what_cannot_be_scaled_is_refused(role: str, number: int) -> None:
    fleet, processes = fleet_of("prefill-0", "decode-0")

    with pytest.raises(InvalidRequest):
        await fleet.scale(role, number)

    assert processes.names == ["prefill-0", "decode-0"]


async def test_two_drains_at_once_leave_the_last_decode_worker() -> None:
    fleet, processes = fleet_of("decode-0", "decode-1")

    results = await asyncio.gather(
        fleet.drain("decode-0", restart=False, force=False),
        fleet.drain("decode-1", restart=False, force=False),
        return_exceptions=True,
    )

    assert [isinstance(result, InvalidRequest) for result in results] == [False, True]
    assert processes.names == ["decode-1"]


@asynccontextmanager
async def on_the_wire(
    fleet: Fleet,
) -> "AsyncIterator[supervisor_pb2_grpc.SupervisorServiceAsyncStub]":
    address = f"127.0.0.1:{find_free_ports(1)[0]}"
    async with (
        serving_fleet(fleet, address),
        grpc.aio.insecure_channel(address) as channel,
    ):
        yield supervisor_pb2_grpc.SupervisorServiceStub(channel)


async def test_a_drain_goes_on_when_its_caller_hangs_up() -> None:
    fleet, processes = fleet_of("decode-0", "decode-1", can_end=False)
    async with on_the_wire(fleet) as stub:
        call = stub.DrainWorker(supervisor_pb2.DrainWorkerRequest(worker_id="decode-0"))
        await asyncio.wait_for(processes.ending.wait(), 20)
        call.cancel()
        processes.may_end.set()

        # Changes take turns: this one comes after the drain.
        response = await stub.ScaleWorkers(
            supervisor_pb2.ScaleWorkersRequest(role="decode", num_workers=2)
        )

    assert response.started_worker_ids == ["decode-0"]
    assert processes.names == ["decode-1", "decode-0"]


async def test_a_worker_that_does_not_start_is_told_to_the_caller() -> None:
    fleet, processes = fleet_of("decode-0")
    processes.starts = False
    async with on_the_wire(fleet) as stub:
        with pytest.raises(WorkerUnavailable, match="decode-1 ended with status 2"), mesh_errors():
            await stub.ScaleWorkers(
                supervisor_pb2.ScaleWorkersRequest(role="decode", num_workers=2)
            )
