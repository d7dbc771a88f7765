"""The machine in words, as a report states it."""

import os
import platform
from collections.abc import Iterable
from pathlib import Path

import psutil

# Those that decide which matrix kernels can run.
_TELLING_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16", "asimd")


def describe_machine(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Processor, cores that this process may use, instructions, memory, system."""
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    model = _value(lines, ("model name", "Model")) or platform.processor() or platform.machine()
    flags = (_value(lines, ("flags", "Features")) or "").split()
    telling = [flag for flag in _TELLING_FLAGS if flag in flags]
    memory_gib = psutil.virtual_memory().total / (1 << 30)
    parts = [
        model,
        f"{len(os.sched_getaffinity(0))} cores",
        *([", ".join(telling)] if telling else []),
        f"{memory_gib:.0f} GiB memory",
        f"{platform.system()} {platform.release()}",
    ]
    return "; ".join(parts)


def _value(lines: Iterable[str], names: tuple[str, ...]) -> str | None:
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in names:
            return value.strip()
    return None
