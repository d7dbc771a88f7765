"""What a mesh that nobody asks anything takes of a processor: `pdmesh up`, then this."""

import time
from pathlib import Path
from typing import Annotated

import psutil
import typer

from mesh.home import Home
from mesh.supervisor import find_process


def main(
    home: Annotated[Path, typer.Option(help="Of the running mesh.")] = Path("~/.pdmesh"),
    seconds: Annotated[float, typer.Option(help="How long to look.", min=1)] = 30.0,
) -> None:
    """Share of one processor that each process of the mesh takes."""
    state = Home(home.expanduser()).read_state()
    if state is None:
        raise typer.BadParameter("no mesh runs there", param_hint="--home")
    processes = {one.name: find_process(one) for one in state.services}
    processes["supervisor"] = psutil.Process(state.pid)
    alive = {name: process for name, process in processes.items() if process is not None}
    before = {name: _processor_s(process) for name, process in alive.items()}
    started = time.monotonic()
    time.sleep(seconds)
    elapsed_s = time.monotonic() - started
    for name, process in alive.items():
        share = (_processor_s(process) - before[name]) / elapsed_s
        typer.echo(f"{name:16} {100 * share:5.2f}%")


def _processor_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


if __name__ == "__main__":
    typer.run(main)
