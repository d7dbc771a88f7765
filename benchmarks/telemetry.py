"""What it costs to be watched: tracing, and the dashboard's page."""

import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

from benchmarks.contenders import OURS, Place, contenders
from benchmarks.points import BenchPoint
from benchmarks.processes import RunningServer, running
from benchmarks.settings import BenchmarkSettings
from mesh import telemetry
from mesh.bench.client import Endpoint, open_client
from mesh.bench.prompts import Vocabulary
from mesh.bench.results import summarize_round
from mesh.bench.run import Plan, measure
from mesh.ports import find_free_ports

PLAIN = "plain"
# Against it, on the same mesh: every request traced, and somebody at its page.
VARIANTS = ("traced", "page")
# A client that has decided: no spans. Two meshes, one without tracing, would differ by more
# than tracing costs.
_NOT_SAMPLED = {"traceparent": f"00-{'0' * 31}1-{'0' * 15}1-00"}
# As often and as much as the page asks (gateway/dashboard/static/app.js).
_POLL_S = 1.0
_NUM_LISTED = 300
_EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
_NUM_CALLS = 100_000
_NUM_RECORDED = 20_000

Report = Callable[[str], None]


@dataclass(frozen=True)
class Sample:
    """One variant in one round."""

    variant: str
    tokens_per_s: float
    # Of the mesh's processes, for each token.
    cpu_ms: float


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


async def measure_cost(
    variants: Sequence[str],
    *,
    concurrency: int,
    num_rounds: int,
    duration_s: float,
    environment: Mapping[str, str],
    report: Report,
) -> tuple[list[Sample], int]:
    """Rounds over `plain` and the variants, interleaved; and how many spans came.

    One mesh serves all of them, so that nothing else differs.
    """
    settings = BenchmarkSettings()
    load = BenchPoint("W1", concurrency).load(Vocabulary.from_folder(settings.model_folder))
    plan = Plan(num_rounds, duration_s, grace_s=30.0, seed=0)
    samples: list[Sample] = []
    sink = Sink()
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        endpoint = await stack.enter_async_context(sink.listening())
        server = await stack.enter_async_context(_mesh(settings, folder, endpoint, environment))
        names = [PLAIN, *variants]
        for round_index in range(num_rounds + 1):
            # Another first one each time: none always runs on the coolest machine.
            first = round_index % len(names)
            for name in (*names[first:], *names[:first]):
                seed = (round_index, name)
                async with _watcher(server.url, is_there=name == "page"):
                    sample = await _measure(name, server, settings, load, plan, seed)
                report(f"round {round_index}: {sample}")
                if round_index > 0:
                    samples.append(sample)
    return samples, sink.num_spans()


async def _measure(
    name: str, server: RunningServer, settings: BenchmarkSettings, load: Any, plan: Plan, seed: Any
) -> Sample:
    headers = {} if name == "traced" else _NOT_SAMPLED
    endpoint = Endpoint(server.url, settings.model_folder.name, headers=headers)
    async with open_client(endpoint) as client:
        cpu_s = server.cpu_s()
        window = await measure(client, load, plan, seed)
        cpu_s = server.cpu_s() - cpu_s
    group = summarize_round(window).groups[load.workload.group]
    if group.num_errors:
        raise RuntimeError(f"{name}: {group.num_errors} requests failed")
    num_tokens = sum(one.num_output_tokens for one in window.recordings)
    return Sample(name, round(group.output_tokens_per_s, 1), round(1000 * cpu_s / num_tokens, 3))


@asynccontextmanager
async def _mesh(
    settings: BenchmarkSettings,
    folder: Path,
    otlp_endpoint: str,
    environment: Mapping[str, str],
) -> AsyncIterator[RunningServer]:
    home = folder / "home"
    home.mkdir()
    [port] = find_free_ports(1)
    arguments = ("--log-level", "INFO", "--otlp-endpoint", otlp_endpoint)
    contender = contenders(settings, arguments)[OURS]
    launch = contender.launch(BenchPoint("W1", 1), Place(port, home))
    async with running(launch, port, folder / "mesh.log", environment) as server:
        yield server


@asynccontextmanager
async def _watcher(url: str, *, is_there: bool) -> AsyncIterator[None]:
    """Somebody with the page open, who asks what the page asks."""
    watching = asyncio.create_task(_watch(url)) if is_there else None
    try:
        yield
    finally:
        if watching is not None:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching


async def _watch(url: str) -> None:
    last_number = 0
    async with aiohttp.ClientSession(url) as session:
        while True:
            asked = {"limit": _NUM_LISTED, "after": last_number}
            async with session.get("/dashboard/api/live") as live:
                await live.read()
            async with session.get("/dashboard/api/requests", params=asked) as listed:
                last_number = (await listed.json())["last_number"]
            await asyncio.sleep(_POLL_S)


def markdown(samples: Sequence[Sample], num_spans: int) -> str:
    """A table: medians, and each variant's rounds by the plain rounds beside them."""
    lines = [
        "| | tokens/s | CPU ms a token | tokens/s by plain | CPU by plain |",
        "|---|---|---|---|---|",
    ]
    by_variant: dict[str, list[Sample]] = {}
    for sample in samples:
        by_variant.setdefault(sample.variant, []).append(sample)
    for name, rounds in by_variant.items():
        speeds = [one.tokens_per_s for one in rounds]
        costs = [one.cpu_ms for one in rounds]
        cells = [name, _spread(speeds, 1), _spread(costs, 3)]
        plain = by_variant[PLAIN]
        for values, base in (
            (speeds, [one.tokens_per_s for one in plain]),
            (costs, [one.cpu_ms for one in plain]),
        ):
            ratios = [value / of for value, of in zip(values, base, strict=True)]
            cells.append("" if name == PLAIN else _spread(ratios, 3))
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", f"{num_spans} spans came. A span that is not recorded takes {no_span_ns()} ns."]
    return "\n".join(lines) + "\n"


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


def _spread(values: Sequence[float], digits: int) -> str:
    low, high = min(values), max(values)
    return f"{statistics.median(values):.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"
