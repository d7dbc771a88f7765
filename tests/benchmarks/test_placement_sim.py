"""The simulation itself, and what it must show, on a small scale."""

import asyncio
from pathlib import Path

import pytest

from benchmarks.placement_sim import trace as traces
from benchmarks.placement_sim import virtual_time
from benchmarks.placement_sim.experiments import (
    Promise,
    default_trace,
    hit_rates,
    placement_cost,
)
from benchmarks.placement_sim.simulation import Fleet, Run, simulate
from scheduler_svc.objectives import Objectives


def test_trace_is_the_same_for_a_seed_and_survives_its_file(tmp_path: Path) -> None:
    trace = default_trace(200, 10, seed=3)

    traces.write(trace, tmp_path / "trace.jsonl")

    assert traces.read(tmp_path / "trace.jsonl") == trace == default_trace(200, 10, seed=3)
    assert trace != default_trace(200, 10, seed=4)
    for one in trace:
        assert len(one.hash_ids) == -(-one.input_length // traces.BLOCK_TOKENS)
        assert one.output_length > 0
    assert [one.timestamp for one in trace] == sorted(one.timestamp for one in trace)


def test_time_jumps_and_a_dead_end_is_told() -> None:
    async def sleep_for_a_day() -> float:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(86_400)
        return loop.time()

    async def wait_for_nobody() -> None:
        await asyncio.Event().wait()

    assert virtual_time.run(sleep_for_a_day()) == pytest.approx(86_400)
    with pytest.raises(RuntimeError, match="no timer"):
        virtual_time.run(wait_for_nobody())


def test_idle_mesh_serves_a_request_in_the_time_that_its_hardware_takes() -> None:
    request = traces.TraceRequest(1000, 1024, 11, [1, 2])
    fleet = Fleet(1, 1)

    [outcome] = simulate(Run([request], fleet))

    assert outcome.ttft_s == pytest.approx(fleet.hardware.prefill_s(1024, 0))
    assert outcome.tbt_s == pytest.approx(0.0208)


def test_requests_find_their_prefixes_far_more_often_than_in_turns() -> None:
    found = hit_rates(default_trace(800, 16, seed=1), Fleet(12, 12))

    assert found["pdmesh"].hit_rate >= 1.5 * found["round robin"].hit_rate
    assert found["pdmesh"].hit_rate >= 1.5 * found["by load"].hit_rate
    assert found["pdmesh"].ttft_p99_s < found["round robin"].ttft_p99_s


def test_early_rejection_saves_the_goodput_under_overload() -> None:
    trace, fleet, promise = default_trace(600, 22, seed=1), Fleet(4, 4), Promise()
    objectives = Objectives(online_ttft_s=promise.ttft_s, tbt_s=promise.tbt_s)

    everybody = simulate(Run(trace, fleet))
    chosen = simulate(Run(trace, fleet, objectives=objectives))

    num_kept = sum(map(promise.is_kept, chosen))
    assert num_kept >= 2 * sum(map(promise.is_kept, everybody))
    # Those who are let in get what was promised, but for the first, before times are known.
    assert num_kept >= 0.7 * sum(one.ttft_s is not None for one in chosen)
    assert all(one.ttft_s is not None for one in everybody)


def test_placement_among_two_hundred_workers_takes_less_than_five_milliseconds() -> None:
    cost = placement_cost(200, 50_000, num_requests=150)

    assert cost.p99_ms < 5
    assert cost.num_blocks >= 50_000
