import asyncio
import io
import json
import logging
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator
from concurrent import futures
from contextlib import aclosing
from typing import Any

import grpc
import pytest
from opentelemetry import trace
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from mesh import telemetry
from mesh.telemetry import (
    ContextFilter,
    JsonFormatter,
    Stopwatch,
    current_traceparent,
    extract_trace,
    request_id_var,
    span,
    start_span,
    use_span,
)
from tests.mesh.echo import serving

TRACE_ID = "0123456789abcdef0123456789abcdef"
SPAN_ID = "0123456789abcdef"
TRACEPARENT = f"00-{TRACE_ID}-{SPAN_ID}-01"


@pytest.fixture
def exporter() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    telemetry.start_tracing("test", SimpleSpanProcessor(exporter))
    yield exporter
    telemetry.shutdown()


def finished(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {one.name: one for one in exporter.get_finished_spans()}


def ids(one: ReadableSpan) -> tuple[str, str | None]:
    """Trace id and parent span id, in hex."""
    context = one.get_span_context()
    assert context is not None
    parent = None if one.parent is None else f"{one.parent.span_id:016x}"
    return f"{context.trace_id:032x}", parent


async def traced_unary(request: bytes, context: Any) -> bytes:
    with span("handler"):
        return (current_traceparent() or "").encode()


async def traced_stream(request: bytes, context: Any) -> AsyncGenerator[bytes, None]:
    current = start_span("handler")
    try:
        for _ in range(1000):
            with use_span(current):
                await asyncio.sleep(0)
            yield (current_traceparent() or "").encode()
    finally:
        current.end()


async def test_a_handlers_span_is_a_child_of_the_callers(exporter: InMemorySpanExporter) -> None:
    async with serving(UnaryUnary=traced_unary, UnaryStream=traced_stream) as stub:
        with span("caller") as caller:
            inside = (await stub.unary_unary(b"", timeout=20)).decode()

    spans = finished(exporter)
    caller_context = caller.get_span_context()
    assert ids(spans["handler"]) == (
        f"{caller_context.trace_id:032x}",
        f"{caller_context.span_id:016x}",
    )
    assert inside.split("-")[1] == f"{caller_context.trace_id:032x}"


# OB-04
@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("traceparent", "garbage")],
        [("traceparent", "")],
        [("traceparent", f"00-{'0' * 32}-{SPAN_ID}-01")],
        [("traceparent", f"00-{TRACE_ID}-{'0' * 16}-01")],
        [("traceparent", TRACEPARENT.upper())],
        [("traceparent", TRACEPARENT + "-extra")],
        [("traceparent", f"ff-{TRACE_ID}-{SPAN_ID}-01")],
        [("tracestate", "vendor=1")],
    ],
)
async def test_a_bad_traceparent_begins_a_new_trace(
    exporter: InMemorySpanExporter, headers: list[tuple[str, str]]
) -> None:
    assert extract_trace(headers) is None

    async with serving(UnaryUnary=traced_unary) as stub:
        await stub.unary_unary(b"", metadata=headers, timeout=20)

    trace_id, parent = ids(finished(exporter)["handler"])
    assert parent is None
    assert trace_id != TRACE_ID


# OB-04
def test_a_traceparent_sent_twice_counts_as_none() -> None:
    assert extract_trace([("traceparent", TRACEPARENT), ("traceparent", TRACEPARENT)]) is None


# OB-04
async def test_a_valid_traceparent_is_followed_with_its_state(
    exporter: InMemorySpanExporter,
) -> None:
    headers = [("Traceparent", TRACEPARENT), ("tracestate", "vendor=1")]

    context = extract_trace(headers)
    assert context is not None
    current = trace.get_current_span(context).get_span_context()
    assert current.trace_state.get("vendor") == "1"

    async with serving(UnaryUnary=traced_unary) as stub:
        await stub.unary_unary(b"", metadata=[("traceparent", TRACEPARENT)], timeout=20)
    assert ids(finished(exporter)["handler"]) == (TRACE_ID, SPAN_ID)


# OB-04
async def test_an_unsampled_trace_stays_unsampled_and_goes_on(
    exporter: InMemorySpanExporter,
) -> None:
    unsampled = f"00-{TRACE_ID}-{SPAN_ID}-00"

    async with serving(UnaryUnary=traced_unary) as stub:
        passed_on = await stub.unary_unary(b"", metadata=[("traceparent", unsampled)], timeout=20)

    assert exporter.get_finished_spans() == ()
    assert passed_on.decode().split("-")[1::2] == [TRACE_ID, "00"]


