"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

from mesh.home import Home

HomeOption = Annotated[
    Path,
    typer.Option(
        "--home",
        envvar="PDMESH_HOME",
        help="Where models, logs and the state of the running mesh are kept.",
    ),
]
DEFAULT_HOME = Path("~/.pdmesh")


def home_at(path: Path) -> Home:
    return Home(path.expanduser().resolve())


def check_writable(*files: Path | None) -> None:
    """End the command unless these can be written: before minutes of work, not after."""
    for file in files:
        if file is not None and (not file.parent.is_dir() or file.is_dir()):
            where = "is a folder" if file.is_dir() else f"has no folder {file.parent}"
            raise fail(f"cannot write {file}: it {where}", 2)


def fail(message: str, code: int = 1) -> typer.Exit:
    """Say what went wrong on stderr; the caller raises what this returns."""
    typer.echo(f"pdmesh: {message}", err=True)
    return typer.Exit(code)
