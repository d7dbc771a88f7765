"""The copy of the block index: equal to the index, through gaps, outages and lost data."""

import asyncio
import random
from collections.abc import AsyncIterator

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from mesh.block_index import BlockEvent, BlockIndex, IndexState, PrefixHit
from mesh.redis_client import MeshRedis, connect_redis
from scheduler_svc.block_replica import BlockReplica
from tests.fakes import FakeClock
from tests.valkey import RedisProxy

MODEL = "smol"


def keys(*numbers: int) -> list[bytes]:
    return [number.to_bytes(16) for number in numbers]


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[MeshRedis]:
    client = connect_redis(redis_url, timeout_s=20)
    yield client
    await client.aclose()


class LeakyFeed:
    """An index whose events can get lost, and which counts what it is asked."""

    def __init__(self, index: BlockIndex) -> None:
        self._index = index
        self.to_lose = 0
        self.error: Exception | None = None
        self.num_pages = 0

    async def state(self, model: str) -> IndexState:
        return await self._index.state(model)

    async def events_after(self, model: str, event_id: str, limit: int) -> list[BlockEvent]:
        if self.error is not None:
            raise self.error
        events = await self._index.events_after(model, event_id, limit)
        lost, self.to_lose = self.to_lose, 0
        return events[lost:]

    async def wait_for_event(self, model: str, event_id: str, wait_s: float) -> None:
        await self._index.wait_for_event(model, event_id, wait_s)

    async def blocks_of(self, model: str, shelf: str, cursor: int) -> tuple[int, list[bytes]]:
        self.num_pages += 1
        return await self._index.blocks_of(model, shelf, cursor)


async def test_copy_begins_with_what_is_there_and_follows(client: MeshRedis) -> None:
    index = BlockIndex(client)
    await index.publish(MODEL, "w", "a", keys(*range(5000)), [])
    replica = BlockReplica(index, MODEL)
    assert not replica.is_ready

    await replica.catch_up()
    assert replica.is_ready
    assert replica.longest_prefix(keys(*range(5000))) == {"w@a": PrefixHit(5000)}

    await index.publish(MODEL, "w", "a", [], keys(1), "device")
    await index.publish(MODEL, "w", "a", keys(1, 2), [], "host")
    await index.publish(MODEL, "v", "a", keys(0), [])
    await replica.catch_up()
    assert replica.longest_prefix(keys(0, 1, 2, 3)) == {
        "w@a": PrefixHit(3, 1),
        "v@a": PrefixHit(1),
    }

    await index.drop_worker(MODEL, "w", "a")
    await replica.catch_up()
    assert replica.longest_prefix(keys(0, 1)) == {"v@a": PrefixHit(1)}


async def test_following_costs_nothing_but_the_events(client: MeshRedis) -> None:
    index = BlockIndex(client)
    feed = LeakyFeed(index)
    await index.publish(MODEL, "w", "a", keys(1), [])
    replica = BlockReplica(feed, MODEL)
    await replica.catch_up()
    num_pages = feed.num_pages

    for number in range(2, 40):
        await index.publish(MODEL, "w", "a", keys(number), [])
        await replica.catch_up()

    assert replica.longest_prefix(keys(*range(1, 40))) == {"w@a": PrefixHit(39)}
    assert feed.num_pages == num_pages


async def test_gap_in_the_numbers_loads_the_worker_anew(client: MeshRedis) -> None:
    index = BlockIndex(client)
    feed = LeakyFeed(index)
    replica = BlockReplica(feed, MODEL)
    await index.publish(MODEL, "w", "a", keys(1, 2), [])
    await replica.catch_up()
    await index.publish(MODEL, "w", "a", [], keys(2))
    await index.publish(MODEL, "w", "a", keys(3), [])

    feed.to_lose = 1
    await replica.catch_up()

    assert replica.longest_prefix(keys(1, 2)) == {"w@a": PrefixHit(1)}
    assert replica.longest_prefix(keys(3)) == {"w@a": PrefixHit(1)}


async def test_lost_event_is_found_although_no_other_follows(client: MeshRedis) -> None:
    index, clock = BlockIndex(client), FakeClock()
    feed = LeakyFeed(index)
    replica = BlockReplica(feed, MODEL, audit_s=1, clock=clock)
    await replica.catch_up()
    await index.publish(MODEL, "w", "a", keys(1), [])
    # The stream was cut off before we came to it.
    await client.xtrim(f"mesh:{{{MODEL}}}:events", maxlen=0)
    await replica.catch_up()
    assert replica.longest_prefix(keys(1)) == {}

    clock.advance(4)
    await replica.catch_up()

    assert replica.longest_prefix(keys(1)) == {"w@a": PrefixHit(1)}


