"""/dashboard's JSON: what it says, what it remembers, whom it answers."""

import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from gateway.dashboard.live import live
from gateway.dashboard.recent import (
    SERIES_S,
    WINDOW_S,
    RecentRequests,
    mean_stages_ms,
    percentiles,
    summarize,
)
from gateway.finished import FinishedRequest
from mesh.v1 import types_pb2
from tests.fakes import FakeClock
from tests.gateway.fake_tokenizer import EOS
from tests.gateway.fakes import FakeMesh
from tests.gateway.running import chat, completion, events, run_gateway

CHAT = "/v1/chat/completions"

DONE = FinishedRequest(
    request_id="r",
    client_request_id="",
    trace_id="",
    operation="chat",
    model="m",
    key="",
    key_group="",
    param_actions="",
    is_stream=True,
    started_at=0.0,
    status=200,
    error=None,
    prompt_tokens=10,
    completion_tokens=5,
    cached_tokens=4,
    ttft_ms=20.0,
    tpot_ms=5.0,
    total_ms=100.0,
    stages_ms={types_pb2.STAGE_QUEUE: 10.0, types_pb2.STAGE_KV_TRANSFER: 2.0},
    segments=(),
    overlap_ms=0.0,
    num_choices=1,
    longest_completion_tokens=5,
    max_tokens=16,
    mode="disaggregated",
    prefill_worker_id="p",
    decode_worker_id="d",
    num_attempts=1,
    finish_reasons=("stop",),
    mean_batch_size=2.0,
    max_kv_cache_usage=0.5,
    num_preemptions=0,
    kv_transfer_bytes=4_000_000,
)


@pytest.fixture
async def mesh() -> AsyncIterator[FakeMesh]:
    async with FakeMesh() as fake:
        yield fake


@pytest.fixture
async def http(mesh: FakeMesh) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        run_gateway(mesh) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=20) as client,
    ):
        yield client


async def test_a_request_can_be_looked_at_by_either_id_and_its_stages_are_all_of_it(
    http: httpx.AsyncClient, mesh: FakeMesh
) -> None:
    mesh.model.default = [*b"classified", EOS]
    await http.post(CHAT, json=chat("secret"), headers={"x-request-id": "mine"})

    [listed] = (await http.get("/dashboard/api/requests")).json()["requests"]
    ours = (await http.get(f"/dashboard/api/requests/{listed['request_id']}")).json()
    mine = (await http.get("/dashboard/api/requests/mine")).json()

    assert ours == mine
    assert ours["client_request_id"] == "mine"
    total_ms = ours["total_ms"]
    assert sum(stage["ms"] for stage in ours["stages"]) == pytest.approx(total_ms, abs=0.01)
    ends_ms = 0.0
    for segment in ours["segments"]:
        assert segment["start_ms"] == pytest.approx(ends_ms, abs=0.01)
        ends_ms = segment["start_ms"] + segment["ms"]
    assert ends_ms == pytest.approx(total_ms, abs=0.01)
    assert "secret" not in str(ours)
    assert "classified" not in str(ours)


async def test_live_numbers_cover_requests_tokens_and_workers(
    http: httpx.AsyncClient, mesh: FakeMesh
) -> None:
    mesh.scheduler.loads["decode-0"] = types_pb2.EngineLoad(
        num_blocks=100,
        num_free_blocks=75,
        num_running=3,
        num_prefix_cache_queries=200,
        num_prefix_cache_hits=50,
    )
    await events(http, CHAT, chat(stream=True))
    await http.post("/v1/completions", json=completion())
    await http.post("/v1/completions", json=completion(temperature=9))
    workers: list[Any] = []

    async def load_is_seen() -> bool:
        live = (await http.get("/dashboard/api/live")).json()
        workers[:] = [one for one in live["workers"] if one["running"] == 3]
        return bool(workers)

    while not await load_is_seen():
        pass
    live = (await http.get("/dashboard/api/live")).json()

    assert (live["num_requests"], live["num_failed"]) == (3, 1)
    assert 0 < live["ttft_ms"]["p50"] <= live["ttft_ms"]["p99"] <= live["total_ms"]["p99"]
    assert sum(live["series"]["tokens"]) == 2 * 14
    assert {"queue", "prefill_compute", "write"} <= set(live["mean_stages_ms"])
    [worker] = workers
    assert worker["worker_id"] == "decode-0"
    assert worker["kv_cache_usage"] == 0.25
    assert worker["prefix_cache_hit_rate"] == 0.25


