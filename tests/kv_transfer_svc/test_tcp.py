"""Pulls between two agents over TCP: every byte checked, none after the end."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from kv_transfer_svc.pulls import Pull
from kv_transfer_svc.runs import BlockRun
from kv_transfer_svc.segments import Segment, SegmentSpec
from kv_transfer_svc.tls import TlsFiles
from kv_transfer_svc.transports import block_wire
from kv_transfer_svc.transports.base import FollowingRead, RemoteSource
from kv_transfer_svc.transports.segment_copy import CopyProgress
from kv_transfer_svc.transports.tcp import TcpTransport
from mesh import telemetry
from mesh.errors import InvalidRequest, KvTransferFailed, LayoutMismatch
from tests.transfer_agents import RunningAgent, pull_from, start_agent

MakeSegment = Callable[..., SegmentSpec]
StartAgent = Callable[..., Any]

# Large enough for several streams and for more than a socket's buffers hold.
BIG = {"num_blocks": 64, "block_bytes": 1 << 19}
ALL = list(range(64))


@pytest.fixture
async def start() -> AsyncIterator[StartAgent]:
    async with AsyncExitStack() as stack:

        async def start_one(**options: Any) -> RunningAgent:
            agent = await start_agent(**options)
            stack.push_async_callback(agent.stop)
            return agent

        yield start_one


def read_blocks(spec: SegmentSpec) -> Any:
    blocks = np.frombuffer(Path(spec.path).read_bytes(), np.uint8)[: spec.num_bytes]
    return blocks.reshape(spec.num_blocks, spec.block_bytes)


async def test_blocks_of_another_machine_arrive_and_no_others_change(
    start: StartAgent, make_segment: MakeSegment
) -> None:
    here, there = await start(), await start()
    source, destination = make_segment("p"), make_segment("d")
    there.attach(source)
    here.attach(destination)
    before = read_blocks(destination)

    moved = await here.agent.pull(pull_from(there, [3, 4, 9], [0, 1, 5]))

    after = read_blocks(destination)
    assert np.array_equal(after[[0, 1, 5]], read_blocks(source)[[3, 4, 9]])
    others = [2, 3, 4, *range(6, 16)]
    assert np.array_equal(after[others], before[others])
    assert (moved.num_bytes, moved.num_runs, moved.transport) == (15000, 2, "tcp")


async def test_scattered_blocks_arrive_over_several_streams(
    start: StartAgent, make_segment: MakeSegment
) -> None:
    here, there = await start(num_streams=3), await start()
    source, destination = make_segment("p", **BIG), make_segment("d", **BIG)
    there.attach(source)
    here.attach(destination)
    shuffled = np.random.default_rng(1).permutation(64).tolist()

    for _ in range(2):  # the second time over the same connections
        await here.agent.pull(pull_from(there, shuffled, ALL))

        assert np.array_equal(read_blocks(destination), read_blocks(source)[shuffled])


async def test_what_the_other_machine_sends_is_part_of_the_readers_trace(
    start: StartAgent, make_segment: MakeSegment
) -> None:
    # OB-04
    here, there = await start(num_streams=3), await start()
    there.attach(make_segment("p", **BIG))
    here.attach(make_segment("d", **BIG))
    exporter = InMemorySpanExporter()
    telemetry.start_tracing("kv_transfer", SimpleSpanProcessor(exporter))
    try:
        with telemetry.span("kv.pull"):
            await here.agent.pull(pull_from(there, ALL, ALL))
        pull, *sends = reversed(exporter.get_finished_spans())
        await here.agent.pull(pull_from(there, ALL, ALL))
        assert len(exporter.get_finished_spans()) == len(sends) + 1
    finally:
        telemetry.shutdown()

    assert len(sends) == 3
    for send in sends:
        assert send.name == "kv.send"
        assert send.parent is not None
        assert pull.context is not None
        assert (send.parent.trace_id, send.parent.span_id) == (
            pull.context.trace_id,
            pull.context.span_id,
        )
        assert (send.end_time or 0) <= (pull.end_time or 0)
    sent = [dict(send.attributes or {})["pdmesh.kv.bytes"] for send in sends]
    assert sum(int(str(one)) for one in sent) == 64 << 19


async def test_engine_of_this_machine_is_read_from_memory_whatever_the_caller_says(
    start: StartAgent, make_segment: MakeSegment
) -> None:
    here, there = await start(), await start()
    for name in ("p", "d"):
        here.attach(make_segment(name))

    moved = await here.agent.pull(pull_from(there, [1], [2]))

    assert moved.transport == "shared_memory"


async def test_engine_that_its_machine_does_not_know_is_named(
    start: StartAgent, make_segment: MakeSegment
) -> None:
    # KV-23
    here, there = await start(), await start()
    here.attach(make_segment("d"))

    with pytest.raises(KvTransferFailed, match="'p' is not attached"):
        await here.agent.pull(pull_from(there, [1], [1]))


async def test_agent_that_calls_itself_for_an_engine_that_left_says_so(
    start: StartAgent, make_segment: MakeSegment
) -> None:
    here = await start()
    here.attach(make_segment("d"))

    with pytest.raises(KvTransferFailed, match="'p' is not attached"):
        await here.agent.pull(pull_from(here, [1], [1]))


async def test_different_layouts_are_refused_before_a_byte_moves(
    start: StartAgent, make_segment: MakeSegment
) -> None:
    # KV-25
    here, there = await start(), await start()
    there.attach(make_segment("p", fingerprint="aaa"))
    destination = make_segment("d", fingerprint="bbb")
    here.attach(destination)
    before = read_blocks(destination)

    with pytest.raises(LayoutMismatch, match=r"aaa and bbb|bbb and aaa"):
        await here.agent.pull(pull_from(there, [1], [1]))

    assert np.array_equal(read_blocks(destination), before)


async def test_restarted_agent_is_asked_again(start: StartAgent, make_segment: MakeSegment) -> None:
    # KV-23
    here, there = await start(), await start()
    source = make_segment("p")
    there.attach(source)
    destination = make_segment("d")
    here.attach(destination)
    await here.agent.pull(pull_from(there, [1], [1]))

    await there.stop()
    with pytest.raises(KvTransferFailed):
        await here.agent.pull(pull_from(there, [2], [2]))
    again = await start(listen=there.address)
    again.attach(source)
    await here.agent.pull(pull_from(again, [3], [3]))

    assert np.array_equal(read_blocks(destination)[3], read_blocks(source)[3])


async def test_token_of_a_former_agent_is_refused(
    start: StartAgent, make_segment: MakeSegment
) -> None:
    # KV-23
    here, there = await start(), await start()
    there.attach(make_segment("p"))
    destination = here.attach(make_segment("d"))
    assert here.agent.network is not None
    located = await here.agent.network.peers.locate(there.address, "p")
    stale = replace(located, token=bytes(block_wire.TOKEN_BYTES))

    with pytest.raises(KvTransferFailed, match="token is another agent's"):
        await read(here, stale, destination)


async def read(here: RunningAgent, source: RemoteSource, destination: Segment) -> int:
    assert here.agent.network is not None
    return await here.agent.network.tcp.read(
        source, destination, [BlockRun(1, 1, 1)], np.empty(0, np.uint32)
    )


class Misbehaving:
    """A data port that answers every connection as the test has it."""

    def __init__(self, answer: Callable[[socket.socket, SegmentSpec], None]) -> None:
        self._answer = answer
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.done = threading.Event()

    def source(self, spec: SegmentSpec) -> RemoteSource:
        threading.Thread(target=self._serve, args=(spec,), daemon=True).start()
        return RemoteSource(
            spec.engine_id,
            spec.block_bytes,
            spec.num_blocks,
            spec.layout_fingerprint,
            self._listener.getsockname(),
            bytes(block_wire.TOKEN_BYTES),
            uses_tls=False,
        )

    def _serve(self, spec: SegmentSpec) -> None:
        connection, _ = self._listener.accept()
        with self._listener, connection:
            block_wire.receive_request(connection, connection.recv(1))
            self._answer(connection, spec)
            self.done.wait(10)


def piece_with_a_wrong_bit(connection: socket.socket, spec: SegmentSpec) -> None:
    payload = bytes(spec.block_bytes)
    frame = block_wire._FRAME.pack(block_wire.Kind.PIECE, len(payload), 1234)
    connection.sendall(frame + payload)


def piece_of_another_size(connection: socket.socket, spec: SegmentSpec) -> None:
    block_wire.send_piece(connection, memoryview(bytes(spec.block_bytes + 1)))


def end_instead_of_a_piece(connection: socket.socket, spec: SegmentSpec) -> None:
    block_wire.send_end(connection)


def half_a_piece(connection: socket.socket, spec: SegmentSpec) -> None:
    frame = block_wire._FRAME.pack(block_wire.Kind.PIECE, spec.block_bytes, 0)
    connection.sendall(frame + bytes(10))
    connection.shutdown(socket.SHUT_WR)


def piece_without_an_end(connection: socket.socket, spec: SegmentSpec) -> None:
    block_wire.send_piece(connection, memoryview(bytes(spec.block_bytes)))
    connection.shutdown(socket.SHUT_WR)


def complaint(connection: socket.socket, spec: SegmentSpec) -> None:
    block_wire.send_piece(connection, memoryview(bytes(spec.block_bytes)))
    block_wire.send_error(connection, "reused meanwhile")


def silence(connection: socket.socket, spec: SegmentSpec) -> None:
    connection.sendall(b"\1")


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (piece_with_a_wrong_bit, "checksum differs"),
        (piece_of_another_size, "5001 bytes instead of 1 with 5000"),
        (end_instead_of_a_piece, "frame 2"),
        (half_a_piece, "ended in the middle"),
        (piece_without_an_end, "ended in the middle"),
        (complaint, "reused meanwhile"),
        (silence, "timed out"),
    ],
)
async def test_answer_that_is_not_whole_fails_the_read(
    start: StartAgent,
    make_segment: MakeSegment,
    answer: Callable[[socket.socket, SegmentSpec], None],
    problem: str,
) -> None:
    # KV-20
    here = await start(stall_timeout_s=0.3)
    destination = here.attach(make_segment("d"))
    misbehaving = Misbehaving(answer)

    with pytest.raises(KvTransferFailed, match=problem):
        await read(here, misbehaving.source(make_segment("p")), destination)

    misbehaving.done.set()


def waiting_then_a_wrong_bit(connection: socket.socket, spec: SegmentSpec) -> None:
    block_wire.send_waiting(connection)
    piece_with_a_wrong_bit(connection, spec)


def half_a_block(connection: socket.socket, spec: SegmentSpec) -> None:
    block_wire.send_piece(connection, memoryview(bytes(spec.block_bytes // 2)))


def end_without_a_token(connection: socket.socket, spec: SegmentSpec) -> None:
    block_wire.send_piece(connection, memoryview(bytes(spec.block_bytes)))
    block_wire.send_end(connection)


def token_without_a_piece(connection: socket.socket, spec: SegmentSpec) -> None:
    block_wire.send_end(connection, 7)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (waiting_then_a_wrong_bit, "checksum differs"),
        (piece_of_another_size, "5001 bytes instead"),
        (half_a_block, "2500 bytes instead"),
        (half_a_piece, "ended in the middle"),
        (token_without_a_piece, "frame 2"),
        (end_without_a_token, "0 bytes instead of 2 with 4"),
        (complaint, "reused meanwhile"),
        (silence, "timed out"),
    ],
)
async def test_answer_that_is_not_whole_fails_the_read_that_follows(
    start: StartAgent,
    make_segment: MakeSegment,
    answer: Callable[[socket.socket, SegmentSpec], None],
    problem: str,
) -> None:
    # KV-20
    here = await start(stall_timeout_s=0.3)
    destination = here.attach(make_segment("d"))
    misbehaving = Misbehaving(answer)
    assert here.agent.network is not None
    arrived: list[int] = []

    with pytest.raises(KvTransferFailed, match=problem):
        await here.agent.network.tcp.follow(
            FollowingRead(
                misbehaving.source(make_segment("p")),
                destination,
                [BlockRun(1, 1, 1)],
                np.ones(1, np.uint32),
                CopyProgress(),
                arrived.append,
            )
        )

    assert arrived == []
    misbehaving.done.set()


async def test_cancelled_pull_writes_nothing_after_its_end(
    start: StartAgent, make_segment: MakeSegment, monkeypatch: pytest.MonkeyPatch
) -> None:
    # KV-21
    here, there = await start(), await start()
    there.attach(make_segment("p", **BIG))
    destination = make_segment("d", **BIG)
    here.attach(destination)
    sent, may_go_on = threading.Event(), threading.Event()
    send_piece = block_wire.send_piece

    def slow_piece(connection: socket.socket, payload: memoryview) -> None:
        if sent.is_set():
            may_go_on.wait(10)
        send_piece(connection, payload)
        sent.set()

    monkeypatch.setattr(block_wire, "send_piece", slow_piece)
    pulling = asyncio.create_task(here.agent.pull(pull_from(there, ALL, ALL)))
    await asyncio.to_thread(sent.wait)

    pulling.cancel()
    async with asyncio.timeout(1):
        await asyncio.wait([pulling])
    at_its_end = read_blocks(destination)
    may_go_on.set()
    await there.stop()

    assert pulling.cancelled()
    assert here.agent.stats.num_active_pulls == 0
    assert np.array_equal(read_blocks(destination), at_its_end)


async def test_connection_of_a_cancelled_pull_serves_nobody_else(
    start: StartAgent, make_segment: MakeSegment
) -> None:
    here, there = await start(), await start()
    source, destination = make_segment("p", **BIG), make_segment("d", **BIG)
    there.attach(source)
    here.attach(destination)
    chance = np.random.default_rng(2)

    for _ in range(20):
        pulling = asyncio.create_task(here.agent.pull(pull_from(there, ALL, ALL)))
        await asyncio.wait([pulling], timeout=chance.random() * 0.02)
        pulling.cancel()
        await asyncio.wait([pulling])
    order = chance.permutation(64).tolist()
    await here.agent.pull(pull_from(there, order, ALL))

    assert np.array_equal(read_blocks(destination), read_blocks(source)[order])


async def test_agent_killed_in_the_middle_of_a_pull_fails_it_at_once(
    start: StartAgent, make_segment: MakeSegment, monkeypatch: pytest.MonkeyPatch
) -> None:
    # KV-19
    here, there = await start(), await start()
    there.attach(make_segment("p", **BIG))
    here.attach(make_segment("d", **BIG))
    has_begun = threading.Event()
    send_piece = block_wire.send_piece

    def slow_piece(connection: socket.socket, payload: memoryview) -> None:
        has_begun.set()
        send_piece(connection, payload)
        threading.Event().wait(0.05)

    monkeypatch.setattr(block_wire, "send_piece", slow_piece)
    pulling = asyncio.create_task(here.agent.pull(pull_from(there, ALL, ALL)))
    await asyncio.to_thread(has_begun.wait)

    await there.stop()

    async with asyncio.timeout(2):
        with pytest.raises(KvTransferFailed):
            await pulling


def with_generations(spec: SegmentSpec, generations: list[int]) -> SegmentSpec:
    with Path(spec.path).open("ab") as file:
        file.write(np.array(generations, "<u4").tobytes())
    return replace(spec, generations_offset=spec.num_bytes)


def set_generation(spec: SegmentSpec, block_id: int, generation: int) -> None:
    assert spec.generations_offset is not None
    with Path(spec.path).open("r+b") as file:
        file.seek(spec.generations_offset + 4 * block_id)
        file.write(np.array([generation], "<u4").tobytes())


@pytest.mark.parametrize("is_remote", [True, False])
async def test_block_with_another_generation_is_refused(
    start: StartAgent, make_segment: MakeSegment, is_remote: bool
) -> None:
    here = await start()
    there = await start() if is_remote else here
    source = with_generations(make_segment("p"), list(range(100, 116)))
    there.attach(source)
    destination = make_segment("d")
    here.attach(destination)
    before = read_blocks(destination)

    def pull(*generations: int) -> Pull:
        return replace(pull_from(there, [3, 4], [0, 1]), source_generations=generations)

    with pytest.raises(KvTransferFailed, match="has reused 1 of the blocks"):
        await here.agent.pull(pull(103, 105))
    assert np.array_equal(read_blocks(destination), before)
    with pytest.raises(InvalidRequest, match="1 generations for 2 blocks"):
        await here.agent.pull(pull(103))
    await here.agent.pull(pull(103, 104))
    assert np.array_equal(read_blocks(destination)[:2], read_blocks(source)[3:5])


async def test_block_reused_while_it_is_sent_fails_the_read(
    start: StartAgent, make_segment: MakeSegment, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = await start(), await start()
    source = with_generations(make_segment("p"), [7] * 16)
    there.attach(source)
    here.attach(make_segment("d"))
    send_piece = block_wire.send_piece

    def piece_then_reuse(connection: socket.socket, payload: memoryview) -> None:
        send_piece(connection, payload)
        set_generation(source, 3, 8)

    monkeypatch.setattr(block_wire, "send_piece", piece_then_reuse)

    with pytest.raises(KvTransferFailed, match="has reused 1 of the blocks"):
        await here.agent.pull(replace(pull_from(there, [3, 4], [0, 1]), source_generations=[7, 7]))


async def test_garbage_on_the_data_port_is_hung_up_on(
    start: StartAgent, make_segment: MakeSegment
) -> None:
    there = await start()
    there.attach(make_segment("p"))
    assert there.agent.network is not None
    port = there.agent.network.block_server.port

    for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"PDKV\1\0\xff\xff\xff\xff", bytes(100)):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(garbage)
        async with asyncio.timeout(2):
            # Some of it was never read, which makes the end a reset.
            with suppress(ConnectionResetError):
                assert await reader.read() == b""
        writer.close()


async def test_blocks_arrive_over_tls(
    start: StartAgent, make_segment: MakeSegment, tls_files: TlsFiles
) -> None:
    here, there = await start(tls=tls_files), await start(tls=tls_files)
    source, destination = make_segment("p", **BIG), make_segment("d", **BIG)
    there.attach(source)
    here.attach(destination)

    for _ in range(2):
        await here.agent.pull(pull_from(there, ALL, ALL))

    assert np.array_equal(read_blocks(destination), read_blocks(source))


async def test_cancelled_read_over_tls_ends_at_once(
    start: StartAgent, make_segment: MakeSegment, tls_files: TlsFiles
) -> None:
    here, there = await start(tls=tls_files), await start(tls=tls_files)
    there.attach(make_segment("p", **BIG))
    here.attach(make_segment("d", **BIG))

    for delay_s in (0.001, 0.005, 0.01, 0.02):
        pulling = asyncio.create_task(here.agent.pull(pull_from(there, ALL, ALL)))
        await asyncio.wait([pulling], timeout=delay_s)
        pulling.cancel()
        async with asyncio.timeout(2):
            await asyncio.wait([pulling])


async def test_agents_with_and_without_tls_do_not_talk(
    start: StartAgent, make_segment: MakeSegment, tls_files: TlsFiles
) -> None:
    here, there = await start(), await start(tls=tls_files)
    there.attach(make_segment("p"))
    here.attach(make_segment("d"))

    with pytest.raises(KvTransferFailed, match="has no TLS certificate"):
        await here.agent.pull(pull_from(there, [1], [1]))


async def test_agent_without_a_certificate_of_the_authority_reads_nothing(
    start: StartAgent, make_segment: MakeSegment, tls_files: TlsFiles
) -> None:
    there = await start(tls=tls_files)
    there.attach(make_segment("p"))
    assert there.agent.network is not None
    context = tls_files.client_context()
    bare = type(context)(context.protocol)
    bare.load_verify_locations(tls_files.authority)
    here = await start()
    destination = here.attach(make_segment("d"))
    located = await here.agent.network.peers.locate(there.address, "p")
    stranger = TcpTransport(tls=bare)
    try:
        with pytest.raises(KvTransferFailed):
            await stranger.read(located, destination, [BlockRun(1, 1, 1)], np.empty(0, np.uint32))
    finally:
        await asyncio.to_thread(stranger.close)
