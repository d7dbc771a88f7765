"""The stages of a request are all of its time: alone, among sixteen streams, and on the wire."""

import asyncio
import json
import re
import time

import grpc
import httpx
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from mesh.spans import SPANS
from mesh.v1 import inference_pb2, inference_pb2_grpc
from tests.e2e.accounts import (
    PROMPT,
    answered_although_a_decoder_dies,
    bodies,
    check_adds_up,
    check_mostly_named,
    check_traces,
    finished,
    left,
)
from tests.e2e.harness import MODEL, Collector, RunningMesh, metric, metrics_addresses

NUM_STREAMS = 16
# Gauges of a worker that has nothing to do.
IDLE = (
    *("engine_running", "engine_waiting", "engine_waiting_tokens", "engine_step_age_seconds"),
    *("kv_cache_leases", "kv_cache_usage"),
)


async def test_the_stages_add_up_to_the_whole_under_sixteen_streams(mesh: RunningMesh) -> None:
    async with httpx.AsyncClient(base_url=mesh.url, timeout=120) as http:
        requests = (finished(http, number) for number in range(2 * NUM_STREAMS))
        accounts = await asyncio.gather(*requests)

    assert "disaggregated" in {account["mode"] for account in accounts}
    for account in accounts:
        check_adds_up(account)
        assert {"network", "rules", "tokenize", "queue", "prefill_compute"} <= set(
            account["stages_ms"]
        )
    check_mostly_named(accounts)


async def test_the_stages_of_streams_that_their_clients_left_add_up_too(mesh: RunningMesh) -> None:
    async with httpx.AsyncClient(base_url=mesh.url, timeout=120) as http:
        requests = (left(http, 300 + number, 1 + number % 4) for number in range(NUM_STREAMS))
        accounts = await asyncio.gather(*requests)

    for account in accounts:
        check_adds_up(account)
        assert account["finish_reason"] is None


async def test_the_log_line_tells_the_same_story(mesh: RunningMesh) -> None:
    async with httpx.AsyncClient(base_url=mesh.url, timeout=120) as http:
        account = await finished(http, 1)

    log = (mesh.home / "logs" / "gateway-0.log").read_text()
    [line] = [json.loads(one) for one in log.splitlines() if account["request_id"] in one]
    assert line["stages_ms"] == account["stages_ms"]
    assert line["total_ms"] == account["total_ms"]
    assert line["batch_size"] >= 1
    assert 0 < line["kv_cache_usage"] <= 1
    assert line["preemptions"] == 0
    assert line["ttft_ms"] > 0
    assert line["tpot_ms"] > 0


