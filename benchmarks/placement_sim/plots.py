"""Pictures of the results."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from benchmarks.placement_sim.experiments import Overload, PlacementCost, Summary

matplotlib.use("Agg")
from matplotlib import pyplot  # the backend is chosen first


def plot_hit_rates(hits: dict[str, Summary], path: Path) -> None:
    drawing, axes = pyplot.subplots(figsize=(6, 3.5))
    bars = axes.bar(list(hits), [100 * one.hit_rate for one in hits.values()])
    axes.bar_label(bars, fmt="%.0f%%")
    axes.set_ylabel("prompt tokens from the cache, %")
    _save(drawing, path)


def plot_overload(result: Overload, path: Path) -> None:
    drawing, axes = pyplot.subplots(figsize=(6, 3.5))
    for label, summaries in (
        ("early rejection", result.with_rejection),
        ("everybody admitted", result.without_rejection),
    ):
        axes.plot(result.loads, [one.goodput_per_s for one in summaries], marker="o", label=label)
    axes.set_xlabel("load, as a multiple of the sustainable one")
    axes.set_ylabel("requests served in time, per second")
    axes.set_ylim(bottom=0)
    axes.legend()
    _save(drawing, path)


def plot_costs(costs: Sequence[PlacementCost], path: Path) -> None:
    drawing, axes = pyplot.subplots(figsize=(6, 3.5))
    labels = [f"{one.num_workers} w\n{one.num_blocks / 1e6:g} M" for one in costs]
    axes.plot(labels, [one.p99_ms for one in costs], marker="o", label="p99")
    axes.plot(labels, [one.p50_ms for one in costs], marker="o", label="p50")
    axes.set_xlabel("workers, and blocks in the index")
    axes.set_ylabel("one placement, ms")
    axes.set_ylim(bottom=0)
    axes.legend()
    _save(drawing, path)


def _save(drawing: Figure, path: Path) -> None:
    drawing.tight_layout()
    drawing.savefig(path, dpi=130)
    pyplot.close(drawing)
