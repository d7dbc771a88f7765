import asyncio
import gc
from collections.abc import AsyncIterator
from typing import Any

import pytest
import redis.asyncio
from redis.exceptions import (
    ConnectionError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TimeoutError,
)

from mesh import metrics
from mesh.redis_client import CircuitBreaker, CircuitOpen, MeshRedis, connect_redis
from tests.loop_clock import LoopClock
from tests.valkey import RedisProxy, running_valkey


@pytest.fixture
async def proxied(redis_proxy: RedisProxy) -> AsyncIterator[MeshRedis]:
    client = connect_redis(redis_proxy.url, timeout_s=20)
    yield client
    await client.aclose()


def num_errors(kind: str) -> float:
    line = f'pdmesh_redis_errors_total{{kind="{kind}"}} '
    for text in metrics.render()[0].decode().splitlines():
        if text.startswith(line):
            return float(text.removeprefix(line))
    return 0.0


# RD-01
async def test_cancelled_gets_never_leave_their_reply_to_the_next_caller(
    proxied: MeshRedis, redis_proxy: RedisProxy
) -> None:
    await proxied.mset({"k1": "first", "k2": "second"})
    redis_proxy.reply_delay_s = 0.003

    async def cancel_one_then_ask_another() -> bytes | str | None:
        abandoned = asyncio.ensure_future(proxied.get("k1"))
        await asyncio.sleep(0.001)
        abandoned.cancel()
        return await proxied.get("k2")

    for _ in range(50):
        values = await asyncio.gather(*(cancel_one_then_ask_another() for _ in range(20)))
        assert values == [b"second"] * 20


# RD-01
async def test_cancelled_pipelines_never_leave_their_replies_to_the_next_caller(
    proxied: MeshRedis, redis_proxy: RedisProxy
) -> None:
    await proxied.mset({"k1": "first", "k2": "second"})
    redis_proxy.reply_delay_s = 0.003

    async def read(key: str) -> list[bytes]:
        async with proxied.pipeline() as pipeline:
            pipeline.get(key)
            pipeline.get(key)
            values: list[bytes] = await pipeline.execute()
            return values

    async def cancel_one_then_ask_another() -> list[bytes]:
        abandoned = asyncio.create_task(read("k1"))
        await asyncio.sleep(0.001)
        abandoned.cancel()
        return await read("k2")

    for _ in range(10):
        values = await asyncio.gather(*(cancel_one_then_ask_another() for _ in range(10)))
        assert values == [[b"second", b"second"]] * 10


async def test_cancelled_callers_return_at_once_and_cost_no_connection(
    redis_proxy: RedisProxy,
) -> None:
    client = connect_redis(redis_proxy.url, timeout_s=60)
    await client.ping()
    redis_proxy.may_reply.clear()

    abandoned = asyncio.ensure_future(client.get("k1"))
    await asyncio.sleep(0.01)
    abandoned.cancel()
    await asyncio.wait({abandoned}, timeout=20)

    assert abandoned.cancelled()
    redis_proxy.may_reply.set()
    await client.wait_until_idle()
    await client.get("k2")
    assert redis_proxy.num_connections == 1
    await client.aclose()


# RD-03
async def test_silent_server_costs_one_timeout_and_then_nothing(redis_proxy: RedisProxy) -> None:
    client = connect_redis(redis_proxy.url, timeout_s=0.3, cooldown_s=60)
    await client.ping()
    redis_proxy.is_black_hole = True

    async with LoopClock() as clock:
        with pytest.raises(TimeoutError):
            await client.get("key")
        first_s = clock.now_s
        for _ in range(100):
            with pytest.raises(CircuitOpen):
                await client.get("key")

        assert first_s < 0.5
        assert clock.now_s - first_s < 0.2
    await client.aclose()


# RD-03
async def test_commands_work_again_after_the_silence_without_a_restart(
    redis_proxy: RedisProxy,
) -> None:
    client = connect_redis(redis_proxy.url, timeout_s=0.3, cooldown_s=0.1)
    await client.set("key", "value")
    redis_proxy.is_black_hole = True
    with pytest.raises(TimeoutError):
        await client.get("key")

    redis_proxy.is_black_hole = False
    async with asyncio.timeout(20):
        while True:
            try:
                value = await client.get("key")
                break
            except RedisError:
                await asyncio.sleep(0.02)

    assert value == b"value"
    assert not client.breaker.is_open
    await client.aclose()


# RD-03
async def test_idle_connections_that_died_silently_cost_one_timeout_together(
    redis_proxy: RedisProxy,
) -> None:
    client = connect_redis(redis_proxy.url, timeout_s=1, cooldown_s=0.05)
    redis_proxy.reply_delay_s = 0.01
    await asyncio.gather(*(client.set("key", "value") for _ in range(10)))
    redis_proxy.reply_delay_s = 0

    redis_proxy.deaden()
    with pytest.raises(TimeoutError):
        await client.get("key")
    await asyncio.sleep(0.1)

    assert await client.get("key") == b"value"
    assert await asyncio.gather(*(client.get("key") for _ in range(10))) == [b"value"] * 10
    await client.aclose()


async def test_watching_a_key_is_refused(proxied: MeshRedis) -> None:
    async with proxied.pipeline() as pipeline:
        with pytest.raises(RedisError, match="Lua"):
            await pipeline.watch("key")


# RD-03
async def test_server_that_starts_later_is_found() -> None:
    with running_valkey() as server:
        port = server.port
    client = connect_redis(f"redis://127.0.0.1:{port}/0", timeout_s=20, cooldown_s=0.05)
    with pytest.raises(ConnectionError):
        await client.ping()

    with running_valkey(port):
        async with asyncio.timeout(20):
            while client.breaker.is_open:
                try:
                    await client.ping()
                except RedisError:
                    await asyncio.sleep(0.02)

        assert await client.ping()
        await client.aclose()


