"""`pdmesh up`: serve a model with every service on this machine."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import psutil
import typer
import yaml
from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from mesh import model_store
from mesh.cli.options import DEFAULT_HOME, HomeOption, fail, home_at
from mesh.fleet import Fleet, serving_fleet
from mesh.home import Home, HomeInUse, MeshState
from mesh.launch import NUM_STOP_STAGES, Launch, LaunchOptions, plan_launch, write_topology
from mesh.supervisor import (
    DEFAULT_HANG_TIMEOUT_S,
    StartFailed,
    Supervisor,
    clean_up,
    find_supervisor,
)
from mesh.telemetry import JsonFormatter

START_TIMEOUT_S = 120.0
# What a service needs to end after its drain, and a mesh after its services.
EXIT_GRACE_S = 2.0
STOP_MARGIN_S = 12.0

console = Console()


def up(
    home: HomeOption = DEFAULT_HOME,
    model: Annotated[
        str, typer.Option(help="A model that `pdmesh model add` knows, or a folder.")
    ] = model_store.DEFAULT_MODEL,
    host: Annotated[str, typer.Option(help="Where the gateway listens.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The gateway's port.", min=1, max=65535)] = 8000,
    prefill: Annotated[int, typer.Option(help="Prefill workers.", min=0, max=64)] = 1,
    decode: Annotated[int, typer.Option(help="Decode workers.", min=1, max=64)] = 1,
    gateways: Annotated[
        int, typer.Option(help="Gateways, on --port and the ports after it.", min=1, max=16)
    ] = 1,
    tokenizers: Annotated[int, typer.Option(help="Tokenizers.", min=1, max=16)] = 1,
    schedulers: Annotated[int, typer.Option(help="Schedulers.", min=1, max=16)] = 1,
    kv_transfer: Annotated[
        int, typer.Option(help="KV transfer agents; workers take turns.", min=1, max=16)
    ] = 1,
    rules: Annotated[
        Path | None,
        typer.Option(help="Parameter rules, see `pdmesh rules`.", exists=True, dir_okay=False),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="Precision of the workers.")] = None,
    setting: Annotated[
        list[str] | None,
        typer.Option("--set", help="A setting of one service, as SERVICE.NAME=VALUE."),
    ] = None,
    hang_timeout: Annotated[
        float,
        typer.Option(
            help="Replace a process that answers nothing for so many seconds; 0: never.", min=0
        ),
    ] = DEFAULT_HANG_TIMEOUT_S,
    detach: Annotated[bool, typer.Option(help="Return when ready; run on behind.")] = False,
    log_level: Annotated[str, typer.Option(help="DEBUG, INFO, WARNING or ERROR.")] = "INFO",
    redis_url: Annotated[
        str | None,
        typer.Option(envvar="REDIS_URL", help="A Redis to use instead of the embedded one."),
    ] = None,
    otlp_endpoint: Annotated[
        str | None,
        typer.Option(envvar="OTEL_EXPORTER_OTLP_ENDPOINT", help="Where traces go."),
    ] = None,
) -> None:
    """Start every service on this machine and serve until Ctrl-C or `pdmesh down`."""
    # A shell without job control has what it starts in the background ignore it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    place = home_at(home)
    if detach:
        _detach(place)
        return
    try:
        name, folder = _find_model(place, model)
        options = LaunchOptions(
            model_name=name,
            model_path=folder,
            host=host,
            port=port,
            num_prefill=prefill,
            num_decode=decode,
            num_gateways=gateways,
            num_tokenizers=tokenizers,
            num_schedulers=schedulers,
            num_kv_transfer=kv_transfer,
            rules_path=rules,
            redis_url=redis_url,
            otlp_endpoint=otlp_endpoint,
            log_level=log_level,
            settings=_settings(setting or [], dtype),
        )
        with place.lock():
            for left in clean_up(place):
                console.print(f"cleaned up after an earlier run: {left}", style="dim")
            status = asyncio.run(_serve(place, options, hang_timeout))
    except (HomeInUse, StartFailed, ValueError, model_store.ModelStoreError, OSError) as error:
        raise fail(str(error)) from error
    raise typer.Exit(status)


async def _serve(home: Home, options: LaunchOptions, hang_timeout_s: float) -> int:
    log = logging.FileHandler(home.logs / "up.log")
    log.setFormatter(JsonFormatter())
    logging.basicConfig(handlers=[log], level=options.log_level)
    launch = plan_launch(home, options, os.environ)
    write_topology(home, launch.topology)
    display = _Display(console)
    grace_s = launch.longest_drain_s + EXIT_GRACE_S
    supervisor = Supervisor(
        home,
        launch.specs,
        url=launch.url,
        grpc_address=launch.grpc_address,
        model=options.model_name,
        control_address=launch.control_address,
        stop_timeout_s=NUM_STOP_STAGES * grace_s + STOP_MARGIN_S,
        hang_timeout_s=hang_timeout_s,
        on_change=display.update,
    )
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    stopped = asyncio.create_task(stop.wait())
    work = asyncio.create_task(_run(supervisor, display, launch, home))
    try:
        await asyncio.wait([work, stopped], return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            work.result()
        return 0
    finally:
        display.close()
        console.print("stopping…", style="dim")
        for task in (work, stopped):
            task.cancel()
        await asyncio.gather(work, stopped, return_exceptions=True)
        await supervisor.stop(grace_s)
        for segment in home.segments():
            segment.unlink(missing_ok=True)


async def _run(supervisor: Supervisor, display: "_Display", launch: Launch, home: Home) -> None:
    with display:
        await supervisor.start(START_TIMEOUT_S)
    console.print(ready_message(supervisor.state(), home), soft_wrap=True)
    fleet = Fleet(supervisor, launch, start_timeout_s=START_TIMEOUT_S)
    async with serving_fleet(fleet, launch.control_address):
        await supervisor.run_until_failed()


def _find_model(home: Home, model: str) -> tuple[str, Path]:
    """The served name and the folder of `model`, fetched first if need be."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder.resolve().name, folder.resolve()
    with console.status(f"preparing {model}"):
        return model, model_store.ensure(home.path, model, report=console.print)


