"""Schedulers learn of each other's charges, and forget those that died."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from mesh.redis_client import MeshRedis, connect_redis
from scheduler_svc.cluster import Cluster
from scheduler_svc.peers import Peers
from scheduler_svc.workers import ActiveLoad
from tests.paper_workers import PaperRegistry, registered
from tests.valkey import RedisProxy


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[MeshRedis]:
    client = connect_redis(redis_url, timeout_s=20)
    yield client
    await client.aclose()


async def test_each_hears_the_sum_of_the_others(client: MeshRedis) -> None:
    a, b, c = (Peers(client, name) for name in "abc")
    assert await a.exchange({"p0@1": ActiveLoad(1, 100, 7)}) == {}
    await b.exchange({"p0@1": ActiveLoad(2, 0, 3), "d0@1": ActiveLoad(1, 0, 1)})

    assert await c.exchange({}) == {
        "p0@1": ActiveLoad(3, 100, 10),
        "d0@1": ActiveLoad(1, 0, 1),
    }
    assert await a.exchange({}) == {"p0@1": ActiveLoad(2, 0, 3), "d0@1": ActiveLoad(1, 0, 1)}
    assert await c.exchange({}) == {"p0@1": ActiveLoad(2, 0, 3), "d0@1": ActiveLoad(1, 0, 1)}


async def test_scheduler_that_died_is_forgotten(client: MeshRedis) -> None:
    await Peers(client, "dead", ttl_s=0.5).exchange({"p0@1": ActiveLoad(1, 100, 7)})
    alive = Peers(client, "alive")
    assert await alive.exchange({}) != {}

    async with asyncio.timeout(20):
        while await alive.exchange({}):  # noqa: ASYNC110, its time ends in Redis
            await asyncio.sleep(0.01)

    assert await client.hkeys("mesh:{scheduler}:charges") == [b"alive"]


async def test_unreadable_charges_count_nothing(client: MeshRedis) -> None:
    await client.hset("mesh:{scheduler}:charges", "newer", "9999999999999:[1,2]")

    assert await Peers(client, "a").exchange({}) == {}


async def test_outage_is_bounded_and_costs_only_the_others_charges(
    redis_proxy: RedisProxy,
) -> None:
    client = connect_redis(redis_proxy.url, timeout_s=0.1)
    redis_proxy.is_black_hole = True

    async with asyncio.timeout(20):
        assert await Peers(client, "a").exchange({"p0@1": ActiveLoad(1, 1, 1)}) == {}

    redis_proxy.is_black_hole = False
    await client.aclose()


async def test_cluster_keeps_what_the_others_told_with_the_last_refresh() -> None:
    registry = PaperRegistry(registered("d0"))
    cluster = Cluster(registry)
    told: list[object] = []

    async def exchange(own: object) -> dict[str, ActiveLoad]:
        told.append(own)
        return {"d0@1": ActiveLoad(3, 0, 5)}

    own = {"d0@1": ActiveLoad(1, 0, 1)}
    cluster.share_charges(lambda: own, exchange)
    await cluster.refresh()

    assert told == [own]
    assert cluster.charged_by_others("d0@1") == ActiveLoad(3, 0, 5)
    registry.error = OSError("down")
    await cluster.refresh()
    assert cluster.charged_by_others("d0@1") == ActiveLoad()
