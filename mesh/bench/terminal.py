"""Results and comparisons in a terminal."""

from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from mesh.bench.client import Recording
from mesh.bench.compare import SIGNIFICANCE, Difference, Verdict, changed_facts
from mesh.bench.honesty import remarks
from mesh.bench.results import BenchResult, GroupSummary
from mesh.bench.run import Load, Observer, Plan

_METRICS = (
    ("TTFT ms", "ttft_ms"),
    ("TPOT ms", "tpot_ms"),
    ("ITL ms", "itl_ms"),
    ("end to end ms", "e2e_ms"),
)
_STYLES = {Verdict.BETTER: "green", Verdict.WORSE: "red"}


class Bars(Observer):
    """Shows the round and what has come back."""

    def __init__(self, plan: Plan) -> None:
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[answers]}"),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._num_rounds = plan.num_rounds
        self._num_done = self._num_failed = 0
        self._task = self._progress.add_task("starting", total=None, answers="")

    def __enter__(self) -> "Bars":
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def run_starts(self, num_loads: int) -> None:
        total = num_loads * (self._num_rounds + 1)
        self._progress.update(self._task, total=total, completed=-1)

    def round_starts(self, load: Load, round_index: int) -> None:
        which = f"round {round_index} of {self._num_rounds}" if round_index else "discarded round"
        self._progress.update(self._task, advance=1, description=f"{load.label}: {which}")

    def request_done(self, recording: Recording) -> None:
        self._num_done += 1
        self._num_failed += recording.error is not None
        failed = f", {self._num_failed} failed" if self._num_failed else ""
        self._progress.update(self._task, answers=f"{self._num_done} answers{failed}")


def print_result(result: BenchResult, out: Console) -> None:
    """Facts, numbers, capacity where there is one, and what to know before quoting them."""
    for name, value in vars(result.facts).items():
        out.print(f"[dim]{name.replace('_', ' ')}:[/dim] {value}", highlight=False)
    for point in result.points:
        for name, group in point.pooled.items():
            out.print(f"\n[bold]{point.label}[/bold], {_rates(name, group)}", highlight=False)
            out.print(_latencies(group))
    if result.knee is not None:
        out.print(
            f"\n[bold]capacity {result.knee.capacity_tokens_per_s:,.1f} tokens/s[/bold]: "
            f"75% of the knee at {result.knee.concurrency} at once",
            highlight=False,
        )
    for remark in remarks(result):
        out.print(f"- {remark}", style="dim", highlight=False)


def _rates(name: str, group: GroupSummary) -> str:
    text = f"{group.num_requests} {name}: {group.output_tokens_per_s:,.1f} tokens/s"
    if group.goodput is None:
        return text
    goodput = group.goodput
    return f"{text}, goodput {goodput.requests_per_s:,.2f} requests/s ({goodput.share:.0%})"


def _latencies(group: GroupSummary) -> Table:
    table = Table("", box=None)
    for heading in ("P50", "P90", "P99", "max"):
        table.add_column(heading, justify="right")
    for heading, name in _METRICS:
        found = getattr(group, name)
        if found is not None:
            values = (found.p50, found.p90, found.p99, found.max)
            table.add_row(heading, *(f"{value:,.1f}" for value in values))
    return table


def print_comparison(
    a: BenchResult, b: BenchResult, differences: Sequence[Difference], out: Console
) -> None:
    """What changed, and which numbers changed with it."""
    for name, before, after in changed_facts(a, b):
        out.print(f"{name.replace('_', ' ')}: {before} -> {after}", highlight=False)
    table = Table("load", "metric", "A", "B", "B / A", "p", "", box=None)
    for each in differences:
        table.add_row(
            f"{each.point}, {each.group}",
            each.metric,
            _range(each.a),
            _range(each.b),
            f"{each.ratio:.3f}",
            f"{each.p_value:.3f}",
            each.verdict.value,
            style=_STYLES.get(each.verdict, "dim"),
        )
    out.print(table)
    out.print(
        f"Ranges over rounds. Of {len(differences)} comparisons of two equal servers, about "
        f"{SIGNIFICANCE * len(differences):.1f} would look different by chance.",
        style="dim",
        highlight=False,
    )


def _range(values: Sequence[float]) -> str:
    return f"{min(values):,.1f} to {max(values):,.1f}"
