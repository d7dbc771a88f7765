"""KV that moves while it is computed, or that colder tiers have: what the engine is told."""

import pytest

from engine.block_pool import BlockEvents
from engine.engine import Engine
from engine.request import PrefillProgress, RemoteKvWanted, Request, TokenOutput
from engine.sampling import SamplingParams
from tests.engine.memory_engine import GREEDY, prompt_of
from tests.fakes import make_engine, naive_generate, run_to_end, run_until_stalled, token_ids_of

BLOCK_SIZE = 4


def wanted_of(engine: Engine, request: Request) -> RemoteKvWanted:
    engine.add_request(request)
    [wanted] = [event for event in engine.step() if isinstance(event, RemoteKvWanted)]
    return wanted


def is_idle(engine: Engine) -> bool:
    return engine.load().num_free_blocks == engine.num_blocks


def test_a_prefill_says_from_its_first_chunk_on_where_its_blocks_lie() -> None:
    engine = make_engine(max_num_batched_tokens=8)
    engine.add_request(Request("r", prompt_of(20), GREEDY, hold_blocks=True))

    events = run_until_stalled(engine)

    progress = [event for event in events if isinstance(event, PrefillProgress)]
    [first] = [event for event in events if isinstance(event, TokenOutput)]
    assert [event.num_computed_tokens for event in progress] == [8, 16]
    for event in progress:
        assert event.block_ids == first.held_block_ids
        assert event.block_generations == first.held_block_generations == (1,) * 5
    engine.release_hold("r")


def test_a_prefill_marks_what_is_filled_and_rings_before_it_samples() -> None:
    engine = make_engine(max_num_batched_tokens=8)
    marks = engine._pool._marks
    rings: list[tuple[int, int]] = []

    def look() -> None:
        filled = zip(marks.filled, marks.generations, strict=True)
        num_tokens = sum(token != 0 for token in marks.next_tokens)
        rings.append((sum(was == now != 0 for was, now in filled), num_tokens))

    engine.on_filled = look
    engine.add_request(Request("r", prompt_of(18), GREEDY, hold_blocks=True))

    [last] = [e for e in run_until_stalled(engine) if isinstance(e, TokenOutput)]

    # The last block has two of its four tokens, and gets no more.
    expected = [(2, 0), (2, 0), (4, 0), (4, 0), (5, 0), (5, 1)]
    assert rings == expected
    assert marks.token_after(last.held_block_ids) == last.token_id
    assert marks.token_after(last.held_block_ids[:4]) is None
    engine.release_hold("r")
    run_to_end(engine, Request("other", prompt_of(18, first=9), GREEDY))
    assert rings == expected


def test_progress_of_a_request_that_nobody_takes_over_names_no_blocks() -> None:
    engine = make_engine(max_num_batched_tokens=8)
    engine.add_request(Request("r", prompt_of(20), GREEDY))

    [event] = engine.step()

    assert isinstance(event, PrefillProgress)
    assert event.block_ids == event.block_generations == ()


def test_a_block_that_gets_new_content_has_a_new_generation() -> None:
    engine = make_engine(num_blocks=6)
    engine.add_request(Request("old", prompt_of(20), GREEDY, hold_blocks=True))
    [old] = [e for e in run_until_stalled(engine) if isinstance(e, TokenOutput)]
    engine.release_hold("old")
    # Cached content that is found again is the old content.
    engine.add_request(Request("same", prompt_of(20), GREEDY, hold_blocks=True))
    [same] = [e for e in run_until_stalled(engine) if isinstance(e, TokenOutput)]
    engine.release_hold("same")

    run_to_end(engine, Request("new", prompt_of(20, first=9), SamplingParams(4, temperature=0.0)))

    assert same.held_block_ids[:4] == old.held_block_ids[:4]
    assert same.held_block_generations[:4] == old.held_block_generations[:4]
    now = engine._pool.generations_of(old.held_block_ids)
    assert all(
        after > before for before, after in zip(old.held_block_generations, now, strict=True)
    )


