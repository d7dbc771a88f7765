"""`python -m benchmarks.placement_sim`: the real placement and admission over virtual workers."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.placement_sim import trace as traces
from benchmarks.placement_sim.experiments import (
    PlacementCost,
    Promise,
    as_json,
    default_trace,
    hit_rates,
    overload,
    placement_cost,
)
from benchmarks.placement_sim.plots import plot_costs, plot_hit_rates, plot_overload
from benchmarks.placement_sim.simulation import Fleet

SIZES = [
    (20, 100_000),
    (100, 1_000_000),
    (200, 1_000_000),
    (200, 10_000_000),
    (500, 10_000_000),
    (1000, 10_000_000),
]


def main(
    output: Annotated[Path, typer.Option(help="Folder for result, trace and plots.")] = Path(
        "build/placement_sim"
    ),
    trace: Annotated[
        Path | None, typer.Option(help="A trace in Mooncake's JSONL format instead of our own.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the trace.")] = 1,
    quick: Annotated[bool, typer.Option(help="Small numbers, within a minute.")] = False,
    only_costs: Annotated[
        bool, typer.Option("--only-costs", help="Only what a placement costs.")
    ] = False,
) -> None:
    """Hit rates, goodput under overload, and what a placement costs."""
    if only_costs:
        typer.echo(json.dumps([asdict(cost) for cost in _costs(quick)], indent=2))
        return
    output.mkdir(parents=True, exist_ok=True)
    own = traces.read(trace) if trace else None
    num_requests, half = (1500, 20) if quick else (8000, 100)
    busy = own or default_trace(num_requests, 1.5 * half, seed)
    traces.write(busy, output / "trace.jsonl")
    hits = hit_rates(busy, Fleet(half, half))
    plot_hit_rates(hits, output / "hit_rates.png")

    small = own or default_trace(1000 if quick else 2500, 10, seed)
    crowded = overload(small, Fleet(8, 8), [0.5, 0.75, 1.0, 1.5, 2.0, 3.0], Promise())
    plot_overload(crowded, output / "overload.png")

    costs = _costs(quick)
    plot_costs(costs, output / "costs.png")
    result = {
        "seed": seed,
        "hit_rates": as_json(hits),
        "overload": asdict(crowded),
        "costs": [asdict(cost) for cost in costs],
    }
    (output / "result.json").write_text(json.dumps(result, indent=2) + "\n")
    typer.echo(json.dumps(result, indent=2))


def _costs(quick: bool) -> list[PlacementCost]:
    return [placement_cost(*size) for size in (SIZES[:3] if quick else SIZES)]


if __name__ == "__main__":
    typer.run(main)
