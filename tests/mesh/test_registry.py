import asyncio
import dataclasses
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from itertools import pairwise

import orjson
import pytest
from redis.exceptions import RedisError

from mesh.redis_client import MeshRedis, connect_redis
from mesh.registry import (
    Heartbeat,
    RegisteredWorker,
    WorkerChanges,
    WorkerLoad,
    WorkerRecord,
    WorkerRegistry,
    new_incarnation,
)
from tests.loop_clock import LoopClock
from tests.valkey import RedisProxy


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[MeshRedis]:
    client = connect_redis(redis_url, timeout_s=20)
    yield client
    await client.aclose()


def make_record(worker_id: str = "decode-0", incarnation: str = "one") -> WorkerRecord:
    return WorkerRecord(
        worker_id=worker_id,
        incarnation=incarnation,
        role="decode",
        address="127.0.0.1:7000",
        model="smollm2-135m-instruct",
        engine_id=f"{worker_id}-{incarnation}",
        transfer_address="127.0.0.1:7001",
        layout_fingerprint="f" * 32,
        block_size=16,
        num_blocks=100,
        max_model_len=8192,
        max_num_batched_tokens=256,
        layout={"block_size": "16"},
        cpus=(0, 1),
        num_threads=2,
    )


async def eventually(holds: Callable[[], Awaitable[bool]]) -> None:
    """Ask again until it holds: what happens inside Redis sets no event here."""
    async with asyncio.timeout(20):
        while not await holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_registered_workers_are_listed_with_their_load(client: MeshRedis) -> None:
    registry = WorkerRegistry(client)
    load = WorkerLoad(num_blocks=100, num_free_blocks=60, num_running=3)

    await registry.put(make_record("prefill-0"), WorkerLoad(), ttl_s=5)
    await registry.put(make_record("decode-0"), load, ttl_s=5)

    assert await registry.list() == [
        RegisteredWorker(make_record("decode-0"), load),
        RegisteredWorker(make_record("prefill-0"), WorkerLoad()),
    ]


async def test_list_is_one_round_trip_however_many_workers_there_are(client: MeshRedis) -> None:
    registry = WorkerRegistry(client)
    for index in range(30):
        await registry.put(make_record(f"decode-{index}"), WorkerLoad(), ttl_s=5)
    await registry.list()
    before = await client.info("commandstats")

    assert len(await registry.list()) == 30

    after = await client.info("commandstats")
    calls = {
        name: after[name]["calls"] - before.get(name, {"calls": 0})["calls"]
        for name in ("cmdstat_evalsha", "cmdstat_eval", "cmdstat_get")
        if name in after
    }
    assert calls["cmdstat_evalsha"] == 1


async def test_worker_that_stops_beating_leaves_the_list_and_its_index(
    client: MeshRedis,
) -> None:
    registry = WorkerRegistry(client)
    await registry.put(make_record(), WorkerLoad(), ttl_s=0.03)

    await asyncio.sleep(0.05)

    assert await registry.list() == []
    # What is left is bounded, and expires too.
    assert await client.keys("mesh:*") == [b"mesh:{worker}-changes"]
    assert await client.ttl("mesh:{worker}-changes") > 0


# KV-23
async def test_removing_an_old_incarnation_leaves_the_new_one(client: MeshRedis) -> None:
    registry = WorkerRegistry(client)
    await registry.put(make_record(incarnation="new"), WorkerLoad(), ttl_s=5)

    await registry.remove("decode-0", "old")
    assert len(await registry.list()) == 1

    await registry.remove("decode-0", "new")
    assert await registry.list() == []


# KV-23
async def test_replaced_process_cannot_overwrite_its_successor(client: MeshRedis) -> None:
    registry = WorkerRegistry(client)
    old, new = new_incarnation(), new_incarnation()
    assert await registry.put(make_record(incarnation=old), WorkerLoad(), ttl_s=5)
    assert await registry.put(make_record(incarnation=new), WorkerLoad(), ttl_s=5)

    stored = await registry.put(make_record(incarnation=old), WorkerLoad(), ttl_s=5)

    assert not stored
    assert [worker.record.incarnation for worker in await registry.list()] == [new]


def test_incarnations_sort_by_age() -> None:
    incarnations = [new_incarnation() for _ in range(100)]

    assert incarnations == sorted(incarnations)
    assert len(set(incarnations)) == 100