async def test_connections_cut_by_a_restart_are_replaced_unnoticed(
    proxied: MeshRedis, redis_proxy: RedisProxy
) -> None:
    await proxied.set("key", "value")

    redis_proxy.cut()

    assert await proxied.get("key") == b"value"


# RD-05
async def test_writes_to_a_replica_fail_counted_and_resume_after_promotion(
    redis_url: str,
) -> None:
    client = connect_redis(redis_url, timeout_s=20)
    before = num_errors("readonly")
    await client.execute_command("REPLICAOF", "127.0.0.1", "1")
    try:
        with pytest.raises(ReadOnlyError):
            await client.set("key", "value")
    finally:
        await client.execute_command("REPLICAOF", "NO", "ONE")

    assert num_errors("readonly") == before + 1
    assert not client.breaker.is_open
    assert await client.set("key", "value")
    await client.aclose()


# RD-05
@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        ("LOADING Redis is loading the dataset in memory", "loading"),
        ("MOVED 3999 127.0.0.1:6381", "moved"),
        ("NOAUTH Authentication required.", "noauth"),
        ("NOPERM this user has no permissions", "noauth"),
        ("OOM command not allowed when used memory > 'maxmemory'.", "out_of_memory"),
        ("READONLY You can't write against a read only replica.", "readonly"),
        ("ERR something else", "other"),
    ],
)
async def test_refusals_are_redis_errors_counted_by_kind(reply: str, kind: str) -> None:
    async with FixedReplies(f"-{reply}\r\n") as server:
        client = connect_redis(server.url, timeout_s=20)
        before = num_errors(kind)

        with pytest.raises(RedisError):
            await client.set("key", "value")
        server.reply = "+OK\r\n"
        accepted = await client.set("key", "value")

        assert accepted
        assert num_errors(kind) == before + 1
        await client.aclose()


async def test_error_of_a_command_inside_a_script_keeps_its_kind(redis_url: str) -> None:
    client = connect_redis(redis_url, timeout_s=20)
    script = client.register_script("return redis.call('SET', KEYS[1], 'value')")
    before = num_errors("readonly")
    await client.execute_command("REPLICAOF", "127.0.0.1", "1")
    try:
        with pytest.raises(ResponseError):
            await script(keys=["key"])
    finally:
        await client.execute_command("REPLICAOF", "NO", "ONE")

    assert num_errors("readonly") == before + 1
    await client.aclose()


async def test_scripts_are_sent_again_after_the_server_forgot_them(redis_url: str) -> None:
    client = connect_redis(redis_url, timeout_s=20)
    script = client.register_script("return 7")
    assert await script() == 7

    await client.script_flush()

    assert await script() == 7
    await client.aclose()


def test_breaker_lets_one_probe_through_per_cooldown() -> None:
    now = 0.0
    breaker = CircuitBreaker(cooldown_s=2.0, clock=lambda: now)
    breaker.admit()
    breaker.failed(ConnectionError("gone"))

    now = 1.9
    with pytest.raises(CircuitOpen):
        breaker.admit()
    now = 2.0
    breaker.admit()
    with pytest.raises(CircuitOpen):
        breaker.admit()
    breaker.succeeded()

    breaker.admit()
    breaker.admit()


async def test_closing_waits_for_commands_whose_callers_left(redis_proxy: RedisProxy) -> None:
    client = connect_redis(redis_proxy.url, timeout_s=20)
    await client.ping()
    redis_proxy.reply_delay_s = 0.05
    abandoned = asyncio.ensure_future(client.set("key", "value"))
    await asyncio.sleep(0.01)
    abandoned.cancel()

    await client.aclose()

    direct = redis.asyncio.from_url(redis_proxy.url)
    assert await direct.get("key") == b"value"
    await direct.aclose()


async def test_failure_that_nobody_awaits_any_more_is_no_error_of_the_loop(
    redis_proxy: RedisProxy,
) -> None:
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    client = connect_redis(redis_proxy.url, timeout_s=20)
    await client.set("key", "no number")
    redis_proxy.reply_delay_s = 0.02
    abandoned = asyncio.ensure_future(client.incr("key"))
    await asyncio.sleep(0)

    abandoned.cancel()
    await client.aclose()
    del abandoned
    gc.collect()

    assert reported == []


async def test_who_only_listens_need_not_wait_to_leave(redis_proxy: RedisProxy) -> None:
    client = connect_redis(redis_proxy.url, timeout_s=60)
    await client.ping()
    redis_proxy.is_black_hole = True
    listening = [asyncio.ensure_future(client.get("news")) for _ in range(3)]
    await asyncio.sleep(0)

    async with asyncio.timeout(20):
        await client.abandon()

    outcomes = await asyncio.gather(*listening, return_exceptions=True)
    assert all(isinstance(one, asyncio.CancelledError) for one in outcomes)


class FixedReplies:
    """A server that says OK to the client's greeting and `reply` to everything else."""

    def __init__(self, reply: str) -> None:
        self.reply = reply
        self.url = ""

    async def __aenter__(self) -> "FixedReplies":
        self._writers: set[asyncio.StreamWriter] = set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/0?protocol=2"
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._server.close()
        for writer in self._writers:
            writer.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        while header := await reader.readline():
            arguments = []
            for _ in range(int(header[1:])):
                length = int((await reader.readline())[1:])
                arguments.append((await reader.readexactly(length + 2))[:-2])
            greeting = arguments[0].upper() in (b"CLIENT", b"SELECT", b"HELLO")
            writer.write(b"+OK\r\n" if greeting else self.reply.encode())
        writer.close()
