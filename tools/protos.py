"""Generate mesh/v1 from protos/, or check that the committed stubs are up to date."""

import argparse
import filecmp
import shutil
import sys
import tempfile
from pathlib import Path

import grpc_tools
from grpc_tools import protoc

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
STUBS = ROOT / "mesh" / "v1"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if the stubs differ")
    check = parser.parse_args().check

    with tempfile.TemporaryDirectory() as folder:
        fresh = _generate(Path(folder))
        stale = sorted({p.name for p in STUBS.glob("*_pb2*")} | {p.name for p in fresh})
        stale = [name for name in stale if not _same(STUBS / name, Path(folder, "mesh/v1", name))]
        if check:
            for name in stale:
                print(f"mesh/v1/{name} is out of date: run `make protos`", file=sys.stderr)
            return 1 if stale else 0
        for old in STUBS.glob("*_pb2*"):
            old.unlink()
        for path in fresh:
            shutil.copy(path, STUBS / path.name)
    return 0


def _generate(out: Path) -> list[Path]:
    sources = sorted(str(p) for p in PROTOS.glob("mesh/v1/*.proto"))
    scripts = Path(sys.executable).parent  # pip put the plugins beside this Python
    arguments = [
        "protoc",
        *(f"--plugin={scripts / name}" for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")),
        f"--proto_path={PROTOS}",
        f"--proto_path={Path(grpc_tools.__file__).parent / '_proto'}",
        f"--python_out={out}",
        f"--mypy_out={out}",
        f"--grpc_python_out={out}",
        f"--mypy_grpc_out={out}",
        *sources,
    ]
    if protoc.main(arguments) != 0:
        raise SystemExit("protoc failed")
    for empty in out.glob("mesh/v1/types_pb2_grpc.py*"):
        empty.unlink()
    return sorted(out.glob("mesh/v1/*"))


def _same(a: Path, b: Path) -> bool:
    return a.exists() and b.exists() and filecmp.cmp(a, b, shallow=False)


if __name__ == "__main__":
    sys.exit(main())
