"""Where a sequence ends, and which requests an engine refuses."""

from dataclasses import replace

import pytest

from engine.request import (
    DuplicateRequest,
    FinishReason,
    InvalidParameter,
    Request,
    RequestTooLarge,
    TooManyWaiting,
)
from engine.sampling import SamplingParams
from tests.engine.memory_engine import GREEDY, assert_idle, prompt_of, runner_of
from tests.fakes import EOS, make_engine, run_to_end, run_until_stalled, token_ids_of


def test_the_model_s_own_end_stops_a_sequence_and_names_the_token() -> None:
    params = replace(GREEDY, logit_bias={EOS: 100.0})

    [output] = run_to_end(make_engine(), Request("r", prompt_of(5), params))["r"]

    assert output.finish_reason is FinishReason.STOP
    assert output.matched_stop_token_id == EOS


def test_an_end_exactly_at_the_cap_is_a_stop() -> None:
    params = SamplingParams(1, temperature=0.0, logit_bias={EOS: 100.0})

    [output] = run_to_end(make_engine(), Request("r", prompt_of(5), params))["r"]

    assert output.finish_reason is FinishReason.STOP


def test_max_tokens_ends_a_sequence_by_length() -> None:
    params = replace(GREEDY, ignore_eos=True)

    outputs = run_to_end(make_engine(), Request("r", prompt_of(5), params))["r"]

    assert len(outputs) == 12
    assert [output.is_last for output in outputs] == [False] * 11 + [True]
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert outputs[-1].matched_stop_token_id is None


@pytest.mark.parametrize(("num_prompt_tokens", "num_expected"), [(18, 2), (19, 1)])
def test_positions_never_reach_the_window(num_prompt_tokens: int, num_expected: int) -> None:
    # KV-10
    engine = make_engine(max_model_len=20)
    request = Request("r", prompt_of(num_prompt_tokens), replace(GREEDY, ignore_eos=True))

    outputs = run_to_end(engine, request)["r"]

    assert len(outputs) == num_expected
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert (runner_of(engine).memory[:, :] >= 0).sum() == 19


@pytest.mark.parametrize("num_prompt_tokens", [20, 21])
def test_a_prompt_that_leaves_no_room_in_the_window_is_refused(num_prompt_tokens: int) -> None:
    # KV-10
    engine = make_engine(max_model_len=20)

    with pytest.raises(RequestTooLarge, match=f"{num_prompt_tokens} tokens .* at most 20"):
        engine.add_request(Request("r", prompt_of(num_prompt_tokens), GREEDY))

    assert_idle(engine)


def test_a_request_that_could_never_fit_is_refused_and_a_large_one_ends_at_capacity() -> None:
    # KV-12: a pool of 32 tokens under a window of 200
    engine = make_engine(num_blocks=8, block_size=4, max_num_batched_tokens=32)
    assert engine.max_model_len == 32
    large = SamplingParams(100, temperature=0.0, ignore_eos=True)

    with pytest.raises(RequestTooLarge, match="at most 32"):
        engine.add_request(Request("hopeless", prompt_of(40), GREEDY))
    requests = [Request("large", prompt_of(25), large)]
    requests += [Request(f"short {i}", prompt_of(3, i), GREEDY) for i in range(10)]
    outputs = run_to_end(engine, *requests)

    assert len(outputs["large"]) == 7
    assert outputs["large"][-1].finish_reason is FinishReason.LENGTH
    assert all(outputs[f"short {i}"][-1].finish_reason for i in range(10))
    assert_idle(engine)


def test_two_requests_that_fit_only_one_at_a_time_both_end() -> None:
    # KV-12
    engine = make_engine(num_blocks=8, block_size=4, max_num_batched_tokens=32)
    params = SamplingParams(20, temperature=0.0, ignore_eos=True)

    outputs = run_to_end(
        engine, Request("old", prompt_of(12), params), Request("young", prompt_of(12, 1), params)
    )

    assert [len(tokens) for tokens in outputs.values()] == [20, 20]


@pytest.mark.parametrize(
    ("prompt", "params", "param"),
    [
        ([], GREEDY, "prompt"),
        ([40], GREEDY, "prompt"),
        ([-1], GREEDY, "prompt"),
        ([5279552648203111001], GREEDY, "prompt"),
        ([True], GREEDY, "prompt"),
        ([3], replace(GREEDY, stop_token_ids=frozenset({151645})), "stop_token_ids"),
        ([3], replace(GREEDY, logit_bias={40: 1.0}), "logit_bias"),
        ([3], replace(GREEDY, temperature=-1.0), "temperature"),
    ],
)
def test_values_that_the_model_cannot_take_are_refused_and_others_go_on(
    prompt: list[int], params: SamplingParams, param: str
) -> None:
    # SA-09, SA-10
    engine = make_engine()
    engine.add_request(Request("good", prompt_of(9), GREEDY))
    engine.step()

    with pytest.raises(InvalidParameter) as caught:
        engine.add_request(Request("bad", prompt, params))

    assert caught.value.param == param
    assert token_ids_of(run_to_end(engine)["good"][-11:])
    assert_idle(engine)


def test_a_request_that_has_all_its_tokens_is_refused() -> None:
    with pytest.raises(InvalidParameter, match="all 12 tokens"):
        make_engine().add_request(Request("r", [3], GREEDY, [4] * 12))


def test_an_id_in_use_is_refused() -> None:
    engine = make_engine()
    engine.add_request(Request("r", [3], GREEDY))

    with pytest.raises(DuplicateRequest):
        engine.add_request(Request("r", [4], GREEDY))

    run_until_stalled(engine)
    engine.add_request(Request("r", [4], GREEDY))


def test_no_more_requests_are_taken_than_may_run_and_wait() -> None:
    engine = make_engine(max_num_seqs=1, max_num_waiting=2)
    for name in ("a", "b", "c"):
        engine.add_request(Request(name, [3], GREEDY))

    with pytest.raises(TooManyWaiting):
        engine.add_request(Request("d", [3], GREEDY))

    engine.abort("b")
    engine.add_request(Request("d", [3], GREEDY))