async def test_records_of_other_versions_do_not_hide_the_rest(client: MeshRedis) -> None:
    registry = WorkerRegistry(client)
    await registry.put(make_record("decode-0"), WorkerLoad(), ttl_s=5)
    newer = dataclasses.asdict(make_record("decode-1")) | {"from_the_future": 1}
    for worker_id, value in (
        ("decode-1", orjson.dumps({"record": newer, "load": {"num_running": 2, "also_new": 3}})),
        ("decode-2", b"garbage"),
        ("decode-3", orjson.dumps({"record": {"worker_id": "decode-3"}, "load": {}})),
        ("decode-4", b"[]"),
    ):
        await client.hset("mesh:{worker}:" + worker_id, "value", value)
        await client.sadd("mesh:{worker}s", worker_id)

    workers = await registry.list()

    assert [worker.record.worker_id for worker in workers] == ["decode-0", "decode-1"]
    assert workers[1].load == WorkerLoad(num_running=2)


async def test_heartbeat_reports_the_current_load_until_it_ends(client: MeshRedis) -> None:
    registry = WorkerRegistry(client)
    load = WorkerLoad(num_running=1)

    async with Heartbeat(registry, make_record(), lambda: load, interval_s=0.01):
        assert (await registry.list())[0].load.num_running == 1
        load = WorkerLoad(num_running=2)

        async def is_reported() -> bool:
            return (await registry.list())[0].load.num_running == 2

        await eventually(is_reported)

    assert await registry.list() == []


# RD-03
async def test_heartbeat_survives_an_outage_and_says_so_once(
    redis_proxy: RedisProxy, client: MeshRedis, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "mesh.registry")
    proxied = connect_redis(redis_proxy.url, timeout_s=0.05, cooldown_s=0.02)
    registry = WorkerRegistry(client)

    def said() -> list[str]:
        return [one.message for one in caplog.records if one.name == "mesh.registry"]

    async def has_said_last(line: str) -> bool:
        return said()[-1] == line

    async def is_forgotten() -> bool:
        return await registry.list() == []

    async def is_listed() -> bool:
        return len(await registry.list()) == 1

    async with Heartbeat(
        WorkerRegistry(proxied), make_record(), WorkerLoad, interval_s=0.01, ttl_s=0.1
    ):
        redis_proxy.is_black_hole = True
        await eventually(lambda: has_said_last("not registered"))
        # Many beats later.
        await eventually(is_forgotten)

        redis_proxy.is_black_hole = False
        await eventually(lambda: has_said_last("registered"))
        await eventually(is_listed)
    assert said()[:2] == ["registered", "not registered"]
    assert all(before != after for before, after in pairwise(said()))
    await proxied.aclose()


async def test_heartbeat_survives_a_load_that_cannot_be_read(client: MeshRedis) -> None:
    registry = WorkerRegistry(client)
    answers: list[WorkerLoad | Exception] = [ValueError("engine is gone"), WorkerLoad()]

    def load() -> WorkerLoad:
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def is_listed() -> bool:
        return len(await registry.list()) == 1

    async with Heartbeat(registry, make_record(), load, interval_s=0.01):
        await eventually(is_listed)


async def test_heartbeat_starts_and_ends_without_redis(redis_proxy: RedisProxy) -> None:
    redis_proxy.is_black_hole = True
    proxied = connect_redis(redis_proxy.url, timeout_s=0.05, cooldown_s=0.05)

    async with (
        LoopClock() as clock,
        Heartbeat(WorkerRegistry(proxied), make_record(), WorkerLoad, interval_s=0.01),
    ):
        pass

    assert clock.now_s < 1
    await proxied.aclose()


async def test_listing_without_redis_is_a_redis_error(redis_proxy: RedisProxy) -> None:
    redis_proxy.is_black_hole = True
    proxied = connect_redis(redis_proxy.url, timeout_s=0.05)

    with pytest.raises(RedisError):
        await WorkerRegistry(proxied).list()

    await proxied.aclose()


async def test_joining_and_leaving_are_told_at_once_and_heartbeats_are_not(
    client: MeshRedis, redis_url: str
) -> None:
    registry, following = WorkerRegistry(client), connect_redis(redis_url, timeout_s=20)
    changes, record = WorkerChanges(following), make_record()

    async def is_told(happening: Awaitable[object], within_s: float) -> bool:
        waiting = asyncio.create_task(changes.wait(within_s))
        started = time.monotonic()
        await happening
        await waiting
        return time.monotonic() - started < within_s

    assert await is_told(registry.put(record, WorkerLoad(), ttl_s=5), 10)
    assert not await is_told(registry.put(record, WorkerLoad(num_running=1), ttl_s=5), 0.2)
    assert await is_told(registry.put(make_record(incarnation="two"), WorkerLoad(), ttl_s=5), 10)
    assert not await is_told(registry.remove("decode-0", "one"), 0.2)
    assert await is_told(registry.remove("decode-0", "two"), 10)
    await following.aclose()
