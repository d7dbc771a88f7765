"""Drawing tokens: truncation, the distribution, and the counter-based generator."""

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling import NextToken, SampledToken, Sampler, SamplingParams, uniform
from tests.engine.sampling_rows import (
    EOS,
    RANDOM,
    VOCAB_SIZE,
    Row,
    make_request,
    sample,
    sample_one,
)

# Truncation.


def draw_counts(row: list[float], params: SamplingParams, num_draws: int = 400) -> Counter[int]:
    requests = [make_request(replace(params, seed=seed)) for seed in range(num_draws)]
    tokens = sample([row] * num_draws, requests)
    return Counter(token.token_id for token in tokens if token is not None)


@pytest.mark.parametrize("top_k", [0, -1, VOCAB_SIZE, 10**9])
def test_top_k_that_keeps_everything_equals_no_top_k(top_k: int) -> None:
    # SA-03
    row = [0.3, 0.1, 0.5, 0.2, 0.0, 0.7, 0.4, 0.6]

    assert draw_counts(row, replace(RANDOM, top_k=top_k)) == draw_counts(row, RANDOM)


def test_top_k_1_equals_greedy_also_among_equals() -> None:
    # SA-03
    row = [0.0, 1.0, 5.0, 1.0, 5.0, 5.0, 0.0, 0.0]

    assert set(draw_counts(row, replace(RANDOM, top_k=1))) == {2}


def test_top_p_0_keeps_the_most_likely_token() -> None:
    row = [0.0, 1.0, 1.1, 1.0, 1.1, 1.0, 0.0, 0.0]

    assert set(draw_counts(row, replace(RANDOM, top_p=0.0))) == {2}


def test_top_p_keeps_the_token_that_reaches_the_mass() -> None:
    row = [math.log(share) for share in (0.5, 0.3, 0.1, 0.05, 0.02, 0.01, 0.01, 0.01)]

    assert set(draw_counts(row, replace(RANDOM, top_p=0.49))) == {0}
    assert set(draw_counts(row, replace(RANDOM, top_p=0.6))) == {0, 1}
    assert set(draw_counts(row, replace(RANDOM, top_p=0.85))) == {0, 1, 2}


def test_top_p_is_a_share_of_what_top_k_left() -> None:
    row = [math.log(share) for share in (0.3, 0.2, 0.1, 0.1, 0.1, 0.1, 0.05, 0.05)]

    # 0.3 is 60% of the two best.
    assert set(draw_counts(row, replace(RANDOM, top_k=2, top_p=0.55))) == {0}


def test_min_p_is_a_share_of_the_top_probability() -> None:
    row = [math.log(share) for share in (0.5, 0.3, 0.1, 0.05, 0.02, 0.01, 0.01, 0.01)]

    assert set(draw_counts(row, replace(RANDOM, min_p=0.19))) == {0, 1, 2}
    assert set(draw_counts(row, replace(RANDOM, min_p=1.0))) == {0}


def test_drawn_frequencies_follow_the_distribution() -> None:
    shares = [0.4, 0.3, 0.2, 0.1, 0.0, 0.0, 0.0, 0.0]
    row = [math.log(share) if share else -math.inf for share in shares]

    counts = draw_counts(row, RANDOM, num_draws=4000)

    assert set(counts) == {0, 1, 2, 3}
    for token_id, count in counts.items():
        assert count / 4000 == pytest.approx(shares[token_id], abs=0.03)


def test_temperature_sharpens_and_flattens() -> None:
    row = [math.log(share) for share in (0.6, 0.4)] + [-math.inf] * 6

    cold = draw_counts(row, replace(RANDOM, temperature=0.5), num_draws=2000)
    hot = draw_counts(row, replace(RANDOM, temperature=2.0), num_draws=2000)

    assert cold[0] / 2000 == pytest.approx(0.36 / 0.52, abs=0.04)
    assert hot[0] / 2000 == pytest.approx(0.6**0.5 / (0.6**0.5 + 0.4**0.5), abs=0.04)


def reference_draw(row: Row, params: SamplingParams, number: float) -> int:
    """The specification, slowly: everything sorted, everything in float64."""
    scaled = row.astype(np.float64) / np.float32(params.temperature)
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    order = np.lexsort((np.arange(len(scaled)), -scaled))
    if 0 < params.top_k < len(order):
        order = order[: params.top_k]
    if params.top_p < 1:
        mass = np.cumsum(probs[order])
        total = mass[-1] if 0 < params.top_k < len(scaled) else 1.0
        order = order[: int((mass < np.float32(params.top_p) * total).sum()) + 1]
    if params.min_p > 0:
        order = order[probs[order] / probs[order[0]] >= np.float32(params.min_p)]
    kept = np.sort(order)
    cdf = np.cumsum(probs[kept])
    return int(kept[np.searchsorted(cdf, number * cdf[-1], side="right")])


