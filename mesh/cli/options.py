"""Options that several commands share, and how they print."""

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

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

# More than any line that is printed has.
_UNBOUNDED_COLUMNS = 1000


def home_at(path: Path) -> Home:
    return Home(path.expanduser().resolve())


def check_writable(*files: Path | None) -> None:
    """End the command unless these can be written: before minutes of work, not after."""
    for file in files:
        if file is not None and (not file.parent.is_dir() or file.is_dir()):
            where = "is a folder" if file.is_dir() else f"has no folder {file.parent}"
            raise fail(f"cannot write {file}: it {where}", 2)


def output_console() -> Console:
    """Prints to stdout. What goes to a file or another program is not cut, whatever its width."""
    console = Console()
    if console.is_terminal or "COLUMNS" in os.environ:
        return console
    return Console(width=_UNBOUNDED_COLUMNS)


def fail(message: str, code: int = 1) -> typer.Exit:
    """Say what went wrong on stderr; the caller raises what this returns."""
    typer.echo(f"pdmesh: {message}", err=True)
    return typer.Exit(code)
