"""Where keys are kept: a file, or Redis. Both hold the same document."""

import asyncio
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from pydantic import ValidationError
from redis.exceptions import RedisError

from gateway.keys.model import KeyBook, KeyBookError
from mesh.redis_client import MeshRedis

REDIS_KEY = "mesh:{keys}"

_MAX_TRIES = 5

# Revision and document change together, and only if nobody was faster.
_WRITE = """
local revision = tonumber(redis.call('HGET', KEYS[1], 'revision') or '0')
if revision ~= tonumber(ARGV[1]) then return 0 end
redis.call('HSET', KEYS[1], 'revision', ARGV[2], 'book', ARGV[3])
return 1
"""

Change = Callable[[KeyBook], KeyBook]


class KeyStore(Protocol):
    """Keys that several gateways read and one command at a time changes."""

    # Without keys, nobody may call. (A file that does not exist asks for none.)
    requires_keys: bool

    async def stamp(self) -> object:
        """Differs when the keys have changed; None when there are none. Cheap."""
        ...

    async def read(self) -> KeyBook:
        """Raises KeyBookError, OSError or RedisError."""
        ...


class FileStore:
    """A JSON file, which is replaced whole."""

    requires_keys = False

    def __init__(self, path: Path) -> None:
        self._path = path

    async def stamp(self) -> object:
        return await asyncio.to_thread(self._stamp)

    async def read(self) -> KeyBook:
        return await asyncio.to_thread(self.read_now)

    def read_now(self) -> KeyBook:
        """The keys; none while there is no file."""
        try:
            return parse(self._path.read_bytes(), str(self._path))
        except FileNotFoundError:
            return KeyBook()

    def change(self, change: Change) -> None:
        """Read, change and replace, with other writers kept out."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        lock = os.open(f"{self._path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            text = change(self.read_now()).model_dump_json(indent=2)
            partial = f"{self._path}.tmp"
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(text + "\n")
                file.flush()
                os.fsync(descriptor)
            os.replace(partial, self._path)
        finally:
            os.close(lock)

    def _stamp(self) -> object:
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return None
        return status.st_mtime_ns, status.st_ino, status.st_size


class RedisStore:
    """A hash in Redis: the document and its revision."""

    # Redis may lose its data: that must not let everybody in.
    requires_keys = True

    def __init__(self, redis: MeshRedis) -> None:
        self._redis = redis
        self._write = redis.register_script(_WRITE)

    async def stamp(self) -> object:
        # redis-py's types leave out that this is awaited.
        command: Any = self._redis.hget(REDIS_KEY, "revision")
        return await command

    async def read(self) -> KeyBook:
        command: Any = self._redis.hget(REDIS_KEY, "book")
        text = await command
        return KeyBook() if text is None else parse(text, REDIS_KEY)

    async def change(self, change: Change) -> None:
        """Read, change and write, again if somebody else was faster."""
        for _ in range(_MAX_TRIES):
            before = await self.read()
            after = change(before)
            written = await self._write(
                keys=[REDIS_KEY], args=[before.revision, after.revision, after.model_dump_json()]
            )
            if written:
                return
        raise RedisError("others change the keys all the time")


def parse(text: bytes, where: str) -> KeyBook:
    """The document. Its errors never quote it."""
    try:
        return KeyBook.model_validate_json(text)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(map(str, one['loc'])) or 'the document'}: {one['msg']}"
            for one in error.errors(include_url=False, include_input=False)[:5]
        )
        raise KeyBookError(f"{where} does not hold API keys: {problems}") from None
