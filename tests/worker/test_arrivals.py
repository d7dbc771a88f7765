"""What a decode worker hears of blocks that are filled for it."""

import queue
import time
from collections.abc import Iterator

import pytest

from engine.block_marks import BlockMarks
from worker.arrivals import Arrivals

NUM_BLOCKS = 6


@pytest.fixture
def marks() -> BlockMarks:
    return BlockMarks.private(NUM_BLOCKS)


@pytest.fixture
def arrivals(marks: BlockMarks) -> Iterator[Arrivals]:
    with Arrivals(marks) as arrivals:
        yield arrivals


def fill(marks: BlockMarks, *block_ids: int, next_token_id: int) -> None:
    for block_id in block_ids:
        marks.filled[block_id] = marks.generations[block_id] = 1
    marks.next_tokens[block_ids[-1]] = next_token_id + 1
    marks.bell.ring()


def test_arrival_is_told_once_and_at_once(marks: BlockMarks, arrivals: Arrivals) -> None:
    told: queue.Queue[int] = queue.Queue()
    for block_id in range(NUM_BLOCKS):
        marks.generations[block_id] = 1

    with arrivals.expect([1, 2], told.put):
        fill(marks, 4, next_token_id=3)
        with pytest.raises(queue.Empty):
            told.get(timeout=0.05)
        started_at = time.perf_counter()
        fill(marks, 1, 2, next_token_id=7)
        assert told.get(timeout=5) == 7
        assert time.perf_counter() - started_at < 0.09
        marks.bell.ring()
        with pytest.raises(queue.Empty):
            told.get(timeout=0.05)


def test_nobody_is_told_after_leaving(marks: BlockMarks, arrivals: Arrivals) -> None:
    told: queue.Queue[int] = queue.Queue()
    marks.generations[1] = 1
    with arrivals.expect([1], told.put):
        pass

    fill(marks, 1, next_token_id=7)

    with pytest.raises(queue.Empty):
        told.get(timeout=0.2)


def test_each_hears_of_its_own_blocks(marks: BlockMarks, arrivals: Arrivals) -> None:
    told: queue.Queue[tuple[str, int]] = queue.Queue()
    marks.generations[1] = marks.generations[2] = 1
    with (
        arrivals.expect([1], lambda token: told.put(("a", token))),
        arrivals.expect([2], lambda token: told.put(("b", token))),
    ):
        fill(marks, 2, next_token_id=0)
        assert told.get(timeout=5) == ("b", 0)
        fill(marks, 1, next_token_id=9)
        assert told.get(timeout=5) == ("a", 9)
