"""/health: forward progress of the mesh, not just an open port."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import httpx
import pytest

from gateway.health import StallDetector
from mesh.server import MeshServer
from mesh.v1 import scheduler_pb2, scheduler_pb2_grpc, tokenizer_pb2_grpc, types_pb2
from tests.gateway.fake_scheduler import FakeScheduler
from tests.gateway.fake_tokenizer import FakeTokenizer
from tests.gateway.fakes import FakeMesh
from tests.gateway.running import RunningGateway, eventually, run_gateway

WITHIN_S = 20


async def until(gateway: RunningGateway, status: int) -> dict[str, Any]:
    """The body of the first answer with this status."""
    async with httpx.AsyncClient(base_url=gateway.url) as http, asyncio.timeout(WITHIN_S):
        while True:
            response = await http.get("/health")
            if response.status_code == status:
                body: dict[str, Any] = response.json()
                return body
            await asyncio.sleep(0.05)


async def test_healthy_mesh_is_ready(gateway: RunningGateway, mesh: FakeMesh) -> None:
    body = await until(gateway, 200)

    assert body == {"status": "ok", "problems": [], "workers": {"prefill": 1, "decode": 2}}


async def test_lost_tokenizer_is_unready_until_it_returns() -> None:
    # ST-16
    async with FakeMesh() as mesh, run_gateway(mesh) as gateway:
        await until(gateway, 200)
        await mesh.kill("tokenizer")
        body = await until(gateway, 503)
        assert body["status"] == "unavailable"
        assert any("tokenizer" in problem for problem in body["problems"])
        assert body["error"]["type"] == "service_unavailable_error"

        await mesh.start_tokenizer(mesh.tokenizer_address)
        await until(gateway, 200)


async def test_lost_scheduler_is_unready() -> None:
    # ST-16
    async with FakeMesh() as mesh, run_gateway(mesh) as gateway:
        await until(gateway, 200)
        await mesh.kill("scheduler")
        body = await until(gateway, 503)
    assert any("scheduler" in problem for problem in body["problems"])


@asynccontextmanager
async def serving(add: Callable[[Any, grpc.aio.Server], None], servicer: Any) -> AsyncIterator[str]:
    server = MeshServer()
    server.add(add, servicer, "another")
    try:
        yield await server.start()
    finally:
        await server.stop(0)


@asynccontextmanager
async def gateway_of_twins(mesh: FakeMesh) -> AsyncIterator[RunningGateway]:
    """Beside a second scheduler and a second tokenizer that are frozen already."""
    frozen = asyncio.Event()
    scheduler, tokenizer = FakeScheduler(state_gate=frozen), FakeTokenizer(list_gate=frozen)
    add_scheduler = scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server
    add_tokenizer = tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server
    async with (
        serving(add_scheduler, scheduler) as scheduler_address,
        serving(add_tokenizer, tokenizer) as tokenizer_address,
        run_gateway(
            mesh,
            scheduler_addresses=[mesh.scheduler_address, scheduler_address],
            tokenizer_addresses=[mesh.tokenizer_address, tokenizer_address],
        ) as gateway,
    ):
        yield gateway


async def test_mesh_stays_ready_while_one_scheduler_and_one_tokenizer_answer(
    mesh: FakeMesh,
) -> None:
    async with gateway_of_twins(mesh) as gateway:
        await until(gateway, 200)
        for _ in range(6):
            await gateway.core.health.check()
            assert gateway.core.health.report()["problems"] == []


async def test_mesh_whose_schedulers_are_all_frozen_is_unready(mesh: FakeMesh) -> None:
    async with gateway_of_twins(mesh) as gateway:
        await until(gateway, 200)
        mesh.scheduler.state_gate = asyncio.Event()
        try:
            body = await until(gateway, 503)
        finally:
            mesh.scheduler.state_gate.set()
            mesh.scheduler.state_gate = None
        assert body["problems"] == ["scheduler: DEADLINE_EXCEEDED"]


async def test_mesh_without_decode_worker_is_unready(
    gateway: RunningGateway, mesh: FakeMesh
) -> None:
    # ST-16
    decodes, mesh.scheduler.decodes = mesh.scheduler.decodes, []
    try:
        body = await until(gateway, 503)
    finally:
        mesh.scheduler.decodes = decodes
    assert body["workers"]["decode"] == 0
    await until(gateway, 200)


async def test_mesh_without_prefill_worker_can_serve(
    gateway: RunningGateway, mesh: FakeMesh
) -> None:
    prefills, mesh.scheduler.prefills = mesh.scheduler.prefills, []
    try:
        async with asyncio.timeout(WITHIN_S):
            await eventually(lambda: not gateway.core.health.report()["workers"]["prefill"])
        assert (await until(gateway, 200))["workers"]["prefill"] == 0
    finally:
        mesh.scheduler.prefills = prefills


async def test_worker_that_takes_no_step_is_unready_until_it_moves() -> None:
    # ST-16
    async with FakeMesh() as mesh, run_gateway(mesh, health_stall_s=0.3) as gateway:
        await until(gateway, 200)
        load = types_pb2.EngineLoad(num_running=3, num_steps=10)
        mesh.scheduler.loads["decode-0"] = load
        body = await until(gateway, 503)
        assert any("decode-0" in problem for problem in body["problems"])

        load.num_running = 0
        await until(gateway, 200)


def worker(num_running: int, num_steps: int, incarnation: str = "a") -> scheduler_pb2.WorkerState:
    return scheduler_pb2.WorkerState(
        worker_id="d",
        incarnation=incarnation,
        load=types_pb2.EngineLoad(num_running=num_running, num_steps=num_steps),
    )


def test_stall_needs_work_and_time_without_a_step() -> None:
    detector = StallDetector(stall_s=10)

    assert detector.check([worker(1, 5)], now=0) == []
    assert detector.check([worker(1, 6)], now=9) == []
    assert detector.check([worker(1, 6)], now=18) == []
    assert len(detector.check([worker(1, 6)], now=19)) == 1
    assert detector.check([worker(1, 7)], now=20) == []
    assert detector.check([worker(0, 7)], now=99) == []
    assert detector.check([worker(1, 7)], now=100) == []


def test_new_incarnation_starts_afresh() -> None:
    detector = StallDetector(stall_s=10)
    detector.check([worker(1, 5)], now=0)

    assert detector.check([worker(1, 5, "b")], now=20) == []


@pytest.mark.parametrize("draining", [True])
async def test_draining_gateway_is_unready(mesh: FakeMesh, draining: bool) -> None:
    async with run_gateway(mesh) as gateway:
        await until(gateway, 200)
        gateway.core.health.drain()
        assert (await until(gateway, 503))["problems"] == ["draining"]
