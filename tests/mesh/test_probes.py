"""Who is alive: whoever serves or drains, and nobody who is stuck, frozen or gone."""

import asyncio
import socket

from typer.testing import CliRunner

from mesh.cli.main import app
from mesh.probes import grpc_alive, grpc_health, http_health
from mesh.server import MeshServer


async def test_a_service_is_alive_unless_it_is_stuck() -> None:
    server = MeshServer()
    address = await server.start()
    try:
        assert await grpc_alive(address, timeout_s=20)

        await server.set_serving(False)
        assert await grpc_health(address, timeout_s=20) == "NOT_SERVING"
        assert not await grpc_alive(address, timeout_s=20)

        await server.set_serving(True)
        assert await grpc_alive(address, timeout_s=20)
    finally:
        await server.stop(0)
    assert not await grpc_alive(address, timeout_s=20)


async def test_a_service_that_drains_is_alive() -> None:
    server = MeshServer()
    address = await server.start()
    try:
        await server.enter_drain()

        assert await grpc_health(address, timeout_s=20) == "NOT_SERVING"
        assert await grpc_alive(address, timeout_s=20)
    finally:
        await server.stop(0)


async def test_a_port_where_no_http_is_spoken_has_no_gateway() -> None:
    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9.6\r\n")
        await reader.read(1)
        writer.close()

    async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

        assert await asyncio.to_thread(http_health, url, 20) is None
        asked = await asyncio.to_thread(CliRunner().invoke, app, ["top", "--once", "--url", url])

    assert asked.exit_code == 1
    assert f"pdmesh: {url} does not answer" in asked.output


async def test_a_service_that_is_frozen_is_not_alive() -> None:
    # The kernel takes connections for a frozen process, and nobody answers.
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"

        assert not await grpc_alive(address, timeout_s=0.2)
