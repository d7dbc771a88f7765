"""The data port: sends blocks of attached engines to other machines' agents."""

import logging
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from opentelemetry import trace

from kv_transfer_svc.filling import Filling
from kv_transfer_svc.segments import Segment, SegmentTable
from kv_transfer_svc.transports import block_wire
from kv_transfer_svc.transports.block_wire import ReadRequest
from mesh.errors import InvalidRequest, KvTransferFailed, LayoutMismatch, MeshError
from mesh.telemetry import extract_trace, is_tracing, span, use_span

logger = logging.getLogger(__name__)

_BACKLOG = 128
_CLOSE_TIMEOUT_S = 2.0
# Of accepting again after a failure, which may be there as long as nobody closes anything.
_ACCEPT_DELAY_S = 0.1
# In the time after which a reader gives up, where there is nothing to send yet.
_SIGNS_OF_LIFE = 4


class BlockServer:
    """Listens inside its block, a thread for each connection; sending releases the lock.

    It answers only those who show its token, which they learn from this very process.
    """

    def __init__(
        self,
        segments: SegmentTable,
        host: str,
        port: int = 0,
        *,
        tls: ssl.SSLContext | None = None,
        stall_timeout_s: float = 5.0,
        idle_timeout_s: float = 2 * block_wire.MAX_REST_S,
        max_connections: int = 256,
    ) -> None:
        self.token = secrets.token_bytes(block_wire.TOKEN_BYTES)
        self.uses_tls = tls is not None
        self._segments = segments
        self._address = (host, port)
        self._tls = tls
        self._stall_timeout_s = stall_timeout_s
        self._idle_timeout_s = idle_timeout_s
        self._max_connections = max_connections
        self._lock = threading.Lock()
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._closing = threading.Event()

    def __enter__(self) -> Self:
        family = socket.AF_INET6 if ":" in self._address[0] else socket.AF_INET
        self._listener = socket.create_server(self._address, family=family, backlog=_BACKLOG)
        self._accepting = threading.Thread(target=self._accept_for_ever, name="kv-accept")
        self._accepting.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        with self._lock:
            self._closing.set()
            open_now = dict(self._connections)
        # Wakes whoever waits on them, which closing does not.
        shut_down(self._listener)
        for connection in open_now:
            shut_down(connection)
        self._accepting.join()
        self._listener.close()
        for thread in open_now.values():
            thread.join(_CLOSE_TIMEOUT_S)

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    def _accept_for_ever(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if self._closing.is_set():
                    return
                # Out of descriptors, or a peer that went away again: others may still come.
                logger.warning("connection not accepted", extra={"reason": str(error)})
                self._closing.wait(_ACCEPT_DELAY_S)
                continue
            thread = threading.Thread(
                target=self._serve, args=(connection,), name="kv-send", daemon=True
            )
            with self._lock:
                is_welcome = not self._closing.is_set() and (
                    len(self._connections) < self._max_connections
                )
                if is_welcome:
                    self._connections[connection] = thread
            if is_welcome:
                thread.start()
            else:
                logger.warning("too many connections to the data port")
                connection.close()

    def _serve(self, accepted: socket.socket) -> None:
        connection = accepted
        try:
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            accepted.settimeout(self._stall_timeout_s)
            if self._tls is not None:
                connection = self._tls.wrap_socket(accepted, server_side=True)
                with self._lock:
                    # Wrapping takes the descriptor away from the socket that was accepted.
                    self._connections[connection] = self._connections.pop(accepted)
                    if self._closing.is_set():
                        shut_down(connection)
            while first_byte := _wait_for_request(connection, self._idle_timeout_s):
                connection.settimeout(self._stall_timeout_s)
                request = block_wire.receive_request(connection, first_byte, self.token)
                self._answer(connection, request)
        except (OSError, block_wire.WireError) as error:
            if not self._closing.is_set():
                logger.warning("a reader is gone", extra={"reason": str(error)})
        finally:
            connection.close()
            with self._lock:
                self._connections.pop(connection, None)

    def _answer(self, connection: socket.socket, request: ReadRequest) -> None:
        try:
            self._check_token(request)
            with self._segments.in_use(request.engine_id) as (segment,):
                # Over before the reader's, which ends with our last word.
                with _send_span(request):
                    next_token_id = self._send_blocks(connection, request, segment)
                block_wire.send_end(connection, next_token_id)
        except MeshError as error:
            block_wire.send_error(connection, str(error))

    def _send_blocks(
        self, connection: socket.socket, request: ReadRequest, segment: Segment
    ) -> int | None:
        """The blocks as they lie in the segment; raises MeshError where an answer must be
        refused. The token after them, where they are followed."""
        _check_request(request, segment)
        segment.check_size()
        block_ids = request.block_ids
        segment.check_generations(block_ids, request.generations)
        for first, count in request.runs.tolist():
            segment.make_resident(first, count)
        if request.follows:
            patience = _Patience(connection, self._stall_timeout_s / _SIGNS_OF_LIFE)
            return _send_filled(connection, request, segment, patience)
        for first, count in request.runs.tolist():
            for piece in block_wire.pieces(first, count, segment.spec.block_bytes):
                block_wire.send_piece(connection, segment.bytes_of(piece))
        # Blocks that were reused meanwhile may have been sent half old, half new.
        segment.check_generations(block_ids, request.generations)
        return None

    def _check_token(self, request: ReadRequest) -> None:
        if not secrets.compare_digest(request.token, self.token):
            raise KvTransferFailed("the token is another agent's: ask this one where to read")


@contextmanager
def _send_span(request: ReadRequest) -> Iterator[None]:
    """What sending takes here, as a part of the reader's trace; a thread has no other."""
    if not is_tracing() or not request.traceparent:
        yield
        return
    reader = trace.get_current_span(extract_trace([("traceparent", request.traceparent)]))
    num_blocks = int(request.runs[:, 1].sum())
    facts = {
        "pdmesh.kv.num_blocks": num_blocks,
        "pdmesh.kv.bytes": num_blocks * request.block_bytes,
    }
    with use_span(reader), span("kv.send", facts):
        yield


def _check_request(request: ReadRequest, segment: Segment) -> None:
    if request.block_bytes != segment.spec.block_bytes:
        raise LayoutMismatch(
            f"blocks of engine {request.engine_id!r} have {segment.spec.block_bytes} bytes, "
            f"not {request.block_bytes}"
        )
    for first, count in request.runs.tolist():
        if first + count > segment.spec.num_blocks:
            raise InvalidRequest(
                f"block {first + count - 1} is outside a segment of {segment.spec.num_blocks}"
            )


class _Patience:
    """What a sender does while blocks are not filled: it says so, and sees whether it is heard."""

    def __init__(self, connection: socket.socket, interval_s: float) -> None:
        self._connection = connection
        self._interval_s = interval_s
        self._said_at = time.monotonic()

    def __call__(self) -> None:
        if block_wire.has_ended(self._connection):
            raise ConnectionError("the reader waits no more")
        if time.monotonic() - self._said_at >= self._interval_s:
            block_wire.send_waiting(self._connection)
            self._said_at = time.monotonic()


def _send_filled(
    connection: socket.socket, request: ReadRequest, segment: Segment, patience: _Patience
) -> int:
    """Each block when it is filled; raises MeshError if that fails. The token after the last."""
    filling = Filling(segment, request.block_ids, request.generations, patience)
    most = block_wire.piece_blocks(request.block_bytes)
    num_sent = 0
    for first, count in request.runs.tolist():
        start, end = first, first + count
        while start < end:
            if num_sent == filling.num_filled:
                filling.wait_for_more()
                segment.check_size()
            num_blocks = min(end - start, filling.num_filled - num_sent, most)
            block_wire.send_piece(connection, segment.bytes_of(slice(start, start + num_blocks)))
            start += num_blocks
            num_sent += num_blocks
    # The last look at the generations is behind that.
    return filling.wait_for_token()


def _wait_for_request(connection: socket.socket, timeout_s: float) -> bytes:
    """The first byte of a request; empty at the end, or when none has come for so long.

    Of a machine that lost its power nothing ever comes, not even an end.
    """
    connection.settimeout(timeout_s)
    try:
        return connection.recv(1)
    except TimeoutError:
        return b""


def shut_down(connection: socket.socket) -> None:
    """Make every call on a connection return, in whichever thread; harmless if it is over.

    On TLS too it is the plain one: the other takes its state from under whoever reads.
    """
    try:
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
    except OSError as error:
        logger.debug("connection was over", extra={"reason": str(error)})
