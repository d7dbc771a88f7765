"""`pdmesh drain` and `pdmesh scale`: workers leave and join the mesh that runs in this home."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

import grpc
import typer

from mesh.cli.options import DEFAULT_HOME, HomeOption, fail, home_at
from mesh.client import mesh_errors
from mesh.errors import MeshError
from mesh.home import Home
from mesh.supervisor import find_supervisor
from mesh.v1 import supervisor_pb2, supervisor_pb2_grpc

# Longer than any drain, and than a worker takes to load a large model.
CALL_TIMEOUT_S = 3600.0

Response = TypeVar("Response")
Ask = Callable[["supervisor_pb2_grpc.SupervisorServiceAsyncStub"], Awaitable[Response]]


def drain(
    worker: Annotated[str, typer.Argument(help="Its name in `pdmesh status`, as decode-0.")],
    home: HomeOption = DEFAULT_HOME,
    restart: Annotated[bool, typer.Option("--restart", help="Start it again afterwards.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Also if no other worker here can decode.")
    ] = False,
) -> None:
    """End a worker without losing a request: its streams finish or go on elsewhere."""
    request = supervisor_pb2.DrainWorkerRequest(worker_id=worker, restart=restart, force=force)
    answer = _ask(home_at(home), lambda stub: stub.DrainWorker(request, timeout=CALL_TIMEOUT_S))
    how = "did not end by itself and was killed" if answer.was_killed else "is drained"
    again = ", and serves again" if restart else ""
    typer.echo(f"{worker} {how} after {answer.drain_seconds:.1f} s{again}")


def scale(
    roles: Annotated[
        list[str], typer.Argument(metavar="ROLE=N...", help="As decode=2 or prefill=0.")
    ],
    home: HomeOption = DEFAULT_HOME,
) -> None:
    """Have so many workers of a role: start what is missing, drain what is too much."""
    requests = [_scale_request(assignment) for assignment in roles]
    place = home_at(home)
    for request in requests:
        answer = _ask(place, _scaling(request))
        for worker_id in answer.started_worker_ids:
            typer.echo(f"{worker_id} serves")
        for worker_id in answer.drained_worker_ids:
            typer.echo(f"{worker_id} is drained")


def _scaling(
    request: supervisor_pb2.ScaleWorkersRequest,
) -> "Ask[supervisor_pb2.ScaleWorkersResponse]":
    return lambda stub: stub.ScaleWorkers(request, timeout=CALL_TIMEOUT_S)


def _scale_request(assignment: str) -> supervisor_pb2.ScaleWorkersRequest:
    role, _, number = assignment.partition("=")
    if not (number.isascii() and number.isdigit()):
        raise fail(f"{assignment}: expected ROLE=N, as decode=2", 2)
    return supervisor_pb2.ScaleWorkersRequest(role=role, num_workers=min(int(number), 2**31))


def _ask(home: Home, ask: "Ask[Response]") -> Response:
    """Call the supervisor of this home; what goes wrong ends the command with a sentence."""
    state = home.read_state()
    if state is None or find_supervisor(state) is None:
        raise fail("nothing runs here; start it with `pdmesh up`")
    address = state.control_address

    async def call() -> Response:
        async with grpc.aio.insecure_channel(address) as channel:
            with mesh_errors():
                return await ask(supervisor_pb2_grpc.SupervisorServiceStub(channel))

    try:
        return asyncio.run(call())
    except MeshError as error:
        raise fail(str(error)) from error
