"""The same request gives the same tokens, whatever else the engine does."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.request import Request
from engine.sampling import SamplingParams
from tests.engine.memory_engine import GREEDY, VARIANTS, assert_idle, prompt_of, runner_of
from tests.fakes import make_engine, naive_generate, run_to_end, token_ids_of


@pytest.mark.parametrize("params", VARIANTS.values(), ids=VARIANTS)
def test_output_equals_a_naive_loop_over_the_same_model(params: SamplingParams) -> None:
    outputs = run_to_end(make_engine(), Request("r", prompt_of(9), params))

    assert token_ids_of(outputs["r"]) == naive_generate(prompt_of(9), params)


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    num_blocks=st.integers(15, 60),
    max_num_seqs=st.integers(1, 6),
    extra_budget=st.integers(0, 20),
    threshold=st.sampled_from([0, 3, 8]),
    block_size=st.sampled_from([1, 4, 16]),
    enable_prefix_caching=st.booleans(),
    variant=st.sampled_from(sorted(VARIANTS)),
)
def test_output_depends_on_nothing_but_the_request(
    lengths: list[int],
    num_blocks: int,
    max_num_seqs: int,
    extra_budget: int,
    threshold: int,
    block_size: int,
    enable_prefix_caching: bool,
    variant: str,
) -> None:
    # SA-05, KV-05, KV-07, KV-14: batches, chunks, hits and preemptions of all sorts.
    engine = make_engine(
        num_blocks * 4 // block_size + 1,
        block_size,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_seqs + extra_budget,
        long_prefill_token_threshold=threshold,
        enable_prefix_caching=enable_prefix_caching,
    )
    requests = [
        # Few different beginnings, so that prompts are prefixes of one another.
        Request(f"r{index}", prompt_of(length, length % 2), replace(VARIANTS[variant], seed=index))
        for index, length in enumerate(lengths)
    ]

    outputs = run_to_end(engine, *requests)

    for request in requests:
        expected = naive_generate(request.prompt_token_ids, request.sampling_params)
        assert token_ids_of(outputs[request.request_id]) == expected
        assert 0 <= outputs[request.request_id][-1].num_cached_tokens < request.num_prompt_tokens
    assert_idle(engine)


@pytest.mark.parametrize("length", [3, 4, 5, 8, 9])
def test_a_repeated_prompt_gives_the_cold_result_whatever_its_length(length: int) -> None:
    # KV-05
    engine = make_engine(block_size=4)
    longer = [*prompt_of(length), 9, 8, 7]

    runs = [
        run_to_end(engine, Request(f"{i}", prompt_of(length), GREEDY))[f"{i}"] for i in range(3)
    ]
    extended = run_to_end(engine, Request("longer", longer, GREEDY))["longer"]

    for outputs in runs:
        assert token_ids_of(outputs) == naive_generate(prompt_of(length), GREEDY)
    assert [outputs[-1].num_cached_tokens for outputs in runs[1:]] == [(length - 1) // 4 * 4] * 2
    # The first token tells already.
    assert all(outputs[0].num_cached_tokens == outputs[-1].num_cached_tokens for outputs in runs)
    assert token_ids_of(extended) == naive_generate(longer, GREEDY)
    assert extended[-1].num_cached_tokens >= length // 4 * 4


def test_concurrent_first_uses_of_a_prefix_do_not_see_each_others_unfilled_blocks() -> None:
    # KV-07
    engine = make_engine(num_blocks=400, max_num_seqs=16, max_num_batched_tokens=64)
    requests = [Request(f"r{i}", prompt_of(64) + [i + 3] * 4, GREEDY) for i in range(16)]

    outputs = run_to_end(engine, *requests)

    for request in requests:
        expected = naive_generate(request.prompt_token_ids, GREEDY)
        assert token_ids_of(outputs[request.request_id]) == expected


@pytest.mark.parametrize("params", VARIANTS.values(), ids=VARIANTS)
def test_preempted_requests_end_as_if_they_had_never_been(params: SamplingParams) -> None:
    # KV-14
    roomy, tight = make_engine(), make_engine(num_blocks=8)

    def requests() -> list[Request]:
        return [
            Request(f"r{i}", prompt_of(9, i), replace(params, ignore_eos=True)) for i in range(3)
        ]

    expected = run_to_end(roomy, *requests())
    outputs = run_to_end(tight, *requests())

    assert tight.load().num_preemptions > 0
    assert roomy.load().num_preemptions == 0
    for request_id, wanted in expected.items():
        assert [(o.token_id, o.logprobs) for o in outputs[request_id]] == [
            (o.token_id, o.logprobs) for o in wanted
        ]
        assert outputs[request_id][-1].finish_reason == wanted[-1].finish_reason
        # Blocks found again after a preemption are no cache hit.
        assert outputs[request_id][-1].num_cached_tokens == 0
    assert_idle(tight)


@pytest.mark.parametrize("params", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("num_done", [1, 3, 11])
def test_a_request_resumed_elsewhere_goes_on_as_if_it_had_never_moved(
    params: SamplingParams, num_done: int
) -> None:
    # KV-26
    params = replace(params, ignore_eos=True)
    whole = run_to_end(make_engine(), Request("r", prompt_of(9), params))["r"]
    done = token_ids_of(whole[:num_done])

    rest = run_to_end(make_engine(), Request("r", prompt_of(9), params, done))["r"]

    assert [(o.token_id, o.logprobs) for o in rest] == [
        (o.token_id, o.logprobs) for o in whole[num_done:]
    ]
    assert len(whole) == params.max_tokens


def test_a_resumed_request_finds_blocks_of_its_own_output() -> None:
    # KV-26
    engine = make_engine()
    whole = run_to_end(engine, Request("r", prompt_of(7), replace(GREEDY, ignore_eos=True)))["r"]

    again = Request("r", prompt_of(7), replace(GREEDY, ignore_eos=True), token_ids_of(whole[:6]))
    rest = run_to_end(engine, again)["r"]

    # The hit covers output too, but only prompt tokens are reported.
    assert runner_of(engine).step_sizes[-6:] == [1] * 6
    assert rest[-1].num_cached_tokens == 6
