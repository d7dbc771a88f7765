"""What a measurement found, as it is summarized, written to JSON and read back."""

import itertools
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal

import numpy as np
from pydantic import TypeAdapter, ValidationError

from mesh.bench.client import Recording
from mesh.bench.load import Window

_MAX_ERRORS_KEPT = 5
# A token's own pace cannot be told from fewer.
_MIN_TOKENS_FOR_PACE = 2
_MS = 1e3


class InvalidResult(Exception):
    """A file is not a result of `pdmesh bench`; the message says why."""


@dataclass(frozen=True)
class Distribution:
    """Values by rank. A mean never stands alone."""

    count: int
    mean: float
    min: float
    p50: float
    p90: float
    p99: float
    max: float
    # The percentiles 0, 1, … 100, for plots.
    curve: tuple[float, ...]

    @classmethod
    def of(cls, values: Iterable[float]) -> "Distribution | None":
        """None if there are no values."""
        array = np.fromiter(values, dtype=np.float64)
        if not len(array):
            return None
        curve = np.percentile(array, np.arange(101))
        p50, p90, p99 = (round(float(curve[rank]), 3) for rank in (50, 90, 99))
        return cls(
            count=len(array),
            mean=round(float(array.mean()), 3),
            min=round(float(array.min()), 3),
            p50=p50,
            p90=p90,
            p99=p99,
            max=round(float(array.max()), 3),
            curve=tuple(round(float(value), 3) for value in curve),
        )


