"""Paired turns: what is said of a difference, and how sure that is."""

import random
from pathlib import Path

import pytest

from benchmarks.pairs import Sample, append, markdown, paired_change, read


def noisy_pairs(effect: float, num_pairs: int, seed: int) -> tuple[list[float], list[float]]:
    """The machine's mood changes by a third from pair to pair, and by a twentieth within one."""
    source = random.Random(seed)
    moods = [source.uniform(70, 130) for _ in range(num_pairs)]
    before = [mood * source.gauss(1, 0.05) for mood in moods]
    after = [mood * source.gauss(1, 0.05) * (1 + effect) for mood in moods]
    return before, after


def test_a_small_change_is_found_under_moods_that_are_ten_times_as_large() -> None:
    change = paired_change(*noisy_pairs(-0.03, 100, seed=1))

    assert change.low < -0.03 < change.high < -0.01
    assert change.high - change.low < 0.035


def test_the_interval_holds_the_truth_about_as_often_as_it_says() -> None:
    changes = [paired_change(*noisy_pairs(0.02, 20, seed)) for seed in range(200)]

    num_held = sum(change.low <= 0.02 <= change.high for change in changes)
    assert 180 <= num_held <= 199


def test_one_pair_that_went_wrong_does_not_decide() -> None:
    before, after = [100.0] * 20, [101.0] * 19 + [10.0]

    assert paired_change(before, after).share == pytest.approx(0.01)


def test_too_few_pairs_have_an_interval_of_all_that_was_seen() -> None:
    change = paired_change([100.0, 100.0], [90.0, 120.0])

    assert change.low == pytest.approx(-0.1)
    assert change.high == pytest.approx(0.2)
    assert str(change) == "+3.9% (-10.0 to +20.0; 2 pairs)"


def test_runs_add_up_and_a_variant_is_compared_within_its_own_block(tmp_path: Path) -> None:
    file = tmp_path / "build" / "cost.jsonl"
    first = [Sample("a 1", "plain", 100.0, 2.0, 0.5), Sample("a 1", "traced", 99.0, 2.02, 0.51)]
    second = [Sample("b 1", "traced", 198.0, 4.04, 0.52), Sample("b 1", "plain", 200.0, 4.0, 0.5)]
    append(file, first)
    append(file, second)

    table = markdown([*read(file), Sample("b 2", "traced", 1.0, 1.0, 1.0)], plain="plain")

    assert "| plain | 150 |  | 3.000 |  | 0.500 |  |" in table
    assert "| traced | 148 | -1.0% (-1.0 to -1.0; 2 pairs) | 3.030 | +1.0% (+1.0 to" in table
    # A hundredth of two and a fiftieth of four: half a percent of either.
    assert "| 0.515 | +0.5% (+0.5 to +0.5; 2 pairs) |" in table
