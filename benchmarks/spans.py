"""What one span costs, and a receiver that keeps what a mesh sends."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

from mesh import telemetry

_EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
_NUM_CALLS = 100_000
_NUM_RECORDED = 20_000


@dataclass
class Sink:
    """Takes traces and looks at them later: what reads them shares no time with the mesh."""

    batches: list[bytes] = field(default_factory=list)

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        """Yields the endpoint."""
        server = grpc.aio.server()
        handler: Any = grpc.unary_unary_rpc_method_handler(self._export)
        service, method = _EXPORT.strip("/").split("/")
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, {method: handler}),)
        )
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            await server.stop(None)

    def num_spans(self) -> int:
        """Spans of everything that came."""
        requests = map(trace_service_pb2.ExportTraceServiceRequest.FromString, self.batches)
        return sum(
            len(scope.spans)
            for request in requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
        )

    async def _export(self, batch: bytes, context: Any) -> bytes:
        self.batches.append(batch)
        return b""


async def recorded_span_us() -> float:
    """Processor time of a span, export and the receiver of this process included."""
    sink = Sink()
    async with sink.listening() as endpoint:
        telemetry.start_tracing("benchmark", telemetry.exporting_to(endpoint))
        spent_s = await asyncio.to_thread(_record_spans)
    if sink.num_spans() != _NUM_RECORDED:
        raise RuntimeError(f"{sink.num_spans()} of {_NUM_RECORDED} spans came")
    return spent_s / _NUM_RECORDED * 1e6


def _record_spans() -> float:
    """As many spans to a trace, and as much on each, as a request has."""
    started = time.process_time()
    for _ in range(_NUM_RECORDED // 10):
        with telemetry.span("gateway.request", {"gen_ai.request.model": "m"}):
            for _ in range(9):
                with telemetry.span("decode.run", {"pdmesh.request_id": "r"}) as current:
                    current.set_attributes({"gen_ai.latency.e2e": 1.5, "pdmesh.num_tokens": 7})
                    current.add_event("first_token")
        # As fast as they are exported: a full queue would drop some.
        time.sleep(0.002)
    telemetry.shutdown()
    return time.process_time() - started


def no_span_ns() -> int:
    """What a span costs where tracing is off."""
    started = time.perf_counter_ns()
    for _ in range(_NUM_CALLS):
        with telemetry.span("off"):
            pass
    return (time.perf_counter_ns() - started) // _NUM_CALLS
