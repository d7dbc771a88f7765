"""What two agents say to each other on the data port, byte for byte.

    request  "PDKV" | version u16 | length u32 | body
    body     token 16 bytes | block_bytes u64 | whether it follows u8
             sizes of the four that follow, each u32
             engine id | traceparent or nothing
             runs: (first block u32, blocks u32), ... | generations: u32, ...
    answer   a piece of each run after the other, then the end:
             kind u8 | length u64 | xxh3-64 u64 | payload
             or, in place of any of them, an error, whose payload is its text

An answer that follows sends blocks when they are filled, in pieces of any number of them, and
says in between that it still waits. The payload of its end is the token that was sampled after
the last block, a u32.

Numbers are little-endian. A connection carries one request after another; whoever finds
anything wrong closes it, so that bytes of one answer are never taken for another's.
"""

import secrets
import select
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import xxhash
from numpy.typing import NDArray

TOKEN_BYTES = 16
MAX_REST_S = 30.0
# Fits into a core's cache, so that checking a piece costs no trip to memory.
_PIECE_BYTES = 1 << 20
_MAX_BODY_BYTES = 64 << 20
# Of who does not know the token: so much is read, for an answer that says so.
_MAX_STRANGERS_BYTES = 64 << 10
_MAX_ERROR_BYTES = 4096

_PREFIX = struct.Struct("<4sHI")
_BODY = struct.Struct(f"<{TOKEN_BYTES}sQBIIII")
_FRAME = struct.Struct("<BQQ")
_NEXT_TOKEN = struct.Struct("<I")
_MAGIC = b"PDKV"
_VERSION = 3
_U32 = np.dtype("<u4")


class WireError(Exception):
    """The other side does not keep to the protocol, or its bytes were damaged."""


class PeerError(Exception):
    """The other side says why it does not answer."""


class Kind(IntEnum):
    """What a frame of an answer is."""

    PIECE = 1
    END = 2
    ERROR = 3
    WAITING = 4


_KINDS = frozenset(Kind)


@dataclass(frozen=True, slots=True)
class Frame:
    """What announces a payload."""

    kind: Kind
    num_bytes: int
    checksum: int


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """Blocks of one engine, as runs of neighbours."""

    token: bytes
    engine_id: str
    block_bytes: int
    # [(first block, number of blocks)]
    runs: NDArray[np.uint32]
    # One a block, or none.
    generations: NDArray[np.uint32]
    # W3C's, of the span that reads; empty where nobody traces.
    traceparent: str = ""
    # The blocks are still being filled, in this order.
    follows: bool = False

    @property
    def block_ids(self) -> NDArray[np.int64]:
        ranges = [np.arange(first, first + count) for first, count in self.runs.tolist()]
        return np.concatenate([np.empty(0, np.int64), *ranges])


def pieces(first_block: int, num_blocks: int, block_bytes: int) -> Iterator[slice]:
    """The blocks of a run, a piece at a time; both sides cut alike."""
    step = piece_blocks(block_bytes)
    end = first_block + num_blocks
    for start in range(first_block, end, step):
        yield slice(start, min(start + step, end))


