"""What a decode worker hears of blocks that are filled for it."""

import queue
from collections.abc import Iterator

import pytest

from engine.block_marks import BlockMarks
from worker import arrivals as arrivals_module
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


def test_arrival_is_told_once_and_at_once(
    marks: BlockMarks, arrivals: Arrivals, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Only the bell can tell of it in time.
    monkeypatch.setattr(arrivals_module, "_LONGEST_WAIT_S", 60)
    told: queue.Queue[int] = queue.Queue()
    for block_id in range(NUM_BLOCKS):
        marks.generations[block_id] = 1

    with arrivals.expect([1, 2], told.put):
        fill(marks, 4, next_token_id=3)
        with pytest.raises(queue.Empty):
            told.get(timeout=0.05)
        fill(marks, 1, 2, next_token_id=7)
        assert told.get(timeout=20) == 7
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
        assert told.get(timeout=20) == ("b", 0)
        fill(marks, 1, next_token_id=9)
        assert told.get(timeout=20) == ("a", 9)
