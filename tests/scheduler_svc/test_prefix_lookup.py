"""Prefix lookup: which keys are asked for, and what happens without an answer."""

import asyncio
from collections.abc import Sequence

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from mesh.block_index import machine_holder_id
from mesh.block_keys import BlockKeys
from scheduler_svc.predicted_blocks import PredictedBlocks
from scheduler_svc.prefix_lookup import BlockLayout, IndexLookup, LocalLookup, PrefixQuery
from scheduler_svc.workers import PrefixHit
from tests.fakes import FakeClock

LAYOUT = BlockLayout("f1", 4)


class FakeIndex:
    """Answers from a set of keys that one holder has."""

    def __init__(self, held: list[bytes] | None = None, error: Exception | None = None) -> None:
        self.held = set(held or [])
        self.error = error
        self.asked: list[list[bytes]] = []

    async def longest_prefix(self, model: str, keys: list[bytes]) -> dict[str, PrefixHit]:
        self.asked.append(keys)
        if self.error is not None:
            raise self.error
        num_blocks = 0
        while num_blocks < len(keys) and keys[num_blocks] in self.held:
            num_blocks += 1
        return {"p0@1": PrefixHit(num_blocks)} if num_blocks else {}


class HangingIndex:
    def __init__(self) -> None:
        self.num_asked = 0

    async def longest_prefix(self, model: str, keys: list[bytes]) -> dict[str, PrefixHit]:
        self.num_asked += 1
        await asyncio.Event().wait()
        raise AssertionError


def make_query(
    token_ids: list[int], layouts: frozenset[BlockLayout] = frozenset({LAYOUT}), salt: str = ""
) -> PrefixQuery:
    return PrefixQuery("smol", token_ids, salt, layouts)


async def test_prefix_is_found_by_the_keys_of_its_full_blocks() -> None:
    token_ids = list(range(20))
    index = FakeIndex(BlockKeys("f1").chain(token_ids[:8], 4))

    hits = await IndexLookup(index).hits(make_query(token_ids))

    assert hits == {"p0@1": PrefixHit(device_blocks=2)}
    assert len(index.asked) == 1


@pytest.mark.parametrize(("num_tokens", "num_keys"), [(8, 1), (9, 2), (12, 2), (13, 3)])
async def test_block_that_holds_the_last_token_is_not_looked_up(
    num_tokens: int, num_keys: int
) -> None:
    # KV-05
    index = FakeIndex()

    await IndexLookup(index).hits(make_query(list(range(num_tokens))))

    assert len(index.asked[0]) == num_keys


async def test_short_prompt_asks_nobody() -> None:
    index = FakeIndex()

    assert await IndexLookup(index).hits(make_query([1, 2, 3, 4])) == {}
    assert index.asked == []


async def test_another_salt_or_layout_finds_nothing() -> None:
    # KV-02, KV-03, KV-25
    token_ids = list(range(20))
    index = FakeIndex(BlockKeys("f1").chain(token_ids, 4, "t1"))
    lookup = IndexLookup(index)

    assert await lookup.hits(make_query(token_ids, salt="t1"))
    assert not await lookup.hits(make_query(token_ids, salt="t2"))
    assert not await lookup.hits(make_query(token_ids))
    other = frozenset({BlockLayout("f2", 4)})
    assert not await lookup.hits(make_query(token_ids, other, "t1"))


async def test_each_layout_of_a_mixed_mesh_is_asked_for() -> None:
    index = FakeIndex()
    layouts = frozenset({BlockLayout("f1", 4), BlockLayout("f2", 8)})

    await IndexLookup(index).hits(make_query(list(range(20)), layouts))

    assert sorted(len(keys) for keys in index.asked) == [2, 4]


async def test_failures_mean_no_hits_and_then_a_pause() -> None:
    # RD-03
    now = [0.0]
    index = FakeIndex(error=RedisConnectionError("down"))
    lookup = IndexLookup(index, max_failures=2, pause_s=1, clock=lambda: now[0])
    query = make_query(list(range(20)))

    for _ in range(5):
        assert await lookup.hits(query) == {}
    assert len(index.asked) == 2
    now[0] = 1.0
    assert await lookup.hits(query) == {}
    assert await lookup.hits(query) == {}

    assert len(index.asked) == 3


