"""The engine over a model whose output depends on every token that its cache holds."""

from dataclasses import asdict, fields, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.block_pool import BlockEvents
from engine.engine import Engine
from engine.reports import EngineStats, StepReport
from engine.request import (
    DuplicateRequest,
    EngineEvent,
    FinishReason,
    InvalidLogits,
    InvalidParameter,
    PrefillProgress,
    RemoteKvWanted,
    Request,
    RequestFailed,
    RequestTimings,
    RequestTooLarge,
    TokenOutput,
    TooManyWaiting,
)
from engine.sampling import SamplingParams
from engine.speculation import NO_DRAFTS
from mesh.v1 import types_pb2
from tests.fakes import (
    EOS,
    FakeClock,
    MemoryRunner,
    make_engine,
    naive_generate,
    run_to_end,
    run_until_stalled,
    token_ids_of,
)

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
SEEDED = SamplingParams(max_tokens=12, temperature=0.9, seed=5)
VARIANTS: dict[str, SamplingParams] = {
    "greedy": GREEDY,
    "seeded": SEEDED,
    "penalties": replace(
        SEEDED, frequency_penalty=1.5, presence_penalty=0.5, repetition_penalty=1.3
    ),
    "min tokens": replace(GREEDY, min_tokens=10, logit_bias={EOS: 100.0}),
    "bad words": replace(GREEDY, bad_words=((7,), (5, 6))),
    "truncated": replace(SEEDED, top_k=9, top_p=0.8, min_p=0.05),
    "logprobs": replace(SEEDED, num_logprobs=3),
}


def prompt_of(num_tokens: int, first: int = 3) -> list[int]:
    return [(first * 7 + 11 * index) % 37 + 3 for index in range(num_tokens)]


def runner_of(engine: Engine) -> MemoryRunner:
    runner = engine._runner
    assert isinstance(runner, MemoryRunner)
    return runner


def assert_idle(engine: Engine) -> None:
    """All blocks are back and nobody is known any more."""
    load = engine.load()
    assert load.num_free_blocks == load.num_blocks
    assert (load.num_leases, load.num_running, load.num_waiting) == (0, 0, 0)
    assert not engine._requests
    assert not engine._quarantined
    assert engine._pool._num_owners == [0] * load.num_blocks


# The same request gives the same tokens.


@pytest.mark.parametrize("params", VARIANTS.values(), ids=VARIANTS)
def test_output_equals_a_naive_loop_over_the_same_model(params: SamplingParams) -> None:
    outputs = run_to_end(make_engine(), Request("r", prompt_of(9), params))

    assert token_ids_of(outputs["r"]) == naive_generate(prompt_of(9), params)


@settings(max_examples=60, deadline=None)
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


# Limits and ends.


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


# What is refused.


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


# Rows that are no distribution.


def break_at(request_id: str, num_tokens: int) -> Any:
    return lambda request: request.request_id == request_id and request.num_tokens == num_tokens


def test_a_broken_row_fails_its_request_only_and_nobody_finds_its_blocks() -> None:
    # SA-16
    engine = make_engine(max_num_batched_tokens=64)
    requests = [Request(f"r{i}", prompt_of(9, i), SEEDED) for i in range(4)]
    told: list[BlockEvents] = []
    engine.on_block_events = told.append
    runner_of(engine).is_broken = break_at("r2", 9 + 3)
    for request in requests:
        engine.add_request(request)

    events = run_until_stalled(engine)

    [failure] = [event for event in events if isinstance(event, RequestFailed)]
    assert failure.request_id == "r2"
    assert isinstance(failure.error, InvalidLogits)
    assert engine.load().num_invalid_logits == 1
    for request in requests:
        tokens = [
            event.token_id
            for event in events
            if isinstance(event, TokenOutput) and event.request_id == request.request_id
        ]
        expected = naive_generate(request.prompt_token_ids, SEEDED)
        assert tokens == (expected[:3] if request.request_id == "r2" else expected)
    keys = requests[2].block_keys
    assert not engine._pool.longest_prefix(keys)
    assert set(keys[:2]) <= {key for events in told for key in events.removed}
    assert_idle(engine)

    runner_of(engine).is_broken = lambda request: False
    again = run_to_end(engine, Request("again", prompt_of(9, 2), SEEDED))["again"]
    assert token_ids_of(again) == naive_generate(prompt_of(9, 2), SEEDED)
    assert again[-1].num_cached_tokens == 0


