"""A service with one method of each kind, whose behaviour a test supplies."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc

from mesh.client import connect
from mesh.local_calls.client import LocalCall
from mesh.server import MeshServer

NAME = "test.Echo"

Unary = Callable[[Any, Any], Awaitable[bytes]]
Stream = Callable[[Any, Any], AsyncGenerator[bytes, None]]


def add_echo(behaviors: dict[str, Any], server: grpc.aio.Server) -> None:
    """Like a generated `add_…_to_server`; messages are bytes."""
    made: dict[str, Any] = {
        "UnaryUnary": grpc.unary_unary_rpc_method_handler,
        "UnaryStream": grpc.unary_stream_rpc_method_handler,
        "StreamUnary": grpc.stream_unary_rpc_method_handler,
        "StreamStream": grpc.stream_stream_rpc_method_handler,
    }
    handlers = {name: made[name](behavior) for name, behavior in behaviors.items()}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(NAME, handlers),))


class Transport:
    """How `serving` reaches its server; a fixture chooses."""

    is_local = False


class EchoStub:
    """The four methods on a channel."""

    def __init__(self, channel: grpc.aio.Channel, address: str = "") -> None:
        self.channel = channel
        self.address = address
        self.unary_unary: Any = channel.unary_unary(f"/{NAME}/UnaryUnary")
        self.unary_stream: Any = channel.unary_stream(f"/{NAME}/UnaryStream")
        self.stream_unary: Any = channel.stream_unary(f"/{NAME}/StreamUnary")
        self.stream_stream: Any = channel.stream_stream(f"/{NAME}/StreamStream")

    async def call(self, kind: str) -> list[bytes]:
        """Call the method of that kind with one message, and read all it answers."""
        if kind == "UnaryUnary":
            return [await self.unary_unary(b"x", timeout=10)]
        if kind == "StreamUnary":
            return [await self.stream_unary(_one(b"x"), timeout=10)]
        if kind == "UnaryStream":
            return [one async for one in self.unary_stream(b"x", timeout=10)]
        if not Transport.is_local:
            return [one async for one in self.stream_stream(_one(b"x"), timeout=10)]
        call = self.stream_stream(timeout=10)
        with suppress(grpc.aio.AioRpcError):  # whoever reads hears of it
            await call.write(b"x")
            await call.done_writing()
        return [message async for message in _messages(call)]


async def _messages(call: Any) -> AsyncIterator[bytes]:
    while (message := await call.read()) is not grpc.aio.EOF:
        yield message


async def connect_locally(address: str) -> grpc.aio.Channel:
    """A channel whose calls go over the local connection that it has."""
    channel = connect(address, calls_locally=True)
    async with asyncio.timeout(10):
        while not isinstance(call := EchoStub(channel).stream_stream(), LocalCall):
            call.cancel()
            await asyncio.sleep(0.01)
    call.cancel()
    return channel


async def _one(message: bytes) -> AsyncIterator[bytes]:
    yield message


@asynccontextmanager
async def serving(
    *, server: MeshServer | None = None, **behaviors: Unary | Stream
) -> AsyncIterator[EchoStub]:
    """A server with these methods, and a stub that reaches it."""
    server = server or MeshServer()
    server.add(lambda servicer, grpc_server: add_echo(servicer, grpc_server), behaviors, NAME)
    address = await server.start()
    channel = await connect_locally(address) if Transport.is_local else connect(address)
    try:
        yield EchoStub(channel, address)
    finally:
        await channel.close()
        await server.stop(0)