@pytest.mark.parametrize(
    ("sampler", "argument", "parent_flag", "is_recorded"),
    [
        ("always_off", "", "01", False),
        ("always_on", "", "00", True),
        ("parentbased_always_off", "", None, False),
        ("parentbased_always_off", "", "01", True),
        ("traceidratio", "0", "01", False),
        ("parentbased_traceidratio", "1", None, True),
        ("parentbased_traceidratio", "1", "00", False),
    ],
)
def test_the_standard_variables_decide_what_is_sampled(
    monkeypatch: pytest.MonkeyPatch,
    sampler: str,
    argument: str,
    parent_flag: str | None,
    is_recorded: bool,
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", argument)
    exporter = InMemorySpanExporter()
    telemetry.start_tracing("test", SimpleSpanProcessor(exporter))
    headers = [] if parent_flag is None else [("traceparent", TRACEPARENT[:-2] + parent_flag)]
    caller = trace.get_current_span(extract_trace(headers))
    try:
        with use_span(caller), span("work"):
            pass
    finally:
        telemetry.shutdown()

    assert bool(exporter.get_finished_spans()) is is_recorded


async def test_a_cancelled_call_ends_its_spans(exporter: InMemorySpanExporter) -> None:
    # OB-03
    has_begun, has_ended = asyncio.Event(), asyncio.Event()

    async def wait_for_ever(request: bytes, context: Any) -> bytes:
        try:
            with span("handler"), span("inner"):
                has_begun.set()
                await asyncio.Event().wait()
        finally:
            has_ended.set()
        raise AssertionError("nobody sets it")

    async with serving(UnaryUnary=wait_for_ever) as stub:
        call = stub.unary_unary(b"", timeout=20)
        await asyncio.wait_for(has_begun.wait(), 20)
        assert exporter.get_finished_spans() == ()
        call.cancel()
        await asyncio.wait_for(has_ended.wait(), 20)

    assert [one.name for one in exporter.get_finished_spans()] == ["inner", "handler"]


# OB-04
def test_an_enormous_tracestate_is_dropped_and_the_trace_kept() -> None:
    context = extract_trace([("traceparent", TRACEPARENT), ("tracestate", "a=" + "x" * 8190)])

    assert context is not None
    current = trace.get_current_span(context).get_span_context()
    assert f"{current.trace_id:032x}" == TRACE_ID
    assert len(current.trace_state) == 0


# OB-01
@pytest.mark.parametrize("ending", ["closed", "cancelled", "read to the end"])
async def test_streams_end_with_one_span_and_no_context_left_behind(
    exporter: InMemorySpanExporter, caplog: pytest.LogCaptureFixture, ending: str
) -> None:
    async def consume(stub: Any) -> None:
        call = stub.unary_stream(b"", timeout=10)

        async def messages() -> AsyncGenerator[bytes, None]:
            try:
                async for message in call:
                    yield message
            finally:
                call.cancel()

        consumer = messages()
        if ending == "read to the end":
            assert len([message async for message in consumer]) == 1000
            return
        await anext(consumer)
        await anext(consumer)
        if ending == "cancelled":
            call.cancel()
        else:
            await asyncio.create_task(consumer.aclose())

    num_calls = 10 if ending == "read to the end" else 100
    async with serving(UnaryStream=traced_stream) as stub:
        with span("caller") as caller:
            await asyncio.gather(*(consume(stub) for _ in range(num_calls)))
        async with asyncio.timeout(20):
            while len(exporter.get_finished_spans()) < num_calls + 1:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    handlers = [one for one in exporter.get_finished_spans() if one.name == "handler"]
    trace_id = f"{caller.get_span_context().trace_id:032x}"
    assert len(handlers) == num_calls
    assert {ids(one)[0] for one in handlers} == {trace_id}
    assert "detach" not in caplog.text
    assert not trace.get_current_span().get_span_context().is_valid


# OB-01
async def test_between_the_messages_of_a_stream_no_span_is_current(
    exporter: InMemorySpanExporter,
) -> None:
    async with aclosing(traced_stream(b"", None)) as messages:
        async for message in messages:
            assert message == b""
            assert not trace.get_current_span().get_span_context().is_valid
            break

    assert len(exporter.get_finished_spans()) == 1


def test_errors_mark_the_span_they_pass_through(exporter: InMemorySpanExporter) -> None:
    with pytest.raises(ValueError, match="no"), span("outer"), span("failing"):
        raise ValueError("no")

    assert finished(exporter)["failing"].status.status_code is trace.StatusCode.ERROR
    assert finished(exporter)["failing"].events[0].name == "exception"


def test_attributes_and_kind_reach_the_span(exporter: InMemorySpanExporter) -> None:
    with span("one", {"num_tokens": 3}, kind=trace.SpanKind.SERVER) as current:
        current.set_attribute("more", "yes")

    recorded = finished(exporter)["one"]
    assert dict(recorded.attributes or {}) == {"num_tokens": 3, "more": "yes"}
    assert recorded.kind is trace.SpanKind.SERVER
    assert recorded.resource.attributes["service.name"] == "test"


def test_without_tracing_spans_are_nothing_and_the_trace_still_passes_through() -> None:
    assert not telemetry.is_tracing()
    with span("one") as current:
        assert current is trace.INVALID_SPAN
        assert current_traceparent() is None
    held = start_span("two")
    with use_span(held):
        assert current_traceparent() is None

    context = extract_trace([("traceparent", TRACEPARENT)])
    assert context is not None
    with use_span(trace.get_current_span(context)), span("three"):
        assert current_traceparent() == TRACEPARENT


def test_without_an_endpoint_the_sdk_is_not_even_imported() -> None:
    program = (
        "import sys\n"
        "from mesh import telemetry\n"
        "telemetry.setup('test', otlp_endpoint=None)\n"
        "print([name for name in sys.modules if name.startswith('opentelemetry.sdk')])"
    )

    printed = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout

    assert printed.strip() == "[]"


class Collector:
    """Keeps what is exported to it."""

    def __init__(self) -> None:
        self.requests: list[Any] = []

    def Export(self, request: Any, context: Any) -> Any:
        self.requests.append(request)
        return trace_service_pb2.ExportTraceServiceResponse()


@pytest.fixture
def collector() -> Iterator[tuple[Collector, str]]:
    collector = Collector()
    server = grpc.server(futures.ThreadPoolExecutor(2))
    add: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
    add(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield collector, f"http://127.0.0.1:{port}"
    server.stop(None).wait()


PROGRAM = """
import sys
from mesh import telemetry
telemetry.setup("prefill", otlp_endpoint=sys.argv[1], worker_id="prefill-0")
with telemetry.span("prefill.run"):
    pass
"""


def test_spans_of_a_process_that_ends_are_exported(collector: tuple[Collector, str]) -> None:
    subprocess.run([sys.executable, "-c", PROGRAM, collector[1]], check=True, timeout=30)

    (resource_spans,) = collector[0].requests[0].resource_spans
    attributes = {one.key: one.value.string_value for one in resource_spans.resource.attributes}
    assert attributes["service.name"] == "prefill"
    assert attributes["service.instance.id"] == "prefill-0"
    assert resource_spans.scope_spans[0].spans[0].name == "prefill.run"


def test_a_dead_collector_does_not_hold_up_the_end_of_a_process() -> None:
    stopwatch = Stopwatch()

    subprocess.run(
        [sys.executable, "-c", PROGRAM, "http://127.0.0.1:1"],
        check=True,
        timeout=30,
        stdout=subprocess.DEVNULL,
    )

    assert stopwatch.elapsed_s < 6


def log_line(log: Any) -> dict[str, Any]:
    """What `log` writes through the JSON handler."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter())
    handler.addFilter(ContextFilter("gateway"))
    logger = logging.Logger("test.logger")
    logger.addHandler(handler)
    log(logger)
    (line,) = stream.getvalue().splitlines()
    parsed: dict[str, Any] = json.loads(line)
    return parsed


def test_log_lines_are_json_with_extra_fields_and_context() -> None:
    token = request_id_var.set("req-1")
    context = extract_trace([("traceparent", TRACEPARENT)])
    assert context is not None
    with use_span(trace.get_current_span(context)):
        line = log_line(lambda log: log.info("request %s", "done", extra={"ttft_ms": 1.5}))
    request_id_var.reset(token)

    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "info",
        "logger": "test.logger",
        "message": "request done",
        "service": "gateway",
        "request_id": "req-1",
        "trace_id": TRACE_ID,
        "ttft_ms": 1.5,
    }


def test_log_lines_survive_what_json_cannot_say() -> None:
    line = log_line(
        lambda log: log.info(
            "odd", extra={"key": b"\xff", "number": float("nan"), "map": {1: object}, "big": 2**70}
        )
    )

    assert line["message"] == "odd"
    assert line["big"] == str(2**70)


def test_unpaired_surrogates_do_not_lose_a_log_line() -> None:
    line = log_line(lambda log: log.info("text %s", "\ud800", extra={"more": "\udfff"}))

    assert line["message"] == "text \ud800"
    assert line["level"] == "info"


def test_exceptions_are_logged_with_their_traceback() -> None:
    def log(logger: logging.Logger) -> None:
        try:
            raise ValueError("boom")
        except ValueError:
            logger.exception("failed")

    line = log_line(log)

    assert line["level"] == "error"
    assert "ValueError: boom" in line["exception"]


def test_stopwatch_counts_in_both_units() -> None:
    stopwatch = Stopwatch()

    before_s = stopwatch.elapsed_s
    assert 0 < before_s * 1000 <= stopwatch.elapsed_ms < 60_000
