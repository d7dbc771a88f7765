"""One run: every load in every round, the first round discarded."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from mesh.bench.client import OpenAiClient, PlannedRequest, Recording
from mesh.bench.knee import NoKnee, find_knee
from mesh.bench.load import Intruder, LoadGenerator, OnDone, Window
from mesh.bench.results import (
    BenchResult,
    Distribution,
    Facts,
    Objectives,
    Point,
    Round,
    pool,
    summarize_round,
)
from mesh.bench.workloads import TimedRequest, Workload, poisson


class BenchFailed(Exception):
    """Nothing was measured; the message holds the first error."""


@dataclass(frozen=True)
class ClosedLoop:
    """Users who each wait for an answer before they ask again."""

    concurrency: int

    def __str__(self) -> str:
        return f"{self.concurrency} at once"


@dataclass(frozen=True)
class OpenLoop:
    """Arrivals that do not wait, Poisson distributed."""

    rate: float

    def __str__(self) -> str:
        return f"{self.rate:g} a second"


@dataclass(frozen=True)
class Replay:
    """Arrivals at recorded times; drawn anew for each round, so that no cache knows them."""

    timed: Callable[[object], Sequence[TimedRequest]]

    def __str__(self) -> str:
        return "as recorded"


@dataclass(frozen=True)
class Load:
    """A workload at one intensity."""

    label: str
    workload: Workload
    arrivals: ClosedLoop | OpenLoop | Replay


@dataclass(frozen=True)
class Plan:
    """How often and for how long each load is measured."""

    num_rounds: int
    duration_s: float
    # For what is in flight when the time is up.
    grace_s: float
    seed: int
    objectives: Objectives | None = None


class Observer:
    """Hears how a run gets on; does nothing by itself."""

    def run_starts(self, num_loads: int) -> None:
        """There will be this many loads in each round."""

    def round_starts(self, load: Load, round_index: int) -> None:
        """Round 0 is the one that is discarded."""

    def request_done(self, recording: Recording) -> None:
        """One request ended, well or badly."""


async def run_loads(
    client: OpenAiClient, loads: Sequence[Load], plan: Plan, observer: Observer
) -> tuple[Point, ...]:
    """Measure every load in each round, so that the machine's moods meet all of them alike.

    Raises:
        BenchFailed: not one request of a load was answered.
    """
    observer.run_starts(len(loads))
    windows: list[list[Window]] = [[] for _ in loads]
    for round_index in range(plan.num_rounds + 1):
        for load, kept in zip(loads, windows, strict=True):
            observer.round_starts(load, round_index)
            seed = (plan.seed, round_index, load.label)
            window = await measure(client, load, plan, seed, observer.request_done)
            if round_index == 0:
                _check(load, window)
            else:
                kept.append(window)
    return tuple(
        _point(load, kept, plan.objectives) for load, kept in zip(loads, windows, strict=True)
    )


async def measure(
    client: OpenAiClient,
    load: Load,
    plan: Plan,
    seed: object,
    on_done: OnDone = lambda recording: None,
) -> Window:
    """One load, once."""
    workload = load.workload
    if workload.warm_up is not None:
        request = next(workload.warm_up(seed))
        recording = Recording(request.group, 0.0)
        await client.stream(request, recording)
        if recording.error is not None:
            raise BenchFailed(recording.error)
    generator = LoadGenerator(client.stream, on_done)
    match load.arrivals:
        case ClosedLoop(concurrency):
            return await generator.closed_loop(
                _drawn_ahead(workload.requests(seed), concurrency),
                concurrency,
                duration_s=plan.duration_s,
                grace_s=plan.grace_s,
                intruder=_intruder(workload, seed),
            )
        case OpenLoop(rate):
            timed: Sequence[TimedRequest] = poisson(workload, seed, rate, plan.duration_s)
            return await generator.open_loop(
                timed, duration_s=plan.duration_s, grace_s=plan.grace_s
            )
        case Replay(drawn):
            return await generator.open_loop(drawn(seed), grace_s=plan.grace_s)


def _drawn_ahead(requests: Iterator[PlannedRequest], num_ahead: int) -> Iterator[PlannedRequest]:
    """The same, the first ones drawn before the clock starts."""
    ready = [next(requests) for _ in range(num_ahead)]
    return _chain(ready, requests)


def _chain(ready: list[PlannedRequest], rest: Iterator[PlannedRequest]) -> Iterator[PlannedRequest]:
    yield from ready
    yield from rest


def _intruder(workload: Workload, seed: object) -> Intruder | None:
    intruders = workload.intruders
    if intruders is None:
        return None
    requests = _drawn_ahead(intruders.requests(seed), 1)
    return Intruder(requests, intruders.every_s, intruders.delay_s)


def _check(load: Load, window: Window) -> None:
    if any(recording.token_times for recording in window.recordings):
        return
    errors = [recording.error for recording in window.recordings if recording.error]
    reason = errors[0] if errors else "no answer came in time"
    raise BenchFailed(f"{load.label}: none of {len(window.recordings)} requests: {reason}")


def _point(load: Load, windows: Sequence[Window], objectives: Objectives | None) -> Point:
    rounds: list[Round] = [summarize_round(window, objectives) for window in windows]
    arrivals = load.arrivals
    return Point(
        label=load.label,
        concurrency=arrivals.concurrency if isinstance(arrivals, ClosedLoop) else None,
        rate=arrivals.rate if isinstance(arrivals, OpenLoop) else None,
        rounds=tuple(rounds),
        pooled=pool(windows, rounds, objectives),
    )


@dataclass(frozen=True)
class Stated:
    """What a measurement cannot find out by itself."""

    hardware: str
    model_and_precision: str


def conclude(
    points: tuple[Point, ...],
    loads: Sequence[Load],
    plan: Plan,
    stated: Stated,
    settings: dict[str, str],
    *,
    seeks_knee: bool,
    now: datetime | None = None,
) -> BenchResult:
    """Put facts to the numbers."""
    workload = loads[-1].workload
    knee, no_knee = None, None
    if seeks_knee:
        try:
            knee = find_knee(points, workload.group)
        except NoKnee as error:
            no_knee = str(error)
    return BenchResult(
        format="pdmesh-bench/1",
        created_at=(now or datetime.now(UTC)).isoformat(timespec="seconds"),
        workload=workload.name,
        main_group=workload.group,
        facts=_facts(points, loads, plan, stated),
        settings=settings,
        points=points,
        knee=knee,
        no_knee=no_knee,
        objectives=plan.objectives,
    )


def _facts(points: Sequence[Point], loads: Sequence[Load], plan: Plan, stated: Stated) -> Facts:
    workload = loads[-1].workload
    main = points[-1].pooled.get(workload.group)
    arrivals = loads[-1].arrivals
    kind = {
        ClosedLoop: "closed loop",
        OpenLoop: "open loop, Poisson",
        Replay: "open loop",
    }[type(arrivals)]
    length = "one replay" if isinstance(arrivals, Replay) else f"{plan.duration_s:g} s"
    return Facts(
        hardware=stated.hardware,
        model_and_precision=stated.model_and_precision,
        input_lengths=_lengths(workload.input_lengths, main.prompt_tokens if main else None),
        output_lengths=_lengths(workload.output_lengths, main.output_tokens if main else None),
        concurrency=f"{', '.join(load.label for load in loads)} ({kind})",
        streaming="streamed, times taken as events arrive at the client",
        statistic=(
            f"P50, P90 and P99 over all requests of {plan.num_rounds} rounds of {length}; "
            "tokens/s is the median of the rounds"
        ),
        cold_or_warm=f"warm: the first round of each load is discarded; {workload.cache_state}",
    )


def _lengths(asked: str, counted: Distribution | None) -> str:
    if counted is None:
        return f"{asked} tokens asked; the server does not count"
    return f"{asked} tokens asked; P50 {counted.p50:g} by the server's count"
