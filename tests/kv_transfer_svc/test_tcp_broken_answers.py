"""A data port that answers wrongly fails the read, and nothing else."""

import asyncio
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from kv_transfer_svc.runs import BlockRun
from kv_transfer_svc.segments import SegmentSpec
from kv_transfer_svc.transports import block_wire
from kv_transfer_svc.transports.base import FollowingRead, RemoteSource
from kv_transfer_svc.transports.segment_copy import CopyProgress
from mesh.errors import KvTransferFailed
from tests.transfer_agents import read_one

MakeSegment = Callable[..., SegmentSpec]
StartAgent = Callable[..., Any]


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
            block_wire.receive_request(
                connection, connection.recv(1), bytes(block_wire.TOKEN_BYTES)
            )
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
    here = await start(stall_timeout_s=0.3 if answer is silence else 60)
    destination = here.attach(make_segment("d"))
    misbehaving = Misbehaving(answer)

    with pytest.raises(KvTransferFailed, match=problem):
        await read_one(here, misbehaving.source(make_segment("p")), destination)

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
    here = await start(stall_timeout_s=0.3 if answer is silence else 60)
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
        async with asyncio.timeout(20):
            # Some of it was never read, which makes the end a reset.
            with suppress(ConnectionResetError):
                assert await reader.read() == b""
        writer.close()


async def test_long_request_without_the_token_is_not_waited_for(start: StartAgent) -> None:
    """It would take memory from the agent, from whoever can reach the port."""
    there = await start(stall_timeout_s=60)
    assert there.agent.network is not None
    length = 32 << 20
    prefix = block_wire._PREFIX.pack(b"PDKV", block_wire._VERSION, length)
    body = block_wire._BODY.pack(bytes(block_wire.TOKEN_BYTES), 1, 0, 0, 0, 0, length)
    port = there.agent.network.block_server.port

    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(prefix + body)

    async with asyncio.timeout(20):
        assert await reader.read() == b""
    writer.close()
