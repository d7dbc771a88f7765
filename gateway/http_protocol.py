"""HTTP/1.1 connections: uvicorn's, with bounds on their number, on heads and on unread answers."""

import asyncio
import re
import uuid
from http import HTTPStatus
from typing import Any

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from gateway.errors import (
    HEADERS_TOO_LARGE,
    INVALID_HTTP,
    OVERLOADED,
    REQUEST_TIMEOUT,
    envelope,
    retry_after,
)
from mesh import metrics

_UPGRADE = re.compile(rb"\r\nupgrade(?=[ \t]*:)", re.IGNORECASE)

# How long a refused client may go on sending.
_LINGER_S = 1.0


def http_protocol(
    *,
    max_header_bytes: int,
    header_timeout_s: float,
    client_timeout_s: float,
    max_connections: int,
) -> type[HttpToolsProtocol]:
    """The protocol class for uvicorn, which makes one instance a connection."""

    class BoundProtocol(_Protocol):
        _max_header_bytes = max_header_bytes
        _header_timeout_s = header_timeout_s
        _max_connections = max_connections
        _client_timeout_s = client_timeout_s

    return BoundProtocol


class _Protocol(HttpToolsProtocol):
    _max_header_bytes: int
    _header_timeout_s: float
    _max_connections: int
    _client_timeout_s: float
    _num_header_bytes = 0
    _is_in_head = True
    _expects_head = True
    _is_refused = False
    _cutting: asyncio.TimerHandle | None = None
    _waiting_for_head: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self._max_connections:
            # Those that are turned away take nobody's place while they are told so.
            self.connections.discard(self)
            metrics.REFUSALS.add(1, {"reason": "too_many_connections"})
            self._refuse(OVERLOADED, "too many connections", type="service_unavailable_error")
        else:
            self._expect_head_soon()

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        if self._expects_head:
            # The parser stops at an offer to upgrade and loses the body behind it
            # (Java's client offers h2c). We accept none, so it never sees one.
            data = _UPGRADE.sub(b"\r\nx-upgrade", data, count=1)
        if self._is_in_head or self._expects_head:
            # On a connection that was kept open, time runs from the first byte.
            self._expect_head_soon()
        super().data_received(data)
        if not self._is_in_head:
            self._num_header_bytes = 0
            return
        # All of it came after the last complete head. The read that completes a
        # head is bounded by the socket's buffer.
        self._num_header_bytes += len(data)
        if self._num_header_bytes > self._max_header_bytes:
            self._refuse(
                HEADERS_TOO_LARGE, f"the head exceeds the limit of {self._max_header_bytes} bytes"
            )

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head = True

    def on_headers_complete(self) -> None:
        self._is_in_head = self._expects_head = False
        self._stop_waiting_for_head()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._expects_head = True

    def send_400_response(self, msg: str) -> None:
        self._refuse(INVALID_HTTP, msg)

    def pause_writing(self) -> None:
        """The client reads more slowly than we write: it gets a bounded time to catch up."""
        super().pause_writing()
        self._cutting = self.loop.call_later(self._client_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._keep()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._expects_head and not self.transport.is_closing():
            # Answered before the body was there. What still comes is read and dropped, but
            # nobody keeps a connection by sending a body that no one wants.
            self.loop.call_later(_LINGER_S, self._hang_up_on_body, self.cycle)

    def connection_lost(self, exc: Exception | None) -> None:
        self._keep()
        self._stop_waiting_for_head()
        super().connection_lost(exc)

    def _hang_up_on_body(self, answered: object) -> None:
        if self.cycle is answered and not self._expects_head:
            self.transport.close()

    def _expect_head_soon(self) -> None:
        if self._waiting_for_head is None:
            self._waiting_for_head = self.loop.call_later(self._header_timeout_s, self._head_late)

    def _stop_waiting_for_head(self) -> None:
        if self._waiting_for_head is not None:
            self._waiting_for_head.cancel()
            self._waiting_for_head = None

    def _head_late(self) -> None:
        """The time is up, however much has come: a byte now and then buys no more of it."""
        self._waiting_for_head = None
        if self.cycle is not None and not self.cycle.response_complete:
            # The next head, while the answer to this one is still on its way.
            self._expect_head_soon()
            return
        if self._num_header_bytes == 0:
            # Opened in advance and never used: there is nothing to answer.
            self.transport.close()
            return
        metrics.REFUSALS.add(1, {"reason": "slow_head"})
        self._refuse(
            REQUEST_TIMEOUT, f"the head did not arrive within {self._header_timeout_s:g} s"
        )

    def _keep(self) -> None:
        if self._cutting is not None:
            self._cutting.cancel()
            self._cutting = None

    def _refuse(self, status: int, message: str, *, type: str = "invalid_request_error") -> None:
        """Answer what never became a request, and hang up.

        What the client still sends is read and dropped for a while: closing at once
        would reset the connection before the client has read the answer.
        """
        if self._is_refused or self.transport.is_closing():
            return
        self._is_refused = True
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._stop_waiting_for_head()
        body: dict[str, Any] = envelope(message, type=type)
        wait = f"retry-after: {retry_after(1)}\r\n" if status == OVERLOADED else ""
        payload = orjson.dumps(body)
        self.transport.write(
            f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n"
            "content-type: application/json\r\n"
            f"content-length: {len(payload)}\r\n"
            f"x-request-id: {uuid.uuid4().hex}\r\n"
            f"{wait}connection: close\r\n\r\n".encode()
            + payload
        )
        self.transport.write_eof()
        self.loop.call_later(_LINGER_S, self.transport.close)
