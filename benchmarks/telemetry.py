"""What it costs to be watched: tracing, and the dashboard's page."""

import asyncio
import random
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import count, cycle, islice, takewhile
from pathlib import Path

import aiohttp

from benchmarks.contenders import OURS, Place, contenders
from benchmarks.pairs import Sample
from benchmarks.points import BenchPoint
from benchmarks.processes import RunningServer, running
from benchmarks.settings import BenchmarkSettings
from benchmarks.spans import Sink
from mesh.bench.client import Endpoint, OpenAiClient, PlannedRequest, Recording
from mesh.bench.load import LoadGenerator
from mesh.bench.prompts import Vocabulary
from mesh.bench.results import tokens_between
from mesh.ports import find_free_ports

PLAIN = "plain"
# Against it: every request traced, somebody at its page, and nothing, to see what chance does.
VARIANTS = ("traced", "page", "again")
# A client that has decided: no spans. Two meshes, one without tracing, would differ by more
# than tracing costs.
_NOT_SAMPLED = {"traceparent": f"00-{'0' * 31}1-{'0' * 15}1-00"}
# As often and as much as the page asks (gateway/dashboard/static/app.js).
_POLL_S = 1.0
_NUM_LISTED = 300
# Spans leave within this time (OpenTelemetry's default), so that the turn that made them also sends
# them.
_EXPORT_DELAY_S = 5.0
_SETTLE_S = 0.5
_TURN_S = 2 * _EXPORT_DELAY_S
_WORKERS = ("prefill_svc", "decode_svc")

Report = Callable[[str], None]


@dataclass
class Shift:
    """Which variant new requests belong to, and how many of each are still running."""

    variant: str = PLAIN
    is_over: bool = False
    num_running: Counter[str] = field(default_factory=Counter)
    _left: asyncio.Condition = field(default_factory=asyncio.Condition)

    @asynccontextmanager
    async def request(self) -> AsyncIterator[str]:
        """Yields the variant of one request."""
        variant = self.variant
        self.num_running[variant] += 1
        try:
            yield variant
        finally:
            self.num_running[variant] -= 1
            async with self._left:
                self._left.notify_all()

    async def change(self, variant: str) -> None:
        """Returns when no request of another variant is left."""
        self.variant = variant
        async with self._left:
            await self._left.wait_for(lambda: self.num_running.total() == self.num_running[variant])


@dataclass(frozen=True)
class Turn:
    """A stretch of time in which all requests were of one variant."""

    block: str
    variant: str
    begun_at: float
    ended_at: float
    # By process.
    cpu_s: Mapping[str, float]

    def sample(self, recordings: Sequence[Recording]) -> Sample:
        num_tokens = tokens_between(recordings, self.begun_at, self.ended_at)
        tokens_per_s = num_tokens / (self.ended_at - self.begun_at)
        edge_s = sum(used_s for name, used_s in self.cpu_s.items() if name not in _WORKERS)
        cpu_ms = (1000 * used_s / num_tokens for used_s in (sum(self.cpu_s.values()), edge_s))
        return Sample(
            self.block, self.variant, round(tokens_per_s, 2), *(round(x, 5) for x in cpu_ms)
        )


async def measure_cost(
    variants: Sequence[str],
    *,
    concurrency: int,
    duration_s: float,
    environment: Mapping[str, str],
    report: Report,
) -> tuple[list[Sample], int]:
    """Turns of `plain` and the variants for so long; and how many spans came.

    One mesh under one load that never pauses serves all of them, so that nothing else differs.
    """
    settings = BenchmarkSettings()
    sink, shift = Sink(), Shift()
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        otlp = await stack.enter_async_context(sink.listening())
        server = await stack.enter_async_context(_mesh(settings, folder, otlp, environment))
        # A connection for each request, as `pdmesh bench` does.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        session = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        load = LoadGenerator(_sender(session, server.url, settings, shift))
        async with asyncio.TaskGroup() as group:
            loading = group.create_task(
                load.closed_loop(_requests(settings, concurrency, shift), concurrency)
            )
            turning = group.create_task(_turns(shift, variants, server, duration_s, report))
    recordings = loading.result().recordings
    if errors := [one.error for one in recordings if one.error]:
        raise RuntimeError(f"{len(errors)} requests failed: {errors[0]}")
    return [turn.sample(recordings) for turn in turning.result()], sink.num_spans()


async def _turns(
    shift: Shift,
    variants: Sequence[str],
    server: RunningServer,
    duration_s: float,
    report: Report,
) -> list[Turn]:
    """Blocks of one turn of each, in an order drawn for each; the first block is discarded."""
    run = datetime.now(UTC).isoformat(timespec="seconds")
    source = random.Random(run)
    ends_at = time.perf_counter() + duration_s
    turns: list[Turn] = []
    order = [PLAIN, *variants]
    for index in count():
        if time.perf_counter() > ends_at:
            break
        # Every second one backwards: none is measured earlier than the others on average.
        if index % 2:
            order.reverse()
        else:
            source.shuffle(order)
        settle_s = _EXPORT_DELAY_S if "traced" in variants else _SETTLE_S
        block = [await _turn(shift, f"{run} {index}", name, server, settle_s) for name in order]
        report(f"block {index}: {', '.join(order)}")
        turns += block if index > 0 else []
    shift.is_over = True
    return turns


async def _turn(
    shift: Shift, block: str, variant: str, server: RunningServer, settle_s: float
) -> Turn:
    await shift.change(variant)
    async with _watcher(server.url, is_there=variant == "page"):
        # Spans of the turn before have left by then, and the first of this one leave.
        await asyncio.sleep(settle_s)
        begun_at, before = time.perf_counter(), server.cpu_s()
        await asyncio.sleep(_TURN_S)
        ended_at, after = time.perf_counter(), server.cpu_s()
    cpu_s = {name: used_s - before.get(name, 0.0) for name, used_s in after.items()}
    return Turn(block, variant, begun_at, ended_at, cpu_s)


def _requests(
    settings: BenchmarkSettings, concurrency: int, shift: Shift
) -> Iterator[PlannedRequest]:
    """The same few prompts again and again, so that all turns have the same work."""
    vocabulary = Vocabulary.from_folder(settings.model_folder)
    drawn = BenchPoint("W1", concurrency).load(vocabulary).workload.requests(0)
    prompts = cycle(list(islice(drawn, concurrency)))
    return takewhile(lambda _: not shift.is_over, prompts)


def _sender(
    session: aiohttp.ClientSession, url: str, settings: BenchmarkSettings, shift: Shift
) -> Callable[[PlannedRequest, Recording], Awaitable[None]]:
    salts = count()

    async def send(request: PlannedRequest, recording: Recording) -> None:
        async with shift.request() as variant:
            endpoint = Endpoint(
                url,
                settings.model_folder.name,
                headers={} if variant == "traced" else _NOT_SAMPLED,
                # No prompt is in a cache.
                extra_body={"cache_salt": str(next(salts))},
            )
            await OpenAiClient(session, endpoint).stream(request, recording)

    return send


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
