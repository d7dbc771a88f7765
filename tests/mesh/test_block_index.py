import asyncio
from collections.abc import AsyncIterator
from itertools import takewhile

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mesh.block_index import BlockIndex
from mesh.redis_client import MeshRedis, connect_redis

MODEL = "smollm2-135m-instruct"


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[MeshRedis]:
    client = connect_redis(redis_url)
    yield client
    await client.aclose()


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def keys(*numbers: int) -> list[bytes]:
    return [key(number) for number in numbers]


async def num_keys(client: MeshRedis) -> int:
    return len(await client.keys("mesh:*"))


async def test_longest_prefix_counts_leading_blocks_per_holder(client: MeshRedis) -> None:
    index = BlockIndex(client)
    await index.publish(MODEL, "prefill-0", "a", keys(1, 2, 3), [])
    await index.publish(MODEL, "prefill-1", "b", keys(1), [])
    await index.publish(MODEL, "decode-0", "c", keys(2, 3), [])

    found = await index.longest_prefix(MODEL, keys(1, 2, 3, 4))

    assert found == {"prefill-0@a": 3, "prefill-1@b": 1}


async def test_a_gap_in_the_chain_ends_the_prefix(client: MeshRedis) -> None:
    index = BlockIndex(client)
    await index.publish(MODEL, "w", "a", keys(1, 3, 4), [])

    assert await index.longest_prefix(MODEL, keys(1, 2, 3, 4)) == {"w@a": 1}


async def test_unknown_and_empty_chains_have_no_holders(client: MeshRedis) -> None:
    index = BlockIndex(client)

    assert await index.longest_prefix(MODEL, []) == {}
    assert await index.longest_prefix(MODEL, keys(1)) == {}


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    holdings=st.dictionaries(
        st.sampled_from(["a", "b", "c"]), st.sets(st.integers(0, 7)), max_size=3
    ),
    chain=st.lists(st.integers(0, 7), unique=True, max_size=8),
)
def test_longest_prefix_agrees_with_counting_by_hand(
    redis_url: str, holdings: dict[str, set[int]], chain: list[int]
) -> None:
    async def find() -> dict[str, int]:
        client = connect_redis(redis_url)
        await client.flushall()
        index = BlockIndex(client)
        for worker_id, held in holdings.items():
            await index.publish(MODEL, worker_id, "x", keys(*held), [])
        found = await index.longest_prefix(MODEL, keys(*chain))
        await client.aclose()
        return found

    counts = {
        f"{worker_id}@x": len(list(takewhile(held.__contains__, chain)))
        for worker_id, held in holdings.items()
    }
    assert asyncio.run(find()) == {holder: count for holder, count in counts.items() if count}


async def test_removed_blocks_are_found_no_more_and_leave_nothing(client: MeshRedis) -> None:
    index = BlockIndex(client)
    await index.publish(MODEL, "w", "a", keys(1, 2), [])

    await index.publish(MODEL, "w", "a", [], keys(2))
    assert await index.longest_prefix(MODEL, keys(1, 2)) == {"w@a": 1}

    await index.publish(MODEL, "w", "a", [], keys(1))
    assert await num_keys(client) == 0


async def test_removing_what_was_never_stored_is_harmless(client: MeshRedis) -> None:
    await BlockIndex(client).publish(MODEL, "w", "a", [], keys(1))

    assert await num_keys(client) == 0


async def test_a_key_stored_and_removed_in_one_call_counts_as_stored(client: MeshRedis) -> None:
    index = BlockIndex(client)

    await index.publish(MODEL, "w", "a", keys(1), keys(1))

    assert await index.longest_prefix(MODEL, keys(1)) == {"w@a": 1}


async def test_large_changes_arrive_whole(client: MeshRedis) -> None:
    index = BlockIndex(client)
    many = keys(*range(1300))

    await index.publish(MODEL, "w", "a", many, [])
    assert await index.longest_prefix(MODEL, many) == {"w@a": 1300}

    await index.publish(MODEL, "w", "a", [], many)
    assert await num_keys(client) == 0


# KV-23
async def test_incarnations_are_different_holders(client: MeshRedis) -> None:
    index = BlockIndex(client)
    await index.publish(MODEL, "w", "old", keys(1, 2), [])
    await index.publish(MODEL, "w", "new", keys(1), [])

    await index.drop_worker(MODEL, "w", "old")

    assert await index.longest_prefix(MODEL, keys(1, 2)) == {"w@new": 1}


async def test_dropping_a_worker_leaves_nothing_of_it(client: MeshRedis) -> None:
    index = BlockIndex(client)
    await index.publish(MODEL, "w", "a", keys(*range(1300)), [])
    await index.publish(MODEL, "other", "a", keys(5), [])

    await index.drop_worker(MODEL, "w", "a")

    assert await index.longest_prefix(MODEL, keys(5)) == {"other@a": 1}
    assert await num_keys(client) == 2


async def test_entries_of_a_vanished_worker_end_by_themselves(client: MeshRedis) -> None:
    index = BlockIndex(client, ttl_s=0.05)
    await index.publish(MODEL, "w", "a", keys(1, 2), [])

    await asyncio.sleep(0.08)

    assert await num_keys(client) == 0


async def test_lookup_forgets_a_holder_whose_lease_has_ended(client: MeshRedis) -> None:
    await BlockIndex(client, ttl_s=0.05).publish(MODEL, "dead", "a", keys(1), [])
    index = BlockIndex(client)
    await index.publish(MODEL, "alive", "a", keys(1), [])
    await asyncio.sleep(0.08)

    assert await index.longest_prefix(MODEL, keys(1)) == {"alive@a": 1}

    assert await client.hkeys(f"mesh:{{{MODEL}}}:block:{key(1).hex()}") == [b"alive@a"]


# KV-25
async def test_models_do_not_share_blocks_whatever_their_names(client: MeshRedis) -> None:
    index = BlockIndex(client)
    names = ["a", "a}", "{a}", "org/a", "a:block", "ä"]

    await index.publish(names[0], "w", "a", keys(1), [])

    for name in names[1:]:
        assert await index.longest_prefix(name, keys(1)) == {}
        await index.publish(name, "w", "a", keys(1), [])
        assert await index.longest_prefix(name, keys(1)) == {"w@a": 1}


async def test_one_call_for_each_lookup_and_each_publication(client: MeshRedis) -> None:
    index = BlockIndex(client)
    await index.publish(MODEL, "w", "a", keys(1), [])
    await index.longest_prefix(MODEL, keys(1))
    before = (await client.info("commandstats"))["cmdstat_evalsha"]["calls"]

    await index.publish(MODEL, "w", "a", keys(*range(100)), keys(*range(200, 300)))
    await index.longest_prefix(MODEL, keys(*range(100)))

    after = (await client.info("commandstats"))["cmdstat_evalsha"]["calls"]
    assert after - before == 2
