"""Runs: the same pairs as the ids, in as few copies as possible."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer_svc.runs import BlockRun, split_runs, to_runs
from mesh.errors import InvalidRequest


def test_neighbours_on_both_sides_become_one_run() -> None:
    assert to_runs([3, 4, 5], [7, 8, 9], 10, 10) == [BlockRun(3, 7, 3)]


def test_gap_on_either_side_begins_a_new_run() -> None:
    assert to_runs([3, 4, 6, 7], [1, 2, 3, 5], 10, 10) == [
        BlockRun(3, 1, 2),
        BlockRun(6, 3, 1),
        BlockRun(7, 5, 1),
    ]


def test_descending_ids_are_not_neighbours() -> None:
    assert to_runs([5, 4], [5, 4], 10, 10) == [BlockRun(5, 5, 1), BlockRun(4, 4, 1)]


def test_no_blocks_are_no_runs() -> None:
    assert to_runs([], [], 10, 10) == []


def test_counts_that_differ_are_refused() -> None:
    # KV-20
    with pytest.raises(InvalidRequest, match="2 source blocks cannot fill 3"):
        to_runs([1, 2], [1, 2, 3], 10, 10)
    with pytest.raises(InvalidRequest):
        to_runs([], [1], 10, 10)


def test_ids_beyond_a_segment_are_refused() -> None:
    # KV-20
    with pytest.raises(InvalidRequest, match="source block 10 is outside a segment of 10 blocks"):
        to_runs([9, 10], [0, 1], 10, 20)
    with pytest.raises(InvalidRequest, match="destination block 20"):
        to_runs([9, 8], [20, 1], 10, 20)
    with pytest.raises(InvalidRequest):
        to_runs([2**32 - 1], [1], 10, 20)


def test_destination_named_twice_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="twice"):
        to_runs([1, 2], [5, 5], 10, 10)


def test_source_named_twice_is_copied_twice() -> None:
    assert to_runs([1, 1], [5, 6], 10, 10) == [BlockRun(1, 5, 1), BlockRun(1, 6, 1)]


@given(st.data())
def test_runs_are_the_same_pairs_and_cannot_be_merged(data: st.DataObject) -> None:
    destinations = data.draw(st.lists(st.integers(0, 19), unique=True))
    sources = [data.draw(st.integers(0, 9)) for _ in destinations]

    runs = to_runs(sources, destinations, 10, 20)

    pairs = [(r.source + i, r.destination + i) for r in runs for i in range(r.num_blocks)]
    assert pairs == list(zip(sources, destinations, strict=True))
    for before, after in itertools.pairwise(runs):
        assert (before.source + before.num_blocks, before.destination + before.num_blocks) != (
            after.source,
            after.destination,
        )


@given(
    counts=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    num_parts=st.integers(1, 6),
)
def test_parts_are_the_runs_in_order_and_about_equal(counts: list[int], num_parts: int) -> None:
    starts = [10 * number for number in range(len(counts))]
    runs = [BlockRun(start, start + 1, count) for start, count in zip(starts, counts, strict=True)]

    parts = split_runs(runs, num_parts)

    def blocks(some: list[BlockRun]) -> list[tuple[int, int]]:
        return [
            (run.source + offset, run.destination + offset)
            for run in some
            for offset in range(run.num_blocks)
        ]

    assert blocks([run for part in parts for run in part]) == blocks(runs)
    assert len(parts) <= num_parts
    largest = -(-sum(counts) // num_parts)
    assert all(0 < len(blocks(part)) <= largest for part in parts)
