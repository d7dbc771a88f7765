"""Rounds over all servers, interleaved, and what came out of them."""

import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import time_ns
from typing import Any

from benchmarks.contenders import Contender, Launch, Place
from benchmarks.points import BenchPoint
from benchmarks.processes import Memory, RunningServer, StartFailed, running
from mesh.bench.client import Endpoint, open_client
from mesh.bench.load import Window
from mesh.bench.prompts import Vocabulary
from mesh.bench.results import GroupSummary, summarize_round
from mesh.bench.run import Load, Plan, measure
from mesh.bench.workloads import LONG_PROMPTS
from mesh.ports import find_free_ports

Report = Callable[[str], None]


@dataclass(frozen=True)
class Schedule:
    """How long and how often."""

    num_rounds: int
    # Whole rounds before those that count.
    num_discarded: int
    duration_s: float
    # Of the same load, before each measurement.
    warm_up_s: float
    # For requests in flight at the end.
    grace_s: float = 30.0


@dataclass(frozen=True)
class Measurement:
    """One server at one point in one round."""

    contender: str
    point: str
    # From 0; discarded rounds are not kept.
    round_index: int
    start_s: float
    num_requests: int
    num_errors: int
    errors: tuple[str, ...]
    tokens_per_s: float
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    tpot_p50_ms: float | None
    itl_p50_ms: float | None
    itl_p99_ms: float | None
    itl_max_ms: float | None
    long_ttft_p50_ms: float | None
    prompt_tokens: float | None
    cached_tokens: float | None
    pss_mib: float
    rss_mib: float
    num_processes: int
    # Cores that were busy.
    server_cpu: float
    client_cpu: float

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class _Start:
    """Points of one contender that one process serves."""

    contender: Contender
    points: tuple[BenchPoint, ...]


class Comparison:
    """Starts one server at a time, so that none disturbs another."""

    def __init__(
        self,
        contenders: Sequence[Contender],
        points: Sequence[BenchPoint],
        schedule: Schedule,
        vocabulary: Vocabulary,
        *,
        logs: Path,
        environment: Mapping[str, str],
        report: Report,
    ) -> None:
        self._contenders = list(contenders)
        self._points = list(points)
        self._schedule = schedule
        self._vocabulary = vocabulary
        self._logs = logs
        self._environment = environment
        self._report = report
        self.failures: list[str] = []

    async def run(self) -> list[Measurement]:
        """All rounds. A server that does not start is reported and left out of its round."""
        measurements: list[Measurement] = []
        num_discarded = self._schedule.num_discarded
        for round_index in range(num_discarded + self._schedule.num_rounds):
            self._report(f"round {round_index}{' (discarded)' * (round_index < num_discarded)}")
            for start in self._starts(round_index):
                made = [each async for each in self._serve(start, round_index - num_discarded)]
                if round_index >= num_discarded:
                    measurements += made
        return measurements

    def _starts(self, round_index: int) -> Iterator[_Start]:
        """Each round begins with another server: none always runs on the coolest machine."""
        first = round_index % len(self._contenders)
        nowhere = Place(0, Path())
        for contender in (*self._contenders[first:], *self._contenders[:first]):
            by_launch: dict[tuple[str, ...], list[BenchPoint]] = {}
            for point in self._points:
                by_launch.setdefault(contender.launch(point, nowhere).argv, []).append(point)
            for points in by_launch.values():
                yield _Start(contender, tuple(points))

    async def _serve(self, start: _Start, round_index: int) -> AsyncIterator[Measurement]:
        (port,) = find_free_ports(1)
        with tempfile.TemporaryDirectory(prefix="pdmesh-bench-") as folder:
            launch = start.contender.launch(start.points[0], Place(port, Path(folder)))
            log = self._logs / f"{start.contender.name}-{start.points[0]}-{round_index}.log"
            try:
                async with running(launch, port, log, self._environment) as server:
                    for point in start.points:
                        yield await self._measure(
                            start.contender, launch, server, point, round_index
                        )
            except StartFailed as error:
                self.failures.append(f"{start.contender.name}: {error}")
                self._report(f"  {start.contender.name} did not start: {error}")

    async def _measure(
        self,
        contender: Contender,
        launch: Launch,
        server: RunningServer,
        point: BenchPoint,
        round_index: int,
    ) -> Measurement:
        load = point.load(self._vocabulary)
        endpoint = Endpoint(server.url, launch.model)
        async with open_client(endpoint) as client:

            async def go(load: Load, duration_s: float) -> Window:
                # Never the same prompts twice: a cache would know them.
                plan = Plan(1, duration_s, self._schedule.grace_s, seed=time_ns())
                return await measure(client, load, plan, seed=(plan.seed,))

            await go(load, self._schedule.warm_up_s)
            cpu_s = sum(server.cpu_s().values())
            window = await go(load, self._schedule.duration_s)
            cpu_s = sum(server.cpu_s().values()) - cpu_s
        made = _measurement(
            contender, load, round_index, window, server, server.memory(), cpu_s / window.wall_s
        )
        self._report(
            f"  {contender.name} {point}: {made.tokens_per_s:.1f} tokens/s, "
            f"TTFT {made.ttft_p50_ms} ms, TPOT {made.tpot_p50_ms} ms, PSS {made.pss_mib:.0f} MiB"
        )
        return made


def _measurement(
    contender: Contender,
    load: Load,
    round_index: int,
    window: Window,
    server: RunningServer,
    memory: Memory,
    server_cpu: float,
) -> Measurement:
    summary = summarize_round(window)
    main: GroupSummary = summary.groups[load.workload.group]
    long = summary.groups.get(LONG_PROMPTS)
    groups = [main, *([long] if long else [])]
    return Measurement(
        contender=contender.name,
        point=load.label,
        round_index=round_index,
        start_s=round(server.start_s, 2),
        num_requests=sum(group.num_requests for group in groups),
        num_errors=sum(group.num_errors for group in groups),
        errors=tuple(error for group in groups for error in group.errors),
        tokens_per_s=main.output_tokens_per_s,
        ttft_p50_ms=main.ttft_ms.p50 if main.ttft_ms else None,
        ttft_p99_ms=main.ttft_ms.p99 if main.ttft_ms else None,
        tpot_p50_ms=main.tpot_ms.p50 if main.tpot_ms else None,
        itl_p50_ms=main.itl_ms.p50 if main.itl_ms else None,
        itl_p99_ms=main.itl_ms.p99 if main.itl_ms else None,
        itl_max_ms=main.itl_ms.max if main.itl_ms else None,
        long_ttft_p50_ms=long.ttft_ms.p50 if long and long.ttft_ms else None,
        prompt_tokens=main.prompt_tokens.p50 if main.prompt_tokens else None,
        cached_tokens=main.cached_tokens.p50 if main.cached_tokens else None,
        pss_mib=memory.pss_mib,
        rss_mib=memory.rss_mib,
        num_processes=memory.num_processes,
        server_cpu=round(server_cpu, 2),
        client_cpu=summary.client_cpu,
    )
