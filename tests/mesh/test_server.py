import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from mesh.client import connect, mesh_errors
from mesh.errors import WorkerUnavailable
from mesh.server import MeshServer, serve
from mesh.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from tests.mesh.echo import NAME, EchoStub, add_echo, serving

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def check(channel: grpc.aio.Channel, service: str = "") -> int:
    stub: Any = health_pb2_grpc.HealthStub(channel)
    response = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
    return int(response.status)


class Running:
    """A `serve()` under way: where it is, and when it has ended."""

    def __init__(self, server: MeshServer, task: asyncio.Task[None]) -> None:
        self.server = server
        self.task = task
        self.channel = connect(server.address)
        self.stub = EchoStub(self.channel)


@asynccontextmanager
async def under_serve(
    *,
    drain: Callable[[], Awaitable[None]] | None = None,
    drain_timeout_s: float = 60,
    **behaviors: Any,
) -> AsyncGenerator[Running, None]:
    server = MeshServer()
    server.add(lambda servicer, grpc_server: add_echo(servicer, grpc_server), behaviors, NAME)
    is_started = asyncio.Event()

    async def on_started(address: str) -> None:
        is_started.set()

    task = asyncio.create_task(
        serve(server, drain=drain, drain_timeout_s=drain_timeout_s, on_started=on_started)
    )
    await is_started.wait()
    running = Running(server, task)
    try:
        yield running
    finally:
        await running.channel.close()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def call_until_refused(stub: EchoStub) -> None:
    with mesh_errors():
        while True:
            await stub.unary_stream(b"", timeout=20).read()


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


async def test_health_answers_for_the_server_and_each_service() -> None:
    async with serving() as stub:
        for name in ("", NAME, "grpc.health.v1.Health"):
            assert await check(stub.channel, name) == SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await check(stub.channel, "no.such.Service")

    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_health_follows_set_serving_and_watchers_are_told() -> None:
    server = MeshServer()
    async with serving(server=server) as stub:
        health: Any = health_pb2_grpc.HealthStub(stub.channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(service=NAME))
        assert (await watch.read()).status == SERVING

        await server.set_serving(False)
        assert await check(stub.channel, NAME) == NOT_SERVING
        assert (await watch.read()).status == NOT_SERVING

        await server.set_serving(True)
        assert await check(stub.channel) == SERVING
        watch.cancel()


async def test_a_draining_server_never_says_serving_again() -> None:
    server = MeshServer()
    async with serving(server=server) as stub:
        await server.enter_drain()
        await server.set_serving(True)

        assert await check(stub.channel) == NOT_SERVING
        assert await check(stub.channel, NAME) == NOT_SERVING


async def test_reflection_lists_and_describes_the_services() -> None:
    server = MeshServer()
    servicer: Any = tokenizer_pb2_grpc.TokenizerServiceServicer
    server.add(
        tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server,
        servicer(),
        tokenizer_pb2.DESCRIPTOR.services_by_name["TokenizerService"].full_name,
    )
    async with serving(server=server) as stub:
        make_stub: Any = reflection_pb2_grpc.ServerReflectionStub
        call = make_stub(stub.channel).ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        listed = {one.name for one in (await call.read()).list_services_response.service}
        await call.write(
            reflection_pb2.ServerReflectionRequest(
                file_containing_symbol="mesh.v1.TokenizerService"
            )
        )
        described = (await call.read()).file_descriptor_response
        await call.done_writing()

    assert {"mesh.v1.TokenizerService", "grpc.health.v1.Health"} <= listed
    assert len(described.file_descriptor_proto) >= 1


async def test_a_second_server_on_the_same_port_is_refused() -> None:
    server = MeshServer()
    address = await server.start()

    with pytest.raises(RuntimeError, match="bind"):
        await MeshServer(address).start()

    await server.stop(0)


def test_the_address_is_not_known_before_the_start() -> None:
    async def ask() -> str:
        return MeshServer().address

    with pytest.raises(RuntimeError, match="not started"):
        asyncio.run(ask())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_serve_cleanly(number: signal.Signals) -> None:
    async with under_serve() as running:
        send(number)

        async with asyncio.timeout(20):
            await running.task


