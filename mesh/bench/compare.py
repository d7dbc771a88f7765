"""Tells whether two results differ by more than their own repeats do."""

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from statistics import median

from mesh.bench.results import BenchResult, Facts, GroupSummary, Point

SIGNIFICANCE = 0.05
_MAX_ENUMERATED = 20_000


class NotComparable(Exception):
    """Two results measured different things; the message says which."""


class Verdict(StrEnum):
    """What may be said of a difference."""

    BETTER = "better"
    WORSE = "worse"
    NOISE = "no difference shown"
    TOO_FEW = "too few rounds"


@dataclass(frozen=True)
class Metric:
    """One number of a group's summary."""

    name: str
    value: Callable[[GroupSummary], float | None]
    higher_is_better: bool = False


def _quantile(name: str, field: str) -> Callable[[GroupSummary], float | None]:
    def value(summary: GroupSummary) -> float | None:
        distribution = getattr(summary, name)
        return None if distribution is None else float(getattr(distribution, field))

    return value


METRICS = (
    Metric("tokens/s", lambda summary: summary.output_tokens_per_s, higher_is_better=True),
    Metric("TTFT P50 ms", _quantile("ttft_ms", "p50")),
    Metric("TTFT P99 ms", _quantile("ttft_ms", "p99")),
    Metric("TPOT P50 ms", _quantile("tpot_ms", "p50")),
    Metric("ITL P99 ms", _quantile("itl_ms", "p99")),
    Metric("end to end P50 ms", _quantile("e2e_ms", "p50")),
    Metric("end to end P99 ms", _quantile("e2e_ms", "p99")),
    Metric(
        "goodput requests/s",
        lambda summary: summary.goodput.requests_per_s if summary.goodput else None,
        higher_is_better=True,
    ),
)


@dataclass(frozen=True)
class Difference:
    """One metric at one point, in A and in B."""

    point: str
    group: str
    metric: str
    a: tuple[float, ...]
    b: tuple[float, ...]
    # Chance of a separation like this if nothing had changed.
    p_value: float
    verdict: Verdict

    @property
    def ratio(self) -> float:
        """B's median by A's."""
        return median(self.b) / median(self.a) if median(self.a) else math.nan


def compare(a: BenchResult, b: BenchResult) -> list[Difference]:
    """Compare every point and group that both have.

    A difference is claimed only when all of B's rounds lie on one side of all of A's and a
    rank test says that chance would do so in less than 5% of cases.

    Raises:
        NotComparable: the load was not the same.
    """
    if unlike := [name for name in _LOAD if _asked(a, name) != _asked(b, name)]:
        details = "; ".join(f"{name}: {_asked(a, name)} / {_asked(b, name)}" for name in unlike)
        raise NotComparable(f"the load differs: {details}")
    differences = [
        each
        for point_a, point_b in _pairs(a, b)
        for group in point_a.pooled
        if group in point_b.pooled
        for each in _compare_group(point_a, point_b, group)
    ]
    if not differences:
        raise NotComparable("the results have no point in common")
    return differences


def changed_facts(a: BenchResult, b: BenchResult) -> list[tuple[str, str, str]]:
    """Facts that are not the same, beside the load."""
    names = [field.name for field in fields(Facts)]
    pairs = ((name, getattr(a.facts, name), getattr(b.facts, name)) for name in names)
    return [each for each in pairs if each[1] != each[2]]


# What decides how much work is asked; all else may be what is compared.
_LOAD = ("workload", "input tokens", "output tokens", "prompts", "ignore_eos")


def _asked(result: BenchResult, name: str) -> str | None:
    return result.workload if name == "workload" else result.settings.get(name)


def _pairs(a: BenchResult, b: BenchResult) -> Iterator[tuple[Point, Point]]:
    by_label = {point.label: point for point in b.points}
    for point in a.points:
        if point.label in by_label:
            yield point, by_label[point.label]


def _compare_group(a: Point, b: Point, group: str) -> Iterator[Difference]:
    for metric in METRICS:
        values_a, values_b = _values(a, group, metric), _values(b, group, metric)
        if not values_a or not values_b:
            continue
        p_value = rank_test(values_a, values_b)
        verdict = _verdict(values_a, values_b, p_value, metric.higher_is_better)
        yield Difference(a.label, group, metric.name, values_a, values_b, p_value, verdict)


def _values(point: Point, group: str, metric: Metric) -> tuple[float, ...]:
    summaries = (each.groups[group] for each in point.rounds if group in each.groups)
    values = (metric.value(summary) for summary in summaries)
    return tuple(value for value in values if value is not None)


def _verdict(
    a: Sequence[float], b: Sequence[float], p_value: float, higher_is_better: bool
) -> Verdict:
    if 2 / math.comb(len(a) + len(b), len(a)) >= SIGNIFICANCE:
        return Verdict.TOO_FEW
    is_higher, is_lower = min(b) > max(a), max(b) < min(a)
    if p_value >= SIGNIFICANCE or not (is_higher or is_lower):
        return Verdict.NOISE
    return Verdict.BETTER if is_higher == higher_is_better else Verdict.WORSE


def rank_test(a: Sequence[float], b: Sequence[float]) -> float:
    """Two-sided permutation test of the rank sum (Wilcoxon, Mann and Whitney); ties are allowed.

    Exact for few values; for many, twenty thousand random permutations.
    """
    ranks = _ranks([*a, *b])
    expected = len(a) * (len(ranks) + 1) / 2
    observed = abs(sum(ranks[: len(a)]) - expected)
    if math.comb(len(ranks), len(a)) <= _MAX_ENUMERATED:
        sums = (sum(chosen) for chosen in itertools.combinations(ranks, len(a)))
    else:
        source = random.Random(0)
        sums = (sum(source.sample(ranks, len(a))) for _ in range(_MAX_ENUMERATED))
    extreme = [abs(each - expected) >= observed - 1e-9 for each in sums]
    return sum(extreme) / len(extreme)


def _ranks(values: Sequence[float]) -> list[float]:
    """Rank from 1; equal values share the mean of their ranks."""
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    start = 0
    for _, tied in itertools.groupby(order, key=values.__getitem__):
        indexes = list(tied)
        for index in indexes:
            ranks[index] = start + (len(indexes) + 1) / 2
        start += len(indexes)
    return ranks
