"""Reads the words of `pdmesh bench`: what is not said has a default for its workload."""

import json
from pathlib import Path
from typing import Any

from mesh.bench.client import Api
from mesh.bench.command import UsageError
from mesh.bench.prompts import Lengths
from mesh.bench.run import ClosedLoop, OpenLoop

SWEEP = (1, 2, 4, 8, 16, 32)
WORKLOADS = ("chat", "agent", "interference", "trace")

# Tokens in and out where the command line is silent.
_DEFAULT_LENGTHS = {
    "chat": ("64", "128"),
    "agent": ("100", "64"),
    "interference": ("64", "256"),
    "trace": ("1", "1"),
}
_DEFAULT_CONCURRENCY = {"chat": 8, "agent": 8, "interference": 4}


def workload_name(workload: str | None, trace_file: Path | None) -> str:
    """The workload, if it is one and has its file."""
    if workload not in WORKLOADS:
        raise UsageError(f"name a workload: {', '.join(WORKLOADS)}")
    if (workload == "trace") != (trace_file is not None):
        raise UsageError("`trace` and only `trace` takes a FILE")
    return workload


def levels(
    concurrency: str | None, rate: str | None, *, sweep: bool, workload: str
) -> tuple[ClosedLoop | OpenLoop, ...]:
    """The loads to measure, one after the other."""
    if sum((concurrency is not None, rate is not None, sweep)) > 1:
        raise UsageError("--concurrency, --rate and --sweep exclude each other")
    if workload == "trace":
        if concurrency or rate or sweep:
            raise UsageError("a trace has its own arrivals; use --speed")
        return ()
    if rate is not None:
        if workload == "interference":
            raise UsageError("`interference` is a closed loop")
        return tuple(OpenLoop(value) for value in _numbers("rate", rate))
    if concurrency is not None:
        return tuple(ClosedLoop(int(value)) for value in _numbers("concurrency", concurrency))
    return tuple(
        ClosedLoop(value) for value in (SWEEP if sweep else (_DEFAULT_CONCURRENCY[workload],))
    )


def _numbers(name: str, text: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = [0.0]
    if min(values) <= 0 or (name == "concurrency" and any(value % 1 for value in values)):
        raise UsageError(f"--{name} is {text!r}, expected positive numbers as 1,2,4")
    if len(set(values)) < len(values):
        raise UsageError(f"--{name} is {text!r}: each number once")
    return values


def input_lengths(text: str | None, workload: str) -> Lengths:
    """Tokens of a prompt; what is usual for the workload if the command line is silent."""
    return Lengths.parse(text or _DEFAULT_LENGTHS[workload][0])


def output_lengths(text: str | None, workload: str) -> Lengths:
    """Tokens of an answer, likewise."""
    return Lengths.parse(text or _DEFAULT_LENGTHS[workload][1])


def api_name(text: str) -> Api:
    """Which of OpenAI's APIs."""
    match text:
        case "completions" | "chat":
            return text
    raise UsageError(f"--api is {text!r}, expected completions or chat")


def json_object(text: str) -> dict[str, Any]:
    """More fields for each body."""
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise UsageError(f"--extra-body is {text!r}, expected a JSON object")
    return value
