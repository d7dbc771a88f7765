import asyncio
import inspect
import signal
import sys
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

import grpc
import pytest

from mesh.client import Channels, connect, mesh_errors, remaining_s
from mesh.errors import DeadlineExceeded, MessageTooLarge, WorkerUnavailable
from mesh.server import MeshServer
from tests.fakes import FakeClock
from tests.loop_clock import LoopClock
from tests.mesh.echo import NAME, EchoStub, add_echo, connect_locally, serving

MIB = 1024 * 1024


async def echo(request: bytes, context: Any) -> bytes:
    return request


async def start_echo(address: str = "127.0.0.1:0", **behaviors: Any) -> MeshServer:
    server = MeshServer(address)
    server.add(lambda servicer, grpc_server: add_echo(servicer, grpc_server), behaviors, NAME)
    await server.start()
    return server


# GR-01
@pytest.mark.usefixtures("transport")
@pytest.mark.parametrize("size", [4 * MIB - 1, 4 * MIB, 4 * MIB + 1, 16 * MIB - 64])
async def test_messages_up_to_the_limit_pass_in_both_directions(size: int) -> None:
    async with serving(UnaryUnary=echo) as stub:
        assert len(await stub.unary_unary(bytes(size), timeout=30)) == size


# GR-01
@pytest.mark.usefixtures("transport")
async def test_a_request_above_the_clients_limit_is_refused_clearly() -> None:
    async with serving(UnaryUnary=echo) as stub:
        with pytest.raises(MessageTooLarge, match=str(32 * MIB)), mesh_errors():
            await stub.unary_unary(bytes(32 * MIB), timeout=30)


# GR-01
@pytest.mark.usefixtures("transport")
async def test_a_request_above_the_servers_limit_is_refused_clearly() -> None:
    server = MeshServer(max_message_bytes=MIB)
    async with serving(server=server, UnaryUnary=echo) as stub:
        with pytest.raises(MessageTooLarge, match=str(MIB)), mesh_errors():
            await stub.unary_unary(bytes(2 * MIB), timeout=30)


# GR-01
@pytest.mark.usefixtures("transport")
@pytest.mark.parametrize("kind", ["UnaryUnary", "UnaryStream"])
async def test_an_answer_above_the_limit_is_refused_clearly(kind: str) -> None:
    async def large(request: bytes, context: Any) -> bytes:
        return bytes(32 * MIB)

    async def large_stream(request: bytes, context: Any) -> AsyncGenerator[bytes, None]:
        yield bytes(32 * MIB)

    async with serving(UnaryUnary=large, UnaryStream=large_stream) as stub:
        with pytest.raises(MessageTooLarge), mesh_errors():
            await stub.call(kind)


# GR-06
@pytest.mark.usefixtures("transport")
async def test_the_deadline_shrinks_from_hop_to_hop() -> None:
    seen: list[float] = []

    async def last(request: bytes, context: Any) -> bytes:
        seen.append(remaining_s(context, default=60))
        return b""

    async def relay(request: bytes, context: Any) -> bytes:
        seen.append(remaining_s(context, default=60))
        await asyncio.sleep(0.1)
        await next_hop.unary_unary(b"", timeout=remaining_s(context, default=60))
        return b""

    async with serving(UnaryUnary=last) as next_hop, serving(UnaryUnary=relay) as stub:
        await stub.unary_unary(b"", timeout=50)

    assert 50 >= seen[0] >= seen[1] + 0.1
    assert seen[1] > 40


@pytest.mark.usefixtures("transport")
async def test_the_remaining_time_is_never_more_than_the_caller_gave() -> None:
    seen: list[float] = []

    async def note(request: bytes, context: Any) -> bytes:
        seen.append(remaining_s(context, default=60))
        return b""

    async with serving(UnaryUnary=note) as stub:
        for timeout_s in (0.5, 5, 60, 300, 3600):
            await stub.unary_unary(b"", timeout=timeout_s)
            assert 0.9 * timeout_s - 0.1 < seen[-1] <= timeout_s
        await stub.unary_unary(b"")

    assert seen[-1] == 60