def _settings(assignments: list[str], dtype: str | None) -> dict[str, dict[str, Any]]:
    settings: dict[str, dict[str, Any]] = {}
    if dtype is not None:
        settings = {role: {"dtype": dtype} for role in ("prefill", "decode")}
    for assignment in assignments:
        target, separator, value = assignment.partition("=")
        section, dot, name = target.partition(".")
        if not separator or not dot:
            raise ValueError(f"--set {assignment}: expected SERVICE.NAME=VALUE")
        try:
            settings.setdefault(section, {})[name] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            problem = " ".join(str(error).split())
            raise ValueError(f"--set {assignment}: not a YAML value: {problem}") from error
    return settings


def _detach(home: Home) -> None:
    """Run the same command behind, and return when it serves."""
    home.logs.mkdir(parents=True, exist_ok=True)
    log_path = home.logs / "up.out"
    arguments = [argument for argument in sys.argv[1:] if argument != "--detach"]
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "mesh.cli.main", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        with console.status("starting"):
            state = _wait_until_ready(home, process)
    except KeyboardInterrupt:
        # It has a session of its own, and hears nothing of the key.
        process.terminate()
        process.wait()
        raise
    if state is None:
        raise fail(log_path.read_text(errors="replace").strip())
    console.print(ready_message(state, home), soft_wrap=True)


def _wait_until_ready(home: Home, process: "subprocess.Popen[bytes]") -> MeshState | None:
    """The state of the mesh that `process` supervises, or None when it ended instead."""
    while process.poll() is None:
        state = home.read_state()
        if state is not None and state.ready and state.pid == process.pid:
            return state
        time.sleep(0.05)
    return None


def ready_message(state: MeshState, home: Home) -> Group:
    """A table of the services and a request to try."""
    key = '-H "authorization: Bearer $PDMESH_KEY" ' if home.keys_file.exists() else ""
    request = (
        f"curl {state.url}/v1/chat/completions {key}-H 'content-type: application/json' -d '"
        f'{{"model": "{state.model}", "messages": '
        '[{"role": "user", "content": "How many days are in a week?"}], "temperature": 0}'
        "'"
    )
    return Group(
        services_table(state), Text(f"\nReady at {state.url}. Try:\n"), Text(request), Text()
    )


def services_table(state: MeshState) -> Table:
    table = Table(box=None)
    for heading in ("service", "state", "pid", "address"):
        table.add_column(heading)
    for service in state.services:
        table.add_row(service.name, service.state, str(service.pid or ""), service.address)
    return table


class _Display:
    """Shows the services while they start; silent afterwards."""

    def __init__(self, target: Console) -> None:
        self._live = Live(console=target, refresh_per_second=8, transient=True)
        self._state: MeshState | None = None

    def __enter__(self) -> "_Display":
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._live.stop()

    def update(self, state: MeshState) -> None:
        self._state = state
        if self._live.is_started:
            self._live.update(Group(Spinner("dots", "starting"), services_table(state)))


def running_state(home: Home) -> MeshState | None:
    """The state of the mesh that runs in `home`, if one does."""
    state = home.read_state()
    return state if state is not None and find_supervisor(state) is not None else None


def wait_for_end(process: psutil.Process, timeout_s: float) -> bool:
    """Whether `process` ended within `timeout_s`."""
    _, alive = psutil.wait_procs([process], timeout=timeout_s)
    return not alive
