"""Medians with their spread, and ours against the best peer's, round by round."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.comparison import Measurement
from benchmarks.contenders import OURS


@dataclass(frozen=True)
class Metric:
    """A field of a measurement."""

    field: str
    title: str
    higher_is_better: bool = False


METRICS = (
    Metric("tokens_per_s", "tokens/s", higher_is_better=True),
    Metric("ttft_p50_ms", "TTFT P50 ms"),
    Metric("tpot_p50_ms", "TPOT P50 ms"),
    Metric("itl_p99_ms", "ITL P99 ms"),
    Metric("itl_max_ms", "ITL max ms"),
    Metric("long_ttft_p50_ms", "long prompt's TTFT ms"),
    Metric("pss_mib", "PSS MiB"),
    Metric("rss_mib", "RSS MiB"),
)
_BY_FIELD = {metric.field: metric for metric in METRICS}


@dataclass(frozen=True)
class Spread:
    """A value over the rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread | None":
        return cls(median(values), min(values), max(values)) if values else None

    def __str__(self) -> str:
        return f"{self.median:,.1f} ({self.low:,.1f} to {self.high:,.1f})"


@dataclass(frozen=True)
class Ratio:
    """Ours by the best peer's, at one point."""

    point: str
    metric: Metric
    peer: str
    # Ours and that peer's of the same round.
    spread: Spread


@dataclass(frozen=True)
class Floor:
    """What ours must reach."""

    point: str
    field: str
    # Of the best peer's value; of nothing, if absolute.
    bound: float
    is_absolute: bool = False


FLOORS = (
    Floor("W1:1", "tokens_per_s", 1.7),
    Floor("W1:1", "ttft_p50_ms", 0.5),
    Floor("W1:8", "tokens_per_s", 4.0),
    Floor("W1:16", "tokens_per_s", 4.0),
    Floor("W1:16", "ttft_p50_ms", 0.25),
    Floor("W2:8", "tokens_per_s", 3.0),
    Floor("W2:8", "ttft_p50_ms", 1 / 3),
    Floor("W3L", "itl_max_ms", 0.1),
    Floor("W3L", "long_ttft_p50_ms", 1.0),
    *(Floor(point, "pss_mib", 2500.0, is_absolute=True) for point in ("W1:16", "W2:8", "W3L")),
)
# P99 gap of the streams among long prompts, by that of the calm run.
_CALM_FLOOR = 2.0


def spread(
    measurements: Iterable[Measurement], contender: str, point: str, field: str
) -> Spread | None:
    """Over the rounds; None if it was not measured."""
    return Spread.of([value for _, value in _values(measurements, contender, point, field)])


def ratio(measurements: Sequence[Measurement], point: str, field: str) -> Ratio | None:
    """Ours against the peer whose median is best."""
    metric = _BY_FIELD[field]
    peers: list[tuple[float, str]] = []
    for name in sorted({m.contender for m in measurements} - {OURS}):
        found = spread(measurements, name, point, field)
        if found is not None:
            peers.append((found.median, name))
    if not peers:
        return None
    _, best = max(peers) if metric.higher_is_better else min(peers)
    theirs = dict(_values(measurements, best, point, field))
    ours = dict(_values(measurements, OURS, point, field))
    ratios = [ours[each] / theirs[each] for each in ours if theirs.get(each)]
    found = Spread.of(ratios)
    return None if found is None else Ratio(point, metric, best, found)


def markdown(measurements: Sequence[Measurement]) -> str:
    """Tables for docs/benchmarks.md: numbers, ratios, floors."""
    points = list(dict.fromkeys(m.point for m in measurements))
    sections = [_numbers(measurements, point) for point in points]
    return "\n\n".join([*sections, _ratios(measurements, points), _floors(measurements)]) + "\n"


def _numbers(measurements: Sequence[Measurement], point: str) -> str:
    here = [m for m in measurements if m.point == point]
    shown = [metric for metric in METRICS if any(_value(m, metric.field) for m in here)]
    lines = [f"### {point}", "", _row(["server", *(metric.title for metric in shown)])]
    lines.append("|---" * (len(shown) + 1) + "|")
    for name in dict.fromkeys(m.contender for m in here):
        found = (spread(here, name, point, metric.field) for metric in shown)
        lines.append(_row([name, *(str(each) if each else "-" for each in found)]))
    if errors := sum(m.num_errors for m in here):
        lines += ["", f"{errors} of {sum(m.num_requests for m in here)} requests failed."]
    return "\n".join(lines)


def _ratios(measurements: Sequence[Measurement], points: Sequence[str]) -> str:
    lines = ["### Ours by the best peer's", "", _row(["point", "metric", "best peer", "ratio"])]
    lines.append("|---|---|---|---|")
    for point in points:
        for metric in METRICS:
            found = ratio(measurements, point, metric.field)
            if found is not None:
                cell = (
                    f"{found.spread.median:.2f} ({found.spread.low:.2f} to {found.spread.high:.2f})"
                )
                lines.append(_row([point, metric.title, found.peer, cell]))
    return "\n".join(lines)


def _floors(measurements: Sequence[Measurement]) -> str:
    lines = ["### Floors", "", _row(["point", "metric", "floor", "reached", ""])]
    lines.append("|---|---|---|---|---|")
    lines += [_row(list(cells)) for cells in floor_rows(measurements)]
    return "\n".join(lines)


def floor_rows(measurements: Sequence[Measurement]) -> Iterator[tuple[str, str, str, str, str]]:
    """Point, metric, floor, what was reached, and whether that is enough."""
    for floor in FLOORS:
        metric = _BY_FIELD[floor.field]
        reached = _reached(measurements, floor)
        if reached is None:
            continue
        at_least = metric.higher_is_better
        is_met = reached >= floor.bound if at_least else reached <= floor.bound
        unit = "" if floor.is_absolute else " x the best peer's"
        bound = f"{'at least' if at_least else 'at most'} {floor.bound:,.3g}{unit}"
        yield floor.point, metric.title, bound, f"{reached:,.3g}", "met" if is_met else "missed"
    calm = spread(measurements, OURS, "W3", "itl_p99_ms")
    disturbed = spread(measurements, OURS, "W3L", "itl_p99_ms")
    if calm is not None and disturbed is not None and calm.median:
        reached = disturbed.median / calm.median
        is_met = reached <= _CALM_FLOOR
        bound = f"at most {_CALM_FLOOR:g} x the calm run's"
        yield "W3L", "ITL P99 ms", bound, f"{reached:,.3g}", "met" if is_met else "missed"


def _reached(measurements: Sequence[Measurement], floor: Floor) -> float | None:
    if floor.is_absolute:
        found = spread(measurements, OURS, floor.point, floor.field)
        return None if found is None else found.median
    against = ratio(measurements, floor.point, floor.field)
    return None if against is None else against.spread.median


def _values(
    measurements: Iterable[Measurement], contender: str, point: str, field: str
) -> Iterator[tuple[int, float]]:
    for each in measurements:
        value = _value(each, field)
        if each.contender == contender and each.point == point and value is not None:
            yield each.round_index, value


def _value(measurement: Measurement, field: str) -> float | None:
    value: float | None = getattr(measurement, field)
    return value


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
