"""/health: forward progress of the mesh, not just an open port."""

import asyncio
from typing import Any

import httpx
import pytest

from gateway.health import StallDetector
from mesh.v1 import scheduler_pb2, types_pb2
from tests.gateway.fakes import FakeMesh
from tests.gateway.running import RunningGateway, eventually, run_gateway

WITHIN_S = 10


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
