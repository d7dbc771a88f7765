"""Two ways of doing the same, measured in turns: by how much they differ, and how sure that is."""

import json
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations_with_replacement
from pathlib import Path

# Of the normal distribution: 95% lie within.
_Z = 1.96


@dataclass(frozen=True)
class Sample:
    """One variant in one turn. Turns of one block follow on each other within seconds."""

    block: str
    variant: str
    tokens_per_s: float
    # Processor time for each token: of all processes of the mesh, and of those without a model.
    cpu_ms: float
    edge_cpu_ms: float


@dataclass(frozen=True)
class Change:
    """By how much something changed, as a share of what it was."""

    share: float
    low: float
    high: float
    num_pairs: int

    def __str__(self) -> str:
        interval = f"{100 * self.low:+.1f} to {100 * self.high:+.1f}"
        return f"{100 * self.share:+.1f}% ({interval}; {self.num_pairs} pairs)"


def paired_change(before: Sequence[float], after: Sequence[float]) -> Change:
    """The median change (Hodges and Lehmann), and the interval that holds it in 95% of cases.

    The signed-rank test's interval: differences need be neither normal nor free of outliers.
    """
    logs = [math.log(b / a) for a, b in zip(before, after, strict=True)]
    means = sorted((a + b) / 2 for a, b in combinations_with_replacement(logs, 2))
    n = len(logs)
    spread = math.sqrt(n * (n + 1) * (2 * n + 1) / 24)
    cut = max(0, math.floor(n * (n + 1) / 4 - _Z * spread))
    estimates = statistics.median(means), means[cut], means[-1 - cut]
    share, low, high = (math.expm1(estimate) for estimate in estimates)
    return Change(share, low, high, n)


def append(path: Path, samples: Iterable[Sample]) -> None:
    """Add to what earlier runs measured."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(asdict(sample)) + "\n" for sample in samples)


def read(path: Path) -> list[Sample]:
    """What all runs have measured."""
    return [Sample(**json.loads(line)) for line in path.read_text("utf-8").splitlines()]


def markdown(samples: Sequence[Sample], plain: str) -> str:
    """A table: medians, and each variant by the plain turn of the same block."""
    blocks: dict[str, dict[str, Sample]] = {}
    for sample in samples:
        blocks.setdefault(sample.block, {})[sample.variant] = sample
    lines = [
        "| | tokens/s | by plain | CPU ms a token | by plain | without the workers | adds to all |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(sample.variant for sample in samples):
        pairs = [
            (turns[plain], turns[name]) for turns in blocks.values() if {plain, name} <= {*turns}
        ]
        lines.append(f"| {' | '.join([name, *_cells(pairs, shows_change=name != plain)])} |")
    return "\n".join(lines) + "\n"


def _cells(pairs: Sequence[tuple[Sample, Sample]], *, shows_change: bool) -> Iterator[str]:
    base = [one for one, _ in pairs]
    cpu_ms = [one.cpu_ms for one in base]
    # What the edge takes more, on top of all that the plain turn took.
    with_edge_ms = [one.cpu_ms + other.edge_cpu_ms - one.edge_cpu_ms for one, other in pairs]
    for values, digits, before, after in (
        ([one.tokens_per_s for _, one in pairs], 0, [one.tokens_per_s for one in base], None),
        ([one.cpu_ms for _, one in pairs], 3, cpu_ms, None),
        ([one.edge_cpu_ms for _, one in pairs], 3, cpu_ms, with_edge_ms),
    ):
        yield f"{statistics.median(values):.{digits}f}"
        yield str(paired_change(before, after or values)) if shows_change else ""