@pytest.mark.parametrize("num_tokens", [7, 8, 9])
def test_a_token_that_comes_with_the_kv_is_gone_on_from(num_tokens: int) -> None:
    # KV-05
    engine = make_engine()
    prompt = prompt_of(num_tokens)
    expected = naive_generate(prompt, GREEDY)
    request = Request("r", prompt, GREEDY, remote_kv=True, remote_token=True)

    wanted = wanted_of(engine, request)
    engine._runner.write(wanted.block_ids, 0, prompt)  # type: ignore[attr-defined]
    assert engine.remote_kv_done("r", expected[:1])

    assert len(wanted.block_ids) == -(-num_tokens // BLOCK_SIZE)
    assert token_ids_of(run_to_end(engine)["r"]) == expected[1:]
    assert is_idle(engine)


def test_a_token_that_comes_without_its_kv_is_not_produced_again() -> None:
    # KV-20
    engine = make_engine()
    prompt = prompt_of(9)
    expected = naive_generate(prompt, GREEDY)
    request = Request("r", prompt, GREEDY, remote_kv=True, remote_token=True)

    wanted_of(engine, request)
    assert engine.remote_kv_failed("r", expected[:1])

    assert token_ids_of(run_to_end(engine)["r"]) == expected[1:]
    assert is_idle(engine)


@pytest.mark.parametrize("num_blocks", [0, 2, 4])
def test_blocks_from_colder_tiers_are_not_computed(num_blocks: int) -> None:
    engine = make_engine()
    prompt = prompt_of(18)
    request = Request("r", prompt, GREEDY, tiered_kv=True)

    wanted = wanted_of(engine, request)
    found = num_blocks * BLOCK_SIZE
    engine._runner.write(wanted.block_ids[:num_blocks], 0, prompt[:found])  # type: ignore[attr-defined]
    assert engine.tiered_kv_done("r", num_blocks)
    outputs = run_to_end(engine)["r"]

    assert len(wanted.keys) == len(wanted.block_ids) == 4
    assert token_ids_of(outputs) == naive_generate(prompt, GREEDY)
    assert outputs[-1].num_cached_tokens == found
    assert engine.load().num_prefix_cache_hits == found
    assert is_idle(engine)


def test_blocks_from_colder_tiers_are_told_from_those_that_were_computed() -> None:
    engine = make_engine()
    announced: list[BlockEvents] = []
    engine.on_block_events = announced.append

    wanted = wanted_of(engine, Request("r", prompt_of(18), GREEDY, tiered_kv=True))
    engine._runner.write(wanted.block_ids[:2], 0, prompt_of(18)[:8])  # type: ignore[attr-defined]
    engine.tiered_kv_done("r", 2)
    run_to_end(engine)

    stored = [key for events in announced for key in events.stored]
    from_tiers = {key for events in announced for key in events.from_tiers}
    assert set(wanted.keys[2:]) < set(stored) - from_tiers
    assert from_tiers == set(wanted.keys[:2])


def test_only_full_blocks_that_are_not_cached_are_asked_of_colder_tiers() -> None:
    engine = make_engine()
    prompt = prompt_of(22)
    run_to_end(engine, Request("before", prompt[:9], SamplingParams(1, temperature=0.0)))

    wanted = wanted_of(engine, Request("r", prompt, GREEDY, tiered_kv=True))
    engine._runner.write(wanted.block_ids[:1], 0, prompt[8:12])  # type: ignore[attr-defined]
    engine.tiered_kv_done("r", 1)

    assert (wanted.first_block_index, len(wanted.block_ids)) == (2, 3)
    assert token_ids_of(run_to_end(engine)["r"]) == naive_generate(prompt, GREEDY)


def test_a_prompt_that_is_cached_here_asks_no_colder_tier() -> None:
    engine = make_engine()
    run_to_end(engine, Request("before", prompt_of(9), GREEDY))

    outputs = run_to_end(engine, Request("r", prompt_of(9), GREEDY, tiered_kv=True))["r"]

    assert token_ids_of(outputs) == naive_generate(prompt_of(9), GREEDY)


@pytest.mark.parametrize("num_tiered_tokens", [0, 4, 8])
def test_tiers_that_have_no_more_than_is_cached_here_are_not_asked(num_tiered_tokens: int) -> None:
    engine = make_engine()
    run_to_end(engine, Request("before", prompt_of(9), GREEDY))
    request = Request(
        "r", prompt_of(22), GREEDY, tiered_kv=True, num_tiered_tokens=num_tiered_tokens
    )

    outputs = run_to_end(engine, request)["r"]

    assert token_ids_of(outputs) == naive_generate(prompt_of(22), GREEDY)


def test_tiers_that_have_more_than_is_cached_here_are_asked() -> None:
    engine = make_engine()
    run_to_end(engine, Request("before", prompt_of(9), GREEDY))

    request = Request("r", prompt_of(22), GREEDY, tiered_kv=True, num_tiered_tokens=12)

    wanted = wanted_of(engine, request)

    assert (wanted.first_block_index, len(wanted.keys)) == (2, 3)


def test_a_request_aborted_while_a_tier_is_read_keeps_its_blocks_until_that_has_ended() -> None:
    # KV-21
    engine = make_engine()
    wanted_of(engine, Request("r", prompt_of(18), GREEDY, tiered_kv=True))

    engine.abort("r")
    assert not is_idle(engine)
    assert not engine.tiered_kv_done("r", 2)

    assert is_idle(engine)


def test_others_go_on_while_a_tier_is_read() -> None:
    engine = make_engine()
    wanted_of(engine, Request("slow", prompt_of(18), GREEDY, tiered_kv=True))

    outputs = run_to_end(engine, Request("other", prompt_of(5, first=8), GREEDY))

    assert token_ids_of(outputs["other"]) == naive_generate(prompt_of(5, first=8), GREEDY)
    engine.tiered_kv_done("slow", 0)
    assert token_ids_of(run_to_end(engine)["slow"]) == naive_generate(prompt_of(18), GREEDY)


def test_stored_blocks_are_announced_with_their_places_and_generations() -> None:
    engine = make_engine()
    announced: list[BlockEvents] = []
    engine.on_block_events = announced.append

    engine.add_request(Request("r", prompt_of(9), GREEDY, hold_blocks=True))
    [first] = [e for e in run_until_stalled(engine) if isinstance(e, TokenOutput)]

    [events] = announced
    assert tuple(events.block_ids) == first.held_block_ids[:2]
    assert tuple(events.generations) == first.held_block_generations[:2]


def test_a_request_that_does_not_wait_for_its_answer_any_more_computes_in_other_blocks() -> None:
    # KV-21
    engine = make_engine()
    wanted = wanted_of(engine, Request("r", prompt_of(18), GREEDY, tiered_kv=True))

    engine.remote_kv_late("r")
    outputs = run_to_end(engine)["r"]

    assert token_ids_of(outputs) == naive_generate(prompt_of(18), GREEDY)
    assert engine.load().num_free_blocks == engine.num_blocks - len(wanted.block_ids) - 1
    assert not engine.tiered_kv_done("r", 2)
    assert is_idle(engine)


def test_blocks_of_an_aborted_request_stay_reserved_when_it_is_also_late() -> None:
    # KV-21
    engine = make_engine()
    wanted = wanted_of(engine, Request("r", prompt_of(18), GREEDY, tiered_kv=True))

    engine.abort("r")
    engine.remote_kv_late("r")

    assert engine.load().num_free_blocks <= engine.num_blocks - len(wanted.block_ids)
    assert not engine.tiered_kv_done("r", 0)
    assert is_idle(engine)


def prompt_sources(engine: Engine) -> tuple[int, int, int]:
    """Prompt tokens computed here, cached here, and from elsewhere."""
    load = engine.load()
    return (
        load.num_computed_prompt_tokens,
        load.num_cached_prompt_tokens,
        load.num_external_prompt_tokens,
    )


def test_a_prompt_s_tokens_are_counted_once_by_where_they_are_from() -> None:
    engine = make_engine()
    prompt = prompt_of(22)

    run_to_end(engine, Request("first", prompt[:9], SamplingParams(1, temperature=0.0)))
    assert prompt_sources(engine) == (9, 0, 0)

    # Two blocks are cached, a colder tier has one of the other three.
    wanted = wanted_of(engine, Request("tier", prompt, GREEDY, tiered_kv=True))
    assert engine.load().num_waiting_for_kv == engine.load().num_waiting == 1
    assert engine.load().num_external_queries == 14
    engine._runner.write(wanted.block_ids[:1], 0, prompt[8:12])  # type: ignore[attr-defined]
    engine.tiered_kv_done("tier", 1)
    assert engine.load().num_external_hits == 4
    run_to_end(engine)
    assert prompt_sources(engine) == (9 + 10, 8, 4)

    # Another worker computed the prompt and the first token.
    other = prompt_of(9, first=8)
    first = naive_generate(other, GREEDY)[:1]
    wanted = wanted_of(engine, Request("remote", other, GREEDY, first, remote_kv=True))
    engine._runner.write(wanted.block_ids, 0, other)  # type: ignore[attr-defined]
    engine.remote_kv_done("remote")
    run_to_end(engine)

    assert prompt_sources(engine) == (19, 8, 4 + 9)
    assert engine.load().num_external_hits == 4 + 9
    assert engine.load().num_waiting_for_kv == 0


def test_a_prompt_that_is_computed_again_is_not_counted_again() -> None:
    engine = make_engine(num_blocks=8)
    params = SamplingParams(12, temperature=0.0, ignore_eos=True)

    run_to_end(engine, *(Request(name, prompt_of(8, first=len(name)), params) for name in "ab"))

    assert engine.load().num_preemptions > 0
    assert sum(prompt_sources(engine)) == 16
