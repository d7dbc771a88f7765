"""Tokens guessed from what came before: which, how many, and that nobody can tell."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.config import SpeculationLimits
from engine.engine import Engine
from engine.request import Request, RequestFailed
from engine.sampling import SamplingParams
from engine.speculation import Speculator, StepCosts, count_accepted
from tests.fakes import MemoryRunner, make_engine, naive_generate, run_to_end, token_ids_of

LIMITS = SpeculationLimits(num_speculative_tokens=4, prompt_lookup_min=2, prompt_lookup_max=3)
GREEDY = SamplingParams(50, temperature=0.0, ignore_eos=True)


def propose(
    token_ids: list[int],
    params: SamplingParams = GREEDY,
    *,
    max_model_len: int = 1000,
) -> list[int]:
    """What is guessed when guesses cost nothing."""
    speculator = Speculator(LIMITS, max_model_len, StepCosts(fixed=1, sequence=0, row=0))
    [draft] = speculator.propose([Request("r", token_ids, params)], budget=100)
    return draft


@pytest.mark.parametrize(
    ("token_ids", "draft"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 1, 2], [3, 4, 5, 6]),
        # The latest place counts.
        ([1, 2, 3, 1, 2, 4, 1, 2], [4, 1, 2]),
        # But a place where more of the end is found counts more.
        ([9, 1, 2, 3, 8, 1, 2, 4, 9, 1, 2], [3, 8, 1, 2]),
        # What followed may reach into the end itself.
        ([5, 5, 5, 5], [5]),
        ([1, 2, 3, 4], []),
        ([2, 3, 2], []),
        ([1], []),
    ],
)
def test_a_draft_is_what_followed_the_last_tokens_before(
    token_ids: list[int], draft: list[int]
) -> None:
    assert propose(token_ids) == draft


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40))
def test_no_earlier_place_has_more_of_the_end(token_ids: list[int]) -> None:
    def followers(length: int) -> list[int]:
        end = token_ids[-length:]
        return [
            at
            for at in range(length, len(token_ids))
            if len(end) == length and token_ids[at - length : at] == end
        ]

    places = next((found for length in (3, 2) if (found := followers(length))), None)

    expected = token_ids[places[-1] : places[-1] + 4] if places else []
    assert propose(token_ids) == expected


REPEATING = [1, 2, 3, 4, 5, 6, 7, 1, 2]


@pytest.mark.parametrize(
    "values",
    [
        {"num_logprobs": 0},
        {"num_prompt_logprobs": 0},
        {"frequency_penalty": 0.1},
        {"logit_bias": {3: 1.0}},
        {"min_tokens": 1},
        {"bad_words": ((3,),)},
    ],
    ids=str,
)
def test_rows_that_need_more_than_a_draw_are_not_guessed(values: dict[str, object]) -> None:
    assert propose(REPEATING, replace(GREEDY, **values)) == []  # type: ignore[arg-type]


def test_a_draft_ends_where_the_sequence_has_to() -> None:
    # One of the tokens left is the step's own.
    assert propose(REPEATING, replace(GREEDY, max_tokens=3)) == [3, 4]
    assert propose(REPEATING, replace(GREEDY, max_tokens=1)) == []
    assert propose(REPEATING, max_model_len=len(REPEATING) + 3) == [3, 4]
    assert propose(REPEATING, max_model_len=len(REPEATING) + 1) == []


COSTS = StepCosts(fixed=4.0, sequence=0.5, row=0.5)


def repeating(number: int) -> list[Request]:
    return [Request(f"r{index}", REPEATING, GREEDY) for index in range(number)]


def test_the_more_requests_decode_the_surer_a_guess_has_to_be() -> None:
    def num_guesses(number: int) -> float:
        drafts = Speculator(LIMITS, 1000, COSTS).propose(repeating(number), budget=1000)
        return sum(map(len, drafts)) / number

    numbers = [num_guesses(number) for number in (1, 4, 16, 32)]

    assert numbers == sorted(numbers, reverse=True)
    assert numbers[0] == 2
    assert numbers[-1] == 0


@given(
    acceptances=st.lists(st.floats(0.01, 0.99), min_size=1, max_size=40),
    budget=st.integers(0, 100),
    tile=st.sampled_from([0.0, 2.0]),
)
def test_the_chosen_guesses_bring_most_tokens_for_the_time(
    acceptances: list[float], budget: int, tile: float
) -> None:
    costs = replace(COSTS, tile=tile, tile_rows=16)
    speculator = Speculator(LIMITS, 1000, costs)
    requests = repeating(len(acceptances))
    speculator.propose(requests, budget=0)
    for request, acceptance in zip(requests, acceptances, strict=True):
        speculator._histories[request].acceptance = acceptance

    drafts = speculator.propose(requests, budget)

    def rate(lengths: list[int]) -> float:
        expected = sum(
            sum(acceptance**place for place in range(length + 1))
            for acceptance, length in zip(acceptances, lengths, strict=True)
        )
        return expected / costs.of(len(requests), sum(lengths))

    chosen = [len(draft) for draft in drafts]
    most = max(0, min(budget, 64 - len(requests)))
    assert sum(chosen) <= most
    # Nobody's longest drafts, nor anybody's next guess, nor one less, would be better.
    others = [[0] * len(requests)]
    for index in range(len(requests)):
        for change in (-1, 1):
            other = chosen.copy()
            other[index] += change
            if 0 <= other[index] <= 4 and sum(other) <= most:
                others.append(other)
    assert all(rate(chosen) >= rate(other) - 1e-9 for other in others)


def test_what_fits_into_a_begun_tile_is_guessed_and_a_new_one_has_to_pay() -> None:
    costs = StepCosts(fixed=4.0, sequence=0.5, row=0.0, tile=30.0, tile_rows=16)

    def num_guesses(number: int) -> int:
        drafts = Speculator(LIMITS, 1000, costs).propose(repeating(number), budget=1000)
        return sum(map(len, drafts))

    assert num_guesses(12) == 4
    assert num_guesses(16) == 0


def test_drafts_become_longer_with_success_and_shorter_without() -> None:
    speculator = Speculator(LIMITS, 1000, COSTS)
    [request] = repeating(1)

    def length() -> int:
        [draft] = speculator.propose([request], budget=100)
        return len(draft)

    first = length()
    for _ in range(30):
        speculator.observe(request, 4, 4)
    after_success = length()
    for _ in range(60):
        speculator.observe(request, 4, 0)
    after_failure = length()

    assert after_failure < first < after_success == 4


def test_failures_are_forgotten_in_time() -> None:
    speculator = Speculator(LIMITS, 1000, COSTS)
    [request] = repeating(1)
    speculator.propose([request], budget=0)
    for _ in range(100):
        speculator.observe(request, 4, 0)

    tried = [bool(speculator.propose([request], budget=100)[0]) for _ in range(200)]

    assert not tried[0]
    assert any(tried)


@given(draft=st.lists(st.integers(0, 1)), chosen=st.lists(st.integers(0, 1)))
def test_accepted_are_the_leading_tokens_that_agree(draft: list[int], chosen: list[int]) -> None:
    number = count_accepted(draft, chosen)

    assert draft[:number] == chosen[:number]
    assert number in (len(draft), len(chosen)) or draft[number] != chosen[number]


def test_counts_are_vllms() -> None:
    speculator = Speculator(LIMITS, 1000)
    request = Request("r", REPEATING, GREEDY)
    speculator.propose([request], budget=0)

    for num_accepted in (4, 1, 0):
        speculator.observe(request, 4, num_accepted)

    counts = speculator.counts()
    assert (counts.num_drafts, counts.num_draft_tokens, counts.num_accepted_tokens) == (3, 12, 5)
    assert counts.num_accepted_per_position == (2, 1, 1, 1)


@pytest.mark.parametrize("limits", [(0, 2, 4), (4, 0, 4), (4, 5, 4)], ids=str)
def test_limits_that_make_no_sense_are_refused(limits: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match=r"num_speculative_tokens|prompt_lookup_min"):
        SpeculationLimits(*limits)


def guessing_engine(runner: MemoryRunner | None = None) -> Engine:
    return make_engine(
        max_num_batched_tokens=64, runner=runner, speculation=replace(LIMITS, prompt_lookup_min=1)
    )


@given(
    prompts=st.lists(st.lists(st.integers(3, 5), min_size=1, max_size=20), min_size=1, max_size=4),
    temperature=st.sampled_from([0.0, 0.7, 1.5]),
    max_tokens=st.integers(1, 40),
)
def test_guesses_change_no_token(
    prompts: list[list[int]], temperature: float, max_tokens: int
) -> None:
    engine = guessing_engine()
    params = SamplingParams(max_tokens, temperature=temperature, seed=7)

    outputs = run_to_end(
        engine, *(Request(f"r{i}", prompt, params) for i, prompt in enumerate(prompts))
    )

    for index, prompt in enumerate(prompts):
        assert token_ids_of(outputs[f"r{index}"]) == naive_generate(prompt, params)


def test_right_guesses_save_steps() -> None:
    params = SamplingParams(60, temperature=0.0, ignore_eos=True)
    runner = MemoryRunner(64, 4, vocab_size=4)
    engine = guessing_engine(runner)

    [outputs] = run_to_end(engine, Request("r", [1, 2], params)).values()

    load = engine.load()
    assert token_ids_of(outputs) == naive_generate([1, 2], params, vocab_size=4)
    assert load.drafts.num_accepted_tokens > 0
    # Each step brings a token and what it guessed right; the last may bring more than are wanted.
    assert load.num_steps == 60 - load.drafts.num_accepted_tokens


def test_a_guess_after_a_broken_row_is_no_loss() -> None:
    """The row after a right guess may have no distribution; the token before it counts."""
    runner = MemoryRunner(64, 4, vocab_size=4)
    engine = guessing_engine(runner)
    request = Request("r", [1, 2] * 4, SamplingParams(60, temperature=0.0, ignore_eos=True))
    engine.add_request(request)
    produced: list[int] = []
    expected = naive_generate(request.prompt_token_ids, request.sampling_params, vocab_size=4)
    runner.is_broken_from = 20
    failures: list[RequestFailed] = []
    while not failures:
        for event in engine.step():
            if isinstance(event, RequestFailed):
                failures.append(event)
            else:
                produced.append(event.token_id)  # type: ignore[union-attr]

    assert produced == expected[: 20 - 8]
    assert engine.load().num_free_blocks == engine.num_blocks
