"""Requests that are aborted, or whose model computes no distribution, leave nothing behind."""

from dataclasses import replace
from typing import Any

import pytest

from engine.block_pool import BlockEvents
from engine.request import InvalidLogits, Request, RequestFailed, TokenOutput
from tests.engine.memory_engine import GREEDY, SEEDED, assert_idle, prompt_of, runner_of
from tests.fakes import make_engine, naive_generate, run_to_end, run_until_stalled, token_ids_of


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
