"""The server's end of local calls: frames in, the same handlers as gRPC's, frames out."""

import asyncio
import logging
import secrets
import socket
import sys
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextvars import Context
from typing import Any, NamedTuple, Never, Self

import grpc

from mesh.interceptors import enter_call, guard
from mesh.local_calls.wire import Credit, FrameSocket, Inbox
from mesh.v1 import local_call_pb2, local_call_pb2_grpc

logger = logging.getLogger(__name__)

_DETAILS_KEY = "grpc-status-details-bin"
# What a caller may take to read the last frames of a server that stops.
_FLUSH_TIMEOUT_S = 1.0


class _CallDetails(NamedTuple):
    """What a generic handler looks at."""

    method: str
    invocation_metadata: Sequence[tuple[str, str]]


class LocalCallServicer(local_call_pb2_grpc.LocalCallServiceServicer):
    """Owns the socket, and the calls that come over it."""

    def __init__(self, max_message_bytes: int) -> None:
        self.max_message_bytes = max_message_bytes
        self._handlers: list[grpc.GenericRpcHandler] = []
        self._found: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
        self._socket_name = f"pdmesh-{secrets.token_hex(16)}"
        self._server: asyncio.Server | None = None
        self._offers: dict[bytes, _Offer] = {}
        self._connections: dict[FrameSocket, _Connection] = {}
        self._is_stopping = False

    def add(self, handlers: Sequence["grpc.GenericRpcHandler"]) -> None:
        """Serve these methods too."""
        self._handlers += handlers

    async def start(self) -> None:
        """Listen, where there are such sockets; elsewhere nothing is offered."""
        if sys.platform != "linux":
            return
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        listening.bind(f"\0{self._socket_name}")
        self._server = await asyncio.get_running_loop().create_unix_server(
            lambda: FrameSocket(self._hear, self._lost), sock=listening
        )

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, give running ones `grace_s`, then cancel them."""
        self._is_stopping = True
        for offer in list(self._offers.values()):
            offer.is_over.set()
        connections = list(self._connections.items())
        running = [call.task for _, one in connections for call in one.calls.values()]
        if running and grace_s > 0:
            await asyncio.wait(running, timeout=grace_s)
        for _, connection in connections:
            connection.cancel_all()
        if running:
            await asyncio.wait(running)
        if self._server is not None:
            self._server.close()
        await asyncio.gather(*(_flush(peer) for peer, _ in connections))

    async def Offer(
        self, request: local_call_pb2.OfferRequest, context: Any
    ) -> AsyncGenerator[local_call_pb2.OfferResponse, None]:
        if self._server is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "no local calls on this system")
        offer = _Offer()
        token = secrets.token_bytes(16)
        self._offers[token] = offer
        try:
            yield local_call_pb2.OfferResponse(socket_name=self._socket_name, token=token)
            if not self._is_stopping:
                await offer.is_over.wait()
        except BaseException:
            # The caller is gone, or frozen, or cut off.
            offer.cut()
            raise
        finally:
            del self._offers[token]

    def find(self, method: str) -> "grpc.RpcMethodHandler[Any, Any] | None":
        """The handler of a method, as interceptors make it."""
        found = self._found.get(method)
        if found is None:
            details: Any = _CallDetails(method, ())
            handlers = (handler.service(details) for handler in self._handlers)
            handler = next(filter(None, handlers), None)
            if handler is None:
                return None
            found = self._found[method] = guard(handler, method)
        return found

    @property
    def is_stopping(self) -> bool:
        return self._is_stopping

    def _hear(self, peer: FrameSocket, frame: local_call_pb2.LocalFrame) -> None:
        if (connection := self._connections.get(peer)) is not None:
            connection.hear(frame)
        elif (offer := self._offers.get(frame.token)) is not None:
            self._connections[peer] = _Connection(self, peer)
            offer.socket = peer
        else:
            logger.warning("a local connection that nobody was offered")
            peer.abort()

    def _lost(self, peer: FrameSocket) -> None:
        if (connection := self._connections.pop(peer, None)) is not None:
            connection.cancel_all()


class _Offer:
    """An offer that was made, for as long as its call lasts."""

    def __init__(self) -> None:
        self.is_over = asyncio.Event()
        self.socket: FrameSocket | None = None

    def cut(self) -> None:
        if self.socket is not None:
            self.socket.abort()


class _Connection:
    """The calls of one caller."""

    def __init__(self, servicer: LocalCallServicer, peer: FrameSocket) -> None:
        self.servicer = servicer
        self.socket = peer
        self.calls: dict[int, _Call] = {}

    def hear(self, frame: local_call_pb2.LocalFrame) -> None:
        if frame.HasField("start"):
            self._start(frame.call_id, frame.start)
        if (call := self.calls.get(frame.call_id)) is not None:
            call.hear(frame)

    def cancel_all(self) -> None:
        for call in list(self.calls.values()):
            call.task.cancel()

    def _start(self, call_id: int, start: local_call_pb2.LocalCallStart) -> None:
        if self.servicer.is_stopping:
            # Like a server that has gone, as gRPC says it: it was not begun.
            self._refuse(call_id, grpc.StatusCode.UNAVAILABLE, "the server is stopping")
        elif (handler := self.servicer.find(start.method)) is None:
            self._refuse(call_id, grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        else:
            self.calls[call_id] = _Call(self, call_id, handler, start)

    def _refuse(self, call_id: int, code: grpc.StatusCode, details: str) -> None:
        self.socket.send(local_call_pb2.LocalFrame(call_id=call_id, status=_status(code, details)))


class _Call:
    """One call: its handler's task, and its context as far as handlers use grpc.aio's."""

    def __init__(
        self,
        connection: _Connection,
        call_id: int,
        handler: "grpc.RpcMethodHandler[Any, Any]",
        start: local_call_pb2.LocalCallStart,
    ) -> None:
        self._connection = connection
        self._id = call_id
        self._handler = handler
        self._metadata = tuple(start.metadata.items())
        self._inbox = Inbox(self._taken)
        self._credit = Credit()
        self._status = _status(grpc.StatusCode.OK, "")
        self._ends_at: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        if start.timeout_us:
            timeout_s = start.timeout_us / 1e6
            self._ends_at = time.monotonic() + timeout_s
            self._timer = asyncio.get_running_loop().call_later(timeout_s, self._expire)
        # In a context of its own, which the caller's id and trace are put into.
        self.task = Context().run(asyncio.create_task, self._run(), name=start.method)

    def hear(self, frame: local_call_pb2.LocalFrame) -> None:
        """What the caller says."""
        if frame.HasField("message"):
            self._receive(frame.message)
        if frame.num_taken:
            self._credit.give(frame.num_taken)
        if frame.is_half_closed:
            self._inbox.end()
        if frame.is_cancelled:
            self.task.cancel()

    # What follows are the methods of grpc.aio.ServicerContext that handlers and guards use.

    def invocation_metadata(self) -> Sequence[tuple[str, str]]:
        return self._metadata

    def time_remaining(self) -> float | None:
        return None if self._ends_at is None else max(0.0, self._ends_at - time.monotonic())

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self.task.add_done_callback(lambda _: callback(self))

    async def send_initial_metadata(self, metadata: object) -> None:
        """A caller that reached the socket knows that it was heard."""

    async def write(self, response: Any) -> None:
        await self._credit.take()
        self._connection.socket.send(self._answer(response))
        await self._connection.socket.drained()

    async def abort(
        self,
        code: grpc.StatusCode,
        details: str = "",
        trailing_metadata: Sequence[tuple[str, str | bytes]] = (),
    ) -> Never:
        self._status = _status(code, details)
        for key, value in trailing_metadata:
            if key == _DETAILS_KEY and isinstance(value, bytes):
                self._status.grpc_status_details_bin = value
        raise grpc.aio.AbortError("aborted")

    async def _run(self) -> None:
        last = local_call_pb2.LocalFrame(call_id=self._id)
        try:
            answer = await self._handle()
            if answer is not None:
                last.message = answer.message
        except grpc.aio.AbortError:
            pass  # its status was kept
        except asyncio.CancelledError:
            if self._connection.servicer.is_stopping:
                self._status = _status(grpc.StatusCode.UNAVAILABLE, "the server has stopped")
            elif self._status.code == grpc.StatusCode.OK.value[0]:
                self._status = _status(grpc.StatusCode.CANCELLED, "the call was cancelled")
        except Exception:
            # The guard answers for handlers: this is a message that cannot be read or written.
            logger.exception("local call failed")
            self._status = _status(grpc.StatusCode.INTERNAL, "the call could not be handled")
        finally:
            if self._timer is not None:
                self._timer.cancel()
            self._connection.calls.pop(self._id, None)
            last.status.CopyFrom(self._status)
            self._connection.socket.send(last)

    async def _handle(self) -> local_call_pb2.LocalFrame | None:
        enter_call(self._metadata)
        handler: Any = self._handler
        requests: Any = _Requests(self._inbox, handler.request_deserializer)
        if not handler.request_streaming:
            requests = await anext(requests)
        if handler.response_streaming:
            behavior = handler.stream_stream if handler.request_streaming else handler.unary_stream
            await behavior(requests, self)
            return None
        behavior = handler.stream_unary if handler.request_streaming else handler.unary_unary
        return self._answer(await behavior(requests, self))

    def _receive(self, message: bytes) -> None:
        limit = self._connection.servicer.max_message_bytes
        if len(message) > limit:
            self._refuse_size("Received", len(message), limit)
            self.task.cancel()
        else:
            self._inbox.put(message)

    def _answer(self, response: Any) -> local_call_pb2.LocalFrame:
        serialize = self._handler.response_serializer or bytes
        message = serialize(response)
        limit = self._connection.servicer.max_message_bytes
        if len(message) > limit:
            self._refuse_size("Sent", len(message), limit)
            raise grpc.aio.AbortError("too large")
        return local_call_pb2.LocalFrame(call_id=self._id, message=message)

    def _refuse_size(self, verb: str, size: int, limit: int) -> None:
        """As gRPC says it."""
        self._status = _status(
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            f"{verb} message larger than max ({size} vs. {limit})",
        )

    def _taken(self, num_messages: int) -> None:
        self._connection.socket.send(
            local_call_pb2.LocalFrame(call_id=self._id, num_taken=num_messages)
        )

    def _expire(self) -> None:
        self._status = _status(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
        self.task.cancel()


class _Requests:
    """A call's requests as they come."""

    def __init__(self, inbox: Inbox, deserialize: Callable[[bytes], Any] | None) -> None:
        self._inbox = inbox
        self._deserialize = deserialize or bytes

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        message = await self._inbox.take()
        if message is None:
            raise StopAsyncIteration
        return self._deserialize(message)


async def _flush(peer: FrameSocket) -> None:
    """Close once the caller has what was sent; one that reads nothing holds nobody up."""
    peer.close()
    try:
        async with asyncio.timeout(_FLUSH_TIMEOUT_S):
            await peer.wait_until_lost()
    except TimeoutError:
        peer.abort()
        await peer.wait_until_lost()


def _status(code: grpc.StatusCode, details: str) -> local_call_pb2.LocalCallStatus:
    return local_call_pb2.LocalCallStatus(code=code.value[0], details=details)
