"""Blocks: who owns them, what free ones still contain, what the outside is told."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from engine.block_pool import BlockEvents, BlockPool
from engine.block_residency import Residency, ResidencyClock
from tests.fakes import ContentHasher

BLOCK_SIZE = 4


def make_pool(num_blocks: int = 8, *, enable_prefix_caching: bool = True) -> BlockPool:
    return BlockPool(
        num_blocks, BLOCK_SIZE, ContentHasher(), enable_prefix_caching=enable_prefix_caching
    )


def keys_of(pool: BlockPool, token_ids: list[int], cache_salt: str = "") -> list[bytes]:
    keys: list[bytes] = []
    pool.extend_keys(keys, token_ids, cache_salt)
    return keys


def fill(pool: BlockPool, token_ids: list[int]) -> list[int]:
    """Own blocks for the tokens and register the full ones."""
    block_ids: list[int] = []
    assert pool.grow(block_ids, len(token_ids))
    for block_id, key in zip(block_ids, keys_of(pool, token_ids), strict=False):
        pool.register(block_id, key)
    return block_ids


def test_growing_takes_only_the_blocks_that_are_missing() -> None:
    pool = make_pool(8)
    block_ids: list[int] = []

    assert pool.grow(block_ids, 1)
    assert len(block_ids) == 1
    assert pool.grow(block_ids, 4)
    assert len(block_ids) == 1
    assert pool.grow(block_ids, 9)
    assert len(block_ids) == 3
    assert pool.num_free_blocks == 5


def test_growing_beyond_what_is_free_takes_nothing() -> None:
    pool = make_pool(2)
    block_ids: list[int] = []

    assert not pool.grow(block_ids, 9)

    assert block_ids == []
    assert pool.num_free_blocks == 2


def test_spare_blocks_must_be_left_over_only_when_something_is_taken() -> None:
    pool = make_pool(2)
    block_ids: list[int] = []

    assert not pool.grow(block_ids, 8, spare=1)
    assert pool.grow(block_ids, 8)
    assert pool.grow(block_ids, 8, spare=1)


def test_a_released_sequence_is_found_again_and_shared() -> None:
    pool = make_pool(8)
    tokens = list(range(8))
    first = fill(pool, tokens)
    original = list(first)
    pool.release(first)

    found = pool.longest_prefix(keys_of(pool, tokens))
    assert found == original
    one: list[int] = []
    two: list[int] = []
    assert pool.grow(one, 9, cached=found)
    assert pool.grow(two, 9, cached=found)

    assert one[:2] == two[:2] == original
    assert one[2] != two[2]
    assert pool.is_shared(one[0])
    assert not pool.is_shared(one[2])
    assert pool.num_free_blocks == 4


def test_a_cached_block_that_is_free_counts_as_taken_when_it_is_reused() -> None:
    pool = make_pool(3)
    blocks = fill(pool, list(range(8)))
    pool.release(blocks)
    other: list[int] = []
    assert pool.grow(other, 4)
    found = pool.longest_prefix(keys_of(pool, list(range(8))))

    again: list[int] = []
    assert not pool.grow(again, 12, cached=found)
    assert pool.grow(again, 8, cached=found)
    assert pool.num_free_blocks == 0


def test_the_longest_prefix_ends_at_the_first_block_that_is_missing() -> None:
    pool = make_pool(8)
    fill(pool, [1, 2, 3, 4, 5, 6, 7, 8])

    assert len(pool.longest_prefix(keys_of(pool, [1, 2, 3, 4, 9, 9, 9, 9]))) == 1
    assert pool.longest_prefix(keys_of(pool, [9, 2, 3, 4, 5, 6, 7, 8])) == []


def test_the_end_of_a_sequence_is_evicted_before_its_beginning() -> None:
    pool = make_pool(3)
    tokens = list(range(12))
    blocks = fill(pool, tokens)
    keys = keys_of(pool, tokens)
    pool.release(blocks)

    taken: list[int] = []
    remaining = []
    for num_blocks in (1, 2, 3):
        assert pool.grow(taken, num_blocks * BLOCK_SIZE)
        remaining.append(len(pool.longest_prefix(keys)))

    assert remaining == [2, 1, 0]


def test_the_least_recently_used_content_goes_first() -> None:
    pool = make_pool(2)
    old, new = [1, 1, 1, 1], [2, 2, 2, 2]
    for tokens in (old, new):
        pool.release(fill(pool, tokens))
    # Using it makes it the most recent.
    touched: list[int] = []
    assert pool.grow(touched, 4, cached=pool.longest_prefix(keys_of(pool, old)))
    pool.release(touched)

    taken: list[int] = []
    assert pool.grow(taken, 4)

    assert pool.longest_prefix(keys_of(pool, old))
    assert not pool.longest_prefix(keys_of(pool, new))


def test_blank_blocks_are_used_before_cached_ones() -> None:
    pool = make_pool(2)
    tokens = [1, 1, 1, 1]
    pool.release(fill(pool, tokens))

    taken: list[int] = []
    assert pool.grow(taken, 4)

    assert pool.longest_prefix(keys_of(pool, tokens))


def test_blocks_that_came_to_hold_the_same_content_are_tolerated() -> None:
    pool = make_pool(4)
    tokens = [1, 1, 1, 1]
    first = fill(pool, tokens)
    second = fill(pool, tokens)

    assert pool.longest_prefix(keys_of(pool, tokens)) == first
    assert pool.drain_events() == BlockEvents(stored=keys_of(pool, tokens))
    pool.release(second)
    pool.release(first)
    assert pool.num_free_blocks == 4


def test_events_tell_what_is_stored_and_what_is_evicted() -> None:
    pool = make_pool(1)
    first, second = [1, 1, 1, 1], [2, 2, 2, 2]
    blocks = fill(pool, first)

    assert pool.drain_events() == BlockEvents(stored=keys_of(pool, first))
    pool.release(blocks)
    assert pool.drain_events() == BlockEvents()
    assert pool.grow(blocks, 4)
    assert pool.drain_events() == BlockEvents(removed=keys_of(pool, first))
    pool.register(blocks[0], keys_of(pool, second)[0])
    assert pool.drain_events() == BlockEvents(stored=keys_of(pool, second))


def test_only_the_last_change_of_a_key_is_told() -> None:
    pool = make_pool(4)
    tokens = [1, 1, 1, 1]
    blocks = fill(pool, tokens)

    pool.forget(blocks)
    assert pool.drain_events() == BlockEvents(removed=keys_of(pool, tokens))
    pool.register(blocks[0], keys_of(pool, tokens)[0])
    pool.forget(blocks)
    pool.register(blocks[0], keys_of(pool, tokens)[0])
    assert pool.drain_events() == BlockEvents(stored=keys_of(pool, tokens))


def test_forgotten_blocks_are_not_found_again() -> None:
    pool = make_pool(4)
    tokens = list(range(8))
    blocks = fill(pool, tokens)

    pool.forget(blocks)
    pool.release(blocks)

    assert pool.longest_prefix(keys_of(pool, tokens)) == []
    assert pool.num_free_blocks == 4


def test_salt_separates_sequences() -> None:
    # KV-02, KV-03
    pool = make_pool(4)
    tokens = list(range(8))
    fill(pool, tokens)

    assert pool.longest_prefix(keys_of(pool, tokens, "tenant")) == []
    assert len(pool.longest_prefix(keys_of(pool, tokens, ""))) == 2


def test_without_prefix_caching_nothing_is_hashed_or_found() -> None:
    pool = make_pool(4, enable_prefix_caching=False)
    tokens = list(range(8))

    blocks = fill(pool, tokens)
    pool.release(blocks)

    assert keys_of(pool, tokens) == []
    assert pool.drain_events() == BlockEvents()


def test_keys_are_extended_and_never_computed_twice() -> None:
    pool = make_pool(4)
    keys = keys_of(pool, list(range(9)))
    before = list(keys)

    pool.extend_keys(keys, list(range(12)), "")

    assert keys[:2] == before
    assert keys == keys_of(pool, list(range(12)))


def test_releasing_a_block_twice_is_a_bug() -> None:
    pool = make_pool(4)
    block_ids: list[int] = []
    assert pool.grow(block_ids, 4)
    twice = block_ids * 2

    with pytest.raises(AssertionError, match="twice"):
        pool.release(twice)


class PoolMachine(RuleBasedStateMachine):
    """Random sequences come, share, grow and go; nothing is lost and nothing is invented."""

    @initialize(num_blocks=st.integers(1, 10))
    def start(self, num_blocks: int) -> None:
        self.pool = make_pool(num_blocks)
        self.sequences: list[tuple[list[int], list[int]]] = []
        self.known_outside: set[bytes] = set()

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20))
    def open(self, tokens: list[int]) -> None:
        keys = keys_of(self.pool, tokens)[: (len(tokens) - 1) // BLOCK_SIZE]
        block_ids: list[int] = []
        if self.pool.grow(block_ids, len(tokens), cached=self.pool.longest_prefix(keys)):
            self.sequences.append((block_ids, tokens))

    @precondition(lambda self: self.sequences)
    @rule(index=st.integers(0, 100))
    def compute(self, index: int) -> None:
        block_ids, tokens = self.sequences[index % len(self.sequences)]
        for block_id, key in zip(block_ids, keys_of(self.pool, tokens), strict=False):
            self.pool.register(block_id, key)

    @precondition(lambda self: self.sequences)
    @rule(index=st.integers(0, 100), token_id=st.integers(0, 1))
    def extend(self, index: int, token_id: int) -> None:
        block_ids, tokens = self.sequences[index % len(self.sequences)]
        if self.pool.grow(block_ids, len(tokens) + 1):
            tokens.append(token_id)

    @precondition(lambda self: self.sequences)
    @rule(index=st.integers(0, 100), fails=st.booleans())
    def close(self, index: int, fails: bool) -> None:
        block_ids, _ = self.sequences.pop(index % len(self.sequences))
        if fails:
            self.pool.forget(block_ids)
        self.pool.release(block_ids)
        assert block_ids == []

    @invariant()
    def every_block_is_free_or_owned(self) -> None:
        owned = Counter(block_id for block_ids, _ in self.sequences for block_id in block_ids)
        assert self.pool.num_free_blocks == self.pool.num_blocks - len(owned)
        assert all(self.pool.is_shared(block_id) == (owned[block_id] > 1) for block_id in owned)

    @invariant()
    def no_sequence_has_a_block_twice(self) -> None:
        assert all(len(set(block_ids)) == len(block_ids) for block_ids, _ in self.sequences)

    @invariant()
    def the_outside_knows_exactly_what_can_be_found(self) -> None:
        events = self.pool.drain_events()
        assert not set(events.stored) & set(events.removed)
        self.known_outside |= set(events.stored)
        self.known_outside -= set(events.removed)
        for key in self.known_outside:
            assert self.pool.longest_prefix([key])


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30)
test_blocks_are_conserved = PoolMachine.TestCase


def test_residency_tells_how_long_content_stayed_and_how_soon_it_was_wanted_again() -> None:
    now = 0.0
    pool = make_pool(2)
    pool.residency = ResidencyClock(2, clock=lambda: now)
    cached = fill(pool, [1, 2, 3, 4])
    [first] = cached
    pool.release(cached)

    now = 3.0
    again: list[int] = []
    assert pool.grow(again, 4, cached=[first])
    pool.release(again)
    now = 10.0
    assert pool.grow([], 8)

    assert pool.residency.drain() == Residency(
        lifetimes_s=(10.0,), idle_s=(7.0,), reuse_gaps_s=(3.0,)
    )
    assert pool.residency.drain() == Residency()
