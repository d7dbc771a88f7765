"""Blocks that are kept for another worker, and blocks that come from one."""

from dataclasses import replace

import pytest

from engine.block_pool import BlockEvents
from engine.engine import Engine
from engine.request import DuplicateRequest, FinishReason, RemoteKvWanted, Request, TokenOutput
from engine.sampling import SamplingParams
from tests.engine.memory_engine import GREEDY, SEEDED, VARIANTS, assert_idle, prompt_of, runner_of
from tests.fakes import (
    EOS,
    make_engine,
    naive_generate,
    run_to_end,
    run_until_stalled,
    token_ids_of,
)


def prefill(
    engine: Engine, request_id: str, prompt: list[int], params: SamplingParams
) -> TokenOutput:
    request = Request(request_id, prompt, params, hold_blocks=True)
    [output] = run_to_end(engine, request)[request_id]
    return output


def test_a_held_request_ends_after_one_token_and_keeps_its_blocks() -> None:
    engine = make_engine(num_blocks=10, block_size=4)

    output = prefill(engine, "r", prompt_of(9), GREEDY)

    assert output.is_last
    assert output.finish_reason is None
    assert output.num_held_tokens == 9
    assert len(output.held_block_ids) == 3
    assert engine.load().num_leases == 1
    assert engine.load().num_free_blocks == 7
    with pytest.raises(DuplicateRequest):
        engine.add_request(Request("r", prompt_of(9), GREEDY))
    assert not engine.abort("r")
    assert engine.release_hold("r")
    assert not engine.release_hold("r")
    assert_idle(engine)


def test_a_sequence_that_is_over_with_its_first_token_holds_nothing() -> None:
    engine = make_engine()

    ended = prefill(engine, "eos", prompt_of(9), replace(GREEDY, logit_bias={EOS: 100.0}))
    capped = prefill(engine, "cap", prompt_of(9), SamplingParams(1, temperature=0.0))

    assert (ended.finish_reason, ended.held_block_ids) == (FinishReason.STOP, ())
    assert (capped.finish_reason, capped.held_block_ids) == (FinishReason.LENGTH, ())
    assert not engine.release_hold("eos")
    assert_idle(engine)


def wait_for_remote(engine: Engine, request: Request) -> RemoteKvWanted:
    engine.add_request(request)
    [wanted] = [event for event in engine.step() if isinstance(event, RemoteKvWanted)]
    assert wanted.request_id == request.request_id
    return wanted


def pull(source: Engine, output: TokenOutput, destination: Engine, wanted: RemoteKvWanted) -> None:
    source_ids = output.held_block_ids[wanted.first_block_index :]
    assert len(source_ids) == len(wanted.block_ids)
    runner_of(destination).memory[list(wanted.block_ids)] = runner_of(source).memory[
        list(source_ids)
    ]


@pytest.mark.parametrize("params", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 30])
def test_a_request_split_between_two_engines_gives_the_tokens_of_one(
    params: SamplingParams, length: int
) -> None:
    prompt = prompt_of(length)
    source, destination = make_engine(), make_engine()
    first = prefill(source, "r", prompt, params)

    request = Request("r", prompt, params, [first.token_id], remote_kv=True)
    wanted = wait_for_remote(destination, request)
    pull(source, first, destination, wanted)
    assert destination.remote_kv_done("r")
    source.release_hold("r")
    rest = run_to_end(destination)["r"]

    expected = run_to_end(make_engine(), Request("r", prompt, params))["r"]
    assert [(o.token_id, o.logprobs) for o in (first, *rest)] == [
        (o.token_id, o.logprobs) for o in expected
    ]
    # Nothing of the prompt was computed here, and moved KV is no cache hit.
    assert set(runner_of(destination).step_sizes) == {1}
    assert rest[-1].num_cached_tokens == 0
    assert_idle(source)
    assert_idle(destination)


def test_only_the_blocks_that_are_not_cached_here_are_wanted() -> None:
    source, destination = make_engine(), make_engine()
    prompt = prompt_of(30)
    first = prefill(source, "r", prompt, GREEDY)
    run_to_end(destination, Request("before", prompt[:13], SamplingParams(1, temperature=0.0)))

    request = Request("r", prompt, GREEDY, [first.token_id], remote_kv=True)
    wanted = wait_for_remote(destination, request)
    pull(source, first, destination, wanted)
    destination.remote_kv_done("r")
    rest = run_to_end(destination)["r"]

    assert (wanted.first_block_index, len(wanted.block_ids)) == (3, 5)
    assert [first.token_id, *token_ids_of(rest)] == naive_generate(prompt, GREEDY)