# Aborts.


def test_aborting_releases_everything_in_any_state_and_twice_is_harmless() -> None:
    # KV-16
    engine = make_engine(num_blocks=9, max_num_batched_tokens=16, max_num_seqs=3)
    params = replace(GREEDY, ignore_eos=True)
    names = ["a", "b", "c", "waiting"]
    for index, name in enumerate(names):
        engine.add_request(Request(name, prompt_of(10, index), params))
    engine.step()
    run = 0
    while not engine.load().num_preemptions and run < 20:
        engine.step()
        run += 1

    assert [engine.abort(name) for name in names] == [True] * 4
    assert [engine.abort(name) for name in names] == [False] * 4

    assert run_until_stalled(engine) == []
    assert_idle(engine)


def test_aborting_a_finished_or_unknown_request_is_harmless() -> None:
    # KV-16
    engine = make_engine()
    run_to_end(engine, Request("r", prompt_of(5), GREEDY))

    assert not engine.abort("r")
    assert not engine.abort("never heard of")
    assert_idle(engine)


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_an_abort_during_prefill_leaves_a_cache_that_is_right(num_steps: int) -> None:
    # KV-08
    engine = make_engine(max_num_batched_tokens=8)
    engine.add_request(Request("r", prompt_of(32), GREEDY))
    for _ in range(num_steps):
        engine.step()
    engine.abort("r")
    assert_idle(engine)

    outputs = run_to_end(
        engine, Request("same", prompt_of(32), GREEDY), Request("other", prompt_of(30, 1), GREEDY)
    )

    assert token_ids_of(outputs["same"]) == naive_generate(prompt_of(32), GREEDY)
    assert token_ids_of(outputs["other"]) == naive_generate(prompt_of(30, 1), GREEDY)
    # What was computed before the abort is there, and no more than that.
    assert outputs["same"][-1].num_cached_tokens == min(8 * num_steps, 28)


# Blocks kept for another worker, and blocks that come from one.


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


# What the outside is told.


def test_chunks_of_a_prompt_are_reported_as_they_are_computed() -> None:
    engine = make_engine(max_num_batched_tokens=8)
    engine.add_request(Request("r", prompt_of(20), GREEDY))

    events: list[EngineEvent] = [*engine.step(), *engine.step(), *engine.step()]

    assert events[:2] == [PrefillProgress("r", 8), PrefillProgress("r", 16)]
    assert isinstance(events[2], TokenOutput)


def test_evicted_keys_are_told_before_their_blocks_are_overwritten() -> None:
    class WatchfulRunner(MemoryRunner):
        def execute(self, scheduled: Any, on_kv_written: Any = None) -> Any:
            log.append("pass")
            return super().execute(scheduled, on_kv_written)

    log: list[object] = []
    engine = make_engine(
        num_blocks=2, runner=WatchfulRunner(2, 4), max_num_batched_tokens=8, max_num_seqs=1
    )
    engine.on_block_events = log.append
    one = SamplingParams(1, temperature=0.0)
    first, second = prompt_of(7, 1), prompt_of(7, 2)
    run_to_end(engine, Request("a", first, one))
    run_to_end(engine, Request("b", second, one))

    keys: list[list[bytes]] = [[], []]
    for tokens, found in zip((first, second), keys, strict=True):
        engine._pool.extend_keys(found, tokens, "")
    assert log == [
        "pass",
        BlockEvents(stored=keys[0]),
        BlockEvents(removed=keys[0]),
        "pass",
        BlockEvents(stored=keys[1]),
    ]


