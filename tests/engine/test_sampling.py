"""Choosing tokens from known logits: bias, penalties, masks, log-probabilities, refusals."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.request import InvalidParameter
from engine.sampling import SampledToken, Sampler, SamplingParams
from tests.engine.sampling_rows import (
    EOS,
    GREEDY,
    RANDOM,
    VOCAB_SIZE,
    logprobs_of,
    make_request,
    sample,
    sample_one,
    shaped,
)

# Greedy.


def test_greedy_takes_the_most_likely_token_and_the_lowest_id_among_equals() -> None:
    assert sample_one([0, 1, 5, 1, 5, 5, 0, 0], make_request(GREEDY)).token_id == 2


@pytest.mark.parametrize("temperature", [1e-6, 1e-8, 1e-12, 5e-324, 0.0])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    # SA-01
    params = SamplingParams(100, temperature=temperature, seed=1)
    neighbour = SamplingParams(100, temperature=0.9, seed=3)
    row = [0.1, 0.3, 0.2, 0.3, 0.0, 0.1, 0.2, 0.1]

    tokens = sample([row, row], [make_request(params), make_request(neighbour)])

    assert tokens[0] == SampledToken(1)
    assert tokens[1] == sample_one(row, make_request(neighbour))


@pytest.mark.parametrize("temperature", [1e-2, 1e-3, 1e-4, 1e-5])
def test_small_temperatures_stay_finite_and_follow_the_best_token(temperature: float) -> None:
    # SA-01
    params = SamplingParams(100, temperature=temperature, seed=1)

    token = sample_one([-80.0, 90.0, 3.0, 89.0, 0.0, -90.0, 1.0, 2.0], make_request(params))

    assert token.token_id == 1


def test_greedy_and_random_rows_do_not_touch_each_other() -> None:
    # SA-02
    rows = [[1.0, 2.0, 3.0, 4.0, 0.0, 1.0, 2.0, 3.0]] * 3
    rows[0][5] = -math.inf
    requests = [
        make_request(replace(GREEDY, logit_bias={3: -100.0}, bad_words=((7,),))),
        make_request(replace(RANDOM, temperature=0.8, top_p=0.9, seed=3)),
        make_request(replace(RANDOM, temperature=2.0)),
    ]

    together = sample(rows, requests)

    alone = [sample_one(row, request) for row, request in zip(rows, requests, strict=True)]
    assert together == alone


# Bias, penalties, masks.


def test_bias_of_100_makes_a_token_the_only_one_and_minus_100_rules_it_out() -> None:
    # SA-09
    row = [9.0, 1.0, 0.0, 0.0, 0.0, -5.0, 0.0, 0.0]

    for seed in range(50):
        forced = make_request(replace(RANDOM, seed=seed, logit_bias={5: 100.0}))
        banned = make_request(replace(RANDOM, seed=seed, logit_bias={0: -100.0}))
        assert sample_one(row, forced).token_id == 5
        assert sample_one(row, banned).token_id != 0


def test_presence_and_frequency_penalties_count_the_output_and_not_the_prompt() -> None:
    # SA-06
    row = [1.0] * VOCAB_SIZE
    presence = replace(GREEDY, presence_penalty=2.0)
    frequency = replace(GREEDY, frequency_penalty=1.0)

    assert shaped(row, make_request(presence, [5, 5, 5]))[5] == pytest.approx(0.0)
    assert shaped(row, make_request(frequency, [5, 5, 5]))[5] == pytest.approx(0.0)
    assert shaped(row, make_request(presence, [5, 5, 5], [5]))[5] == pytest.approx(-2.0)
    assert shaped(row, make_request(frequency, [5, 5, 5], [5]))[5] == pytest.approx(-1.0)
    both = replace(GREEDY, presence_penalty=2.0, frequency_penalty=1.0)
    assert shaped(row, make_request(both, [5], [5, 4, 5]))[5] == pytest.approx(-4.0)


def test_repetition_penalty_counts_prompt_and_output() -> None:
    # SA-06
    row = [0.0, 4.0, 0.0, -4.0, 4.0, 4.0, 0.0, 0.0]
    request = make_request(replace(GREEDY, repetition_penalty=2.0), [5, 3, 5], [4])

    result = shaped(row, request)

    assert result[5] == pytest.approx(2.0)
    assert result[4] == pytest.approx(2.0)
    assert result[3] == pytest.approx(-8.0)
    assert result[1] == pytest.approx(4.0)


@pytest.mark.parametrize("temperature", [0.0, 1e-5, 1.0])
@pytest.mark.parametrize("penalty", [1e-20, 1e-38, 1e-40, 5e-324])
def test_tiny_repetition_penalties_repeat_the_best_token_seen(
    penalty: float, temperature: float
) -> None:
    params = SamplingParams(
        100, repetition_penalty=penalty, temperature=temperature, num_logprobs=2
    )
    row = [1.0, 80.0, 20.0, 90.0, -80.0, 0.0, 1.0, 2.0]

    token = sample_one(row, make_request(params, [1, 2, 4, 5]))

    assert token.token_id == 1
    assert token.logprobs is not None
    assert token.logprobs.logprob == 0.0


def test_bias_comes_before_penalties() -> None:
    # Otherwise 8 / 2 - 4 would be 0.
    row = [0.0, 0.0, 0.0, 0.0, 0.0, 8.0, 0.0, 0.0]
    params = replace(GREEDY, logit_bias={5: -4.0}, repetition_penalty=2.0)

    assert shaped(row, make_request(params, [5]))[5] == pytest.approx(2.0)


def test_no_end_is_chosen_before_min_tokens() -> None:
    # SA-12
    row = [50.0, 0.0, 40.0, 30.0, 1.0, 0.0, 0.0, 0.0]
    params = replace(GREEDY, min_tokens=3, stop_token_ids=frozenset({3}), logit_bias={0: 100.0})

    assert sample_one(row, make_request(params)).token_id == 4
    assert sample_one(row, make_request(params, output=[4, 4])).token_id == 4
    assert sample_one(row, make_request(params, output=[4, 4, 4])).token_id == 0


def test_masked_ends_have_no_probability_and_are_no_alternatives() -> None:
    # SA-12
    logprobs = logprobs_of([1.0] * VOCAB_SIZE, make_request(replace(GREEDY, min_tokens=1)))

    assert set(logprobs) == {1, 3, 4, 5, 6, 7}
    assert sum(map(math.exp, logprobs.values())) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("prompt", "output", "is_banned"),
    [
        ([1], [], False),
        ([1], [3], False),
        ([1], [3, 4], True),
        ([1], [3, 4, 4], False),
        # A phrase that begins in the prompt counts too.
        ([1, 3], [4], True),
        ([1, 3, 4], [], True),
        ([4], [], False),
    ],
)
def test_only_the_last_token_of_a_bad_phrase_is_banned_and_only_after_the_others(
    prompt: list[int], output: list[int], is_banned: bool
) -> None:
    # SA-14
    row = [0.0, 0.0, 0.0, 0.0, 0.0, 9.0, 8.0, 0.0]
    request = make_request(replace(GREEDY, bad_words=((3, 4, 5),)), prompt, output)

    assert sample_one(row, request).token_id == (6 if is_banned else 5)


def test_a_bad_word_of_one_token_is_always_banned() -> None:
    # SA-14
    row = [0.0, 0.0, 0.0, 0.0, 0.0, 9.0, 8.0, 0.0]

    token = sample_one(row, make_request(replace(GREEDY, bad_words=((5,), (6,)))))

    assert token.token_id not in (5, 6)


# Log-probabilities.


def test_logprobs_are_taken_before_temperature_and_truncation() -> None:
    row = [math.log(share) for share in (0.5, 0.3, 0.1, 0.05, 0.02, 0.01, 0.01, 0.01)]
    params = replace(RANDOM, temperature=0.2, top_k=1, num_logprobs=3)

    logprobs = sample_one(row, make_request(params)).logprobs

    assert logprobs is not None
    assert logprobs.token_id == 0
    assert logprobs.logprob == pytest.approx(math.log(0.5), abs=1e-6)
    assert [candidate.token_id for candidate in logprobs.top] == [0, 1, 2]
    assert [candidate.logprob for candidate in logprobs.top] == pytest.approx(
        [math.log(0.5), math.log(0.3), math.log(0.1)], abs=1e-6
    )


def test_equal_alternatives_come_in_order_of_their_ids() -> None:
    params = replace(GREEDY, num_logprobs=3)

    logprobs = sample_one([1.0] * VOCAB_SIZE, make_request(params)).logprobs

    assert logprobs is not None
    assert [candidate.token_id for candidate in logprobs.top] == [0, 1, 2]


def test_no_alternatives_are_an_empty_list_and_no_logprobs_are_none() -> None:
    row = [0.0] * VOCAB_SIZE

    wanted = sample_one(row, make_request(replace(GREEDY, num_logprobs=0))).logprobs

    assert wanted is not None
    assert wanted.top == ()
    assert sample_one(row, make_request(GREEDY)).logprobs is None


# Rows that are no distribution.


@pytest.mark.parametrize("params", [GREEDY, RANDOM, replace(RANDOM, top_p=0.5, num_logprobs=2)])
@pytest.mark.parametrize(
    "broken",
    [
        [math.nan] * VOCAB_SIZE,
        [0.0] * 7 + [math.nan],
        [-math.inf] * VOCAB_SIZE,
        [0.0] * 7 + [math.inf],
    ],
)
def test_a_broken_row_yields_nothing_and_its_neighbours_are_unaffected(
    params: SamplingParams, broken: list[float]
) -> None:
    # SA-16
    row = [0.1, 0.2, 0.3, 0.1, 0.6, 0.1, 0.2, 0.3]

    tokens = sample([row, broken, row], [make_request(params)] * 3)

    assert tokens[1] is None
    assert tokens[0] == tokens[2] == sample_one(row, make_request(params))


def test_a_row_from_which_everything_is_masked_yields_nothing() -> None:
    everything = tuple((token_id,) for token_id in range(VOCAB_SIZE))

    [token] = sample([[0.0] * VOCAB_SIZE], [make_request(replace(GREEDY, bad_words=everything))])

    assert token is None


def test_no_rows_yield_no_tokens() -> None:
    assert Sampler(EOS).sample(np.empty((0, VOCAB_SIZE), dtype=np.float32), []) == []


# Validation.


@pytest.mark.parametrize(
    ("param", "values"),
    [
        ("temperature", [-0.1, 2.1, math.nan, math.inf, "1", None, True]),
        ("top_p", [-0.1, 1.1, math.nan]),
        ("min_p", [-0.1, 1.1]),
        # SA-03
        ("top_k", [-2, 1.5, "1", None]),
        ("presence_penalty", [-2.1, 2.1]),
        ("frequency_penalty", [-2.1, 2.1]),
        ("repetition_penalty", [0.0, -1.0, 2.1, math.nan]),
        ("seed", [2**63, -(2**63) - 1, 1.0]),
        ("max_tokens", [0, -1, 1.0]),
        # SA-12: more than max_tokens
        ("min_tokens", [-1, 101]),
        # SA-10
        ("stop_token_ids", [frozenset({8}), frozenset({-1}), frozenset({"a"}), frozenset({True})]),
        # SA-09
        ("logit_bias", [{8: 5.0}, {-1: 5.0}, {"AI": -100.0}, {1.5: 1.0}, {5: "x"}, {5: None}]),
        ("logit_bias", [{5: 1000.0}, {5: -100.1}, {5: math.nan}]),
        ("bad_words", [((8,),), ((),), ((1, -1),)]),
    ],
)
def test_values_out_of_range_are_refused_by_name(param: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(InvalidParameter, match=param) as caught:
            replace(GREEDY, **{param: value}).validate(VOCAB_SIZE)
        assert caught.value.param == param


@pytest.mark.parametrize("num_logprobs", [-1, 9, 21])
def test_too_many_logprobs_are_refused(num_logprobs: int) -> None:
    with pytest.raises(InvalidParameter) as caught:
        replace(GREEDY, num_logprobs=num_logprobs).validate(VOCAB_SIZE)

    assert caught.value.param == "logprobs"


def test_the_edges_of_all_ranges_are_accepted() -> None:
    for params in (
        SamplingParams(1, temperature=0, top_p=0, top_k=-1, min_p=0, seed=-(2**63)),
        SamplingParams(
            10**6,
            temperature=2,
            top_p=1,
            top_k=10**9,
            min_p=1,
            seed=2**63 - 1,
            repetition_penalty=2,
            presence_penalty=-2,
            frequency_penalty=2,
            min_tokens=10**6,
            stop_token_ids=frozenset({0, 7}),
            logit_bias={0: 100, 7: -100},
            num_logprobs=8,
            bad_words=((0, 7),),
        ),
    ):
        params.validate(VOCAB_SIZE)