async def test_during_the_drain_health_says_no_and_running_calls_finish() -> None:
    is_draining, may_finish = asyncio.Event(), asyncio.Event()

    async def drain() -> None:
        is_draining.set()
        await may_finish.wait()

    async def stream(request: bytes, context: Any) -> AsyncGenerator[bytes, None]:
        yield b"first"
        await may_finish.wait()
        yield b"last"

    async with under_serve(drain=drain, UnaryStream=stream) as running:
        call = running.stub.unary_stream(b"")
        assert await call.read() == b"first"

        send(signal.SIGTERM)
        await is_draining.wait()

        assert await check(running.channel) == NOT_SERVING
        may_finish.set()
        assert await call.read() == b"last"
        async with asyncio.timeout(20):
            await running.task


async def test_without_a_drain_of_its_own_the_server_waits_for_calls_and_takes_no_new_ones() -> (
    None
):
    may_finish = asyncio.Event()

    async def stream(request: bytes, context: Any) -> AsyncGenerator[bytes, None]:
        yield b"first"
        await may_finish.wait()
        yield b"last"

    async with under_serve(UnaryStream=stream) as running:
        call = running.stub.unary_stream(b"")
        await call.read()
        send(signal.SIGTERM)

        other = connect(running.server.address)
        async with asyncio.timeout(20):
            with pytest.raises(WorkerUnavailable):
                await call_until_refused(EchoStub(other))
        await other.close()

        may_finish.set()
        assert await call.read() == b"last"
        async with asyncio.timeout(20):
            await running.task


async def test_a_drain_that_takes_too_long_is_cut_off() -> None:
    was_cancelled = asyncio.Event()

    async def drain() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            was_cancelled.set()

    async with under_serve(drain=drain, drain_timeout_s=0.1) as running:
        send(signal.SIGTERM)

        async with asyncio.timeout(20):
            await running.task
        assert was_cancelled.is_set()


async def test_a_second_signal_stops_at_once() -> None:
    is_draining = asyncio.Event()

    async def drain() -> None:
        is_draining.set()
        await asyncio.Event().wait()

    async def hang(request: bytes, context: Any) -> bytes:
        await asyncio.Event().wait()
        return b""

    async with under_serve(drain=drain, drain_timeout_s=60, UnaryUnary=hang) as running:
        call = running.stub.unary_unary(b"")
        send(signal.SIGTERM)
        await is_draining.wait()

        send(signal.SIGINT)

        async with asyncio.timeout(20):
            await running.task
        with pytest.raises(WorkerUnavailable), mesh_errors():
            await call


async def test_a_failure_to_start_up_stops_the_server() -> None:
    server = MeshServer()

    async def on_started(address: str) -> None:
        raise ValueError("cannot register")

    with pytest.raises(ValueError, match="cannot register"):
        await serve(server, drain=None, drain_timeout_s=1, on_started=on_started)

    other = MeshServer(server.address)
    await other.start()
    await other.stop(0)


CHILD = """
import asyncio, sys
from mesh.server import MeshServer, serve

async def started(address):
    print("started", flush=True)

asyncio.run(serve(MeshServer(), drain=None, drain_timeout_s=1, on_started=started,
                  parent_pid=int(sys.argv[1])))
"""

PARENT = f"""
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}, str(os.getpid())],
                         stdout=subprocess.PIPE, text=True)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(60)
"""


def test_a_server_ends_when_its_parent_is_killed() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))

        parent.kill()
        parent.wait()

        gone, _ = psutil.wait_procs([child], timeout=5)
        assert gone == [child]


def test_a_server_whose_parent_is_not_the_expected_one_does_not_start() -> None:
    finished = subprocess.run(
        [sys.executable, "-c", CHILD, "1"], capture_output=True, text=True, timeout=30, check=False
    )

    assert finished.returncode == 1
    assert "started" not in finished.stdout