def test_the_stages_of_a_request_add_up_to_its_time() -> None:
    clock = FakeClock()

    class SlowRunner(MemoryRunner):
        def execute(self, scheduled: Any, on_kv_written: Any = None) -> Any:
            clock.advance(1.0)
            return super().execute(scheduled, on_kv_written)

    engine = make_engine(runner=SlowRunner(64, 4), clock=clock, max_num_batched_tokens=8)
    params = SamplingParams(3, temperature=0.0, ignore_eos=True)
    engine.add_request(Request("r", prompt_of(20), params))
    clock.advance(0.5)

    outputs = run_to_end(engine)["r"]

    assert outputs[-1].timings == RequestTimings(wait_s=0.5, prefill_s=3.0, decode_s=2.0)
    assert all(output.timings is None for output in outputs[:-1])
    # The first token tells what is known by then.
    assert outputs[0].timings_so_far == RequestTimings(wait_s=0.5, prefill_s=3.0)
    assert all(output.timings_so_far is None for output in outputs[1:])


def test_the_wait_for_a_step_to_end_belongs_to_the_request_that_waits() -> None:
    clock = FakeClock()
    engine = make_engine(clock=clock)
    request = Request("r", prompt_of(4), SamplingParams(1, temperature=0.0))
    request.submitted_at = clock()
    clock.advance(2.0)
    engine.add_request(request)

    [output] = run_to_end(engine)["r"]

    assert output.timings == RequestTimings(wait_s=2.0)


def test_each_step_is_reported_with_its_requests_and_whom_it_preempted() -> None:
    engine, reports = make_engine(num_blocks=8), list[StepReport]()
    engine.on_step = reports.append
    params = SamplingParams(20, temperature=0.0, ignore_eos=True)

    outputs = run_to_end(engine, *(Request(f"r{i}", prompt_of(9, i), params) for i in range(3)))

    preempted = [one for report in reports for one in report.preempted_request_ids]
    assert len(preempted) == engine.load().num_preemptions > 0
    for request_id, made in outputs.items():
        assert made[-1].num_preemptions == preempted.count(request_id)
        num_steps = sum(request_id in report.request_ids for report in reports)
        assert num_steps >= len(made)
    assert sum(report.num_tokens for report in reports) >= 3 * (9 + 20 - 1)


def test_load_counts_what_the_engine_does() -> None:
    engine = make_engine(num_blocks=20, block_size=4, max_num_batched_tokens=8, max_num_seqs=2)
    params = SamplingParams(50, temperature=0.0, ignore_eos=True)
    engine.add_request(Request("running", prompt_of(6), params))
    engine.add_request(Request("prefilling", prompt_of(12, 1), params))
    engine.add_request(Request("waiting", prompt_of(5, 2), params))
    engine.step()

    load = engine.load()

    assert asdict(load) == {
        "num_blocks": 20,
        "num_free_blocks": 20 - 2 - 3,
        "num_leases": 0,
        "num_running": 2,
        "num_waiting": 1,
        "num_waiting_tokens": 10 + 5,
        "num_prefix_cache_queries": 18,
        "num_prefix_cache_hits": 0,
        "num_preemptions": 0,
        "num_recomputed_tokens": 0,
        "num_steps": 1,
        "num_invalid_logits": 0,
        "num_waiting_for_kv": 0,
        "num_external_queries": 0,
        "num_external_hits": 0,
        # Of the one that has its first token: the others' prompts are not over.
        "num_computed_prompt_tokens": 6,
        "num_cached_prompt_tokens": 0,
        "num_external_prompt_tokens": 0,
        "drafts": asdict(NO_DRAFTS),
    }


def test_load_has_all_fields_of_the_wire() -> None:
    wire = {field.name for field in types_pb2.EngineLoad.DESCRIPTOR.fields}

    assert wire <= {field.name for field in fields(EngineStats)}


def test_cache_hits_are_counted_once_per_request() -> None:
    engine = make_engine(block_size=4)
    for name in ("cold", "warm"):
        run_to_end(engine, Request(name, prompt_of(10), GREEDY))

    load = engine.load()

    assert (load.num_prefix_cache_queries, load.num_prefix_cache_hits) == (20, 8)


def test_closing_releases_the_cache() -> None:
    engine = make_engine()

    engine.close()

    assert runner_of(engine).is_closed
