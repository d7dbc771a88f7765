"""A difference is claimed when there is one, and not when rounds only scatter."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mesh.bench.compare import NotComparable, Verdict, compare, rank_test
from mesh.bench.results import BenchResult
from tests.bench.made import point, recording, result, window


def with_ttfts(*ttfts_s: float, **settings: str) -> BenchResult:
    """A result with a round for each."""
    windows = [window([recording(ttft_s=ttft_s)] * 4) for ttft_s in ttfts_s]
    values = {"input tokens": "64", "output tokens": "8", **settings}
    return result([point("1 at once", 1, windows)], settings=values)


def verdict(a: BenchResult, b: BenchResult, metric: str = "TTFT P50 ms") -> Verdict:
    (found,) = [each for each in compare(a, b) if each.metric == metric]
    return found.verdict


def test_rounds_that_lie_apart_are_a_difference() -> None:
    slow = with_ttfts(0.20, 0.21, 0.22, 0.20, 0.23)
    fast = with_ttfts(0.10, 0.11, 0.12, 0.10, 0.13)

    assert verdict(slow, fast) is Verdict.BETTER
    assert verdict(fast, slow) is Verdict.WORSE


def test_rounds_that_overlap_are_no_difference() -> None:
    a = with_ttfts(0.10, 0.11, 0.12, 0.13, 0.14)
    b = with_ttfts(0.139, 0.15, 0.16, 0.17, 0.18)

    assert verdict(a, b) is Verdict.NOISE


def test_three_rounds_each_can_show_nothing() -> None:
    assert verdict(with_ttfts(0.1, 0.1, 0.1), with_ttfts(0.9, 0.9, 0.9)) is Verdict.TOO_FEW


def test_four_rounds_each_can() -> None:
    a = with_ttfts(0.10, 0.11, 0.12, 0.13)

    assert verdict(a, with_ttfts(0.90, 0.91, 0.92, 0.93)) is Verdict.WORSE


def test_a_result_does_not_differ_from_itself() -> None:
    made = with_ttfts(0.10, 0.11, 0.12, 0.13, 0.14)

    assert {each.verdict for each in compare(made, made)} == {Verdict.NOISE}


def test_equal_servers_rarely_look_different() -> None:
    source = random.Random(5)

    def rounds() -> list[float]:
        return [source.gauss(100, 15) for _ in range(5)]

    found = [rank_test(rounds(), rounds()) for _ in range(400)]

    assert sum(p_value < 0.05 for p_value in found) / len(found) < 0.07


def test_higher_throughput_is_better() -> None:
    def with_tokens(*counts: int) -> BenchResult:
        windows = [window([recording(num_tokens=count, tpot_s=0.001)]) for count in counts]
        return result([point("1 at once", 1, windows)])

    few, many = with_tokens(10, 11, 12, 13), with_tokens(20, 21, 22, 23)

    assert verdict(few, many, "tokens/s") is Verdict.BETTER


@pytest.mark.parametrize("changed", ["input tokens", "output tokens"])
def test_another_load_is_not_comparable(changed: str) -> None:
    a = with_ttfts(0.1)
    b = with_ttfts(0.1, **{changed: "4000"})

    with pytest.raises(NotComparable, match=changed):
        compare(a, b)


def test_results_without_a_common_point_are_not_comparable() -> None:
    a = result([point("1 at once", 1, [window([recording()])])])
    b = result([point("2 at once", 2, [window([recording()])])])

    with pytest.raises(NotComparable, match="no point in common"):
        compare(a, b)


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        # Two of the C(n + m, n) orders are as extreme as full separation.
        ([1, 2, 3], [4, 5, 6], 2 / 20),
        ([1, 2, 3, 4], [5, 6, 7, 8], 2 / 70),
        ([1, 2, 3, 4, 5], [6, 7, 8, 9, 10], 2 / 252),
        ([5, 5, 5], [5, 5, 5], 1.0),
    ],
)
def test_the_rank_test_is_exact(a: Sequence[float], b: Sequence[float], expected: float) -> None:
    assert rank_test(a, b) == pytest.approx(expected)


@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=6),
    st.lists(st.integers(0, 20), min_size=1, max_size=6),
)
def test_the_rank_test_knows_no_side(a: list[int], b: list[int]) -> None:
    p_value = rank_test(a, b)

    assert 0 < p_value <= 1
    assert rank_test(b, a) == pytest.approx(p_value)
    assert rank_test([-x for x in a], [-x for x in b]) == pytest.approx(p_value)


def test_many_rounds_are_sampled_and_still_tell() -> None:
    low, high = [float(i) for i in range(12)], [float(i) for i in range(20, 32)]

    assert rank_test(low, high) < 0.01
