"""The caller's end of local calls: they look like grpc.aio's, and are made where they can be."""

import asyncio
import itertools
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable, Generator, Mapping
from contextlib import suppress
from contextvars import Context
from dataclasses import dataclass
from typing import Any

import grpc

from mesh.local_calls.wire import Credit, FrameSocket, Inbox
from mesh.v1 import local_call_pb2, local_call_pb2_grpc

logger = logging.getLogger(__name__)

_DETAILS_KEY = "grpc-status-details-bin"
_CODES = {code.value[0]: code for code in grpc.StatusCode}
# A peer that offers no socket is asked again after so long, one that cannot be reached by it too.
_RETRY_S = 1.0
_RETRY_UNREACHABLE_S = 60.0
_CONNECT_TIMEOUT_S = 2.0


@dataclass(frozen=True)
class Method:
    """What a stub knows of a method."""

    name: str
    serialize: Callable[[Any], bytes]
    deserialize: Callable[[bytes], Any]


def to_method(
    name: str,
    request_serializer: Callable[[Any], bytes] | None = None,
    response_deserializer: Callable[[bytes], Any] | None = None,
    **kwargs: object,
) -> Method:
    """From what a stub says to a channel."""
    return Method(name, request_serializer or bytes, response_deserializer or bytes)


class LocalCall:
    """One call. It has those of grpc.aio's methods that the mesh uses, with their meaning."""

    def __init__(
        self,
        connection: "LocalConnection",
        call_id: int,
        method: Method,
        timeout_s: float | None,
    ) -> None:
        self._connection = connection
        self._id = call_id
        self._method = method
        self._inbox = Inbox(self._taken)
        self._credit = Credit()
        self._is_half_closed = False
        self._is_cancelled = False
        self._status: local_call_pb2.LocalCallStatus | None = None
        self._ended = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        if timeout_s is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, timeout_s), self._expire)

    def __await__(self) -> Generator[Any, None, Any]:
        """The answer of a method that has one."""
        return self._answer().__await__()

    def __aiter__(self) -> AsyncIterator[Any]:
        return self._all()

    async def read(self) -> Any:
        """The next message, or EOF; raises what the call failed with."""
        try:
            message = await self._inbox.take()
        except asyncio.CancelledError:
            self.cancel()
            raise
        if message is not None:
            return self._method.deserialize(message)
        self._raise_for_status()
        return grpc.aio.EOF

    async def write(self, request: Any) -> None:
        await self._credit.take()
        if self._status is not None or self._is_half_closed:
            raise asyncio.InvalidStateError("the call is over, or its last message was sent")
        message = self._method.serialize(request)
        self._send(local_call_pb2.LocalFrame(call_id=self._id, message=message))
        await self._connection.drained()

    async def done_writing(self) -> None:
        if self._status is None and not self._is_half_closed:
            self._is_half_closed = True
            self._send(local_call_pb2.LocalFrame(call_id=self._id, is_half_closed=True))

    def done(self) -> bool:
        return self._status is not None

    def cancel(self) -> bool:
        """Give up; the handler is cancelled."""
        if self._status is not None:
            return False
        self._is_cancelled = True
        self._give_up(grpc.StatusCode.CANCELLED, "Locally cancelled by application!")
        return True

    async def code(self) -> grpc.StatusCode:
        """How it ended; waits for that."""
        await self._ended.wait()
        return self._code()

    def begin(
        self, message: bytes | None, metadata: Mapping[str, str], timeout_s: float | None
    ) -> None:
        """Send the head, with the request of a method that takes one."""
        frame = local_call_pb2.LocalFrame(
            call_id=self._id,
            start=local_call_pb2.LocalCallStart(
                method=self._method.name,
                timeout_us=0 if timeout_s is None else max(1, int(timeout_s * 1e6)),
                metadata=metadata,
            ),
        )
        if message is not None:
            frame.message = message
            frame.is_half_closed = self._is_half_closed = True
        self._send(frame)

    def hear(self, frame: local_call_pb2.LocalFrame) -> None:
        """What the server says."""
        if frame.HasField("message"):
            self._inbox.put(frame.message)
        if frame.num_taken:
            self._credit.give(frame.num_taken)
        if frame.HasField("status"):
            self._end(frame.status)

    def lose(self, reason: str) -> None:
        """There is nobody any more to answer."""
        self._end(_status(grpc.StatusCode.UNAVAILABLE, reason))

    async def _answer(self) -> Any:
        answer = await self.read()
        if answer is grpc.aio.EOF:
            self._end(_status(grpc.StatusCode.INTERNAL, "the server sent no answer"))
            self._raise_for_status()
        return answer

    async def _all(self) -> AsyncIterator[Any]:
        while (message := await self.read()) is not grpc.aio.EOF:
            yield message

    def _send(self, frame: local_call_pb2.LocalFrame) -> None:
        size, limit = len(frame.message), self._connection.max_message_bytes
        if size > limit:
            # As gRPC says it.
            self._give_up(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"Sent message larger than max ({size} vs. {limit})",
            )
            return
        self._connection.send(frame)

    def _taken(self, num_messages: int) -> None:
        self._connection.send(local_call_pb2.LocalFrame(call_id=self._id, num_taken=num_messages))

    def _expire(self) -> None:
        self._give_up(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")

    def _give_up(self, code: grpc.StatusCode, details: str) -> None:
        if self._status is None:
            self._connection.send(local_call_pb2.LocalFrame(call_id=self._id, is_cancelled=True))
            self._end(_status(code, details))

    def _end(self, status: local_call_pb2.LocalCallStatus) -> None:
        if self._status is not None:
            return
        self._status = status
        if self._timer is not None:
            self._timer.cancel()
        self._connection.forget(self._id)
        self._inbox.end(drops_messages=self._is_cancelled)
        # Whoever waits for room learns that it is over.
        self._credit.give(1)
        self._ended.set()

    def _code(self) -> grpc.StatusCode:
        assert self._status is not None, "the call has ended"
        return _CODES.get(self._status.code, grpc.StatusCode.UNKNOWN)

    def _raise_for_status(self) -> None:
        assert self._status is not None, "messages are over when the call has ended"
        code = self._code()
        if code is grpc.StatusCode.OK:
            return
        trailing = grpc.aio.Metadata()
        if self._status.grpc_status_details_bin:
            trailing.add(_DETAILS_KEY, self._status.grpc_status_details_bin)
        elif self._is_cancelled:
            raise asyncio.CancelledError
        raise grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, self._status.details)


