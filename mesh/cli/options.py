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


def fail(message: str, code: int = 1) -> typer.Exit:
    """Say what went wrong on stderr; the caller raises what this returns."""
    typer.echo(f"pdmesh: {message}", err=True)
    return typer.Exit(code)