async def test_a_refused_request_is_remembered_with_its_reason(http: httpx.AsyncClient) -> None:
    await http.post(CHAT, json=chat(temperature=9))

    [listed] = (await http.get("/dashboard/api/requests")).json()["requests"]

    assert (listed["status"], listed["error"]) == (400, "INVALID_REQUEST")
    assert set(listed["stages_ms"]) <= {"network", "rules", "write"}


async def test_only_what_is_new_is_listed_again(http: httpx.AsyncClient) -> None:
    for _ in range(3):
        await http.post("/v1/completions", json=completion())
    first = (await http.get("/dashboard/api/requests?limit=2")).json()
    await http.post("/v1/completions", json=completion())

    after = f"/dashboard/api/requests?after={first['last_number']}"
    later = (await http.get(after)).json()
    restarted = (await http.get("/dashboard/api/requests?after=900")).json()

    assert len(first["requests"]) == 2
    assert len(later["requests"]) == 1
    assert later["last_number"] == 4
    assert len(restarted["requests"]) == 4


@pytest.mark.parametrize("path", ["nothing", "%2e%2e", "a/b"])
async def test_an_unknown_request_is_not_found(http: httpx.AsyncClient, path: str) -> None:
    response = await http.get(f"/dashboard/api/requests/{path}")

    assert response.status_code == 404
    assert response.json()["error"]["code"] == "unknown_url"


@pytest.mark.parametrize(
    "headers",
    [
        {"host": "attacker.example"},
        {"x-forwarded-for": "203.0.113.9"},
        {"forwarded": "for=203.0.113.9"},
        {"host": "api.example.com", "x-real-ip": "203.0.113.9"},
    ],
)
async def test_without_a_key_only_this_machine_by_its_own_name_may_look(
    http: httpx.AsyncClient, headers: dict[str, str]
) -> None:
    for path in ("", "/app.js", "/api/live", "/api/requests", "/api/requests/x"):
        response = await http.get(f"/dashboard{path}", headers=headers)
        assert response.status_code == 401, path
    assert (await http.get("/dashboard")).status_code == 200


async def test_with_a_key_whoever_has_it_may_look_and_nobody_else(mesh: FakeMesh) -> None:
    async with (
        run_gateway(mesh, dashboard_key="open sesame") as gateway,
        httpx.AsyncClient(base_url=gateway.url) as client,
    ):
        strangers = [
            await client.get("/dashboard/api/live"),
            await client.get("/dashboard/api/live", headers={"authorization": "Bearer no"}),
            await client.get("/dashboard?key=nö"),
        ]
        bearer = {"authorization": "Bearer open sesame", "host": "mesh.example"}
        allowed = await client.get("/dashboard/api/live", headers=bearer)
        opened = await client.get("/dashboard?key=open%20sesame")
        page = await client.get(opened.headers["location"])

    assert [one.status_code for one in strangers] == [401] * 3
    assert allowed.status_code == 200
    assert "open" not in opened.headers["location"]
    assert "httponly" in opened.headers["set-cookie"].lower()
    assert page.status_code == 200


async def test_nothing_of_the_page_comes_from_elsewhere_or_may_run_there(
    http: httpx.AsyncClient,
) -> None:
    page = await http.get("/dashboard")
    parts = [(await http.get(f"/dashboard/{name}")).text for name in ("app.js", "style.css")]

    assert page.headers["content-security-policy"].startswith("default-src 'none'")
    assert page.headers["content-type"].startswith("text/html")
    for text in (page.text, *parts):
        assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
        assert "https://" not in text
        assert "innerHTML" not in text