# GR-06
@pytest.mark.usefixtures("transport")
async def test_a_silent_server_costs_the_deadline_and_no_more() -> None:
    async def hang(request: bytes, context: Any) -> bytes:
        await asyncio.Event().wait()
        return b""

    async with serving(UnaryUnary=hang) as stub:
        started = time.monotonic()
        async with LoopClock() as clock:
            with pytest.raises(DeadlineExceeded), mesh_errors():
                await stub.unary_unary(b"", timeout=0.2)

    assert time.monotonic() - started > 0.15
    assert clock.now_s < 1


FROZEN = """
import asyncio
from tests.mesh.echo import NAME, add_echo
from mesh.server import MeshServer

async def stream(request, context):
    yield b"first"
    await asyncio.Event().wait()

async def main():
    server = MeshServer()
    server.add(lambda servicer, grpc_server: add_echo(servicer, grpc_server),
               {"UnaryStream": stream}, NAME)
    print(await server.start(), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


# GR-06, KV-19
@pytest.mark.parametrize("connects", [connect, connect_locally])
async def test_a_frozen_server_is_noticed_within_seconds_without_a_deadline(
    connects: Callable[[str], Any],
) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", FROZEN, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    channel = connects((await process.stdout.readline()).decode().strip())
    if inspect.isawaitable(channel):
        channel = await channel
    call = EchoStub(channel).unary_stream(b"")
    assert await call.read() == b"first"

    process.send_signal(signal.SIGSTOP)

    async with LoopClock() as clock:
        with pytest.raises(WorkerUnavailable), mesh_errors():
            await call.read()
    assert clock.now_s < 8
    process.kill()
    await process.wait()
    await channel.close()


async def test_nobody_at_the_address_is_worker_unavailable_in_bounded_time() -> None:
    server = await start_echo()
    await server.stop(0)
    channel = connect(server.address)
    started = time.monotonic()

    with pytest.raises(WorkerUnavailable), mesh_errors():
        await EchoStub(channel).unary_unary(b"", timeout=30)

    assert time.monotonic() - started < 10
    await channel.close()


async def test_a_call_made_while_the_server_restarts_is_sent_again() -> None:
    server = await start_echo(UnaryUnary=echo)
    channel = connect(server.address)
    stub = EchoStub(channel)
    assert await stub.unary_unary(b"before", timeout=10) == b"before"
    await server.stop(0)

    calling = asyncio.ensure_future(stub.unary_unary(b"after", timeout=10))
    await asyncio.sleep(0.05)
    restarted = await start_echo(server.address, UnaryUnary=echo)

    assert await calling == b"after"
    await channel.close()
    await restarted.stop(0)


async def test_a_stream_whose_server_dies_ends_as_worker_unavailable() -> None:
    async def stream(request: bytes, context: Any) -> AsyncGenerator[bytes, None]:
        yield b"first"
        await asyncio.Event().wait()

    server = await start_echo(UnaryStream=stream)
    channel = connect(server.address)
    call = EchoStub(channel).unary_stream(b"")
    assert await call.read() == b"first"

    await server.stop(0)

    with pytest.raises(WorkerUnavailable), mesh_errors():
        await call.read()
    await channel.close()


async def test_several_addresses_share_the_calls_and_outlive_one_of_them() -> None:
    num_calls = [0, 0]

    def counting(index: int) -> Any:
        async def count(request: bytes, context: Any) -> bytes:
            num_calls[index] += 1
            return b""

        return count

    servers = [await start_echo(UnaryUnary=counting(index)) for index in (0, 1)]
    channel = connect([server.address for server in servers])
    stub = EchoStub(channel)
    async with asyncio.timeout(10):
        while 0 in num_calls:
            await stub.unary_unary(b"", timeout=5)

    await servers[0].stop(0)
    before = num_calls[1]
    for _ in range(10):
        await stub.unary_unary(b"", timeout=5)

    assert num_calls[1] == before + 10
    await channel.close()
    await servers[1].stop(0)


@pytest.mark.parametrize(
    "addresses", [[], ["localhost:1", "127.0.0.1:2"], ["127.0.0.1:1", "[::1]:2"], ["a:1", "b:1"]]
)
def test_addresses_that_cannot_be_used_together_are_refused(addresses: list[str]) -> None:
    with pytest.raises(ValueError, match="address"):
        connect(addresses)


async def test_channels_are_shared_by_address_and_closed_together() -> None:
    server = await start_echo(UnaryUnary=echo)
    async with Channels() as channels:
        channel = channels.get(server.address)
        assert channels.get(server.address) is channel
        assert channels.get("127.0.0.1:1") is not channel
        assert await EchoStub(channel).unary_unary(b"x", timeout=5) == b"x"

    assert channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN
    await server.stop(0)


async def test_a_new_process_at_an_old_address_has_a_channel_of_its_own() -> None:
    server = await start_echo(UnaryUnary=echo)
    async with Channels() as channels:
        old = channels.get(server.address, "1")
        assert await EchoStub(old).unary_unary(b"x", timeout=5) == b"x"
        await server.stop(0)
        with pytest.raises(grpc.aio.AioRpcError):
            await EchoStub(old).unary_unary(b"x", timeout=5)

        server = await start_echo(server.address, UnaryUnary=echo)
        new = channels.get(server.address, "2")

        assert new is not old
        assert await EchoStub(new).unary_unary(b"x", timeout=5) == b"x"
        # News of its predecessor may come late.
        assert channels.get(server.address, "1") is new
        assert channels.get(server.address) is new

    for channel in (old, new):
        assert channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN
    await server.stop(0)


async def test_channels_that_nobody_asks_for_any_more_are_closed() -> None:
    clock = FakeClock()
    server = await start_echo(UnaryUnary=echo)
    async with Channels(max_rest_s=60, clock=clock) as channels:
        gone = channels.get("127.0.0.1:1")
        used = channels.get(server.address)
        clock.advance(50)
        assert channels.get(server.address) is used
        clock.advance(20)

        channels.get("127.0.0.1:2")

        assert channels.get(server.address) is used
        assert channels.get("127.0.0.1:1") is not gone
        assert await EchoStub(used).unary_unary(b"x", timeout=5) == b"x"
    assert gone.get_state() is grpc.ChannelConnectivity.SHUTDOWN
    await server.stop(0)


async def test_a_process_becomes_known_without_a_new_channel() -> None:
    async with Channels() as channels:
        channel = channels.get("127.0.0.1:1")

        assert channels.get("127.0.0.1:1", "1") is channel


async def test_a_forgotten_address_gets_a_new_channel() -> None:
    async with Channels() as channels:
        channel = channels.get("127.0.0.1:1")

        await channels.forget("127.0.0.1:1")
        await channels.forget("127.0.0.1:2")

        assert channel.get_state() is grpc.ChannelConnectivity.SHUTDOWN
        assert channels.get("127.0.0.1:1") is not channel


async def test_the_callers_own_metadata_is_kept() -> None:
    seen: list[dict[str, Any]] = []

    async def note(request: bytes, context: Any) -> bytes:
        seen.append(dict(context.invocation_metadata()))
        return b""

    async with serving(UnaryUnary=note) as stub:
        await stub.unary_unary(b"", metadata=(("own", "value"),))
        await stub.unary_unary(b"", metadata=grpc.aio.Metadata(("own", "other")))

    assert [metadata["own"] for metadata in seen] == ["value", "other"]


async def test_proxies_of_the_world_outside_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("grpc_proxy", "http://127.0.0.1:9")

    async with serving(UnaryUnary=echo) as stub:
        assert await stub.unary_unary(b"x", timeout=5) == b"x"


async def test_cancelling_the_caller_cancels_the_call_and_stays_a_cancellation() -> None:
    is_started, is_aborted = asyncio.Event(), asyncio.Event()

    async def hang(request: bytes, context: Any) -> bytes:
        is_started.set()
        try:
            await asyncio.Event().wait()
        finally:
            is_aborted.set()
        return b""

    async def call(stub: EchoStub) -> None:
        with mesh_errors():
            await stub.unary_unary(b"")

    async with serving(UnaryUnary=hang) as stub:
        calling = asyncio.create_task(call(stub))
        await is_started.wait()

        calling.cancel()

        with pytest.raises(asyncio.CancelledError):
            await calling
        async with asyncio.timeout(20):
            await is_aborted.wait()
