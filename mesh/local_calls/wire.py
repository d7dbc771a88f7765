"""Frames on a socket, and how far its two ends may be apart."""

import asyncio
import logging
import struct
from collections import deque
from collections.abc import Callable

from google.protobuf.message import DecodeError

from mesh.v1 import local_call_pb2

logger = logging.getLogger(__name__)

# Messages of one direction of a call that may be on their way or unread.
WINDOW = 64

_LENGTH = struct.Struct("<I")
# Far above what any message may have: a length beyond is no length.
_MAX_FRAME_BYTES = 1 << 28


class FrameSocket(asyncio.Protocol):
    """Owns one socket: frames in order, and `on_lost` once, when there will be no more."""

    def __init__(
        self,
        on_frame: "Callable[[FrameSocket, local_call_pb2.LocalFrame], None]",
        on_lost: "Callable[[FrameSocket], None]",
    ) -> None:
        self._on_frame = on_frame
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._unread = bytearray()
        self._is_writable = asyncio.Event()
        self._is_writable.set()
        self._is_lost = asyncio.Event()

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    def send(self, frame: local_call_pb2.LocalFrame) -> None:
        """Send a frame; on a socket that is lost it goes nowhere."""
        if self._transport is not None and self.is_open:
            payload = frame.SerializeToString()
            self._transport.write(_LENGTH.pack(len(payload)) + payload)

    async def drained(self) -> None:
        """Wait while the other end reads too slowly."""
        await self._is_writable.wait()

    def close(self) -> None:
        """Once what was sent has left."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    async def wait_until_lost(self) -> None:
        """At once on a socket that was never connected."""
        if self._transport is not None:
            await self._is_lost.wait()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._unread += data
        begin = 0
        try:
            while len(self._unread) - begin >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(self._unread, begin)
                if length > _MAX_FRAME_BYTES:
                    raise DecodeError("no frame is so long")
                end = begin + _LENGTH.size + length
                if end > len(self._unread):
                    break
                payload = bytes(self._unread[begin + _LENGTH.size : end])
                begin = end
                self._on_frame(self, local_call_pb2.LocalFrame.FromString(payload))
        except DecodeError:
            logger.error("what came over a local connection is no frame")
            self.abort()
        del self._unread[:begin]

    def pause_writing(self) -> None:
        self._is_writable.clear()

    def resume_writing(self) -> None:
        self._is_writable.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_writable.set()
        self._is_lost.set()
        self._on_lost(self)


class Inbox:
    """One direction of a call where it ends: messages that wait to be taken."""

    def __init__(self, on_taken: Callable[[int], None]) -> None:
        """`on_taken` hears, now and then, how many were."""
        self._on_taken = on_taken
        self._messages: deque[bytes] = deque()
        self._num_taken = 0
        self._is_over = False
        self._waiting: asyncio.Future[None] | None = None

    def put(self, message: bytes) -> None:
        if not self._is_over:
            self._messages.append(message)
            self._wake()

    def end(self, *, drops_messages: bool = False) -> None:
        """There will be no more."""
        self._is_over = True
        if drops_messages:
            self._messages.clear()
        self._wake()

    async def take(self) -> bytes | None:
        """The next message, None when they are over. One taker at a time."""
        while not self._messages:
            if self._is_over:
                return None
            self._waiting = asyncio.get_running_loop().create_future()
            await self._waiting
        self._num_taken += 1
        if self._num_taken >= WINDOW // 2 and not self._is_over:
            self._on_taken(self._num_taken)
            self._num_taken = 0
        return self._messages.popleft()

    def _wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


class Credit:
    """One direction of a call where it begins: how many messages more may be sent."""

    def __init__(self) -> None:
        self._left = WINDOW
        self._changed = asyncio.Event()

    async def take(self) -> None:
        """Wait until one more may be sent."""
        while self._left <= 0:
            self._changed.clear()
            await self._changed.wait()
        self._left -= 1

    def give(self, num_messages: int) -> None:
        self._left += num_messages
        self._changed.set()
