"""`pdmesh model add | quantize | list`: what this machine can serve."""

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from mesh import model_store
from mesh.cli.options import DEFAULT_HOME, HomeOption, output_console

app = typer.Typer(help="Install and list models.", no_args_is_help=True)


class Quantization(StrEnum):
    """Of a copy's weights."""

    INT8 = "int8"
    INT4 = "int4"


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
    """Install a model; the default one is left as it is where none of its files is damaged."""
    console = Console(stderr=True)
    try:
        folder = model_store.add(home.expanduser(), model, name, console.print)
    except model_store.ModelStoreError as error:
        console.print(str(error), style="red", markup=False, highlight=False)
        raise typer.Exit(1) from None
    typer.echo(folder)


@app.command()
def quantize(
    model: Annotated[str, typer.Argument(help="An installed model.")],
    quantization: Annotated[
        Quantization, typer.Option(help="What the matrices of the copy are stored as.")
    ],
    name: Annotated[
        str | None, typer.Option(help="What to install it as; default: NAME-int8 or NAME-int4.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Write it to this new folder, and do not install it.")
    ] = None,
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Make a copy with quantized weights: smaller files, and the same tokens as from the original
    served with this quantization."""
    console = Console(stderr=True)
    try:
        if output is None:
            folder = model_store.add_quantized(
                home.expanduser(), model, quantization, name, console.print
            )
        else:
            source = model_store.resolve(home.expanduser(), model)
            folder = output.expanduser()
            model_store.write_quantized(source, folder, quantization)
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
    output_console().print(table)
