"""Traces and logs: one trace a request, one line a request, no text in either."""

import asyncio
import logging
import threading

import grpc
import httpx
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from mesh import metrics
from mesh.errors import WorkerUnavailable
from mesh.v1 import inference_pb2, inference_pb2_grpc
from tests.gateway.fake_tokenizer import EOS
from tests.gateway.fake_workers import Fault
from tests.gateway.fakes import FakeMesh
from tests.gateway.running import RunningGateway, chat, completion, events

CHAT = "/v1/chat/completions"
TRACE_ID = "0123456789abcdef0123456789abcdef"
SPAN_ID = "0123456789abcdef"
PARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"
# Read to the end, left, and cancelled by an internal caller.
NUM_STREAMS = 99


def roots(exporter: InMemorySpanExporter) -> list[ReadableSpan]:
    return [span for span in exporter.get_finished_spans() if span.name == "gateway.request"]


def trace_id(span: ReadableSpan) -> str:
    return trace.format_trace_id(span.context.trace_id)


async def test_inbound_trace_goes_on_through_every_hop(
    http: httpx.AsyncClient, mesh: FakeMesh, spans: InMemorySpanExporter
) -> None:
    # OB-04
    await http.post(CHAT, json=chat(), headers={"traceparent": PARENT})

    [root] = roots(spans)
    assert trace_id(root) == TRACE_ID
    assert root.parent is not None
    assert trace.format_span_id(root.parent.span_id) == SPAN_ID
    [attempt] = [span for span in spans.get_finished_spans() if span.name == "gateway.attempt"]
    assert attempt.parent is not None
    assert attempt.parent.span_id == root.context.span_id
    sent = [
        mesh.scheduler.metadata[0]["traceparent"],
        mesh.prefill.metadata[0]["traceparent"],
        mesh.decode.metadata[0]["traceparent"],
    ]
    assert sent == [f"00-{TRACE_ID}-{trace.format_span_id(attempt.context.span_id)}-01"] * 3
    of_root = f"00-{TRACE_ID}-{trace.format_span_id(root.context.span_id)}-01"
    assert mesh.tokenizer.traceparents[0] == of_root


async def test_root_encloses_its_children_and_ends_last(
    http: httpx.AsyncClient, mesh: FakeMesh, spans: InMemorySpanExporter
) -> None:
    await events(http, CHAT, chat(stream=True))

    [root] = roots(spans)
    children = [span for span in spans.get_finished_spans() if span is not root]
    assert {span.name for span in children} >= {"gateway.rules"}
    for child in children:
        assert child.context.trace_id == root.context.trace_id
        assert (root.start_time or 0) <= (child.start_time or 0)
        assert (child.end_time or 0) <= (root.end_time or 0)
    assert spans.get_finished_spans()[-1] is root


@pytest.mark.parametrize(
    "headers",
    [
        [("traceparent", f"00-{'0' * 32}-{SPAN_ID}-01")],
        [("traceparent", f"00-{TRACE_ID}-{'0' * 16}-01")],
        [("traceparent", "garbage")],
        [("traceparent", PARENT.upper())],
        [("traceparent", PARENT), ("traceparent", PARENT)],
        [],
    ],
)
async def test_bad_inbound_trace_starts_a_new_one(
    http: httpx.AsyncClient,
    mesh: FakeMesh,
    spans: InMemorySpanExporter,
    headers: list[tuple[str, str]],
) -> None:
    # OB-04
    response = await http.post(CHAT, json=chat(), headers=headers)

    assert response.status_code == 200
    [root] = roots(spans)
    assert root.parent is None
    assert trace_id(root) != TRACE_ID


async def test_huge_tracestate_is_dropped_and_the_trace_kept(
    http: httpx.AsyncClient, mesh: FakeMesh, spans: InMemorySpanExporter
) -> None:
    # OB-04
    headers = {"traceparent": PARENT, "tracestate": "a=" + "x" * 8000}
    response = await http.post(CHAT, json=chat(), headers=headers)

    assert response.status_code == 200
    assert trace_id(roots(spans)[0]) == TRACE_ID
    assert "tracestate" not in mesh.prefill.metadata[0]