async def test_redis_that_comes_back_empty_is_filled_again_by_the_workers(
    client: MeshRedis,
) -> None:
    index, clock = BlockIndex(client), FakeClock()
    replica = BlockReplica(index, MODEL, audit_s=1, forget_s=10, clock=clock)
    for worker_id in ("back", "gone"):
        await index.publish(MODEL, worker_id, "a", keys(1, 2), [])
    await replica.catch_up()

    await client.flushall()
    clock.advance(2)
    await replica.catch_up()
    # Nobody has told yet, and the blocks are where they were.
    assert set(replica.longest_prefix(keys(1))) == {"back@a", "gone@a"}

    await index.publish(MODEL, "back", "a", keys(1), [])
    clock.advance(2)
    await replica.catch_up()
    assert replica.longest_prefix(keys(1, 2)) == {
        "back@a": PrefixHit(1),
        "gone@a": PrefixHit(2),
    }

    clock.advance(11)
    await replica.catch_up()
    assert replica.longest_prefix(keys(1, 2)) == {"back@a": PrefixHit(1)}
    await index.publish(MODEL, "back", "a", keys(2), [])
    await replica.catch_up()
    assert replica.longest_prefix(keys(1, 2)) == {"back@a": PrefixHit(2)}


async def test_failover_that_loses_the_last_events_is_noticed(client: MeshRedis) -> None:
    index = BlockIndex(client)
    replica = BlockReplica(index, MODEL)
    await index.publish(MODEL, "w", "a", keys(1), [])
    await index.publish(MODEL, "w", "a", keys(2), [])
    await replica.catch_up()

    # What a replica that lagged behind knows: one event less.
    await client.hset(f"mesh:{{{MODEL}}}:seqs", "w@a#device", "1")
    await client.srem(f"mesh:{{{MODEL}}}:held:w@a#device", keys(2)[0].hex())
    await index.publish(MODEL, "w", "a", keys(3), [])
    await replica.catch_up()

    assert replica.longest_prefix(keys(1, 2)) == {"w@a": PrefixHit(1)}
    assert replica.longest_prefix(keys(3)) == {"w@a": PrefixHit(1)}


# RD-03
async def test_copy_stands_while_redis_hangs_and_goes_on_afterwards(
    redis_url: str, redis_proxy: RedisProxy
) -> None:
    writer = connect_redis(redis_url, timeout_s=20)
    reader = connect_redis(redis_proxy.url, timeout_s=0.1, cooldown_s=0.1)
    index = BlockIndex(writer)
    await index.publish(MODEL, "w", "a", keys(1), [])
    replica = BlockReplica(BlockIndex(reader), MODEL, interval_s=0.01)
    following = asyncio.create_task(replica.run())
    await until(replica, {"w@a": PrefixHit(1)})

    redis_proxy.is_black_hole = True
    await index.publish(MODEL, "w", "a", keys(2), [])
    await asyncio.sleep(0.3)
    assert replica.longest_prefix(keys(1, 2)) == {"w@a": PrefixHit(1)}
    redis_proxy.is_black_hole = False
    redis_proxy.cut()

    await until(replica, {"w@a": PrefixHit(2)})
    following.cancel()
    await reader.aclose()
    await writer.aclose()


async def until(replica: BlockReplica, found: dict[str, PrefixHit]) -> None:
    async with asyncio.timeout(20):
        # The replica polls Redis, and we the replica.
        while replica.longest_prefix(keys(1, 2)) != found:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_copy_equals_the_index_after_random_changes_and_losses(client: MeshRedis) -> None:
    chance, clock = random.Random(5), FakeClock()
    index = BlockIndex(client)
    feed = LeakyFeed(index)
    replica = BlockReplica(feed, MODEL, audit_s=1, forget_s=3, clock=clock)
    for _ in range(150):
        worker_id, numbers = chance.choice("abc"), [chance.randrange(6) for _ in range(3)]
        action = chance.random()
        if action < 0.6:
            await index.publish(MODEL, worker_id, "1", keys(*numbers[:2]), keys(*numbers[2:]))
        elif action < 0.7:
            await index.drop_worker(MODEL, worker_id, "1")
        elif action < 0.75:
            await client.flushall()
        elif action < 0.85:
            feed.to_lose = chance.randrange(3)
        elif action < 0.9:
            feed.error = RedisConnectionError("down")
        else:
            feed.error = None
        clock.advance(chance.random())
        if feed.error is None and chance.random() < 0.5:
            await replica.catch_up()

    feed.error, feed.to_lose = None, 0
    for _ in range(8):
        clock.advance(1.1)
        await replica.catch_up()

    for number in range(6):
        assert replica.longest_prefix(keys(number)) == await index.longest_prefix(
            MODEL, keys(number)
        )