async def test_one_failure_costs_no_affinity() -> None:
    token_ids = list(range(20))
    index = FakeIndex(BlockKeys("f1").chain(token_ids, 4), RedisConnectionError("once"))
    lookup = IndexLookup(index, max_failures=2)

    assert await lookup.hits(make_query(token_ids)) == {}
    index.error = None
    assert await lookup.hits(make_query(token_ids))
    index.error = RedisConnectionError("again")
    assert await lookup.hits(make_query(token_ids)) == {}
    index.error = None

    assert await lookup.hits(make_query(token_ids))


async def test_index_that_hangs_costs_few_requests_the_timeout() -> None:
    # RD-03
    index = HangingIndex()
    lookup = IndexLookup(index, timeout_s=0.01, max_failures=2, pause_s=60)

    async with asyncio.timeout(20):
        for _ in range(5):
            assert await lookup.hits(make_query(list(range(20)))) == {}

    assert index.num_asked == 2


async def test_cancelled_lookup_is_not_taken_for_an_outage() -> None:
    index = HangingIndex()
    lookup = IndexLookup(index, timeout_s=60, max_failures=1)
    asking = asyncio.create_task(lookup.hits(make_query(list(range(20)))))
    await asyncio.sleep(0)
    await asyncio.sleep(0)

    asking.cancel()
    await asyncio.wait([asking])
    second = asyncio.create_task(lookup.hits(make_query(list(range(20)))))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.wait([second])

    assert asking.cancelled()
    assert index.num_asked == 2


class PaperReplica:
    """A local copy that has what a test says."""

    def __init__(self, found: dict[str, PrefixHit]) -> None:
        self.found = found
        self.is_ready = True
        self.asked: list[list[bytes]] = []

    def longest_prefix(self, keys: Sequence[bytes]) -> dict[str, PrefixHit]:
        self.asked.append(list(keys))
        return self.found


TOKEN_IDS = list(range(20))


def make_lookup(
    replica: PaperReplica, index: FakeIndex | None = None, clock: FakeClock | None = None
) -> LocalLookup:
    predicted = PredictedBlocks(ttl_s=5, clock=clock or FakeClock())
    return LocalLookup({"smol": replica}, IndexLookup(index or FakeIndex()), predicted)


async def test_local_copy_answers_and_redis_is_not_asked() -> None:
    replica, index = PaperReplica({"p0@1": PrefixHit(2, 1)}), FakeIndex()

    hits = await make_lookup(replica, index).hits(make_query(TOKEN_IDS))

    assert hits == {"p0@1": PrefixHit(2, 1)}
    assert replica.asked == [BlockKeys("f1").chain(TOKEN_IDS[:-1], 4)]
    assert index.asked == []


async def test_index_is_asked_while_there_is_no_copy_yet() -> None:
    replica = PaperReplica({})
    replica.is_ready = False
    index = FakeIndex(BlockKeys("f1").chain(TOKEN_IDS[:8], 4))
    lookup = make_lookup(replica, index)

    hits = await lookup.hits(make_query(TOKEN_IDS))
    assert hits == {"p0@1": PrefixHit(2)}
    assert lookup.latest(make_query(TOKEN_IDS), hits) == hits


async def test_second_request_of_a_burst_finds_where_the_first_one_went() -> None:
    clock = FakeClock()
    lookup = make_lookup(PaperReplica({"p1@1": PrefixHit(1)}), clock=clock)
    query = make_query(TOKEN_IDS)

    lookup.placed(query, ["p1@1", "d0@1"])

    expected = {"p1@1": PrefixHit(4), "d0@1": PrefixHit(4)}
    assert await lookup.hits(query) == expected
    assert lookup.latest(query, {}) == expected
    assert await lookup.hits(make_query([*TOKEN_IDS[:9], 99, 99])) == {
        "p1@1": PrefixHit(2),
        "d0@1": PrefixHit(2),
    }
    clock.advance(5)
    assert await lookup.hits(query) == {"p1@1": PrefixHit(1)}


async def test_tiers_of_a_machine_go_by_its_address() -> None:
    machine = machine_holder_id("10.0.0.1:7000")
    replica = PaperReplica(
        {
            f"{machine}@old": PrefixHit(0, 1),
            f"{machine}@new": PrefixHit(0, 2, 2),
            "p0@1": PrefixHit(1),
        }
    )

    hits = await make_lookup(replica).hits(make_query(TOKEN_IDS))

    assert hits == {"10.0.0.1:7000": PrefixHit(0, 2, 2), "p0@1": PrefixHit(1)}
