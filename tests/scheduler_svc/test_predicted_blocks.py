"""Blocks that are expected, for a while."""

from scheduler_svc.predicted_blocks import PredictedBlocks
from tests.fakes import FakeClock

KEYS = [bytes([number]) * 16 for number in range(8)]


def test_burst_of_one_prefix_finds_where_its_first_request_went() -> None:
    predicted = PredictedBlocks()

    predicted.add(KEYS[:6], ["p0@1", "d0@1"])
    predicted.add(KEYS[:2], ["p1@1"])

    assert predicted.longest_prefix(KEYS[:4]) == {"p0@1": 4, "d0@1": 4, "p1@1": 2}
    assert predicted.longest_prefix(KEYS[1:2]) == {"p0@1": 1, "d0@1": 1, "p1@1": 1}
    assert predicted.longest_prefix([b"x" * 16]) == {}


def test_prediction_ends_and_leaves_nothing() -> None:
    clock = FakeClock()
    predicted = PredictedBlocks(ttl_s=5, clock=clock)
    predicted.add(KEYS, ["p0@1"])
    clock.advance(3)
    predicted.add(KEYS[:3], ["p0@1"])
    clock.advance(3)

    assert predicted.longest_prefix(KEYS) == {"p0@1": 3}
    clock.advance(3)
    assert predicted.longest_prefix(KEYS) == {}
    assert predicted.num_blocks == 0
    assert not predicted._holders


def test_memory_is_bounded_by_forgetting_the_oldest() -> None:
    predicted = PredictedBlocks(max_blocks=10)

    for number in range(5):
        predicted.add(KEYS[:4], [f"p{number}@1"])

    assert predicted.num_blocks <= 10
    assert predicted.longest_prefix(KEYS) == {"p3@1": 4, "p4@1": 4}
