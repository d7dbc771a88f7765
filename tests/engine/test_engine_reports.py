"""What an engine tells of its requests, its steps, its blocks and its load."""

from dataclasses import asdict, fields
from typing import Any

from engine.block_pool import BlockEvents
from engine.reports import EngineStats, StepReport
from engine.request import EngineEvent, PrefillProgress, Request, RequestTimings, TokenOutput
from engine.sampling import SamplingParams
from engine.speculation import NO_DRAFTS
from mesh.v1 import types_pb2
from tests.engine.memory_engine import GREEDY, prompt_of, runner_of
from tests.fakes import FakeClock, MemoryRunner, make_engine, run_to_end


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