async def test_server_timing_tells_the_stages_before_the_first_token(
    http: httpx.AsyncClient,
) -> None:
    async with http.stream("POST", CHAT, json=chat(stream=True)) as response:
        await response.aread()
    parts = dict(part.split(";dur=") for part in response.headers["server-timing"].split(", "))

    assert {"rules", "tokenize", "queue", "prefill_compute", "network"} <= set(parts)
    assert "decode_steps" not in parts
    [listed] = (await http.get("/dashboard/api/requests")).json()["requests"]
    before_first = sum(map(float, parts.values()))
    assert before_first == pytest.approx(listed["ttft_ms"], abs=5)


def recent(clock: FakeClock, max_requests: int = 100) -> RecentRequests:
    return RecentRequests(max_requests, clock=clock)


def test_memory_is_bounded_by_the_setting_and_by_two_minutes() -> None:
    clock = FakeClock()
    requests = recent(clock, max_requests=3)
    for number in range(1000):
        requests.add(replace(DONE, request_id=str(number)))
        requests.add_tokens(2)
        clock.advance(1)

    assert [one.request_id for one in requests.latest(10)] == ["999", "998", "997"]
    assert requests.find("996") is None
    series = requests.series()
    assert {len(values) for values in series.values()} == {SERIES_S}
    assert sum(series["tokens"]) == 2 * (SERIES_S - 1)


def test_the_window_is_the_last_minute_and_quiet_seconds_count_as_none() -> None:
    clock = FakeClock()
    requests = recent(clock)
    requests.add(replace(DONE, request_id="old"))
    clock.advance(WINDOW_S + 1)
    requests.add(replace(DONE, request_id="new", error="INTERNAL"))

    assert [one.request_id for one in requests.window()] == ["new"]
    assert requests.series()["failed"][-1] == 1
    assert requests.series()["finished"][-2] == 0


def test_a_summary_leaves_failures_out_of_the_latencies() -> None:
    requests = [DONE, replace(DONE, ttft_ms=40.0), replace(DONE, error="X", ttft_ms=9e9)]
    summary = summarize(requests)

    assert (summary["num_requests"], summary["num_failed"]) == (3, 1)
    assert summary["ttft_ms"] == {"p50": 20.0, "p90": 40.0, "p99": 40.0}
    assert summary["cache_hit_rate"] == 0.4
    # 4 MB in 2 ms.
    assert summary["kv_transfer_gb_per_s"] == pytest.approx(2.0)
    assert mean_stages_ms(requests) == {"queue": 10.0, "kv_transfer": 2.0}
    assert mean_stages_ms(requests[2:]) == {}


def test_a_client_that_left_is_no_failure() -> None:
    requests = RecentRequests()
    left = replace(DONE, status=499, error="CANCELLED")
    requests.add(left)

    summary = summarize([DONE, left])

    assert (summary["num_requests"], summary["num_failed"]) == (2, 0)
    assert sum(requests.series()["failed"]) == 0
    assert sum(requests.series()["finished"]) == 1


def test_percentiles_are_values_that_occurred() -> None:
    assert percentiles([]) is None
    assert percentiles([None, 7.0]) == {"p50": 7.0, "p90": 7.0, "p99": 7.0}
    hundred = percentiles([float(value) for value in range(1, 101)])
    assert hundred == {"p50": 50.0, "p90": 90.0, "p99": 99.0}


async def test_gauges_are_right_again_after_clients_have_left(
    http: httpx.AsyncClient, mesh: FakeMesh
) -> None:
    for _ in range(5):
        async with http.stream("POST", CHAT, json=chat(stream=True)) as response:
            await response.aiter_raw().__anext__()

    # Time limits bound the wait.
    while (await http.get("/dashboard/api/live")).json()["streams"]:
        pass
    metrics = (await http.get("/metrics")).text

    assert "pdmesh_gateway_streams 0.0" in metrics


async def test_a_look_at_the_page_costs_less_than_a_hundredth_of_a_core(mesh: FakeMesh) -> None:
    async with run_gateway(mesh) as gateway:
        for number in range(gateway.core.config.dashboard_requests):
            gateway.core.recent.add(replace(DONE, request_id=str(number)))
        live(gateway.core)

        started = time.process_time()
        for _ in range(20):
            live(gateway.core)
        spent_ms = (time.process_time() - started) / 20 * 1000

    # The page looks once a second.
    assert spent_ms < 10
