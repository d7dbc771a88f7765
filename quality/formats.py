"""The gate over every pair of weight and KV formats."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quality.gate import GateResult, limits_for, run_gate
from quality.settings import engine_config, settled

FORMAT = "pdmesh-gate-formats/1"
# The formats that are served come first: all pairs take many minutes.
WEIGHTS = {
    "int4": ["quantization=int4"],
    "int4_channel": ["quantization=int4_channel"],
    "int8": ["quantization=int8"],
    "bfloat16": ["quantization=none", "dtype=bfloat16"],
    "float32": ["quantization=none", "dtype=float32"],
}
# The first is what the others are compared with.
KV_DTYPES = ("bfloat16", "int8", "fp8")
# Beyond the same weights with bfloat16 keys and values.
MAX_KV_INCREASE = 0.005


@dataclass(frozen=True)
class FormatResult:
    """One pair's verdict."""

    weights: str
    kv_dtype: str
    result: GateResult
    # Of perplexity, by keys and values alone.
    kv_increase: float

    @property
    def failures(self) -> tuple[str, ...]:
        if self.kv_increase <= MAX_KV_INCREASE:
            return self.result.failures
        return (*self.result.failures, f"{self.kv_dtype} KV alone costs {self.kv_increase:.2%}")

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "weights": self.weights,
            "kv_dtype": self.kv_dtype,
            "kv_perplexity_increase": self.kv_increase,
            "passed": not self.failures,
            "failures": self.failures,
            "gate": self.result.to_dict(),
        }


def judge_all(
    name: str,
    folder: Path,
    settings: Sequence[str],
    reference: Sequence[str],
    chosen: Sequence[str] = tuple(WEIGHTS),
) -> Iterator[FormatResult]:
    """Run the gate for each pair, against one reference; yield verdicts as they come."""
    trusted = engine_config(folder, reference)
    for weights in chosen:
        assignments = WEIGHTS[weights]
        plain: float | None = None
        for kv_dtype in KV_DTYPES:
            config = engine_config(folder, [*assignments, f"kv_cache_dtype={kv_dtype}", *settings])
            result = run_gate(name, config, trusted, limits=limits_for(settled(config)))
            assert result.quality is not None, "there are limits"
            perplexity = result.quality["all"].candidate_perplexity
            plain = plain or perplexity
            yield FormatResult(weights, kv_dtype, result, perplexity / plain - 1)
