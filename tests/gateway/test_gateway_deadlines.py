"""Time and room: every wait ends, and a full mesh says so."""

import asyncio
import time
from typing import Any

import httpx
import pytest

from mesh.errors import QueueFull
from tests.gateway.fake_tokenizer import WINDOW
from tests.gateway.fake_workers import Fault
from tests.gateway.fakes import FakeMesh
from tests.gateway.running import RunningGateway, chat, completion, run_gateway

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("hop", ["encode", "place", "prefill", "decode"])
async def test_frozen_service_is_answered_when_the_requests_time_is_up(
    hop: str, stream: bool
) -> None:
    # GR-06
    async with FakeMesh() as mesh, run_gateway(mesh, request_timeout_s=0.4) as gateway:
        if hop == "encode":
            mesh.tokenizer.encode_gate = asyncio.Event()
        elif hop == "place":
            mesh.scheduler.gate = asyncio.Event()
        elif hop == "prefill":
            mesh.prefill.start_gate = asyncio.Event()
        else:
            mesh.scheduler.local = True
            mesh.decode.faults = [Fault(hangs=True)]
        async with httpx.AsyncClient(base_url=gateway.url, timeout=20) as http:
            started = time.monotonic()
            response = await http.post(CHAT, json=chat(stream=stream))
            elapsed_s = time.monotonic() - started
        await mesh.quiet()

    assert response.status_code == 504
    assert response.json()["error"]["code"] == "timeout"
    # Every other bound that could end the wait is 20 s or more.
    assert 0.3 < elapsed_s < 10


async def test_wait_for_the_text_of_a_prompt_of_tokens_is_bounded(mesh: FakeMesh) -> None:
    mesh.tokenizer.decode_gate = asyncio.Event()
    async with (
        run_gateway(mesh, encode_timeout_s=0.2) as gateway,
        httpx.AsyncClient(base_url=gateway.url) as http,
    ):
        response = await http.post("/v1/completions", json=completion([104, 105], echo=True))

    assert response.status_code == 504


async def test_each_hop_gets_less_time_than_the_one_before() -> None:
    # GR-06
    async with FakeMesh() as mesh, run_gateway(mesh, request_timeout_s=50) as gateway:
        mesh.prefill.steps = asyncio.Semaphore(0)
        async with httpx.AsyncClient(base_url=gateway.url) as http:
            asking = asyncio.create_task(http.post(CHAT, json=chat()))
            await mesh.prefill.was_active.wait()
            # Time that prefill takes is time that decode does not get.
            await asyncio.sleep(0.1)
            mesh.prefill.steps.release()
            await asking

        [prefill_s] = mesh.prefill.deadlines_s
        [decode_s] = mesh.decode.deadlines_s
    assert prefill_s is not None
    assert decode_s is not None
    assert 40 < decode_s < prefill_s <= 50


async def test_wait_for_a_place_is_bounded(mesh: FakeMesh) -> None:
    mesh.scheduler.gate = asyncio.Event()
    async with (
        run_gateway(mesh, queue_timeout_s=0.2) as gateway,
        httpx.AsyncClient(base_url=gateway.url) as http,
    ):
        response = await http.post(CHAT, json=chat())

    assert response.status_code == 504
    assert "free" in response.json()["error"]["message"]
    await mesh.quiet()


async def test_burst_above_the_mesh_is_answered_and_leaves_nothing(
    gateway: RunningGateway, mesh: FakeMesh
) -> None:
    # ST-15
    class Bounded:
        """Admits four at a time and refuses the rest, as a full scheduler does."""

        num_admitted = 0

        def full(self) -> QueueFull | None:
            self.num_admitted += 1
            return QueueFull("full", retry_after_s=2) if self.num_admitted > 20 else None

    bounded = Bounded()
    place = mesh.scheduler._place

    def refuse_when_full(admit: Any) -> Any:
        if (error := bounded.full()) is not None:
            raise error
        return place(admit)

    mesh.scheduler._place = refuse_when_full  # type: ignore[method-assign]
    try:
        async with httpx.AsyncClient(
            base_url=gateway.url, limits=httpx.Limits(max_connections=None), timeout=30
        ) as http:
            answers = await asyncio.gather(
                *(http.post(CHAT, json=chat(), timeout=0.2 if i % 2 else 30) for i in range(200)),
                return_exceptions=True,
            )
    finally:
        mesh.scheduler._place = place  # type: ignore[method-assign]

    responses = [one for one in answers if isinstance(one, httpx.Response)]
    assert {response.status_code for response in responses} <= {200, 429}
    refused = [response for response in responses if response.status_code == 429]
    assert refused
    assert all(response.headers["retry-after"] == "2" for response in refused)
    assert all(isinstance(one, httpx.Response | httpx.TimeoutException) for one in answers)
    async with asyncio.timeout(20):
        await gateway.core.in_flight.wait_idle()
        await mesh.quiet()


async def test_huge_prompt_holds_nobody_up(http: httpx.AsyncClient, mesh: FakeMesh) -> None:
    # ST-17
    # By what this process computes, which runs all services of this test on one loop.
    gaps_s: list[float] = []
    is_over = asyncio.Event()

    async def poll() -> None:
        while not is_over.is_set():
            started_s = time.process_time()
            await http.get("/health")
            gaps_s.append(time.process_time() - started_s)

    async def stream() -> None:
        while not is_over.is_set():
            started_s = time.process_time()
            async with http.stream("POST", CHAT, json=chat(stream=True)) as response:
                async for _ in response.aiter_raw():
                    gaps_s.append(time.process_time() - started_s)
                    started_s = time.process_time()

    others = asyncio.gather(poll(), stream())
    response = await http.post("/v1/completions", json=completion("a" * 5_000_000))
    is_over.set()
    await others

    assert response.status_code == 400
    assert str(WINDOW) in response.json()["error"]["message"]
    # A blocked loop shows as seconds.
    assert max(gaps_s) < 1.0
