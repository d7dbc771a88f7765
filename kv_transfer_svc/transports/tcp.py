"""Blocks from another machine: parallel streams from its segment straight into ours."""

import socket
import ssl
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from kv_transfer_svc.runs import BlockRun, split_runs
from kv_transfer_svc.segments import Segment
from kv_transfer_svc.transports import block_wire
from kv_transfer_svc.transports.base import (
    FollowingRead,
    RemoteSource,
    to_their_end,
)
from kv_transfer_svc.transports.block_server import shut_down
from kv_transfer_svc.transports.block_wire import PeerError, ReadRequest, WireError
from kv_transfer_svc.transports.connections import Connections
from kv_transfer_svc.transports.segment_copy import CopyProgress
from mesh.errors import KvTransferFailed
from mesh.telemetry import Stopwatch, current_traceparent

# Below this a second stream costs more than it brings.
_MIN_STREAM_BYTES = 4 << 20
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
        self._connections = Connections(connect_timeout_s, stall_timeout_s, tls)

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
        """The same for blocks that are still being filled: each is sent when it is.

        Over one connection: there is time for all but the last, and each stream is a thread to
        wake on both sides.
        """
        streams = _Streams(
            self._connections, reading.source, reading.destination, current_traceparent() or ""
        )
        return await _to_their_end([self._followers.submit(streams.follow, reading)], streams)

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
        connections: Connections,
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

    def follow(self, reading: FollowingRead) -> int:
        """The same as the source fills its own; in a thread."""
        with self._connection() as connection:
            self._ask(connection, reading.runs, reading.generations, follows=True)
            num_bytes = self._receive_as_filled(connection, reading.runs, reading.progress)
            next_token_id = block_wire.await_end(connection)
        reading.progress.next_token_id = next_token_id
        reading.on_arrival(next_token_id)
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
        self._ask(connection, runs, generations)
        num_bytes = 0
        for run in runs:
            self._destination.make_resident(run.destination, run.num_blocks)
            for piece in block_wire.pieces(
                run.destination, run.num_blocks, self._source.block_bytes
            ):
                written = self._destination.bytes_of(piece)
                block_wire.receive_piece(connection, written)
                num_bytes += len(written)
        block_wire.receive_end(connection)
        return num_bytes

    def _receive_as_filled(
        self, connection: socket.socket, runs: Sequence[BlockRun], progress: CopyProgress
    ) -> int:
        for run in runs:
            # While there is time.
            self._destination.make_resident(run.destination, run.num_blocks)
        for run in runs:
            blocks = slice(run.destination, run.destination + run.num_blocks)
            room = self._destination.bytes_of(blocks)
            while len(room):
                frame = block_wire.await_piece(connection, len(room), self._source.block_bytes)
                stopwatch = Stopwatch()
                block_wire.receive_payload(connection, frame, room[: frame.num_bytes])
                progress.copy_s += stopwatch.elapsed_s
                progress.num_bytes += frame.num_bytes
                room = room[frame.num_bytes :]
        return progress.num_bytes

    def _ask(
        self,
        connection: socket.socket,
        runs: Sequence[BlockRun],
        generations: NDArray[np.uint32],
        *,
        follows: bool = False,
    ) -> None:
        source = self._source
        request = ReadRequest(
            source.token,
            source.engine_id,
            source.block_bytes,
            np.array([(run.source, run.num_blocks) for run in runs], np.uint32),
            generations,
            self._traceparent,
            follows,
        )
        block_wire.send_request(connection, request)


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