def test_a_prompt_that_is_cached_here_wants_no_blocks_but_an_answer_all_the_same() -> None:
    destination = make_engine()
    prompt = prompt_of(8)
    expected = naive_generate(prompt, GREEDY)
    run_to_end(destination, Request("before", prompt, GREEDY))

    request = Request("r", prompt, GREEDY, expected[:1], remote_kv=True)
    wanted = wait_for_remote(destination, request)
    assert wanted.block_ids == ()
    assert destination.is_stalled
    assert run_until_stalled(destination) == []
    destination.remote_kv_done("r")

    assert token_ids_of(run_to_end(destination)["r"]) == expected[1:]


def test_moved_blocks_can_be_found_by_others_once_they_have_arrived() -> None:
    # KV-07, KV-20
    source, destination = make_engine(), make_engine()
    prompt = prompt_of(16)
    first = prefill(source, "r", prompt, GREEDY)
    told: list[BlockEvents] = []
    destination.on_block_events = told.append
    wanted = wait_for_remote(
        destination, Request("r", prompt, GREEDY, [first.token_id], remote_kv=True)
    )
    assert told == []

    early = run_to_end(destination, Request("early", prompt, GREEDY))["early"]
    pull(source, first, destination, wanted)
    destination.remote_kv_done("r")
    run_until_stalled(destination)
    late = run_to_end(destination, Request("late", prompt, GREEDY))["late"]

    assert early[-1].num_cached_tokens == 0
    assert late[-1].num_cached_tokens == 12
    assert token_ids_of(early) == token_ids_of(late) == naive_generate(prompt, GREEDY)


def test_when_the_pull_fails_the_prompt_is_computed_here() -> None:
    # KV-19, KV-20
    engine = make_engine(max_num_batched_tokens=8)
    expected = naive_generate(prompt_of(20), SEEDED)
    request = Request("r", prompt_of(20), SEEDED, expected[:1], remote_kv=True)
    wanted = wait_for_remote(engine, request)
    runner_of(engine).memory[list(wanted.block_ids[:2])] = 39

    assert engine.remote_kv_failed("r")
    assert not engine.remote_kv_failed("r")

    assert token_ids_of(run_to_end(engine)["r"]) == expected[1:]
    assert_idle(engine)


@pytest.mark.parametrize("is_done", [True, False])
def test_blocks_of_an_aborted_pull_stay_reserved_until_it_has_ended(is_done: bool) -> None:
    # KV-21
    engine = make_engine(num_blocks=8, block_size=4)
    wanted = wait_for_remote(engine, Request("r", prompt_of(13), GREEDY, [5], remote_kv=True))

    assert engine.abort("r")
    assert engine.load().num_free_blocks == 4
    with pytest.raises(DuplicateRequest):
        engine.add_request(Request("r", [3], GREEDY))
    engine.add_request(Request("next", prompt_of(14), SamplingParams(2, temperature=0.0)))
    events = engine.step()
    # The late write arrives between two steps of the other request.
    runner_of(engine).memory[list(wanted.block_ids)] = 39
    events += run_until_stalled(engine)

    tokens = [event.token_id for event in events if isinstance(event, TokenOutput)]
    assert tokens == naive_generate(prompt_of(14), SamplingParams(2, temperature=0.0))
    answer = engine.remote_kv_done if is_done else engine.remote_kv_failed
    # Nobody waits for it any more, and its blocks are free again.
    assert not answer("r")
    assert_idle(engine)
    again = run_to_end(engine, Request("r", prompt_of(13), GREEDY))["r"]
    assert token_ids_of(again) == naive_generate(prompt_of(13), GREEDY)


def test_a_moved_request_that_is_preempted_recomputes_everything_here() -> None:
    source, destination = make_engine(), make_engine(num_blocks=8, block_size=4)
    params = SamplingParams(14, temperature=0.0, ignore_eos=True)
    first = prefill(source, "moved", prompt_of(9), params)
    wanted = wait_for_remote(
        destination, Request("moved", prompt_of(9), params, [first.token_id], remote_kv=True)
    )
    pull(source, first, destination, wanted)
    destination.remote_kv_done("moved")

    outputs = run_to_end(destination, Request("local", prompt_of(10, 1), params))

    assert destination.load().num_preemptions > 0
    assert [first.token_id, *token_ids_of(outputs["moved"])] == naive_generate(prompt_of(9), params)
    assert token_ids_of(outputs["local"]) == naive_generate(prompt_of(10, 1), params)
