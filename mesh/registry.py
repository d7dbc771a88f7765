"""Workers in Redis: who is alive, where, and how busy."""

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Self

import orjson
from redis.exceptions import RedisError

from mesh.block_index import BlockIndex
from mesh.redis_client import MeshRedis, connect_redis

__all__ = [
    "BlockIndex",
    "Heartbeat",
    "RegisteredWorker",
    "WorkerChanges",
    "WorkerLoad",
    "WorkerRecord",
    "WorkerRegistry",
    "connect_redis",
    "new_incarnation",
]

logger = logging.getLogger(__name__)

# The hash tag puts the records and their index into one slot of a Redis Cluster.
_PREFIX = "mesh:{worker}:"
_INDEX = "mesh:{worker}s"
# A stream with an entry for each worker that joined or left, the latest few.
_CHANGES = "mesh:{worker}-changes"

# KEYS: record, index, changes. ARGV: worker id, incarnation, JSON, TTL in ms.
# Incarnations made by new_incarnation() sort by age: a process that was replaced and
# does not know it must not overwrite its successor.
_PUT = """
local held = redis.call('HGET', KEYS[1], 'incarnation')
local dated = '^%x+%-%x+$'
if held and held > ARGV[2] and string.match(held, dated) and string.match(ARGV[2], dated) then
  return 0
end
redis.call('HSET', KEYS[1], 'incarnation', ARGV[2], 'value', ARGV[3])
redis.call('PEXPIRE', KEYS[1], ARGV[4])
redis.call('SADD', KEYS[2], ARGV[1])
if held ~= ARGV[2] then
  redis.call('XADD', KEYS[3], 'MAXLEN', '~', 64, '*', 'joined', ARGV[1])
  redis.call('PEXPIRE', KEYS[3], 3600000)
end
return 1
"""

# KEYS: record, index, changes. ARGV: worker id, incarnation.
_REMOVE = """
if redis.call('HGET', KEYS[1], 'incarnation') ~= ARGV[2] then
  return 0
end
redis.call('DEL', KEYS[1])
redis.call('SREM', KEYS[2], ARGV[1])
redis.call('XADD', KEYS[3], 'MAXLEN', '~', 64, '*', 'left', ARGV[1])
redis.call('PEXPIRE', KEYS[3], 3600000)
return 1
"""

# KEYS: index. ARGV: prefix of records. Ids whose record has expired leave the index.
_LIST = """
local values = {}
for _, worker_id in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local value = redis.call('HGET', ARGV[1] .. worker_id, 'value')
  if value then
    values[#values + 1] = value
  else
    redis.call('SREM', KEYS[1], worker_id)
  end
end
return values
"""


def new_incarnation() -> str:
    """An id for this process that sorts after those of earlier processes."""
    return f"{time.time_ns():016x}-{secrets.token_hex(4)}"


@dataclass(frozen=True)
class WorkerRecord:
    """What does not change while a worker lives."""

    worker_id: str
    # A new process is a new incarnation.
    incarnation: str
    role: Literal["prefill", "decode"]
    address: str
    model: str
    engine_id: str
    transfer_address: str
    layout_fingerprint: str
    block_size: int
    num_blocks: int
    max_model_len: int
    max_num_batched_tokens: int
    # What the fingerprint stands for, for messages.
    layout: Mapping[str, str] = field(default_factory=dict)
    # Cores of its machine that it may compute on, and on how many at a time; none: it does not
    # compute on cores.
    cpus: tuple[int, ...] = ()
    num_threads: int = 0

    @property
    def holder(self) -> str:
        """How the block index names this process."""
        return f"{self.worker_id}@{self.incarnation}"


@dataclass(frozen=True)
class WorkerLoad:
    """What a worker is doing, as of its last heartbeat."""

    num_blocks: int = 0
    num_free_blocks: int = 0
    num_leases: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    num_steps: int = 0
    # Since the start.
    num_prefix_cache_queries: int = 0
    num_prefix_cache_hits: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0


@dataclass(frozen=True)
class RegisteredWorker:
    """A worker that is alive."""

    record: WorkerRecord
    load: WorkerLoad