async def test_unsampled_trace_records_nothing_and_is_passed_on(
    http: httpx.AsyncClient, mesh: FakeMesh, spans: InMemorySpanExporter
) -> None:
    # OB-04
    await http.post(CHAT, json=chat(), headers={"traceparent": PARENT[:-2] + "00"})

    assert not roots(spans)
    assert mesh.prefill.metadata[0]["traceparent"].startswith(f"00-{TRACE_ID}-")
    assert mesh.prefill.metadata[0]["traceparent"].endswith("-00")


async def test_every_end_of_a_stream_ends_one_root_span_and_detaches_cleanly(
    gateway: RunningGateway,
    mesh: FakeMesh,
    spans: InMemorySpanExporter,
    caplog: pytest.LogCaptureFixture,
) -> None:
    # OB-01
    stub_channel = grpc.aio.insecure_channel(gateway.grpc_address)
    stub = inference_pb2_grpc.InferenceServiceStub(stub_channel)
    async with httpx.AsyncClient(base_url=gateway.url) as http:
        for i in range(NUM_STREAMS):
            if i % 3 == 0:
                await events(http, CHAT, chat(stream=True))
            elif i % 3 == 1:
                async with http.stream("POST", CHAT, json=chat(stream=True)) as response:
                    async for _ in response.aiter_raw():
                        break
            else:
                call = stub.Generate(inference_pb2.GenerateRequest(text="hi"))
                await call.read()
                call.cancel()
        async with asyncio.timeout(20):
            await gateway.core.in_flight.wait_idle()
    await stub_channel.close()

    traces = {trace_id(span) for span in roots(spans)}
    assert len(roots(spans)) == len(traces) == NUM_STREAMS
    assert {trace_id(span) for span in spans.get_finished_spans()} == traces
    assert not [one for one in caplog.records if "detach" in one.getMessage()]
    assert not trace.get_current_span().get_span_context().is_valid