async def test_an_internal_caller_gets_every_stage_with_the_last_message(
    mesh: RunningMesh,
) -> None:
    request = inference_pb2.GenerateRequest(model=MODEL, text=PROMPT * 12)
    request.sampling_params.max_tokens = 12
    async with grpc.aio.insecure_channel(mesh.state.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        started = time.perf_counter()
        async for event in stub.Generate(request, timeout=60):
            last = event
        client_ms = (time.perf_counter() - started) * 1000

    total_ms = sum(timing.duration_ms for timing in last.finished.timings)
    assert 0.5 * client_ms < total_ms <= client_ms


async def test_server_timing_covers_the_wait_for_the_first_token(mesh: RunningMesh) -> None:
    shares = []
    for number in range(3):
        async with httpx.AsyncClient(base_url=mesh.url, timeout=60) as http:
            body = {"model": MODEL, "prompt": f"{number}: " + PROMPT * 9, "max_tokens": 8}
            started = time.perf_counter()
            async with http.stream(
                "POST", "/v1/completions", json=body | {"stream": True}
            ) as response:
                waited_ms = (time.perf_counter() - started) * 1000
                await response.aread()
        parts = dict(part.split(";dur=") for part in response.headers["server-timing"].split(", "))
        assert {"tokenize", "queue", "prefill_compute", "network"} <= set(parts)
        shares.append(sum(map(float, parts.values())) / waited_ms)

    assert max(shares) <= 1
    # A client on a busy machine also waits for its own turn.
    assert max(shares) > 0.5


async def test_each_of_sixteen_streams_is_one_trace_from_the_edge_to_the_copy_of_the_kv(
    mesh: RunningMesh, collector: tuple[Collector, str]
) -> None:
    # OB-04
    trace_ids = [f"{number + 1:032x}" for number in range(NUM_STREAMS)]

    async def ask(http: httpx.AsyncClient, number: int) -> None:
        headers = {"traceparent": f"00-{trace_ids[number]}-b7ad6b7169203331-01"}
        body = {**bodies(number), "prompt": f"traced {number}: " + PROMPT * 6, "stop": None}
        response = await http.post("/v1/completions", json=body, headers=headers)
        assert response.status_code == 200

    async with httpx.AsyncClient(base_url=mesh.url, timeout=120) as http:
        await asyncio.gather(*(ask(http, number) for number in range(NUM_STREAMS)))

    wanted = {"gateway.request", "gateway.attempt", "tokenizer.encode", "scheduler.place"}
    wanted |= {"prefill.run", "decode.run", "kv.pull", "tokenizer.detokenize"}
    names: dict[str, set[str]] = {trace_id: set() for trace_id in trace_ids}
    linked: set[str] = set()
    while any(not wanted <= found for found in names.values()) or not linked & set(trace_ids):
        service, span = await asyncio.to_thread(collector[0].spans.get, timeout=20)
        check_is_documented(service, span)
        if span.trace_id.hex() in names:
            names[span.trace_id.hex()].add(span.name)
        if span.name == "engine.step":
            linked |= {link.trace_id.hex() for link in span.links}


def check_is_documented(service: str, span: Span) -> None:
    [described] = [one for one in SPANS if one.name == span.name]
    assert service in described.service
    patterns = [re.sub("<.*>", ".+", re.escape(one)) for one in described.attributes]
    for attribute in span.attributes:
        assert any(re.fullmatch(one, attribute.key) for one in patterns), attribute.key
    assert {event.name for event in span.events} <= {*described.events, "exception"}


def test_every_service_has_metrics_and_its_gauges_return_to_nothing_after_aborts(
    mesh: RunningMesh,
) -> None:
    with httpx.Client(base_url=mesh.url, timeout=60) as http:
        for number in range(6):
            body = {**bodies(number), "stream": True, "max_tokens": 200}
            with http.stream("POST", "/v1/completions", json=body) as response:
                next(response.iter_raw())
    wait_until_gauges_are_idle(mesh)

    for name, address in metrics_addresses(mesh).items():
        assert "# TYPE" in httpx.get(f"http://{address}/metrics").text, name


async def test_a_worker_killed_under_load_leaves_accounts_that_add_up_and_gauges_that_are_right(
    mesh: RunningMesh, collector: tuple[Collector, str]
) -> None:
    async with httpx.AsyncClient(base_url=mesh.url, timeout=120) as http:
        # Numbers that no other test used: a full cache would make them short.
        numbers = range(100, 100 + NUM_STREAMS)
        requests = [finished(http, number, max_tokens=60, stop=None) for number in numbers]
        accounts = await answered_although_a_decoder_dies(mesh, requests)
    await asyncio.to_thread(wait_until_all_are_back, mesh)

    wait_until_gauges_are_idle(mesh)
    assert max(account["attempts"] for account in accounts) > 1
    for account in accounts:
        check_adds_up(account)
        assert account["status"] == 200
        assert account["finish_reason"] == "length"
    await check_traces(collector[0], accounts, {"gateway.request", "prefill.run", "decode.run"})


def wait_until_all_are_back(mesh: RunningMesh) -> None:
    """Time limits bound the wait."""
    while not mesh.is_whole():
        time.sleep(0.05)


def wait_until_gauges_are_idle(mesh: RunningMesh) -> None:
    """Time limits bound the wait."""
    addresses = metrics_addresses(mesh)
    busy = [
        ("gateway-0", "pdmesh_gateway_streams"),
        ("scheduler-0", "pdmesh_scheduler_placements"),
        ("scheduler-0", "pdmesh_scheduler_queued"),
        ("scheduler-0", "pdmesh_scheduler_breakers"),
        ("kv_transfer-0", "pdmesh_kv_transfer_active_pulls"),
        ("tokenizer-0", "pdmesh_tokenizer_sequences"),
        *(
            (name, f"pdmesh_{gauge}")
            for name in addresses
            if name.startswith(("prefill", "decode"))
            for gauge in IDLE
        ),
    ]
    expected = [
        ("kv_transfer-0", "pdmesh_kv_transfer_segments", 3),
        ("scheduler-0", 'pdmesh_scheduler_workers{role="decode"}', 2),
        ("scheduler-0", 'pdmesh_scheduler_workers{role="prefill"}', 1),
        *((service, name, 0) for service, name in busy),
    ]
    while any(metric(addresses[service], name) != value for service, name, value in expected):
        time.sleep(0.05)