@settings(max_examples=150)
@given(
    vocab_size=st.sampled_from([5, 40, 1500]),
    row_seed=st.integers(0, 1000),
    # Coarse logits have ties, flat ones need more candidates than are looked at first.
    scale=st.sampled_from([0.01, 1.0, 4.0]),
    is_coarse=st.booleans(),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, -1, 1, 3, 50, 1200]),
    top_p=st.sampled_from([0.0, 0.3, 0.9, 0.999999, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    seed=st.integers(-(2**63), 2**63 - 1),
)
def test_draws_agree_with_the_specification(
    vocab_size: int, row_seed: int, scale: float, is_coarse: bool, seed: int, **values: Any
) -> None:
    drawn = np.random.default_rng(row_seed).standard_normal(vocab_size)
    if is_coarse:
        drawn = (drawn * 4).round() / 4
    row = (drawn * scale).astype(np.float32)
    params = SamplingParams(10, seed=seed, **values)
    expected = reference_draw(row, params, uniform(seed, 1))

    [token] = Sampler(EOS).sample(row[None].copy(), [NextToken.of(make_request(params))])

    assert token == SampledToken(expected)


# The generator.


def test_the_generator_is_splitmix64() -> None:
    # The first outputs of SplitMix64 seeded with 0; seed n is its n-th step.
    outputs = (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F)

    for seed, output in enumerate(outputs, start=1):
        assert uniform(seed, 0) == (output >> 11) * 2.0**-53


def test_golden_numbers_of_the_generator() -> None:
    # They are a contract between workers of different versions.
    assert uniform(42, 17) == 0.6575784703170114
    assert uniform(-1, 3) == 0.3466749812659621
    assert uniform(-(2**63), 8191) == 0.06892467369738653
    assert uniform(0, 0) == 0.0


def test_negative_seeds_are_twos_complement() -> None:
    assert uniform(-1, 5) == uniform(2**64 - 1, 5)


@given(seed=st.integers(-(2**63), 2**63 - 1), position=st.integers(0, 10**6))
def test_numbers_lie_in_the_half_open_unit_interval(seed: int, position: int) -> None:
    assert 0.0 <= uniform(seed, position) < 1.0


def test_numbers_of_neighbouring_seeds_and_positions_look_independent() -> None:
    numbers = np.array([[uniform(seed, position) for position in range(64)] for seed in range(64)])

    assert np.abs(np.corrcoef(numbers)[np.triu_indices(64, 1)]).max() < 0.6
    assert np.abs(np.corrcoef(numbers.T)[np.triu_indices(64, 1)]).max() < 0.6
    assert numbers.mean() == pytest.approx(0.5, abs=0.02)


def test_the_position_is_the_new_tokens_place_in_the_whole_sequence() -> None:
    # KV-26: a resumed request draws what it would have drawn.
    row = [0.1 * token_id for token_id in range(VOCAB_SIZE)]
    params = replace(RANDOM, seed=11)

    split = {
        num_output: sample_one(
            row, make_request(params, [1] * (9 - num_output), [1] * num_output)
        ).token_id
        for num_output in range(8)
    }

    assert len(set(split.values())) == 1


@pytest.mark.parametrize("vocab_size", [97, 1531])
@pytest.mark.parametrize("num_rows", [2, 5, 16])
def test_a_row_is_treated_alike_alone_and_among_others(vocab_size: int, num_rows: int) -> None:
    # SA-05: bit for bit, so that log-probabilities are equal too.
    generator = np.random.default_rng(num_rows)
    logits = generator.standard_normal((num_rows, vocab_size), dtype=np.float32) * 3
    requests = [
        make_request(
            SamplingParams(
                50,
                temperature=0.3 + 0.1 * row,
                top_p=(1.0, 0.8)[row % 2],
                top_k=(0, 20, 0)[row % 3],
                seed=row,
                num_logprobs=5,
            )
        )
        for row in range(num_rows)
    ]

    wanted = list(map(NextToken.of, requests))
    together = Sampler(EOS).sample(logits.copy(), wanted)

    for row in range(num_rows):
        assert Sampler(EOS).sample(logits[row : row + 1].copy(), [wanted[row]]) == [together[row]]
