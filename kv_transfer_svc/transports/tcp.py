"""Blocks from another machine: parallel streams from its segment straight into ours."""

import socket
import ssl
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from kv_transfer_svc.runs import BlockRun, deal_runs, split_runs
from kv_transfer_svc.segments import Segment
from kv_transfer_svc.transports import block_wire
from kv_transfer_svc.transports.base import (
    Address,
    FollowingRead,
    RemoteSource,
    to_their_end,
)
from kv_transfer_svc.transports.block_server import shut_down
from kv_transfer_svc.transports.block_wire import PeerError, ReadRequest, WaitFor, WireError
from mesh.errors import KvTransferFailed
from mesh.telemetry import current_traceparent

# Below this a second stream costs more than it brings.
_MIN_STREAM_BYTES = 4 << 20
_MAX_IDLE_CONNECTIONS = 16
# Threads that sleep most of the time. What is beyond begins later.
_MAX_FOLLOWERS = 64


class TcpTransport:
    """Owns the threads that receive and the connections that wait for the next read."""

    def __init__(
        self,
        *,
        num_streams: int = 4,
        num_threads: int = 16,
        connect_timeout_s: float = 2.0,
        stall_timeout_s: float = 5.0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._num_streams = num_streams
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="kv-receive")
        # Others: who waits for blocks keeps nobody from reading those that are there.
        self._followers = ThreadPoolExecutor(_MAX_FOLLOWERS, thread_name_prefix="kv-follow")
        self._connections = _Connections(connect_timeout_s, stall_timeout_s, tls)

    async def read(
        self,
        source: RemoteSource,
        destination: Segment,
        runs: Sequence[BlockRun],
        generations: NDArray[np.uint32],
    ) -> int:
        """Return the bytes that were written, when the last of them is.

        The destination is not written to any more once the call has ended, in whichever way:
        only this process's threads write, and cancelling cuts their connections and waits for
        them. Raises KvTransferFailed when not everything arrived as it was sent.
        """
        parts = split_runs(runs, self._num_streams_for(source, runs))
        streams = _Streams(self._connections, source, destination, current_traceparent() or "")
        works = [
            self._threads.submit(streams.read, *share)
            for share in _with_generations(parts, generations)
        ]
        return await _to_their_end(works, streams)

    async def follow(self, reading: FollowingRead) -> int:
        """The same for blocks that are still being filled: each is sent when it is."""
        source, runs = reading.source, reading.runs
        parts = deal_runs(
            runs,
            self._num_streams_for(source, runs),
            block_wire.piece_blocks(source.block_bytes),
        )
        streams = _Streams(
            self._connections, source, reading.destination, current_traceparent() or ""
        )
        arriving = _Arriving(reading, len(parts))
        last = sum(run.num_blocks for run in runs) - 1
        works = []
        for cuts, places in parts:
            wait_for = WaitFor.TOKEN if places[-1] == last else WaitFor.FILLED
            works.append(
                self._followers.submit(
                    streams.follow, cuts, reading.generations[places], wait_for, arriving
                )
            )
        return await _to_their_end(works, streams)

    def close(self) -> None:
        self._threads.shutdown(wait=True)
        self._followers.shutdown(wait=True)
        self._connections.close()

    def _num_streams_for(self, source: RemoteSource, runs: Sequence[BlockRun]) -> int:
        num_bytes = sum(run.num_blocks for run in runs) * source.block_bytes
        return max(1, min(self._num_streams, num_bytes // _MIN_STREAM_BYTES))


class _Streams:
    """The connections over which one read runs, so that it can be cut short."""

    def __init__(
        self,
        connections: "_Connections",
        source: RemoteSource,
        destination: Segment,
        traceparent: str,
    ) -> None:
        self._connections = connections
        self._traceparent = traceparent
        self._source = source
        self._destination = destination
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._is_cut = False

    def read(self, runs: Sequence[BlockRun], generations: NDArray[np.uint32]) -> int:
        """Fill the destination's blocks; in a thread."""
        with self._connection() as connection:
            return self._receive(connection, runs, generations)

    def follow(
        self,
        runs: Sequence[BlockRun],
        generations: NDArray[np.uint32],
        wait_for: WaitFor,
        arriving: "_Arriving",
    ) -> int:
        """The same as the source fills its own; in a thread."""
        with self._connection() as connection:
            self._ask(connection, runs, generations, wait_for)
            num_bytes = self._receive_as_filled(connection, runs, arriving)
            next_token_id = block_wire.await_end(connection, wait_for)
        arriving.end_stream(next_token_id)
        return num_bytes

    def cut(self) -> None:
        """Make every stream fail at once."""
        with self._lock:
            self._is_cut = True
            for connection in self._open:
                shut_down(connection)

    @contextmanager
    def _connection(self) -> Iterator[socket.socket]:
        host, port = self._source.data_address
        try:
            with (
                self._connections.lend(self._source) as connection,
                self._cuttable(connection),
            ):
                yield connection
        except (OSError, WireError, PeerError) as error:
            raise KvTransferFailed(f"reading from {host}:{port}: {error}") from error

    @contextmanager
    def _cuttable(self, connection: socket.socket) -> Iterator[None]:
        with self._lock:
            if self._is_cut:
                raise ConnectionError("the read was stopped")
            self._open.add(connection)
        try:
            yield
        finally:
            with self._lock:
                self._open.discard(connection)
                if self._is_cut:
                    # It was shut down after its last byte: nobody may use it again.
                    raise ConnectionError("the read was stopped")

    def _receive(
        self,
        connection: socket.socket,
        runs: Sequence[BlockRun],
        generations: NDArray[np.uint32],
    ) -> int:
        self._ask(connection, runs, generations, WaitFor.NOTHING)
        num_bytes = 0
        for run in runs:
            self._destination.make_resident(run.destination, run.num_blocks, for_writing=True)
            for piece in block_wire.pieces(
                run.destination, run.num_blocks, self._source.block_bytes
            ):
                written = self._destination.bytes_of(piece)
                block_wire.receive_piece(connection, written)
                num_bytes += len(written)
        block_wire.receive_end(connection)
        return num_bytes

    def _receive_as_filled(
        self, connection: socket.socket, runs: Sequence[BlockRun], arriving: "_Arriving"
    ) -> int:
        for run in runs:
            # While there is time.
            self._destination.make_resident(run.destination, run.num_blocks, for_writing=True)
        block_bytes, num_bytes = self._source.block_bytes, 0
        for run in runs:
            room = self._destination.bytes_of(
                slice(run.destination, run.destination + run.num_blocks)
            )
            while len(room):
                frame = block_wire.await_piece(connection, len(room), block_bytes)
                with arriving.piece(frame.num_bytes):
                    block_wire.receive_payload(connection, frame, room[: frame.num_bytes])
                num_bytes += frame.num_bytes
                room = room[frame.num_bytes :]
        return num_bytes

    def _ask(
        self,
        connection: socket.socket,
        runs: Sequence[BlockRun],
        generations: NDArray[np.uint32],
        wait_for: WaitFor,
    ) -> None:
        source = self._source
        request = ReadRequest(
            source.token,
            source.engine_id,
            source.block_bytes,
            np.array([(run.source, run.num_blocks) for run in runs], np.uint32),
            generations,
            self._traceparent,
            wait_for,
        )
        block_wire.send_request(connection, request)


class _Arriving:
    """What the streams of a following read receive, together."""

    def __init__(self, reading: FollowingRead, num_streams: int) -> None:
        self._progress = reading.progress
        self._on_arrival = reading.on_arrival
        self._lock = threading.Lock()
        self._num_streams_left = num_streams
        self._num_pieces_now = 0
        self._busy_since = 0.0

    @contextmanager
    def piece(self, num_bytes: int) -> Iterator[None]:
        """Count what is received inside the block, and the time in which any stream does so."""
        with self._lock:
            if self._num_pieces_now == 0:
                self._busy_since = time.perf_counter()
            self._num_pieces_now += 1
        try:
            yield
        except BaseException:
            num_bytes = 0
            raise
        finally:
            with self._lock:
                self._num_pieces_now -= 1
                if self._num_pieces_now == 0:
                    self._progress.copy_s += time.perf_counter() - self._busy_since
                self._progress.num_bytes += num_bytes

    def end_stream(self, next_token_id: int | None) -> None:
        """A stream has received all it was to; one has the token too."""
        with self._lock:
            if next_token_id is not None:
                self._progress.next_token_id = next_token_id
            self._num_streams_left -= 1
            if self._num_streams_left:
                return
        token_id = self._progress.next_token_id
        assert token_id is not None, "one of the streams waits for it"
        self._on_arrival(token_id)


class _Connections:
    """Connections to data ports, opened when needed and kept for the next read."""

    def __init__(
        self, connect_timeout_s: float, stall_timeout_s: float, tls: ssl.SSLContext | None
    ) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._tls = tls
        self._lock = threading.Lock()
        self._idle: dict[Address, list[socket.socket]] = defaultdict(list)

    @contextmanager
    def lend(self, source: RemoteSource) -> Iterator[socket.socket]:
        """A connection for one read; after a failure nobody gets it again."""
        connection = self._take_idle(source.data_address) or self._connect(source)
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        with self._lock:
            idle = self._idle[source.data_address]
            idle.append(connection)
            surplus = idle.pop(0) if len(idle) > _MAX_IDLE_CONNECTIONS else None
        if surplus is not None:
            surplus.close()

    def close(self) -> None:
        with self._lock:
            for idle in self._idle.values():
                for connection in idle:
                    connection.close()
            self._idle.clear()

    def _take_idle(self, address: Address) -> socket.socket | None:
        while True:
            with self._lock:
                idle = self._idle.get(address)
                connection = idle.pop() if idle else None
                if not idle:
                    self._idle.pop(address, None)
            if connection is None or not block_wire.has_ended(connection):
                return connection
            connection.close()

    def _connect(self, source: RemoteSource) -> socket.socket:
        if source.uses_tls != (self._tls is not None):
            ours, theirs = ("has", "none") if self._tls is not None else ("has no", "one")
            raise KvTransferFailed(f"this agent {ours} TLS certificate, the other has {theirs}")
        host, _ = source.data_address
        connection = socket.create_connection(source.data_address, self._connect_timeout_s)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection, server_hostname=host)
            connection.settimeout(self._stall_timeout_s)
        except BaseException:
            connection.close()
            raise
        return connection


async def _to_their_end(works: Sequence["Future[int]"], streams: _Streams) -> int:
    def stop() -> None:
        for work in works:
            work.cancel()
        streams.cut()

    return await to_their_end(works, stop)


def _with_generations(
    shares: Sequence[Sequence[BlockRun]], generations: NDArray[np.uint32]
) -> Iterator[tuple[Sequence[BlockRun], NDArray[np.uint32]]]:
    start = 0
    for runs in shares:
        end = start + sum(run.num_blocks for run in runs)
        yield runs, generations[start:end]
        start = end
