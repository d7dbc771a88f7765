"""What is particular to calls over a socket; what they share with gRPC's is tested beside it."""

import asyncio
import socket
import struct
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import grpc
import pytest

from mesh.client import connect, is_connection_lost, mesh_errors, settled
from mesh.errors import DeadlineExceeded, WorkerUnavailable
from mesh.local_calls.client import LocalCall
from mesh.local_calls.wire import WINDOW
from mesh.server import MeshServer
from mesh.v1 import local_call_pb2, local_call_pb2_grpc
from tests.mesh.echo import EchoStub, Transport, serving


@pytest.fixture(autouse=True)
def locally(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Transport, "is_local", True)


async def echo(request: bytes, context: Any) -> bytes:
    return request


async def hang(request: bytes, context: Any) -> AsyncGenerator[bytes, None]:
    yield b"first"
    await asyncio.Event().wait()


async def reply(requests: AsyncIterator[bytes], context: Any) -> AsyncGenerator[bytes, None]:
    async for request in requests:
        yield request


async def test_first_calls_do_not_wait_for_the_connection() -> None:
    async with serving(UnaryUnary=echo) as stub:
        channel = connect(stub.address, calls_locally=True)
        call = EchoStub(channel).unary_unary(b"x", timeout=5)

        assert not isinstance(call, LocalCall)
        assert await call == b"x"
        await channel.close()


async def test_calls_of_every_kind_answer() -> None:
    async def stream(request: bytes, context: Any) -> AsyncGenerator[bytes, None]:
        for number in range(3 * WINDOW):
            yield b"%d" % number

    async with serving(UnaryUnary=echo, UnaryStream=stream, StreamStream=reply) as stub:
        unary = stub.unary_unary(b"x", timeout=5)
        assert isinstance(unary, LocalCall)
        assert await unary == b"x"

        assert len([one async for one in stub.unary_stream(b"")]) == 3 * WINDOW

        both = stub.stream_stream(timeout=5)
        for number in range(3 * WINDOW):
            await both.write(b"%d" % number)
            assert await both.read() == b"%d" % number
        await both.done_writing()
        assert await both.read() is grpc.aio.EOF
        assert await both.code() is grpc.StatusCode.OK


async def test_long_requests_and_several_addresses_go_by_grpc() -> None:
    async with serving(UnaryUnary=echo) as stub:
        call = stub.unary_unary(bytes(1 << 20), timeout=5)
        assert not isinstance(call, LocalCall)
        assert len(await call) == 1 << 20

        channel = connect([stub.address, stub.address], calls_locally=True)
        for _ in range(2):
            call = EchoStub(channel).unary_unary(b"x", timeout=5)
            assert not isinstance(call, LocalCall)
            assert await call == b"x"
        await channel.close()