async def test_one_log_line_says_where_the_time_went_and_nothing_of_the_text(
    http: httpx.AsyncClient, mesh: FakeMesh, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    mesh.prefill.num_cached_tokens = 3
    mesh.model.default = [*b"classified", EOS]

    await events(http, CHAT, chat("secret question", stream=True, user="ada", foo="bar"))

    [line] = [one.__dict__ for one in caplog.records if one.message == "request finished"]
    assert line["model"] == "byte-model"
    assert line["prompt_tokens"] == len(b"user: secret question\n")
    assert line["completion_tokens"] == len(b"classified") + 1
    assert line["cached_tokens"] == 3
    assert line["mode"] == "disaggregated"
    assert (line["prefill_worker_id"], line["decode_worker_id"]) == ("prefill-0", "decode-0")
    assert line["finish_reason"] == "stop"
    assert (line["attempts"], line["status"], line["stream"]) == (1, 200, True)
    assert 0 < line["ttft_ms"] <= line["total_ms"]
    assert line["tpot_ms"] > 0
    stages = line["stages_ms"]
    assert set(stages) == {
        "network",
        "rules",
        "tokenize",
        "queue",
        "prefill_wait",
        "prefill_compute",
        "kv_transfer",
        "decode_steps",
        "detokenize",
        "write",
    }
    # What the workers measured, as they said it; the stages are all of the time.
    assert stages["prefill_compute"] == 0.125
    assert stages["decode_steps"] == 0.25
    assert sum(stages.values()) == pytest.approx(line["total_ms"], abs=0.01)
    assert line["overlap_ms"] == 0
    logged = " ".join(str(one.__dict__) for one in caplog.records if one.name[:7] == "gateway")
    assert "secret" not in logged
    assert "classified" not in logged
    assert "bar" not in logged


async def test_failed_requests_are_logged_with_their_reason(
    http: httpx.AsyncClient, mesh: FakeMesh, caplog: pytest.LogCaptureFixture
) -> None:
    # ST-03: counted as an error.
    caplog.set_level(logging.INFO)
    for decode in mesh.decodes:
        decode.faults = [Fault(after=2, error=WorkerUnavailable("gone"), num_calls=9)]

    await events(http, CHAT, chat(stream=True))
    await http.post(CHAT, json=chat(temperature=9), headers={"x-request-id": "mine"})

    lost, refused = [one.__dict__ for one in caplog.records if one.message == "request finished"]
    assert (lost["status"], lost["error"], lost["attempts"]) == (503, "WORKER_UNAVAILABLE", 3)
    assert lost["finish_reason"] is None
    assert (refused["status"], refused["error"]) == (400, "INVALID_REQUEST")
    assert refused["client_request_id"] == "mine"
    assert refused["request_id"] != "mine"


def sample(name: str, **labels: str) -> float:
    """The sum of the series of /metrics with these labels."""
    return sum(
        float(line.rsplit(" ", 1)[1])
        for line in metrics.render()[0].decode().splitlines()
        if line.startswith(name) and all(f'{k}="{v}"' in line for k, v in labels.items())
    )


async def test_metrics_count_requests_and_tokens(http: httpx.AsyncClient, mesh: FakeMesh) -> None:
    requests = sample("pdmesh_requests_total", outcome="ok")
    rejected = sample("pdmesh_requests_total", outcome="rejected")
    completion_tokens = sample("pdmesh_tokens_total", type="completion")

    await http.post(CHAT, json=chat())
    await http.post(CHAT, json=chat(n=0))
    response = await http.get("/metrics")

    assert response.headers["content-type"].startswith("text/plain; version=")
    assert "gen_ai_server_time_to_first_token" in response.text
    assert sample("pdmesh_requests_total", outcome="ok") == requests + 1
    assert sample("pdmesh_requests_total", outcome="rejected") == rejected + 1
    assert sample("pdmesh_tokens_total", type="completion") == completion_tokens + 14


async def test_prompts_of_refused_requests_are_no_traffic(
    http: httpx.AsyncClient, mesh: FakeMesh
) -> None:
    names = ("pdmesh_tokens_total", "pdmesh_request_prompt_tokens_count")
    before = {name: sample(name) for name in names}
    mesh.scheduler.full = {b"user: hello\n": 1}

    refused = await http.post(CHAT, json=chat("hello"))

    assert refused.status_code == 429
    assert {name: sample(name) for name in names} == before


async def test_lengths_gaps_and_parameters_of_requests_are_measured(
    http: httpx.AsyncClient, mesh: FakeMesh
) -> None:
    mesh.model.default = [*b"four", EOS]
    mesh.prefill.num_cached_tokens = 3
    names = {
        "pdmesh_inter_token_latency_seconds_count": 8,
        "pdmesh_request_choices_sum": 2,
        "pdmesh_request_max_tokens_sum": 30,
        "pdmesh_request_longest_completion_tokens_sum": 5,
        "pdmesh_request_completion_tokens_sum": 10,
        "pdmesh_request_computed_prompt_tokens_sum": len(b"user: hello\n") - 3,
        "pdmesh_request_inference_duration_seconds_count": 1,
    }
    before = {name: sample(name) for name in names}

    await events(http, CHAT, chat("hello", n=2, max_tokens=30, stream=True))

    grown = {name: sample(name) - before[name] for name in names}
    assert grown == names


async def test_what_clients_send_adds_no_series(http: httpx.AsyncClient, mesh: FakeMesh) -> None:
    # OB-05
    await http.post(CHAT, json={**chat(), "model": "unknown"})
    await http.get("/unknown")
    before = (await http.get("/metrics")).text
    for i in range(100):
        headers = {"x-tenant": f"tenant-{i}", "x-request-id": f"client-{i}"}
        body = {**chat(f"prompt-{i}"), "model": f"model-{i}"}
        await http.post(CHAT, json=body, headers=headers)
        await http.request(f"METHOD{i}", f"/path-{i}", headers=headers)
    after = (await http.get("/metrics")).text

    assert after.count("\n") == before.count("\n")
    for sent in ("tenant-", "client-", "prompt-", "model-7", "path-", "METHOD"):
        assert sent not in after


async def test_tracing_off_leaves_no_trace(http: httpx.AsyncClient, mesh: FakeMesh) -> None:
    await http.post("/v1/completions", json=completion())

    assert "traceparent" not in mesh.prefill.metadata[0]
    assert mesh.tokenizer.traceparents == [""]
    assert threading.active_count() < 40
