"""`pdmesh down`: stop the mesh that runs in this home."""

import time

import typer

from mesh.cli.options import DEFAULT_HOME, HomeOption, fail, home_at
from mesh.home import HomeInUse
from mesh.supervisor import clean_up, find_supervisor


def down(home: HomeOption = DEFAULT_HOME) -> None:
    """Stop every service and remove what they held."""
    place = home_at(home)
    state = place.read_state()
    supervisor = None if state is None else find_supervisor(state)
    if state is not None and supervisor is not None:
        supervisor.terminate()
        deadline = time.monotonic() + state.stop_timeout_s
        # Not until its pid is gone: whoever has to collect it may take another second.
        while find_supervisor(state) is not None:
            if time.monotonic() > deadline:
                raise fail(f"process {supervisor.pid} did not stop in {state.stop_timeout_s:.0f} s")
            time.sleep(0.02)
    try:
        with place.lock():
            left = clean_up(place)
    except HomeInUse as error:
        raise fail(f"{error} (it is just starting)") from error
    typer.echo("stopped" if supervisor or left else "nothing was running")
