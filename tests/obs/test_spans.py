"""What the gateway's spans say: attempts, GenAI attributes, errors, and nothing of the text."""

import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from gateway.config import GatewayConfig
from mesh import telemetry
from mesh.config import load
from mesh.errors import WorkerUnavailable
from tests.gateway.fake_tokenizer import EOS, MODEL
from tests.gateway.fake_workers import Fault
from tests.gateway.fakes import FakeMesh
from tests.gateway.running import chat, completion, events, run_gateway

CHAT = "/v1/chat/completions"


@pytest.fixture
def exporter() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    telemetry.start_tracing("gateway", SimpleSpanProcessor(exporter))
    yield exporter
    telemetry.shutdown()


@pytest.fixture
async def mesh() -> AsyncIterator[FakeMesh]:
    async with FakeMesh() as fake:
        yield fake


@pytest.fixture
async def http(mesh: FakeMesh, exporter: InMemorySpanExporter) -> AsyncIterator[httpx.AsyncClient]:
    async with (
        run_gateway(mesh) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=20) as client,
    ):
        yield client


@pytest.fixture(autouse=True)
def no_opt_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", raising=False)


def named(exporter: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [span for span in exporter.get_finished_spans() if span.name == name]


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


async def test_a_failover_shows_both_attempts_in_one_trace(
    http: httpx.AsyncClient, mesh: FakeMesh, exporter: InMemorySpanExporter
) -> None:
    mesh.model.default = [*b"classified", EOS]
    mesh.decode.faults = [Fault(after=2, error=WorkerUnavailable("gone"))]

    await events(http, CHAT, chat("secret", stream=True))

    [root] = named(exporter, "gateway.request")
    failed, served = named(exporter, "gateway.attempt")
    assert root.context is not None
    for attempt in (failed, served):
        assert attempt.context is not None
        assert attempt.parent is not None
        assert attempt.parent.span_id == root.context.span_id
        assert attempt.context.trace_id == root.context.trace_id
    assert failed.status.status_code is StatusCode.ERROR
    assert attributes(failed)["error.type"] == "WORKER_UNAVAILABLE"
    assert served.status.status_code is not StatusCode.ERROR
    decoders = [attributes(one)["pdmesh.decode_worker_id"] for one in (failed, served)]
    assert decoders == ["decode-0", "decode-1"]
    assert [attributes(one)["pdmesh.attempt"] for one in (failed, served)] == [1, 2]
    assert attributes(root)["pdmesh.num_attempts"] == 2
    # Each call's context is its attempt's.
    sent = [decode.metadata[0]["traceparent"].split("-")[2] for decode in mesh.decodes]
    assert sent == [f"{one.context.span_id:016x}" for one in (failed, served) if one.context]


async def test_usage_is_on_the_edge_span_alone_and_the_stages_with_it(
    http: httpx.AsyncClient, mesh: FakeMesh, exporter: InMemorySpanExporter
) -> None:
    mesh.model.default = [*b"classified", EOS]

    await events(http, CHAT, chat("secret", stream=True))

    [root] = named(exporter, "gateway.request")
    told = attributes(root)
    assert told["gen_ai.operation.name"] == "chat"
    assert told["gen_ai.usage.output_tokens"] == len(b"classified") + 1
    assert told["gen_ai.response.finish_reasons"] == ("stop",)
    assert [event.name for event in root.events] == ["first_token"]
    stages_ms = [value for name, value in told.items() if name.startswith("pdmesh.stage.")]
    assert sum(stages_ms) == pytest.approx(told["gen_ai.latency.e2e"] * 1000, abs=0.01)
    others = [span for span in exporter.get_finished_spans() if span is not root]
    assert not any("gen_ai.usage" in name for span in others for name in attributes(span))
    exported = json.dumps([json.loads(span.to_json()) for span in exporter.get_finished_spans()])
    assert "secret" not in exported
    assert "classified" not in exported


async def test_the_edge_span_has_the_parameters_that_the_request_ran_with(
    http: httpx.AsyncClient, mesh: FakeMesh, exporter: InMemorySpanExporter
) -> None:
    asked: dict[str, Any] = {
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 3,
        "seed": 7,
        "n": 2,
        "max_tokens": 9,
    }
    await http.post(CHAT, json=chat(**asked, stop=["z"], presence_penalty=0.25))
    await http.post(CHAT, json=chat())

    told, plain = (attributes(span) for span in named(exporter, "gateway.request"))
    params = {name: value for name, value in told.items() if name.startswith("gen_ai.request.")}
    assert params == {
        "gen_ai.request.model": MODEL,
        "gen_ai.request.stream": False,
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.request.top_p": 0.5,
        "gen_ai.request.top_k": 3,
        "gen_ai.request.seed": 7,
        "gen_ai.request.presence_penalty": 0.25,
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.stop_sequences": ("z",),
    }
    # Drawn at the edge: with it, the answer can be made again.
    assert plain["gen_ai.request.seed"] == mesh.prefill.requests[-1].sampling_params.seed
    assert "gen_ai.request.choice.count" not in plain


@pytest.mark.parametrize(("prompt", "stream"), [("text", True), ("ids", False), ("chat", True)])
async def test_text_is_in_the_edge_span_only_where_an_operator_asks_for_it(
    mesh: FakeMesh, exporter: InMemorySpanExporter, prompt: str, stream: bool
) -> None:
    mesh.model.default = [*b"classified", EOS]
    chat_part = {"type": "text", "text": "secret"}
    body, path = {
        "text": (completion("secret", max_tokens=20), "/v1/completions"),
        "ids": (completion([5, 6], max_tokens=20), "/v1/completions"),
        "chat": ({**chat(), "messages": [{"role": "user", "content": [chat_part]}]}, CHAT),
    }[prompt]
    async with (
        run_gateway(mesh, trace_content=True) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=20) as http,
    ):
        await http.post(path, json=body | {"stream": stream})

    told = attributes(named(exporter, "gateway.request")[0])
    [asked] = json.loads(told["gen_ai.input.messages"])
    text_part = {"type": "text", "content": "secret"}
    ids_part = {"type": "token_ids", "token_ids": [5, 6]}
    assert asked["role"] == "user"
    assert asked["parts"] == [{"ids": ids_part}.get(prompt, text_part)]
    assert json.loads(told["gen_ai.output.messages"]) == [
        {
            "role": "assistant",
            "parts": [{"type": "text", "content": "classified"}],
            "finish_reason": "stop",
        }
    ]
    others = [one for one in exporter.get_finished_spans() if one.name != "gateway.request"]
    assert not any("classified" in one.to_json() for one in others)


@pytest.mark.parametrize(
    ("said", "captures"),
    [("true", True), ("SPAN_ONLY", True), ("span_and_event", True), ("event_only", False)],
)
def test_opentelemetrys_own_variable_asks_for_text_too(
    monkeypatch: pytest.MonkeyPatch, said: str, captures: bool
) -> None:
    assert not load(GatewayConfig).trace_content
    monkeypatch.setenv("OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT", said)

    assert load(GatewayConfig).trace_content is captures


async def test_a_client_that_leaves_ends_every_span_once(
    http: httpx.AsyncClient, mesh: FakeMesh, exporter: InMemorySpanExporter
) -> None:
    # OB-01, OB-03
    for _ in range(5):
        async with http.stream("POST", CHAT, json=chat(stream=True)) as response:
            await anext(response.aiter_raw())
    while len(named(exporter, "gateway.request")) < 5:
        # Time limits bound the wait.
        await http.get("/live")

    for name in ("gateway.request", "gateway.attempt"):
        ids = [span.context.span_id for span in named(exporter, name) if span.context]
        assert len(ids) == len(set(ids)) == 5
