"""Results made from chosen numbers."""

from collections.abc import Sequence

from mesh.bench.client import Recording
from mesh.bench.load import Window
from mesh.bench.results import BenchResult, Facts, Knee, Point, pool, summarize_round

FACTS = Facts(
    hardware="a machine",
    model_and_precision="m, float32",
    input_lengths="64",
    output_lengths="8",
    concurrency="1 at once",
    streaming="streamed",
    statistic="P50, P90, P99",
    cold_or_warm="warm",
)


def recording(
    started_at: float = 0.0,
    *,
    ttft_s: float = 0.1,
    tpot_s: float = 0.01,
    num_tokens: int = 8,
    num_prompt_tokens: int = 64,
    group: str = "requests",
) -> Recording:
    """A request that went as told."""
    times = [started_at + ttft_s + tpot_s * index for index in range(num_tokens)]
    return Recording(
        group,
        started_at,
        token_times=times,
        ended_at=times[-1],
        num_prompt_tokens=num_prompt_tokens,
        num_completion_tokens=num_tokens,
    )


def window(recordings: Sequence[Recording], length_s: float = 1.0) -> Window:
    return Window(
        started_at=0.0,
        ends_at=length_s,
        recordings=list(recordings),
        client_cpu_s=0.1,
        wall_s=length_s,
    )


def point(label: str, concurrency: int, windows: Sequence[Window]) -> Point:
    rounds = tuple(summarize_round(each) for each in windows)
    return Point(label, concurrency, None, rounds, pool(windows, rounds))


def result(
    points: Sequence[Point] = (),
    *,
    facts: Facts = FACTS,
    settings: dict[str, str] | None = None,
    knee: Knee | None = None,
    no_knee: str | None = None,
) -> BenchResult:
    return BenchResult(
        format="pdmesh-bench/1",
        created_at="2026-11-29T12:00:00+00:00",
        workload="chat",
        main_group="requests",
        facts=facts,
        settings=settings or {"input tokens": "64", "output tokens": "8"},
        points=tuple(points),
        knee=knee,
        no_knee=no_knee,
        objectives=None,
    )
