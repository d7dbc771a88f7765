"""A Redis client that cancellation cannot corrupt and a dead server cannot slow down."""

import asyncio
import builtins
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import redis.asyncio
from redis.asyncio.client import Pipeline
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel, SentinelConnectionPool
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    ConnectionError,
    MovedError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
    TimeoutError,
)

from mesh import metrics
from mesh.redis_urls import SeveralServers, parse_several

logger = logging.getLogger(__name__)

TIMEOUT_S = 0.5
COOLDOWN_S = 2.0
_MAX_CONNECTIONS = 64
# What a command may take in all where several servers are asked.
_MAX_TIMEOUTS = 4

Result = TypeVar("Result")


class CircuitOpen(ConnectionError):
    """Redis failed a moment ago and is not asked again yet."""


class CircuitBreaker:
    """After a failure, lets one command in `cooldown_s` try and refuses the others."""

    def __init__(
        self, cooldown_s: float = COOLDOWN_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._cooldown_s = cooldown_s
        self._clock = clock
        self._closed_again_at: float | None = None

    @property
    def is_open(self) -> bool:
        return self._closed_again_at is not None

    def admit(self) -> None:
        """Raises CircuitOpen unless the command may be sent."""
        if self._closed_again_at is None:
            return
        now = self._clock()
        if now < self._closed_again_at:
            raise CircuitOpen("Redis failed a moment ago")
        # This command is the probe; the next one waits for its result or its turn.
        self._closed_again_at = now + self._cooldown_s

    def succeeded(self) -> None:
        if self._closed_again_at is not None:
            logger.info("Redis answers again")
        self._closed_again_at = None

    def failed(self, error: Exception) -> None:
        if self._closed_again_at is None:
            logger.warning(
                "Redis does not answer; going on without it", extra={"error": repr(error)}
            )
        self._closed_again_at = self._clock() + self._cooldown_s


class MeshRedis(redis.asyncio.Redis):
    """Runs every command and pipeline to its end in a task of its own.

    A caller that is cancelled stops waiting at once, but its command still reads its
    reply before the connection is used again, so no reply can reach another caller.
    Commands are bounded by the socket timeouts; errors are counted by kind.
    """

    def __init__(self, *args: Any, breaker: CircuitBreaker | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.breaker = breaker or CircuitBreaker()
        self._running: set[asyncio.Task[Any]] = set()

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        return await self.run_to_end(lambda: self._send(*args, **options))

    async def _send(self, *args: Any, **options: Any) -> Any:
        execute: Callable[..., Awaitable[Any]] = super().execute_command
        return await execute(*args, **options)

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> "_MeshPipeline":
        return _MeshPipeline(self, transaction, shard_hint)

    async def run_to_end(self, command: Callable[[], Awaitable[Result]]) -> Result:
        """Run a command whether or not the caller stays to see its result."""
        try:
            self.breaker.admit()
        except CircuitOpen:
            metrics.REDIS_ERRORS.add(1, {"kind": "circuit_open"})
            raise
        task = asyncio.create_task(self._observe(command))
        self._running.add(task)
        task.add_done_callback(self._ended)
        return await asyncio.shield(task)

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        self._running.discard(task)
        if not task.cancelled():
            # It was counted; whoever has left must not make asyncio report it as forgotten.
            task.exception()

    async def wait_until_idle(self) -> None:
        """Until commands whose callers left have ended too."""
        while self._running:
            await asyncio.wait(self._running)

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        await self.wait_until_idle()
        await super().aclose(close_connection_pool)

    async def abandon(self) -> None:
        """Close without waiting for replies: for a client that only listens for news."""
        for task in self._running:
            task.cancel()
        await self.aclose()

    async def _observe(self, command: Callable[[], Awaitable[Result]]) -> Result:
        try:
            result = await command()
        except RedisError as error:
            await self._failed(error)
            raise
        self.breaker.succeeded()
        return result

    async def _failed(self, error: RedisError) -> None:
        kind = error_kind(error)
        metrics.REDIS_ERRORS.add(1, {"kind": kind})
        if kind in ("connection", "timeout"):
            self.breaker.failed(error)
        else:
            # It answered, if only to refuse: no reason to stop asking.
            self.breaker.succeeded()
        if kind not in ("loading", "out_of_memory", "other"):
            # The server, the primary or our rights have moved, or idle connections are
            # as dead as this one: connect and resolve anew next time.
            await self._drop_idle_connections()

    async def _drop_idle_connections(self) -> None:
        await self.connection_pool.disconnect(inuse_connections=False)


class _MeshPipeline(Pipeline):
    """A pipeline whose execution survives its caller; WATCH is not for it."""

    def __init__(self, client: MeshRedis, transaction: bool, shard_hint: str | None) -> None:
        super().__init__(client.connection_pool, client.response_callbacks, transaction, shard_hint)
        self._client = client

    async def immediate_execute_command(self, *args: Any, **options: Any) -> Any:
        raise RedisError("WATCH is not supported: use a Lua script")

    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        # The commands move to an object that nobody else resets while it runs.
        detached = Pipeline(
            self.connection_pool, self.response_callbacks, self.is_transaction, self.shard_hint
        )
        detached.command_stack, self.command_stack = self.command_stack, []
        detached.scripts, self.scripts = self.scripts, set()
        return await self._client.run_to_end(lambda: detached.execute(raise_on_error))


def connect_redis(
    url: str, *, timeout_s: float = TIMEOUT_S, cooldown_s: float = COOLDOWN_S
) -> MeshRedis:
    """A client for `url`; connects on first use. Failures are RedisError, within bounds.

    `redis://`, `rediss://` and `unix://` name one server; `redis+sentinel://HOST,HOST/SERVICE`
    and `redis+cluster://HOST,HOST` (`rediss+...` with TLS) name several. A command takes at
    most about two timeouts with one server and four with several; after a failure further ones
    fail at once, except for one try per `cooldown_s`.
    """
    breaker = CircuitBreaker(cooldown_s)
    options = _connection_options(timeout_s)
    several = parse_several(url)
    if several is None:
        pool = redis.asyncio.BlockingConnectionPool.from_url(
            url, max_connections=_MAX_CONNECTIONS, timeout=timeout_s, **options
        )
        client = MeshRedis(connection_pool=pool, breaker=breaker)
    elif several.kind == "sentinel":
        client = _SentinelRedis(several, options, timeout_s, breaker)
    else:
        client = _ClusterRedis(several, options, timeout_s, breaker)
    client.auto_close_connection_pool = True
    return client


def _connection_options(timeout_s: float) -> dict[str, Any]:
    return {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "socket_keepalive": True,
        # One more try covers a connection that a restarted server closed; a timeout
        # is final.
        "retry": Retry(NoBackoff(), 1, supported_errors=(ConnectionError,)),
    }


class _BoundedRedis(MeshRedis):
    """Bounds a command as a whole: finding its server can take several connections.

    redis-py's pools for several servers refuse a command when all connections are in use,
    which looks like a server that is gone: here it waits for its turn, as with one server.
    """

    def __init__(self, timeout_s: float, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._total_timeout_s = _MAX_TIMEOUTS * timeout_s
        self._turns = asyncio.Semaphore(_MAX_CONNECTIONS)

    async def _observe(self, command: Callable[[], Awaitable[Result]]) -> Result:
        return await super()._observe(lambda: self._bounded(command))

    async def _bounded(self, command: Callable[[], Awaitable[Result]]) -> Result:
        try:
            async with asyncio.timeout(self._total_timeout_s), self._turns:
                return await command()
        except builtins.TimeoutError:
            raise TimeoutError(f"no reply within {self._total_timeout_s:g} s") from None
        except RedisClusterException as error:
            # Not a RedisError, although it only says that the cluster cannot be reached.
            raise ConnectionError(str(error)) from error


class _SentinelRedis(_BoundedRedis):
    """Talks to whichever server the sentinels call the primary."""

    def __init__(
        self,
        servers: SeveralServers,
        options: dict[str, Any],
        timeout_s: float,
        breaker: CircuitBreaker,
    ) -> None:
        # redis-py's own signatures have no types here.
        self._sentinel = Sentinel(servers.hosts, sentinel_kwargs=dict(options))  # type: ignore[no-untyped-call]
        pool = SentinelConnectionPool(  # type: ignore[no-untyped-call]
            servers.service,
            self._sentinel,
            max_connections=_MAX_CONNECTIONS,
            db=servers.db,
            username=servers.username,
            password=servers.password,
            ssl=servers.has_tls,
            **options,
        )
        super().__init__(timeout_s, connection_pool=pool, breaker=breaker)

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        await super().aclose(close_connection_pool)
        for sentinel in self._sentinel.sentinels:
            await sentinel.aclose()


class _ClusterRedis(_BoundedRedis):
    """Sends each command to the node that owns its key: the keys of a command share a hash tag."""

    def __init__(
        self,
        servers: SeveralServers,
        options: dict[str, Any],
        timeout_s: float,
        breaker: CircuitBreaker,
    ) -> None:
        super().__init__(timeout_s, breaker=breaker)
        self._cluster = RedisCluster(
            startup_nodes=[ClusterNode(host, port) for host, port in servers.hosts],
            username=servers.username,
            password=servers.password,
            ssl=servers.has_tls,
            max_connections=_MAX_CONNECTIONS,
            # A slot that has moved is noted by itself: to learn the cluster anew would close
            # connections that other commands use.
            reinitialize_steps=0,
            **options,
        )

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> "_MeshPipeline":
        raise RedisError("no pipelines in a cluster: use a Lua script")

    async def aclose(self, close_connection_pool: bool | None = None) -> None:
        await super().aclose(close_connection_pool)
        await self._cluster.aclose()

    async def _send(self, *args: Any, **options: Any) -> Any:
        # By itself it chooses a node before it knows whose slot it is.
        await self._cluster.initialize()
        return await self._cluster.execute_command(*args, **options)

    async def _drop_idle_connections(self) -> None:
        # The cluster client drops what failed and asks for the slots again by itself.
        return


def error_kind(error: RedisError) -> str:
    """One of the kinds under which metrics count errors."""
    if isinstance(error, TimeoutError):
        return "timeout"
    if isinstance(error, BusyLoadingError):
        return "loading"
    if isinstance(error, AuthenticationError | NoPermissionError):
        return "noauth"
    if isinstance(error, ConnectionError):
        return "connection"
    if isinstance(error, ReadOnlyError):
        return "readonly"
    if isinstance(error, MovedError):
        return "moved"
    if isinstance(error, OutOfMemoryError):
        return "out_of_memory"
    if isinstance(error, ResponseError):
        return _kind_in_reply(str(error))
    return "other"


def _kind_in_reply(text: str) -> str:
    """Scripts wrap the reply of the command that failed inside them."""
    for sign, kind in (
        ("READONLY", "readonly"),
        ("read only replica", "readonly"),
        ("MOVED", "moved"),
        ("NOAUTH", "noauth"),
        ("OOM", "out_of_memory"),
    ):
        if sign in text:
            return kind
    return "other"
