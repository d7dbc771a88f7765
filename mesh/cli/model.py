"""`pdmesh model add | list`: what this machine can serve."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from mesh import model_store

app = typer.Typer(help="Install and list models.", no_args_is_help=True)

HomeOption = Annotated[
    Path, typer.Option("--home", envvar="PDMESH_HOME", help="Where pdmesh keeps its files.")
]
DEFAULT_HOME = Path("~/.pdmesh")


@app.command()
def add(
    model: Annotated[
        str,
        typer.Argument(
            help=f"{model_store.DEFAULT_MODEL}, a Hugging Face folder, or ORG/NAME on the hub."
        ),
    ],
    name: Annotated[
        str | None, typer.Option(help="The name to serve it under; default: its own.")
    ] = None,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Install a model; one that is already there is left as it is."""
    console = Console(stderr=True)
    try:
        folder = model_store.add(home.expanduser(), model, name, console.print)
    except model_store.ModelStoreError as error:
        console.print(str(error), style="red", markup=False, highlight=False)
        raise typer.Exit(1) from None
    typer.echo(folder)


@app.command("list")
def list_(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """List the installed models."""
    manifests = model_store.list_models(home.expanduser())
    if as_json:
        models = [{"name": m.name, "size_bytes": m.size, "source": m.source} for m in manifests]
        typer.echo(json.dumps({"models": models}, indent=2))
        return
    table = Table("Name", "Size", "Source")
    for manifest in manifests:
        source = ", ".join(f"{key} {value}" for key, value in manifest.source.items())
        table.add_row(manifest.name, f"{manifest.size / 1e6:,.0f} MB", source)
    Console().print(table)