class LocalConnection:
    """One socket to a server, and the calls on it."""

    def __init__(self, max_message_bytes: int, on_lost: Callable[[], object]) -> None:
        self.max_message_bytes = max_message_bytes
        self._on_lost = on_lost
        self._socket = FrameSocket(self._hear, self._lost)
        self._calls: dict[int, LocalCall] = {}
        self._call_ids = itertools.count(1)
        self._is_retired = False

    async def open(self, offer: local_call_pb2.OfferResponse) -> None:
        """Connect; raises OSError where the socket is not of this machine."""
        loop = asyncio.get_running_loop()
        # Connected here: uvloop takes no name of the abstract namespace.
        connecting = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            await loop.sock_connect(connecting, f"\0{offer.socket_name}")
            await loop.create_unix_connection(lambda: self._socket, sock=connecting)
        except BaseException:
            connecting.close()
            raise
        self._socket.send(local_call_pb2.LocalFrame(token=offer.token))

    @property
    def is_usable(self) -> bool:
        """New calls may begin."""
        return self._socket.is_open and not self._is_retired

    def call(
        self,
        method: Method,
        message: bytes | None,
        metadata: Mapping[str, str],
        timeout_s: float | None,
    ) -> LocalCall:
        """Begin a call with its serialized request, or with None where there will be several."""
        call_id = next(self._call_ids)
        call = LocalCall(self, call_id, method, timeout_s)
        self._calls[call_id] = call
        call.begin(message, metadata, timeout_s)
        return call

    def send(self, frame: local_call_pb2.LocalFrame) -> None:
        self._socket.send(frame)

    async def drained(self) -> None:
        await self._socket.drained()

    def forget(self, call_id: int) -> None:
        self._calls.pop(call_id, None)
        self._close_if_done()

    def retire(self) -> None:
        """Begin no more calls, and close after the last one."""
        self._is_retired = True
        self._close_if_done()

    async def close(self) -> None:
        """Close now; calls fail as they do when gRPC loses a peer."""
        self._socket.abort()
        await self._socket.wait_until_lost()

    async def wait_until_lost(self) -> None:
        await self._socket.wait_until_lost()

    def _close_if_done(self) -> None:
        if self._is_retired and not self._calls:
            self._socket.close()

    def _hear(self, _: FrameSocket, frame: local_call_pb2.LocalFrame) -> None:
        # What is said of a call that was given up has crossed the news of it.
        if (call := self._calls.get(frame.call_id)) is not None:
            call.hear(frame)

    def _lost(self, _: FrameSocket) -> None:
        for call in list(self._calls.values()):
            call.lose("the local connection broke")
        self._on_lost()