def piece_blocks(block_bytes: int) -> int:
    """Blocks of a piece, at most."""
    return max(1, _PIECE_BYTES // block_bytes)


def send_request(connection: socket.socket, request: ReadRequest) -> None:
    engine_id, traceparent = request.engine_id.encode(), request.traceparent.encode()
    runs = request.runs.astype(_U32).tobytes()
    generations = request.generations.astype(_U32).tobytes()
    parts: Sequence[bytes] = (engine_id, traceparent, runs, generations)
    body = _BODY.pack(request.token, request.block_bytes, request.follows, *map(len, parts))
    prefix = _PREFIX.pack(_MAGIC, _VERSION, len(body) + sum(map(len, parts)))
    connection.sendall(b"".join((prefix, body, *parts)))


def receive_request(
    connection: socket.socket, first_byte: bytes, expected_token: bytes
) -> ReadRequest:
    """`first_byte` was read by whoever waited for the request.

    One with another token may be returned too, but takes no memory to speak of.
    """
    prefix = first_byte + _receive(connection, _PREFIX.size - len(first_byte))
    magic, version, length = _PREFIX.unpack(prefix)
    if (magic, version) != (_MAGIC, _VERSION):
        raise WireError(f"not a request of version {_VERSION}")
    if not _BODY.size <= length <= _MAX_BODY_BYTES:
        raise WireError(f"a request of {length} bytes")
    token, block_bytes, follows, *sizes = _BODY.unpack(_receive(connection, _BODY.size))
    if length > _MAX_STRANGERS_BYTES and not secrets.compare_digest(token, expected_token):
        raise WireError(f"a request of {length} bytes without the token")
    rest = memoryview(_receive(connection, length - _BODY.size))
    if _BODY.size + sum(sizes) != length or any(size % _U32.itemsize for size in sizes[2:]):
        raise WireError("the parts of a request do not add up")
    parts, start = [], 0
    for size in sizes:
        parts.append(rest[start : start + size])
        start += size
    runs = np.frombuffer(parts[2], _U32)
    if len(runs) % 2:
        raise WireError("half a run")
    return ReadRequest(
        token=token,
        engine_id=bytes(parts[0]).decode(errors="replace"),
        block_bytes=block_bytes,
        runs=runs.reshape(-1, 2),
        generations=np.frombuffer(parts[3], _U32),
        traceparent=bytes(parts[1]).decode(errors="replace"),
        follows=bool(follows),
    )


def send_piece(connection: socket.socket, payload: memoryview) -> None:
    checksum = xxhash.xxh3_64_intdigest(payload)
    connection.sendall(_FRAME.pack(Kind.PIECE, len(payload), checksum))
    connection.sendall(payload)


def send_end(connection: socket.socket, next_token_id: int | None = None) -> None:
    payload = b"" if next_token_id is None else _NEXT_TOKEN.pack(next_token_id)
    connection.sendall(_FRAME.pack(Kind.END, len(payload), 0) + payload)


def send_waiting(connection: socket.socket) -> None:
    connection.sendall(_FRAME.pack(Kind.WAITING, 0, 0))


def send_error(connection: socket.socket, message: str) -> None:
    text = message.encode()[:_MAX_ERROR_BYTES]
    connection.sendall(_FRAME.pack(Kind.ERROR, len(text), 0) + text)


def receive_piece(connection: socket.socket, destination: memoryview) -> None:
    """Fill `destination`; raises PeerError or WireError, whatever has been written by then."""
    frame = _receive_frame(connection)
    _check(frame, Kind.PIECE, len(destination))
    receive_payload(connection, frame, destination)


def await_piece(connection: socket.socket, max_bytes: int, block_bytes: int) -> Frame:
    """The announcement of some blocks, once they are filled."""
    frame = _await_frame(connection)
    is_whole = frame.num_bytes % block_bytes == 0
    if frame.kind is not Kind.PIECE or not is_whole or not 0 < frame.num_bytes <= max_bytes:
        raise WireError(
            f"frame {frame.kind:d} with {frame.num_bytes} bytes instead of {Kind.PIECE:d} with "
            f"blocks of {block_bytes} up to {max_bytes}"
        )
    return frame


def receive_payload(connection: socket.socket, frame: Frame, destination: memoryview) -> None:
    """Fill `destination`, which has the size that was announced."""
    _receive_into(connection, destination)
    if xxhash.xxh3_64_intdigest(destination) != frame.checksum:
        raise WireError("bytes were damaged on the way: their checksum differs")


def receive_end(connection: socket.socket) -> None:
    """Take the other side's word that what it sent was valid to the end."""
    _check(_receive_frame(connection), Kind.END, 0)


def await_end(connection: socket.socket) -> int:
    """The same where blocks were followed: the token that was sampled after the last one."""
    frame = _await_frame(connection)
    _check(frame, Kind.END, _NEXT_TOKEN.size)
    (token_id,) = _NEXT_TOKEN.unpack(_receive(connection, _NEXT_TOKEN.size))
    return int(token_id)


def has_ended(connection: socket.socket) -> bool:
    """Whether a connection is over on which the other side has nothing to say."""
    poll = select.poll()
    poll.register(connection, select.POLLIN)
    return bool(poll.poll(0))


def _await_frame(connection: socket.socket) -> Frame:
    """The next one that says more than that there will be one."""
    while (frame := _receive_frame(connection)).kind is Kind.WAITING:
        _check(frame, Kind.WAITING, 0)
    return frame


def _receive_frame(connection: socket.socket) -> Frame:
    """Its payload is still to come; raises PeerError if it is an error."""
    kind, length, checksum = _FRAME.unpack(_receive(connection, _FRAME.size))
    if kind not in _KINDS:
        raise WireError(f"a frame of kind {kind}")
    if kind == Kind.ERROR:
        if length > _MAX_ERROR_BYTES:
            raise WireError(f"an error of {length} bytes")
        raise PeerError(_receive(connection, length).decode(errors="replace"))
    return Frame(Kind(kind), length, checksum)


def _check(frame: Frame, kind: Kind, num_bytes: int) -> None:
    if (frame.kind, frame.num_bytes) != (kind, num_bytes):
        raise WireError(
            f"frame {frame.kind:d} with {frame.num_bytes} bytes instead of {kind:d} "
            f"with {num_bytes}"
        )


def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    buffer = bytearray(num_bytes)
    _receive_into(connection, memoryview(buffer))
    return bytes(buffer)


def _receive_into(connection: socket.socket, destination: memoryview) -> None:
    while len(destination):
        num_bytes = connection.recv_into(destination)
        if num_bytes == 0:
            raise ConnectionError("the connection ended in the middle of a message")
        destination = destination[num_bytes:]
