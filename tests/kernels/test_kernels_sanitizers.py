"""The kernels under the address and undefined-behaviour sanitizers."""

import subprocess
import sys
from pathlib import Path

import pytest

from engine.kernels import build

# -Og without symbols: the sanitizers see the same, and compiling takes a fifth of the time.
FLAGS = ("-Og", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_every_format_and_level_is_clean_under_sanitizers() -> None:
    compiler = build.find_compiler()
    if compiler is None or "g++" not in Path(compiler).name:
        pytest.skip("needs g++")
    runtime = _runtime(compiler)
    if runtime is None:
        pytest.skip("the compiler has no sanitizer runtime")
    library = build.build_cached(FLAGS)  # once for each state of the sources

    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("sanitized_run.py")), str(library)],
        capture_output=True,
        text=True,
        timeout=100,
        env={
            "LD_PRELOAD": runtime,
            # The interpreter itself does not free everything at its end.
            "ASAN_OPTIONS": "detect_leaks=0",
            "UBSAN_OPTIONS": "print_stacktrace=1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(Path(__file__).parents[2]),
        },
    )

    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.startswith("clean")


def _runtime(compiler: str) -> str | None:
    asked = [compiler, "-print-file-name=libasan.so"]
    path = Path(subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip())
    return str(path.resolve()) if path.is_absolute() else None