@dataclass(frozen=True)
class Objectives:
    """What a request must meet to count as good; None asks nothing."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    @classmethod
    def parse(cls, pairs: Sequence[str]) -> "Objectives | None":
        """Read `ttft:500`, `tpot:50`, `e2e:10000`; None for none of them."""
        values: dict[str, float] = {}
        for pair in pairs:
            name, _, text = pair.partition(":")
            try:
                value = float(text)
            except ValueError:
                value = -1.0
            if name not in ("ttft", "tpot", "e2e") or value <= 0:
                raise ValueError(f"{pair!r}: expected ttft:MS, tpot:MS or e2e:MS")
            values[f"{name}_ms"] = value
        return cls(**values) if values else None

    def are_met_by(self, recording: Recording) -> bool:
        if not recording.is_complete:
            return False
        measured = (
            (self.ttft_ms, ttft_ms(recording)),
            (self.tpot_ms, tpot_ms(recording)),
            (self.e2e_ms, e2e_ms(recording)),
        )
        # An answer of one token has no pace, and cannot miss one.
        return all(limit is None or value is None or value <= limit for limit, value in measured)


@dataclass(frozen=True)
class Goodput:
    """Requests that met every objective."""

    requests_per_s: float
    # Of all that were asked, failures included.
    share: float


@dataclass(frozen=True)
class GroupSummary:
    """The numbers of one kind of request in one window."""

    num_requests: int
    num_errors: int
    # Not finished when the measurement was over.
    num_cut: int
    errors: tuple[str, ...]
    # Tokens that arrived within the window, by its length.
    output_tokens_per_s: float
    requests_per_s: float
    ttft_ms: Distribution | None
    tpot_ms: Distribution | None
    itl_ms: Distribution | None
    e2e_ms: Distribution | None
    prompt_tokens: Distribution | None
    output_tokens: Distribution | None
    cached_tokens: Distribution | None
    goodput: Goodput | None
    # Below 1: several tokens came in one event, and gaps between events are not those of tokens.
    events_per_token: float | None


Groups = Mapping[str, GroupSummary]


@dataclass(frozen=True)
class Round:
    """One repeat of a point."""

    window_s: float
    # Of one core; near 1 the client is what was measured.
    client_cpu: float
    # How far sends lagged behind their times, at worst.
    max_late_ms: float
    groups: dict[str, GroupSummary]


@dataclass(frozen=True)
class Point:
    """One load, measured several times."""

    label: str
    # One of the two: a closed loop's users, or an open loop's arrivals a second.
    concurrency: int | None
    rate: float | None
    rounds: tuple[Round, ...]
    # All rounds together; rates are medians of the rounds.
    pooled: dict[str, GroupSummary]


@dataclass(frozen=True)
class Facts:
    """The eight without which two numbers do not compare."""

    hardware: str
    model_and_precision: str
    input_lengths: str
    output_lengths: str
    concurrency: str
    streaming: str
    statistic: str
    cold_or_warm: str


@dataclass(frozen=True)
class Knee:
    """Where more concurrency stops paying, and what may be promised."""

    concurrency: int
    output_tokens_per_s: float
    # 75% of the knee's throughput.
    capacity_tokens_per_s: float
    highest_output_tokens_per_s: float


@dataclass(frozen=True)
class BenchResult:
    """Everything that one run of `pdmesh bench` found."""

    format: Literal["pdmesh-bench/1"]
    created_at: str
    workload: str
    # The group whose numbers come first.
    main_group: str
    facts: Facts
    settings: dict[str, str]
    points: tuple[Point, ...]
    knee: Knee | None
    # Why there is no knee, where one was looked for.
    no_knee: str | None
    objectives: Objectives | None

    def to_json(self) -> bytes:
        return _ADAPTER.dump_json(self, indent=2)

    @classmethod
    def read(cls, path: Path) -> "BenchResult":
        """
        Raises:
            InvalidResult: not a complete result.
        """
        try:
            return _ADAPTER.validate_json(path.read_bytes())
        except OSError as error:
            raise InvalidResult(f"{path}: {error.strerror}") from error
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"])) or "the file"
            raise InvalidResult(f"{path}: {place}: {first['msg']}") from None


_ADAPTER = TypeAdapter(BenchResult)


def ttft_ms(recording: Recording) -> float | None:
    """Time to the first token."""
    if not recording.token_times:
        return None
    return _MS * (recording.token_times[0] - recording.started_at)


def tpot_ms(recording: Recording) -> float | None:
    """Time per output token after the first one."""
    num_tokens = recording.num_output_tokens
    # Of a stream that was cut only the events are known.
    if not recording.is_complete or num_tokens < _MIN_TOKENS_FOR_PACE:
        return None
    times = recording.token_times
    return _MS * (times[-1] - times[0]) / (num_tokens - 1) if times else None


def itl_ms(recording: Recording) -> Iterable[float]:
    """Gaps between the events that brought tokens."""
    times = recording.token_times
    return (_MS * (after - before) for before, after in itertools.pairwise(times))


def e2e_ms(recording: Recording) -> float | None:
    """Time to the end of the stream."""
    if not recording.is_complete or recording.ended_at is None:
        return None
    return _MS * (recording.ended_at - recording.started_at)


def summarize_round(window: Window, objectives: Objectives | None = None) -> Round:
    """Summarize one window."""
    late = max((recording.late_s for recording in window.recordings), default=0.0)
    return Round(
        window_s=round(window.length_s, 3),
        client_cpu=round(window.client_cpu_s / window.wall_s, 3) if window.wall_s else 0.0,
        max_late_ms=round(_MS * late, 3),
        groups=_summaries([window], objectives),
    )


def pool(
    windows: Sequence[Window], rounds: Sequence[Round], objectives: Objectives | None = None
) -> dict[str, GroupSummary]:
    """Summarize all rounds of a point together."""
    return _summaries(windows, objectives, rounds)


def _summaries(
    windows: Sequence[Window], objectives: Objectives | None, rounds: Sequence[Round] = ()
) -> dict[str, GroupSummary]:
    names = sorted({recording.group for window in windows for recording in window.recordings})
    return {name: _summarize(name, windows, objectives, rounds) for name in names}


def _summarize(
    name: str, windows: Sequence[Window], objectives: Objectives | None, rounds: Sequence[Round]
) -> GroupSummary:
    recordings = [r for window in windows for r in window.recordings if r.group == name]
    answered = [r for r in recordings if r.error is None]
    failed = Counter(r.error for r in recordings if r.error is not None)
    num_events = sum(len(r.token_times) for r in answered if r.is_complete)
    num_tokens = sum(r.num_output_tokens for r in answered if r.is_complete)
    if rounds:
        groups = [each.groups[name] for each in rounds if name in each.groups]
        tokens_per_s = median(group.output_tokens_per_s for group in groups)
        requests_per_s = median(group.requests_per_s for group in groups)
    else:
        length_s = windows[0].length_s
        tokens_per_s = _tokens_within(answered, windows[0]) / length_s if length_s else 0.0
        num_complete = sum(r.is_complete for r in recordings)
        # Answers that came in the grace time count: so does the time.
        requests_per_s = num_complete / windows[0].wall_s if windows[0].wall_s else 0.0
    return GroupSummary(
        num_requests=len(recordings),
        num_errors=sum(failed.values()),
        num_cut=sum(r.was_cut for r in recordings),
        errors=tuple(f"{n} x {error}" for error, n in failed.most_common(_MAX_ERRORS_KEPT)),
        output_tokens_per_s=round(tokens_per_s, 3),
        requests_per_s=round(requests_per_s, 4),
        ttft_ms=Distribution.of(v for r in answered if (v := ttft_ms(r)) is not None),
        tpot_ms=Distribution.of(v for r in answered if (v := tpot_ms(r)) is not None),
        itl_ms=Distribution.of(gap for r in answered for gap in itl_ms(r)),
        e2e_ms=Distribution.of(v for r in answered if (v := e2e_ms(r)) is not None),
        prompt_tokens=_counts(r.num_prompt_tokens for r in answered),
        output_tokens=_counts(r.num_output_tokens for r in answered if r.is_complete),
        cached_tokens=_counts(r.num_cached_tokens for r in answered),
        goodput=_goodput(recordings, objectives, sum(window.wall_s for window in windows)),
        events_per_token=round(num_events / num_tokens, 4) if num_tokens else None,
    )


def _tokens_within(recordings: Iterable[Recording], window: Window) -> float:
    ends_at = math.inf if window.ends_at is None else window.ends_at
    return tokens_between(recordings, -math.inf, ends_at)


def tokens_between(recordings: Iterable[Recording], begins_at: float, ends_at: float) -> float:
    """Tokens that arrived in this time; an event counts as its share of its answer's tokens."""
    total = 0.0
    for recording in recordings:
        times = recording.token_times
        if not times:
            continue
        per_event = recording.num_output_tokens / len(times) if recording.is_complete else 1.0
        total += per_event * sum(begins_at < at <= ends_at for at in times)
    return total


def _counts(values: Iterable[int | None]) -> Distribution | None:
    return Distribution.of(float(value) for value in values if value is not None)


def _goodput(
    recordings: Sequence[Recording], objectives: Objectives | None, wall_s: float
) -> Goodput | None:
    if objectives is None or not recordings or not wall_s:
        return None
    num_good = sum(objectives.are_met_by(recording) for recording in recordings)
    return Goodput(round(num_good / wall_s, 4), round(num_good / len(recordings), 4))
