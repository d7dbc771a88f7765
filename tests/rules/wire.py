"""HTTP by hand: a client that sends exact bytes, and an upstream that tells what it got."""

import asyncio
import base64
import http.client
import json
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import uvloop

Header = tuple[str, str]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Received:
    """A request as it arrived at the upstream."""

    method: str
    path: str
    headers: tuple[Header, ...]
    body: bytes

    def header(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key == name]


@dataclass(frozen=True)
class Answer:
    """A response as it arrived at the client."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    def received(self) -> Received:
        """What the echoing upstream got."""
        assert self.status == 200, self
        echo = self.json()
        return Received(
            echo["method"],
            echo["path"],
            tuple((name, value) for name, value in echo["headers"]),
            base64.b64decode(echo["body"]),
        )


class Client:
    """One kept-alive connection."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._connection = self._connect()

    def _connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)

    def send(
        self,
        body: bytes | None,
        *,
        path: str = "/v1/chat/completions",
        method: str = "POST",
        headers: Sequence[Header] = (("content-type", "application/json"),),
        chunk_bytes: int | None = None,
    ) -> Answer:
        """Ask and wait for the answer."""
        self.ask(body, path, method, headers, chunk_bytes)
        return self.answer()

    def ask(
        self,
        body: bytes | None,
        path: str,
        method: str,
        headers: Sequence[Header],
        chunk_bytes: int | None,
    ) -> None:
        """`chunk_bytes` sends the body chunked, in pieces of that size."""
        if self._connection.sock is None:
            self._connection = self._connect()
        self._connection.putrequest(method, path, skip_accept_encoding=True)
        for name, value in headers:
            self._connection.putheader(name, value)
        if chunk_bytes is not None and body is not None:
            self._connection.putheader("transfer-encoding", "chunked")
            pieces = [body[at : at + chunk_bytes] for at in range(0, len(body), chunk_bytes)]
            self._connection.endheaders(iter(pieces), encode_chunked=True)
        else:
            if body is not None:
                self._connection.putheader("content-length", str(len(body)))
            self._connection.endheaders(body)

    def answer(self) -> Answer:
        """The answer to what was asked."""
        response = self._connection.getresponse()
        payload = response.read()
        fields = {name.lower(): value for name, value in response.getheaders()}
        if response.will_close:
            self._connection.close()
        return Answer(response.status, fields, payload)

    def close(self) -> None:
        self._connection.close()


def send_once(port: int, body: bytes = b"{}") -> Answer:
    """One request on a connection of its own."""
    client = Client(port)
    try:
        return client.send(body)
    finally:
        client.close()


Respond = Callable[[Received, asyncio.StreamWriter], Awaitable[None]]


async def echo(received: Received, writer: asyncio.StreamWriter) -> None:
    """Answer with the request itself."""
    payload = json.dumps(
        {
            "method": received.method,
            "path": received.path,
            "headers": received.headers,
            "body": base64.b64encode(received.body).decode(),
        }
    ).encode()
    writer.write(response(200, payload))


def response(status: int, payload: bytes, content_type: str = "application/json") -> bytes:
    return (
        f"HTTP/1.1 {status} X\r\ncontent-type: {content_type}\r\n"
        f"content-length: {len(payload)}\r\n\r\n".encode()
        + payload
    )


class Background:
    """An event loop in a thread, for servers that blocking tests talk to."""

    def __init__(self) -> None:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, Result]) -> Result:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)

    def close(self) -> None:
        self.run(self._end_tasks())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _end_tasks(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@contextmanager
def upstream(background: Background, respond: Respond = echo) -> Iterator[int]:
    """An HTTP server on a free port; yields the port."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while (received := await read_request(reader)) is not None:
                await respond(received, writer)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            # The peer left, or the test is over.
            return
        finally:
            writer.close()

    async def start() -> asyncio.Server:
        return await asyncio.start_server(handle, "127.0.0.1", 0, limit=2**20)

    server = background.run(start())
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        background.run(_close(server))


async def _close(server: asyncio.Server) -> None:
    server.close()


async def read_request(reader: asyncio.StreamReader) -> Received | None:
    head = await _read_head(reader)
    if head is None:
        return None
    first, headers = head
    method, path, _ = first.split(" ")
    return Received(method, path, headers, await _read_body(reader, dict(headers)))


async def _read_head(reader: asyncio.StreamReader) -> tuple[str, tuple[Header, ...]] | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
    pairs = [line.partition(":") for line in lines]
    return first, tuple((name.lower(), value.strip()) for name, _, value in pairs)


async def _read_body(reader: asyncio.StreamReader, headers: dict[str, str]) -> bytes:
    if "chunked" not in headers.get("transfer-encoding", ""):
        return await reader.readexactly(int(headers.get("content-length", "0")))
    parts = []
    while True:
        size = int(await reader.readuntil(b"\r\n"), 16)
        parts.append((await reader.readexactly(size + 2))[:-2])
        if size == 0:
            return b"".join(parts)


async def forward(port: int, method: str, path: str, headers: list[Header], body: bytes) -> Answer:
    """Send a request on, as a gateway without rules of its own would."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
    try:
        lines = [f"{method} {path} HTTP/1.1", "host: upstream", f"content-length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in headers]
        writer.write("\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body)
        head = await _read_head(reader)
        assert head is not None
        first, fields = head
        return Answer(
            int(first.split(" ")[1]), dict(fields), await _read_body(reader, dict(fields))
        )
    finally:
        writer.close()
