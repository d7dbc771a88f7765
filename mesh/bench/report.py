"""A result as one HTML file that needs nothing else: facts, tables, plots."""

from collections.abc import Iterable, Sequence
from dataclasses import fields
from html import escape

from mesh.bench.honesty import Claim, refusals, remarks
from mesh.bench.knee import CAPACITY_SHARE
from mesh.bench.results import BenchResult, Distribution, Facts, GroupSummary, Point
from mesh.bench.svg import Marker, Series, line_chart

_LATENCIES = (
    ("ttft_ms", "Time to first token"),
    ("tpot_ms", "Time per output token"),
    ("itl_ms", "Gap between tokens"),
    ("e2e_ms", "End to end"),
)
# The last percent of a curve is one request or two, and would flatten the rest.
_LAST_PERCENTILE = 99

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1b1b; --paper: #fff; --soft: #8884; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e6e6; --paper: #16181c; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
       max-width: 1180px; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid var(--soft); text-align: left;
         font-variant-numeric: tabular-nums; }
td.number, th.number { text-align: right; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 440px), 1fr));
         gap: 1rem; }
svg { width: 100%; height: auto; } svg text { fill: var(--ink); font-size: 11px; }
svg .title { font-size: 13px; font-weight: 600; } svg .middle { text-anchor: middle; }
svg .end { text-anchor: end; } svg .grid { stroke: var(--soft); }
svg .marker { stroke: var(--ink); stroke-dasharray: 4 3; }
"""


class ReportRefused(Exception):
    """The numbers cannot be reported honestly; `reasons` say why."""

    def __init__(self, reasons: Sequence[str]) -> None:
        super().__init__("; ".join(reasons))
        self.reasons = tuple(reasons)


def render(result: BenchResult, claims: Iterable[Claim] = ()) -> str:
    """The report.

    Raises:
        ReportRefused: facts are missing, or a claim has no ground.
    """
    if reasons := refusals(result, claims):
        raise ReportRefused(reasons)
    title = f"{result.workload} on {result.facts.model_and_precision}"
    sections = [
        f"<h1>{escape(title)}</h1>",
        f"<p>{escape(result.created_at)}</p>",
        _facts(result),
        _capacity(result),
        _table(result),
        f'<div class="plots">{"".join(_plots(result))}</div>',
        _remarks(result),
        _settings(result),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head>"
        f"<body>{''.join(sections)}</body></html>\n"
    )


def _facts(result: BenchResult) -> str:
    rows = "".join(
        f"<tr><th>{escape(field.name.replace('_', ' ').capitalize())}</th>"
        f"<td>{escape(getattr(result.facts, field.name))}</td></tr>"
        for field in fields(Facts)
    )
    return f"<h2>What was measured</h2><table>{rows}</table>"


def _capacity(result: BenchResult) -> str:
    knee = result.knee
    if knee is None:
        return ""
    group = next(
        point.pooled[result.main_group]
        for point in result.points
        if point.concurrency == knee.concurrency
    )
    return (
        "<h2>Capacity</h2>"
        f"<p><strong>{knee.capacity_tokens_per_s:,.1f} tokens/s</strong>: "
        f"{CAPACITY_SHARE:.0%} of the {knee.output_tokens_per_s:,.1f} at the knee of the sweep, "
        f"{knee.concurrency} at once. There the first token took {_spread(group.ttft_ms)}, "
        f"each further one {_spread(group.tpot_ms)}. Saturated, the server reached "
        f"{knee.highest_output_tokens_per_s:,.1f}, which is not capacity.</p>"
    )


def _spread(distribution: Distribution | None) -> str:
    if distribution is None:
        return "an unknown time"
    return f"{distribution.p50:,.1f} ms (P50), {distribution.p99:,.1f} ms (P99)"


def _table(result: BenchResult) -> str:
    headings = ["load", "requests", "group", "tokens/s"]
    headings += [
        f"{short} {statistic}"
        for short in ("TTFT", "TPOT", "ITL", "end to end")
        for statistic in ("P50", "P90", "P99")
    ]
    if result.objectives is not None:
        headings.append("goodput, requests/s")
    head = "".join(f"<th>{escape(heading)}</th>" for heading in headings)
    rows = "".join(
        _row(point, group, summary, has_goodput=result.objectives is not None)
        for point in result.points
        for group, summary in point.pooled.items()
    )
    return (
        "<h2>Numbers</h2><p>Milliseconds over all requests of all rounds; "
        "tokens/s is the median of the rounds, with the lowest and the highest.</p>"
        f"<table><tr>{head}</tr>{rows}</table>"
    )


def _row(point: Point, group: str, summary: GroupSummary, *, has_goodput: bool) -> str:
    rates = [
        each.groups[group].output_tokens_per_s for each in point.rounds if group in each.groups
    ]
    cells = [
        _cell(point.label),
        _cell(f"{summary.num_requests}", is_number=True),
        _cell(group),
        _cell(
            f"{summary.output_tokens_per_s:,.1f} ({min(rates):,.1f} to {max(rates):,.1f})",
            is_number=True,
        ),
    ]
    for name, _ in _LATENCIES:
        distribution: Distribution | None = getattr(summary, name)
        for statistic in ("p50", "p90", "p99"):
            value = None if distribution is None else getattr(distribution, statistic)
            cells.append(_cell("" if value is None else f"{value:,.1f}", is_number=True))
    if has_goodput:
        goodput = summary.goodput
        text = "" if goodput is None else f"{goodput.requests_per_s:,.2f} ({goodput.share:.0%})"
        cells.append(_cell(text, is_number=True))
    return f"<tr>{''.join(cells)}</tr>"


def _cell(text: str, *, is_number: bool = False) -> str:
    return f'<td class="number">{escape(text)}</td>' if is_number else f"<td>{escape(text)}</td>"


def _plots(result: BenchResult) -> Iterable[str]:
    yield from _sweep_plots(result)
    for name, title in _LATENCIES:
        series = [
            Series(
                point.label if group == result.main_group else f"{point.label}, {group}",
                list(enumerate(distribution.curve[: _LAST_PERCENTILE + 1])),
            )
            for point in result.points
            for group, summary in point.pooled.items()
            if group == result.main_group and (distribution := getattr(summary, name)) is not None
        ]
        yield line_chart(
            f"{title}, by percentile", series, x_label="percentile", y_label="milliseconds"
        )


def _sweep_plots(result: BenchResult) -> Iterable[str]:
    if not _is_sweep(result):
        return
    points = [
        (point.concurrency, point.pooled[result.main_group])
        for point in sorted(result.points, key=lambda point: point.concurrency or 0)
        if point.concurrency is not None and result.main_group in point.pooled
    ]
    knee = result.knee
    marker = None if knee is None else Marker(knee.concurrency, "knee")
    throughput = Series("tokens/s", [(c, group.output_tokens_per_s) for c, group in points])
    yield line_chart(
        "Throughput by concurrency",
        [throughput],
        x_label="requests at once",
        y_label="tokens/s",
        marker=marker,
        log_x=True,
    )
    for name, title in _LATENCIES[:2]:
        lines = [
            Series(
                statistic.upper(),
                [
                    (c, getattr(distribution, statistic))
                    for c, group in points
                    if (distribution := getattr(group, name)) is not None
                ],
            )
            for statistic in ("p50", "p90", "p99")
        ]
        yield line_chart(
            f"{title} by concurrency",
            lines,
            x_label="requests at once",
            y_label="milliseconds",
            marker=marker,
            log_x=True,
        )


def _is_sweep(result: BenchResult) -> bool:
    concurrencies = [point.concurrency for point in result.points if point.concurrency]
    return len(set(concurrencies)) > 1 and len(set(concurrencies)) == len(concurrencies)


def _remarks(result: BenchResult) -> str:
    found = remarks(result)
    items = "".join(f"<li>{escape(each)}</li>" for each in found)
    return f"<h2>Remarks</h2><ul>{items}</ul>" if found else ""


def _settings(result: BenchResult) -> str:
    rows = "".join(
        f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>"
        for name, value in result.settings.items()
    )
    return f"<h2>Settings</h2><table>{rows}</table>"