class WorkerRegistry:
    """The workers that are alive. Every failure is a RedisError, within bounds."""

    def __init__(self, redis: MeshRedis) -> None:
        self._put = redis.register_script(_PUT)
        self._remove = redis.register_script(_REMOVE)
        self._list = redis.register_script(_LIST)

    async def put(self, record: WorkerRecord, load: WorkerLoad, ttl_s: float) -> bool:
        """Register for `ttl_s`; False when a newer process has the same worker id."""
        value = orjson.dumps({"record": asdict(record), "load": asdict(load)})
        stored = await self._put(
            keys=[_PREFIX + record.worker_id, _INDEX, _CHANGES],
            args=[record.worker_id, record.incarnation, value, int(ttl_s * 1000)],
        )
        return bool(stored)

    async def remove(self, worker_id: str, incarnation: str) -> None:
        """End a registration at once; another incarnation's stays."""
        keys = [_PREFIX + worker_id, _INDEX, _CHANGES]
        await self._remove(keys=keys, args=[worker_id, incarnation])

    async def list(self) -> list[RegisteredWorker]:
        """All live workers in one round trip."""
        values: Any = await self._list(keys=[_INDEX], args=[_PREFIX])
        workers = [_parse(value) for value in values]
        return sorted(
            (worker for worker in workers if worker is not None),
            key=lambda worker: worker.record.worker_id,
        )


class WorkerChanges:
    """Tells when workers join and leave. One whose record expires is not told of."""

    def __init__(self, redis: MeshRedis) -> None:
        self._redis = redis
        self._last_id: Any = "0-0"

    async def wait(self, wait_s: float) -> None:
        """Until something has changed since the last call, at most for `wait_s`, which the
        client's timeout exceeds."""
        block = max(1, int(1000 * wait_s))
        if await self._redis.xread({_CHANGES: self._last_id}, count=1, block=block):
            latest: Any = await self._redis.xrevrange(_CHANGES, count=1)
            self._last_id = latest[0][0] if latest else "0-0"


def _parse(value: bytes) -> RegisteredWorker | None:
    """None for what another version of pdmesh wrote and this one cannot use."""
    try:
        fields = orjson.loads(value)
        return RegisteredWorker(
            WorkerRecord(**_known(WorkerRecord, fields["record"])),
            WorkerLoad(**_known(WorkerLoad, fields["load"])),
        )
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        logger.warning("unreadable worker record", extra={"error": repr(error)})
        return None


def _known(kind: type[WorkerRecord] | type[WorkerLoad], fields: dict[str, Any]) -> dict[str, Any]:
    # Sequences are tuples again, as they were when they were written.
    return {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in fields.items()
        if name in kind.__dataclass_fields__
    }


class Heartbeat:
    """Keeps a worker registered while the block runs; an outage of Redis is survived."""

    def __init__(
        self,
        registry: WorkerRegistry,
        record: WorkerRecord,
        load_fn: Callable[[], WorkerLoad],
        interval_s: float = 0.5,
        ttl_s: float = 3.0,
    ) -> None:
        self._registry = registry
        self._record = record
        self._load_fn = load_fn
        self._interval_s = interval_s
        self._ttl_s = ttl_s
        self._stop = asyncio.Event()
        self._is_registered: bool | None = None
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self._beat()
        self._task = asyncio.create_task(self._run(), name="heartbeat")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._stop.set()
        if self._task is not None:
            await self._task
        try:
            await self._registry.remove(self._record.worker_id, self._record.incarnation)
        except RedisError as error:
            logger.warning("not removed from the registry", extra={"error": repr(error)})

    async def _run(self) -> None:
        while not self._stop.is_set():
            try:
                async with asyncio.timeout(self._interval_s):
                    await self._stop.wait()
            except TimeoutError:
                await self._beat()

    async def _beat(self) -> None:
        try:
            stored = await self._registry.put(self._record, self._load_fn(), self._ttl_s)
        except Exception as error:
            # Redis is away, or the load could not be read: the next beat tries again.
            self._changed(False, repr(error))
        else:
            self._changed(stored, "a newer process has this worker id")

    def _changed(self, registered: bool, why_not: str) -> None:
        """One line when the worker leaves the registry, and one when it is back."""
        if registered == self._is_registered:
            return
        self._is_registered = registered
        extra = {"worker_id": self._record.worker_id}
        if registered:
            logger.info("registered", extra=extra)
        else:
            logger.warning("not registered", extra={**extra, "reason": why_not})