async def test_where_there_is_no_such_socket_calls_go_by_grpc(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(Transport, "is_local", False)
    async with serving(UnaryUnary=echo) as stub:
        channel = connect(stub.address, calls_locally=True)
        async with asyncio.timeout(20):
            await settled(channel)
        call = EchoStub(channel).unary_unary(b"x", timeout=5)

        assert not isinstance(call, LocalCall)
        assert await call == b"x"
        await channel.close()


@pytest.mark.parametrize("how", ["cancel", "deadline", "channel"])
async def test_who_gives_up_ends_the_handler_at_once(how: str) -> None:
    has_left = asyncio.Event()

    async def hold(request: bytes, context: Any) -> AsyncGenerator[bytes, None]:
        try:
            yield b"first"
            await asyncio.Event().wait()
        finally:
            has_left.set()

    async with serving(UnaryStream=hold) as stub:
        call = stub.unary_stream(b"", timeout=0.5 if how == "deadline" else 60)
        assert await call.read() == b"first"
        if how == "cancel":
            assert call.cancel()
            assert not call.cancel()
        elif how == "channel":
            await stub.channel.close()
        async with asyncio.timeout(20):
            await has_left.wait()

        expected = {
            "cancel": asyncio.CancelledError,
            "deadline": DeadlineExceeded,
            "channel": WorkerUnavailable,
        }
        with pytest.raises(expected[how]), mesh_errors():
            await call.read()


async def test_cancelling_who_waits_for_an_answer_cancels_the_handler() -> None:
    has_begun, has_left = asyncio.Event(), asyncio.Event()

    async def hold(request: bytes, context: Any) -> bytes:
        has_begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            has_left.set()
        return b""

    async def ask() -> None:
        await stub.unary_unary(b"")

    async with serving(UnaryUnary=hold) as stub:
        asking = asyncio.create_task(ask())
        await has_begun.wait()
        asking.cancel()
        async with asyncio.timeout(20):
            await has_left.wait()


async def test_who_does_not_read_holds_up_its_own_call_only() -> None:
    num_sent = 0

    async def flood(request: bytes, context: Any) -> AsyncGenerator[bytes, None]:
        nonlocal num_sent
        while True:
            num_sent += 1
            yield bytes(100)

    async with serving(UnaryStream=flood, UnaryUnary=echo) as stub:
        unread = stub.unary_stream(b"")
        await unread.read()
        for _ in range(20):
            assert await stub.unary_unary(b"x", timeout=5) == b"x"
        assert WINDOW <= num_sent <= WINDOW + 2
        unread.cancel()


async def test_an_unknown_method_is_unimplemented() -> None:
    async with serving(UnaryUnary=echo) as stub:
        nothing: Any = stub.channel.unary_unary("/test.Echo/Nothing")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await nothing(b"")

    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_a_server_that_stops_lets_calls_end_and_takes_no_more() -> None:
    server = MeshServer()
    async with serving(server=server, StreamStream=reply) as stub:
        running = stub.stream_stream(timeout=10)
        await running.write(b"1")
        assert await running.read() == b"1"

        stopping = asyncio.create_task(server.stop(60))
        async with asyncio.timeout(20):
            while isinstance(late := stub.stream_stream(timeout=20), LocalCall):
                late.cancel()
                await asyncio.sleep(0.01)
        late.cancel()
        await running.write(b"2")
        assert await running.read() == b"2"
        await running.done_writing()

        assert await running.code() is grpc.StatusCode.OK
        async with asyncio.timeout(20):
            await stopping


async def test_calls_of_a_server_that_is_gone_are_lost_and_later_ones_reach_the_next() -> None:
    server = MeshServer()
    async with serving(server=server, UnaryStream=hang, UnaryUnary=echo) as stub:
        call = stub.unary_stream(b"")
        assert await call.read() == b"first"
        await server.stop(0)

        with pytest.raises(WorkerUnavailable) as caught, mesh_errors():
            await call.read()
        assert is_connection_lost(caught.value)

        async with serving(server=MeshServer(server.address), UnaryUnary=echo):
            assert await stub.unary_unary(b"x", timeout=10) == b"x"
            async with asyncio.timeout(10):
                while not isinstance(late := stub.unary_unary(b"x", timeout=10), LocalCall):
                    assert await late == b"x"
                    await asyncio.sleep(0.05)
            assert await late == b"x"


async def test_the_end_of_the_offer_ends_the_calls() -> None:
    """As a frozen caller does, whose socket stays open."""
    has_left = asyncio.Event()

    async def hold(request: bytes, context: Any) -> AsyncGenerator[bytes, None]:
        try:
            yield b"first"
            await asyncio.Event().wait()
        finally:
            has_left.set()

    async with serving(UnaryStream=hold) as stub, grpc.aio.insecure_channel(stub.address) as plain:
        offering = local_call_pb2_grpc.LocalCallServiceStub(plain).Offer(
            local_call_pb2.OfferRequest()
        )
        offer = await offering.read()
        assert isinstance(offer, local_call_pb2.OfferResponse)
        reader, writer = await _open(offer.socket_name)
        start = local_call_pb2.LocalCallStart(method="/test.Echo/UnaryStream")
        _send(writer, local_call_pb2.LocalFrame(token=offer.token))
        _send(writer, local_call_pb2.LocalFrame(call_id=1, start=start, message=b"x"))
        assert await reader.read(1)

        offering.cancel()

        async with asyncio.timeout(20):
            await has_left.wait()
            await reader.read()
        writer.close()


async def test_a_server_that_stops_does_not_wait_for_who_reads_nothing() -> None:
    """As a frozen caller does, whose socket stays open."""
    has_begun = asyncio.Event()

    async def answer(request: bytes, context: Any) -> AsyncGenerator[bytes, None]:
        has_begun.set()
        yield bytes(1 << 22)

    server = MeshServer()
    async with (
        serving(server=server, UnaryStream=answer) as stub,
        grpc.aio.insecure_channel(stub.address) as plain,
    ):
        offering = local_call_pb2_grpc.LocalCallServiceStub(plain).Offer(
            local_call_pb2.OfferRequest()
        )
        offer = await offering.read()
        assert isinstance(offer, local_call_pb2.OfferResponse)
        _, writer = await _open(offer.socket_name)
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        start = local_call_pb2.LocalCallStart(method="/test.Echo/UnaryStream")
        _send(writer, local_call_pb2.LocalFrame(token=offer.token))
        _send(writer, local_call_pb2.LocalFrame(call_id=1, start=start, message=b"x"))

        async with asyncio.timeout(20):
            await has_begun.wait()
            await server.stop(0)
        writer.close()


@pytest.mark.parametrize("sent", [b"\xff\xff\xff\xff", b"\x02\x00\x00\x00\xff\xff", b"wrong token"])
async def test_what_nobody_was_offered_is_cut(sent: bytes) -> None:
    async with serving(UnaryUnary=echo) as stub, grpc.aio.insecure_channel(stub.address) as plain:
        offering = local_call_pb2_grpc.LocalCallServiceStub(plain).Offer(
            local_call_pb2.OfferRequest()
        )
        offer = await offering.read()
        assert isinstance(offer, local_call_pb2.OfferResponse)
        reader, writer = await _open(offer.socket_name)

        if sent == b"wrong token":
            _send(writer, local_call_pb2.LocalFrame(token=b"guessed"))
        else:
            writer.write(sent)

        async with asyncio.timeout(20):
            assert await reader.read() == b""
        writer.close()
        offering.cancel()
        assert await stub.unary_unary(b"x", timeout=5) == b"x"


async def _open(name: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    connected = socket.socket(socket.AF_UNIX)
    connected.connect(f"\0{name}")
    return await asyncio.open_unix_connection(sock=connected)


def _send(writer: asyncio.StreamWriter, frame: local_call_pb2.LocalFrame) -> None:
    payload = frame.SerializeToString()
    writer.write(struct.pack("<I", len(payload)) + payload)
