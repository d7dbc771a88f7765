import asyncio
from collections.abc import AsyncIterator
from itertools import takewhile

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mesh.block_index import BlockIndex, PrefixHit, Tier
from mesh.redis_client import MeshRedis, connect_redis

MODEL = "smollm2-135m-instruct"


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[MeshRedis]:
    client = connect_redis(redis_url, timeout_s=20)
    yield client
    await client.aclose()


def key(number: int) -> bytes:
    return number.to_bytes(16, "big")


def keys(*numbers: int) -> list[bytes]:
    return [key(number) for number in numbers]


async def num_keys(client: MeshRedis) -> int:
    """Keys that grow with what is held: blocks and shelves."""
    return len(await client.keys("mesh:*:block:*")) + len(await client.keys("mesh:*:held:*"))


async def test_longest_prefix_counts_leading_blocks_per_holder(client: MeshRedis) -> None:
    index = BlockIndex(client)
    await index.publish(MODEL, "prefill-0", "a", keys(1, 2, 3), [])
    await index.publish(MODEL, "prefill-1", "b", keys(1), [])
    await index.publish(MODEL, "decode-0", "c", keys(2, 3), [])

    found = await index.longest_prefix(MODEL, keys(1, 2, 3, 4))

    assert found == {"prefill-0@a": PrefixHit(3), "prefill-1@b": PrefixHit(1)}


async def test_a_gap_in_the_chain_ends_the_prefix(client: MeshRedis) -> None:
    index = BlockIndex(client)
    await index.publish(MODEL, "w", "a", keys(1, 3, 4), [])

    assert await index.longest_prefix(MODEL, keys(1, 2, 3, 4)) == {"w@a": PrefixHit(1)}


async def test_unknown_and_empty_chains_have_no_holders(client: MeshRedis) -> None:
    index = BlockIndex(client)

    assert await index.longest_prefix(MODEL, []) == {}
    assert await index.longest_prefix(MODEL, keys(1)) == {}


