"""Compiles the kernel library; standard library only, because setup.py loads this file by path."""

import fcntl
import hashlib
import logging
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path

logger = logging.getLogger(__name__)

SOURCE_FOLDER = Path(__file__).parent
BUILD_TIMEOUT_S = 300

_PREFIX = "libpdmesh_kernels-"
_COMPILERS = ("g++", "clang++", "c++")
# Contraction is off because every level rounds at the same places; warnings of GCC 12 about
# its own AVX-512 headers are false.
_FLAGS = ("-std=c++17", "-O3", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-pthread", "-w")
_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni")
_X86_FLAGS = {
    "level_amx.cpp": (*_AVX512, "-mamx-tile", "-mamx-int8", "-mamx-bf16"),
    "level_avx512.cpp": _AVX512,
    "level_avx2.cpp": _AVX2,
}
# What is unrolled for wide registers takes a minute to compile without them.
_PORTABLE_FLAGS = {"level_portable.cpp": ("-O2",)}


class BuildError(Exception):
    """The library could not be compiled; the message has the compiler's own words."""


def find_compiler() -> str | None:
    return next((path for name in _COMPILERS if (path := shutil.which(name))), None)


def build(target: Path, extra_flags: Sequence[str] = ()) -> Path:
    """Compile the library to `target`, replacing it atomically."""
    compiler = find_compiler()
    if compiler is None:
        raise BuildError(f"no C++ compiler found (looked for {', '.join(_COMPILERS)})")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        objects = [Path(folder, source.stem + ".o") for source in _sources()]
        commands = [
            [
                compiler,
                *_FLAGS,
                *_level_flags(source.name),
                *extra_flags,
                "-c",
                str(source),
                "-o",
                str(output),
            ]
            for source, output in zip(_sources(), objects, strict=True)
        ]
        with ThreadPoolExecutor() as threads:
            list(threads.map(_run, commands))
        library = Path(folder, "linked.so")
        _run(
            [compiler, "-shared", "-pthread", *extra_flags, *map(str, objects), "-o", str(library)]
        )
        library.replace(target)
    return target


@lru_cache(maxsize=1)
def ensure_library() -> Path | None:
    """The library's path, compiled now if need be; None, with one warning, where it cannot be."""
    installed = SOURCE_FOLDER / library_name()
    if installed.exists():
        return installed
    try:
        return build_cached()
    except (BuildError, OSError, RuntimeError) as error:  # RuntimeError: there is no home
        logger.warning("kernels are not available, torch serves instead", extra={"why": str(error)})
        return None


def build_cached(extra_flags: Sequence[str] = ()) -> Path:
    """The library of exactly these sources and flags, from the user's cache if it is there."""
    target = Path.home() / ".cache" / "pdmesh" / library_name(extra_flags)
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # Workers start together: one compiles, on all cores, and the others wait for it.
    with target.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return target if target.exists() else build(target, extra_flags)


def build_in_place() -> Path:
    """Compile the library beside its sources, where it is found first; older ones go."""
    for old in SOURCE_FOLDER.glob(f"{_PREFIX}*.so"):
        old.unlink()
    return build(SOURCE_FOLDER / library_name())


def library_name(extra_flags: Sequence[str] = ()) -> str:
    """Tells libraries of different sources apart, so that a stale one is never loaded."""
    digest = hashlib.sha256(f"{platform.machine()} {' '.join(extra_flags)}".encode())
    for path in sorted([*SOURCE_FOLDER.glob("*.cpp"), *SOURCE_FOLDER.glob("*.h"), Path(__file__)]):
        content = path.read_bytes()
        digest.update(f"{path.name}:{len(content)}:".encode() + content)
    return f"{_PREFIX}{digest.hexdigest()[:16]}.so"


def _sources() -> list[Path]:
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    return [
        path
        for path in sorted(SOURCE_FOLDER.glob("*.cpp"))
        if is_x86 or path.name not in _X86_FLAGS
    ]


def _level_flags(name: str) -> tuple[str, ...]:
    return (_X86_FLAGS | _PORTABLE_FLAGS).get(name, ())


def _run(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=BUILD_TIMEOUT_S)
    except subprocess.CalledProcessError as error:
        raise BuildError(f"{command[0]} failed: {error.stderr[-2000:]}") from error
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{command[0]} took more than {BUILD_TIMEOUT_S} s") from error


if __name__ == "__main__":
    print(build_in_place())
