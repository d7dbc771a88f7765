"""Logging, tracing and stopwatches, set up once per process."""

import atexit
import json
import logging
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

import orjson
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

Span = trace.Span
SpanKind = trace.SpanKind
INVALID_SPAN = trace.INVALID_SPAN
Attributes = Mapping[str, AttributeValue]

request_id_var: ContextVar[str] = ContextVar("request_id", default="")

# W3C asks for at least 512 characters; more would crowd out gRPC's 8 KiB of metadata.
_MAX_TRACESTATE_CHARS = 512
_SHUTDOWN_TIMEOUT_MS = 2000
_STANDARD_FIELDS = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}

_propagator = TraceContextTextMapPropagator()


class _Tracing:
    """The process's tracer; both are None while tracing is off."""

    provider: "TracerProvider | None" = None
    tracer: trace.Tracer | None = None


def setup(
    service: str,
    *,
    log_level: str = "INFO",
    otlp_endpoint: str | None = None,
    worker_id: str | None = None,
) -> None:
    """JSON logs to stdout; spans to the collector when there is one."""
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(JsonFormatter())
    handler.addFilter(ContextFilter(service))
    logging.basicConfig(level=log_level.upper(), handlers=[handler], force=True)
    if otlp_endpoint:
        start_tracing(service, exporting_to(otlp_endpoint), worker_id=worker_id)
        atexit.register(shutdown)


def start_tracing(
    service: str, processor: "SpanProcessor", *, worker_id: str | None = None
) -> None:
    """Give every span from now on to `processor`."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider

    attributes = {"service.name": service, "service.namespace": "pdmesh"}
    if worker_id:
        attributes["service.instance.id"] = worker_id
    # Sampling stays the SDK's business: OTEL_TRACES_SAMPLER, parent-based by default.
    provider = TracerProvider(resource=Resource.create(attributes), shutdown_on_exit=False)
    provider.add_span_processor(processor)
    _Tracing.provider, _Tracing.tracer = provider, provider.get_tracer("pdmesh")


def shutdown() -> None:
    """Send what is left, for a bounded time, and stop tracing."""
    provider, _Tracing.provider, _Tracing.tracer = _Tracing.provider, None, None
    if provider is not None:
        provider.shutdown()


def exporting_to(otlp_endpoint: str) -> "SpanProcessor":
    """Sends spans to a collector, in batches; a process without one loads none of it."""
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    class BoundedSpanProcessor(BatchSpanProcessor):
        def shutdown(self) -> None:
            # The SDK's own shutdown waits up to 30 s for a collector that is gone.
            self._batch_processor.shutdown(_SHUTDOWN_TIMEOUT_MS)

    # Without a scheme, OTEL_EXPORTER_OTLP_INSECURE decides.
    insecure = True if otlp_endpoint.startswith("http://") else None
    return BoundedSpanProcessor(OTLPSpanExporter(endpoint=otlp_endpoint, insecure=insecure))


@contextmanager
def span(
    name: str, attributes: Attributes | None = None, kind: SpanKind = SpanKind.INTERNAL
) -> Iterator[Span]:
    """A child of the current span around a block of work. Never `yield` inside it."""
    if _Tracing.tracer is None:
        yield trace.INVALID_SPAN
        return
    with _Tracing.tracer.start_as_current_span(name, kind=kind, attributes=attributes) as started:
        yield started


def start_span(
    name: str,
    attributes: Attributes | None = None,
    kind: SpanKind = SpanKind.INTERNAL,
    *,
    links: Sequence[Span] = (),
    start_time_ns: int | None = None,
) -> Span:
    """A child of the current span that the caller ends; for work that spans a `yield`."""
    if _Tracing.tracer is None:
        return trace.INVALID_SPAN
    return _Tracing.tracer.start_span(
        name,
        kind=kind,
        attributes=attributes,
        links=[trace.Link(linked.get_span_context()) for linked in links],
        start_time=start_time_ns,
    )


@contextmanager
def use_span(parent: Span) -> Iterator[None]:
    """Make `parent` current around awaits; it is not ended. Never `yield` inside it."""
    if not parent.get_span_context().is_valid:
        yield
        return
    with trace.use_span(parent, end_on_exit=False):
        yield


def is_tracing() -> bool:
    """Whether spans are recorded."""
    return _Tracing.tracer is not None


def current_traceparent() -> str | None:
    """The W3C form of the current span, None outside a trace."""
    carrier: dict[str, str] = {}
    _propagator.inject(carrier)
    return carrier.get("traceparent")


def trace_headers() -> list[tuple[str, str]]:
    """What carries the current span to the next service."""
    if not trace.get_current_span().get_span_context().is_valid:
        return []
    carrier: dict[str, str] = {}
    _propagator.inject(carrier)
    return list(carrier.items())


def extract_trace(headers: Iterable[tuple[str, str]]) -> otel_context.Context | None:
    """The caller's span as a context, or None where there is no valid one.

    As W3C asks, a traceparent that is malformed or sent twice is ignored, and a
    new trace begins.
    """
    parents: list[str] = []
    states: list[str] = []
    for key, value in headers:
        name = key.lower()
        if name == "traceparent":
            parents.append(value)
        elif name == "tracestate":
            states.append(value)
    if len(parents) != 1:
        return None
    carrier = {"traceparent": parents[0]}
    state = ",".join(states)
    if state and len(state) <= _MAX_TRACESTATE_CHARS:
        carrier["tracestate"] = state
    extracted = _propagator.extract(carrier, otel_context.Context())
    if not trace.get_current_span(extracted).get_span_context().is_valid:
        return None
    return extracted


def enter_trace(headers: Iterable[tuple[str, str]]) -> None:
    """Make the caller's span current for the rest of the running task.

    There is nothing to undo: a task owns its context, and it ends with the task.
    Call it only where a task serves a single request.
    """
    extracted = extract_trace(headers)
    otel_context.attach(extracted if extracted is not None else otel_context.Context())


class Stopwatch:
    """Time since it was made, by the monotonic clock."""

    def __init__(self) -> None:
        self._started = time.perf_counter()

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self._started

    @property
    def elapsed_ms(self) -> float:
        return self.elapsed_s * 1000


class ContextFilter(logging.Filter):
    """Adds what every line carries: service, request and trace."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def filter(self, record: logging.LogRecord) -> bool:
        record.service = self._service
        if not hasattr(record, "request_id"):
            record.request_id = request_id_var.get()
        current = trace.get_current_span().get_span_context()
        record.trace_id = trace.format_trace_id(current.trace_id) if current.is_valid else ""
        return True


class JsonFormatter(logging.Formatter):
    """One JSON object a line; `extra` fields at the top level."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
            + f".{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name, value in vars(record).items():
            if name not in _STANDARD_FIELDS and value not in ("", None):
                line.setdefault(name, value)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        try:
            return orjson.dumps(line, default=repr, option=orjson.OPT_NON_STR_KEYS).decode()
        except TypeError:
            # A line is never lost: what JSON cannot say is written as Python says it.
            said = ((name, v if isinstance(v, str) else repr(v)) for name, v in line.items())
            return json.dumps(dict(said))