@settings(
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
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
    async def find() -> dict[str, PrefixHit]:
        client = connect_redis(redis_url, timeout_s=20)
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
    assert asyncio.run(find()) == {
        holder: PrefixHit(count) for holder, count in counts.items() if count
    }


async def test_removed_blocks_are_found_no_more_and_leave_nothing(client: MeshRedis) -> None:
    index = BlockIndex(client)
    await index.publish(MODEL, "w", "a", keys(1, 2), [])

    await index.publish(MODEL, "w", "a", [], keys(2))
    assert await index.longest_prefix(MODEL, keys(1, 2)) == {"w@a": PrefixHit(1)}

    await index.publish(MODEL, "w", "a", [], keys(1))
    assert await num_keys(client) == 0


async def test_removing_what_was_never_stored_is_harmless(client: MeshRedis) -> None:
    await BlockIndex(client).publish(MODEL, "w", "a", [], keys(1))

    assert await num_keys(client) == 0


async def test_a_key_stored_and_removed_in_one_call_counts_as_stored(client: MeshRedis) -> None:
    index = BlockIndex(client)

    await index.publish(MODEL, "w", "a", keys(1), keys(1))

    assert await index.longest_prefix(MODEL, keys(1)) == {"w@a": PrefixHit(1)}


async def test_large_changes_arrive_whole(client: MeshRedis) -> None:
    index = BlockIndex(client)
    many = keys(*range(1300))

    await index.publish(MODEL, "w", "a", many, [])
    assert await index.longest_prefix(MODEL, many) == {"w@a": PrefixHit(1300)}

    await index.publish(MODEL, "w", "a", [], many)
    assert await num_keys(client) == 0


# KV-23
async def test_incarnations_are_different_holders(client: MeshRedis) -> None:
    index = BlockIndex(client)
    await index.publish(MODEL, "w", "old", keys(1, 2), [])
    await index.publish(MODEL, "w", "new", keys(1), [])

    await index.drop_worker(MODEL, "w", "old")

    assert await index.longest_prefix(MODEL, keys(1, 2)) == {"w@new": PrefixHit(1)}


async def test_dropping_a_worker_leaves_nothing_of_it(client: MeshRedis) -> None:
    index = BlockIndex(client)
    await index.publish(MODEL, "w", "a", keys(*range(1300)), [])
    await index.publish(MODEL, "other", "a", keys(5), [])

    await index.drop_worker(MODEL, "w", "a")

    assert await index.longest_prefix(MODEL, keys(5)) == {"other@a": PrefixHit(1)}
    assert await num_keys(client) == 2


async def test_all_that_is_left_alone_ends_by_itself(client: MeshRedis) -> None:
    index = BlockIndex(client, keep_s=0.05)
    await index.publish(MODEL, "w", "a", keys(1, 2), [])

    await asyncio.sleep(0.08)

    assert await client.keys("mesh:*") == []


async def test_lookup_forgets_a_holder_whose_lease_has_ended(client: MeshRedis) -> None:
    await BlockIndex(client, lease_s=0.05).publish(MODEL, "dead", "a", keys(1), [])
    index = BlockIndex(client)
    await index.publish(MODEL, "alive", "a", keys(1), [])
    await asyncio.sleep(0.08)

    assert await index.longest_prefix(MODEL, keys(1)) == {"alive@a": PrefixHit(1)}

    assert await client.hkeys(f"mesh:{{{MODEL}}}:block:{key(1).hex()}") == [b"alive@a#device"]


async def test_renewing_clears_away_what_the_dead_have_left(client: MeshRedis) -> None:
    await BlockIndex(client, lease_s=0.05).publish(MODEL, "dead", "a", keys(*range(1300)), [])
    index = BlockIndex(client)
    await index.publish(MODEL, "alive", "a", keys(5), [])
    await asyncio.sleep(0.08)

    for _ in range(3):
        assert await index.renew(MODEL, "alive", "a") == 1

    assert await num_keys(client) == 2
    assert (await index.state(MODEL)).seqs == {"alive@a#device": 1}


async def test_worker_whose_lease_has_ended_is_told_to_publish_everything_again(
    client: MeshRedis,
) -> None:
    index = BlockIndex(client, lease_s=0.05)
    assert await index.publish(MODEL, "w", "a", keys(1), []) == 1
    assert await index.publish(MODEL, "v", "a", keys(1), []) == 1
    await asyncio.sleep(0.08)

    assert await index.publish(MODEL, "w", "a", keys(2), []) == 0
    assert await index.renew(MODEL, "v", "a") == 0


async def test_each_block_counts_in_its_warmest_tier(client: MeshRedis) -> None:
    index = BlockIndex(client)
    held: dict[Tier, list[bytes]] = {
        "device": keys(1, 2),
        "host": keys(2, 3, 4),
        "disk": keys(1, 2, 3, 4, 5),
    }
    for tier, blocks in held.items():
        await index.publish(MODEL, "w", "a", blocks, [], tier)

    assert await index.longest_prefix(MODEL, keys(1, 2, 3, 4, 5, 6)) == {"w@a": PrefixHit(2, 2, 1)}

    await index.publish(MODEL, "w", "a", [], keys(2), "device")
    assert await index.longest_prefix(MODEL, keys(1, 2, 3)) == {"w@a": PrefixHit(1, 2, 0)}

    await index.drop_worker(MODEL, "w", "a")
    assert await num_keys(client) == 0


async def test_worker_cannot_fill_redis(client: MeshRedis) -> None:
    index = BlockIndex(client, max_blocks=3)
    await index.publish(MODEL, "w", "a", keys(1, 2), [])

    await index.publish(MODEL, "w", "a", keys(2, 3, 4, 5), [])

    assert await index.longest_prefix(MODEL, keys(1, 2, 3, 4)) == {"w@a": PrefixHit(3)}
    events = await index.events_after(MODEL, "0-0")
    assert [event.stored for event in events] == [keys(1, 2), keys(2, 3)]
    assert await num_keys(client) == 4


async def test_events_are_numbered_for_each_worker_and_tier(client: MeshRedis) -> None:
    index = BlockIndex(client)
    assert await index.publish(MODEL, "w", "a", keys(*range(600)), []) == 2
    assert await index.publish(MODEL, "w", "a", keys(1), [], "host") == 1
    assert await index.publish(MODEL, "v", "a", keys(1), keys(2)) == 1
    await index.drop_worker(MODEL, "v", "a")

    state = await index.state(MODEL)
    events = await index.events_after(MODEL, "0-0")

    assert state.seqs == {"w@a#device": 2, "w@a#host": 1}
    assert state.last_event_id == events[-1].event_id
    assert {event.run_id for event in events} == {state.run_id}
    assert [(event.shelf, event.seq, event.is_drop) for event in events] == [
        ("w@a#device", 1, False),
        ("w@a#device", 2, False),
        ("w@a#host", 1, False),
        ("v@a#device", 1, False),
        ("v@a#device", 0, True),
    ]
    assert (events[3].stored, events[3].removed) == (keys(1), keys(2))
    assert await index.events_after(MODEL, events[-1].event_id) == []


async def test_events_are_bounded(client: MeshRedis) -> None:
    index = BlockIndex(client, max_events=10)
    for number in range(500):
        await index.publish(MODEL, "w", "a", keys(number), [])

    assert len(await index.events_after(MODEL, "0-0", limit=1000)) < 250


async def test_redis_that_lost_its_data_has_another_run(client: MeshRedis) -> None:
    index = BlockIndex(client)
    await index.publish(MODEL, "w", "a", keys(1), [])
    before = await index.state(MODEL)

    await client.flushall()

    assert (await index.state(MODEL)).run_id == ""
    assert await index.renew(MODEL, "w", "a") == 0
    assert await index.publish(MODEL, "w", "a", keys(1), []) == 1
    assert (await index.state(MODEL)).run_id not in ("", before.run_id)


async def test_blocks_of_a_shelf_come_page_by_page(client: MeshRedis) -> None:
    index = BlockIndex(client)
    await index.publish(MODEL, "w", "a", keys(*range(5000)), [])

    found, cursor, num_pages = set(), 0, 0
    while num_pages == 0 or cursor:
        cursor, page = await index.blocks_of(MODEL, "w@a#device", cursor)
        found.update(page)
        num_pages += 1

    assert found == set(keys(*range(5000)))
    assert num_pages > 1


# KV-25
async def test_models_do_not_share_blocks_whatever_their_names(client: MeshRedis) -> None:
    index = BlockIndex(client)
    names = ["a", "a}", "{a}", "org/a", "a:block", "ä"]

    await index.publish(names[0], "w", "a", keys(1), [])

    for name in names[1:]:
        assert await index.longest_prefix(name, keys(1)) == {}
        await index.publish(name, "w", "a", keys(1), [])
        assert await index.longest_prefix(name, keys(1)) == {"w@a": PrefixHit(1)}


async def test_one_call_for_each_lookup_and_each_publication(client: MeshRedis) -> None:
    index = BlockIndex(client)
    await index.publish(MODEL, "w", "a", keys(1), [])
    await index.longest_prefix(MODEL, keys(1))
    before = (await client.info("commandstats"))["cmdstat_evalsha"]["calls"]

    await index.publish(MODEL, "w", "a", keys(*range(100)), keys(*range(200, 300)))
    await index.longest_prefix(MODEL, keys(*range(100)))

    after = (await client.info("commandstats"))["cmdstat_evalsha"]["calls"]
    assert after - before == 2