class LocalLink:
    """Keeps a local connection to the peer of one channel, once it was asked for."""

    def __init__(self, channel: grpc.aio.Channel, max_message_bytes: int) -> None:
        self._stub = local_call_pb2_grpc.LocalCallServiceStub(channel)
        self._max_message_bytes = max_message_bytes
        self._connection: LocalConnection | None = None
        self._keeping: asyncio.Task[None] | None = None
        self._try_at = 0.0
        self._is_settled = asyncio.Event()

    def connection(self) -> LocalConnection | None:
        """The connection, while there is one; else it is made, and callers do not wait for it."""
        if self._connection is not None and self._connection.is_usable:
            return self._connection
        is_idle = self._keeping is None or self._keeping.done()
        if is_idle and time.monotonic() >= self._try_at:
            self._try_at = time.monotonic() + _RETRY_S
            self._is_settled.clear()
            # It belongs to no request.
            self._keeping = Context().run(
                asyncio.create_task, self._keep(), name="local-connection"
            )
        return None

    async def settled(self) -> None:
        """Wait until the connection is there, or will not be: for calls that are held open."""
        if self.connection() is None:
            await self._is_settled.wait()

    async def close(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            with suppress(asyncio.CancelledError):
                await self._keeping

    async def _keep(self) -> None:
        call = self._stub.Offer(local_call_pb2.OfferRequest())
        # Neither end of it lives without the other.
        connection = LocalConnection(self._max_message_bytes, on_lost=call.cancel)
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                offer = await call.read()
                if not isinstance(offer, local_call_pb2.OfferResponse):
                    return
                await connection.open(offer)
            self._connection = connection
            self._is_settled.set()
            # Nothing more comes: this ends with the server, or with keepalive.
            await call.read()
            connection.retire()
            await connection.wait_until_lost()
        except grpc.aio.AioRpcError as error:
            self._without(error.code().name, error.code() is grpc.StatusCode.UNIMPLEMENTED)
        except OSError as error:
            # Of another machine or container.
            self._without(str(error), is_lasting=True)
        except TimeoutError:
            self._without("no answer", is_lasting=False)
        finally:
            self._connection = None
            self._is_settled.set()
            call.cancel()
            await connection.close()

    def _without(self, reason: str, is_lasting: bool) -> None:
        logger.debug("no local calls", extra={"reason": reason})
        if is_lasting:
            self._try_at = time.monotonic() + _RETRY_UNREACHABLE_S


def _status(code: grpc.StatusCode, details: str) -> local_call_pb2.LocalCallStatus:
    return local_call_pb2.LocalCallStatus(code=code.value[0], details=details)
