"""`python -m benchmarks`: pdmesh and its peers on the same machine, by the same client."""

import asyncio
import json
import os
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.comparison import Comparison, Measurement, Schedule
from benchmarks.contenders import Contender, Place, contenders
from benchmarks.edge import measure_edge
from benchmarks.pairs import append, read
from benchmarks.pairs import markdown as markdown_of_pairs
from benchmarks.points import DEFAULT_POINTS, BenchPoint
from benchmarks.settings import BenchmarkSettings
from benchmarks.spans import no_span_ns, recorded_span_us
from benchmarks.summary import markdown
from benchmarks.telemetry import PLAIN, VARIANTS, measure_cost
from mesh.bench.machine import describe_machine
from mesh.bench.prompts import Vocabulary

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def benchmarks() -> None:
    """Measurements that need more than one server, or none."""


@app.command()
def compare(
    servers: Annotated[
        str, typer.Option(help="Names, or `all`: pdmesh,llama.cpp-Q8_0,vllm.")
    ] = "all",
    points: Annotated[str, typer.Option(help="Loads.")] = ",".join(DEFAULT_POINTS),
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that count.")] = 3,
    discard: Annotated[int, typer.Option(min=0, help="Rounds before them.")] = 1,
    duration_s: Annotated[float, typer.Option(min=1, help="Of a measurement.")] = 20.0,
    warm_up_s: Annotated[float, typer.Option(min=0.1, help="Before each.")] = 3.0,
    pdmesh_args: Annotated[
        str, typer.Option(help="More arguments of `pdmesh up`, such as '--dtype bfloat16'.")
    ] = "",
    output: Annotated[Path, typer.Option(help="Folder for result, tables and logs.")] = Path(
        "build/benchmarks"
    ),
) -> None:
    """Run every load on every server, one server at a time, and print tables."""
    settings = BenchmarkSettings()
    known = contenders(settings, tuple(pdmesh_args.split()))
    try:
        chosen = _choose(known, servers)
        parsed = [BenchPoint.parse(point) for point in points.split(",")]
        _check_installed(chosen, parsed)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    logs = output / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    schedule = Schedule(rounds, discard, duration_s, warm_up_s)
    comparison = Comparison(
        chosen,
        parsed,
        schedule,
        Vocabulary.from_folder(settings.model_folder),
        logs=logs,
        environment=_child_environment(),
        report=lambda line: typer.echo(line, err=True),
    )
    measurements = asyncio.run(comparison.run())
    if measurements:
        _write(output, measurements, chosen, schedule)
    for failure in comparison.failures:
        typer.echo(failure, err=True)
    if comparison.failures or any(measurement.num_errors for measurement in measurements):
        raise typer.Exit(1)


@app.command()
def telemetry(
    variants: Annotated[str, typer.Option(help="Of traced,page,again.")] = "traced,page",
    concurrency: Annotated[int, typer.Option(min=1, help="Streams at once.")] = 16,
    duration_s: Annotated[float, typer.Option(min=1, help="Of this run, after the start.")] = 200.0,
    output: Annotated[Path, typer.Option(help="Where runs add up.")] = Path(
        "build/telemetry.jsonl"
    ),
) -> None:
    """Measure what tracing, and an open dashboard, cost a mesh under load."""
    names = tuple(variants.split(","))
    if unknown := set(names) - set(VARIANTS):
        raise typer.BadParameter(f"no variant {', '.join(unknown)}; there are {VARIANTS}")
    samples, num_spans = asyncio.run(
        measure_cost(
            names,
            concurrency=concurrency,
            duration_s=duration_s,
            environment=_child_environment(),
            report=lambda line: typer.echo(line, err=True),
        )
    )
    append(output, samples)
    typer.echo(markdown_of_pairs(read(output), PLAIN))
    typer.echo(f"{num_spans} spans came in this run.")


@app.command()
def edge(
    mode: Annotated[str, typer.Option(help="local or disaggregated.")] = "local",
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that count.")] = 4,
    parts: Annotated[
        str, typer.Option(help="Of cost,limits,nginx,engine.")
    ] = "cost,limits,nginx,engine",
) -> None:
    """What gateway and mesh cost beside the engine, and what nginx in front of them costs."""
    settings = BenchmarkSettings()
    with tempfile.TemporaryDirectory() as folder:
        result = asyncio.run(
            measure_edge(settings.model_folder, Path(folder), mode, rounds, parts.split(","))
        )
    typer.echo(json.dumps(result, indent=2))


@app.command()
def spans() -> None:
    """Measure the processor time of one span, recorded and not; needs no mesh."""
    typer.echo(f"recorded, exported and received: {asyncio.run(recorded_span_us()):.0f} us")
    typer.echo(f"where nobody traces: {no_span_ns() / 1000:.2f} us")


def _choose(known: dict[str, Contender], names: str) -> list[Contender]:
    if names == "all":
        return list(known.values())
    chosen = names.split(",")
    if unknown := [name for name in chosen if name not in known]:
        raise ValueError(f"no server {', '.join(unknown)}; there are {', '.join(known)}")
    return [known[name] for name in chosen]


def _check_installed(chosen: list[Contender], points: list[BenchPoint]) -> None:
    for contender in chosen:
        launch = contender.launch(points[0], Place(0, Path()))
        if launch.missing:
            paths = ", ".join(map(str, launch.missing))
            raise ValueError(f"{contender.name} needs {paths}; see docs/benchmarks.md")


def _child_environment() -> dict[str, str]:
    """Ours, without what would configure a mesh by accident."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PDMESH_")}


def _write(
    output: Path, measurements: list[Measurement], chosen: list[Contender], schedule: Schedule
) -> None:
    result = {
        "format": "pdmesh-comparison/1",
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "precisions": {contender.name: contender.precision for contender in chosen},
        "schedule": vars(schedule),
        "measurements": [measurement.as_dict() for measurement in measurements],
    }
    (output / "comparison.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    tables = markdown(measurements)
    (output / "comparison.md").write_text(tables, encoding="utf-8")
    typer.echo(tables)


if __name__ == "__main__":
    app(prog_name="python -m benchmarks")
