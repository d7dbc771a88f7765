"""Predicted times to the first token, and refusals that follow from them."""

from dataclasses import replace

import pytest

from mesh.errors import QueueFull
from scheduler_svc.admission import PriorityClass
from scheduler_svc.estimates import Estimates
from scheduler_svc.forecast import Ahead, Forecast, forecast
from scheduler_svc.objectives import Objectives
from scheduler_svc.workers import ActiveLoad, RequestFacts, Role, WorkerView

DECODE = WorkerView("d0", "1", "d0@1", Role.DECODE, "d0:1", "smol", "f1", 16, 10_000, 8192)
PREFILL = replace(DECODE, worker_id="p0", holder_id="p0@1", role=Role.PREFILL)
FACTS = RequestFacts("smol", 1000, 16)


def measured() -> Estimates:
    """5,000 tokens a second, 2 s of decode, 10 ms a step and one more for each neighbour."""
    estimates = Estimates()
    for number in range(40):
        estimates.prefill[Role.PREFILL].observe(100 + 50 * number, 0, (100 + 50 * number) / 5000)
        num_running = 1 + number % 20
        step_s = 0.01 + 0.001 * num_running
        estimates.observe_decode(int(2 / step_s), num_running, 2.0)
    return estimates


def predict(
    *workers: WorkerView,
    ahead: Ahead | None = None,
    decoding_since: list[float | None] | None = None,
    num_cached_tokens: int = 0,
) -> Forecast:
    expected = forecast(
        FACTS,
        num_cached_tokens,
        workers or [PREFILL, DECODE],
        ahead or Ahead(),
        decoding_since or [],
        measured(),
        max_num_seqs=8,
        now=100.0,
    )
    assert expected is not None
    return expected


def test_idle_mesh_takes_the_time_of_the_prefill() -> None:
    assert predict().ttft_s == pytest.approx(0.2, rel=0.02)
    assert predict(num_cached_tokens=900).ttft_s == pytest.approx(0.02, rel=0.1)


def test_prompts_on_the_prefill_worker_s_cores_are_waited_for_wherever_they_are() -> None:
    cores = {"transfer_address": "m0:1", "cpus": frozenset({0, 1}), "num_threads": 2}
    prefill = replace(PREFILL, **cores)  # type: ignore[arg-type]
    busy = replace(DECODE, charged=ActiveLoad(1, 2000, 100), **cores)  # type: ignore[arg-type]

    assert predict(prefill, busy).ttft_s == pytest.approx(0.6, rel=0.02)
    assert predict(PREFILL, replace(DECODE, charged=busy.charged)).ttft_s == pytest.approx(
        0.2, rel=0.02
    )
    # A mesh of decode workers alone counts them once.
    assert predict(busy).ttft_s == pytest.approx(0.6, rel=0.02)


def test_work_ahead_is_shared_by_the_prefill_workers() -> None:
    busy = replace(PREFILL, charged=ActiveLoad(1, 2000, 100))
    idle = replace(PREFILL, worker_id="p1", holder_id="p1@1")

    one = predict(busy, DECODE, ahead=Ahead(2, 4000)).ttft_s
    two = predict(busy, idle, DECODE, ahead=Ahead(2, 4000)).ttft_s

    assert one == pytest.approx(1.2 + 0.2, rel=0.02)
    assert two == pytest.approx(0.6 + 0.2, rel=0.02)


def test_request_without_room_waits_until_enough_others_have_ended() -> None:
    full = replace(DECODE, charged=ActiveLoad(8, 0, 80))

    # Eight end in 2 s, and four must.
    assert predict(PREFILL, full, ahead=Ahead(3, 0)).ttft_s == pytest.approx(1.2, rel=0.02)


def test_room_is_counted_in_blocks_where_these_run_out_first() -> None:
    full = replace(DECODE, num_blocks=1000, charged=ActiveLoad(2, 0, 1000))

    assert predict(PREFILL, full).ttft_s == pytest.approx(1.0 + 0.2, rel=0.02)


def test_those_that_will_have_ended_by_then_do_not_count() -> None:
    # The prefill ends at 100.2; what began before 98.2 will be gone then.
    expected = predict(decoding_since=[97.0, 98.0, 99.0, 99.9, None])

    assert expected.num_decoding == 4
    assert expected.step_s == pytest.approx(0.014, rel=0.02)


def test_nothing_is_predicted_before_prefills_are_measured() -> None:
    assert (
        forecast(FACTS, 0, [PREFILL, DECODE], Ahead(), [], Estimates(), max_num_seqs=8, now=100.0)
        is None
    )


def test_request_that_would_be_late_is_refused_with_the_time_after_which_it_would_not() -> None:
    objectives = Objectives(online_ttft_s=2.0, tbt_s=0.02)
    assert objectives.ttft_s(PriorityClass.ONLINE) == 2.0
    assert objectives.ttft_s(PriorityClass.OFFLINE) is None

    objectives.check_forecast(Forecast(1.9, 5, 0.01), 2.0)
    objectives.check_forecast(Forecast(100.0, 5, None), None)
    with pytest.raises(QueueFull, match="first token") as late:
        objectives.check_forecast(Forecast(7.0, 5, 0.01), 2.0)
    with pytest.raises(QueueFull, match="every 30 ms"):
        objectives.check_forecast(Forecast(1.0, 5, 0.03), 2.0)
    with pytest.raises(QueueFull):
        objectives.check_waited(2.0, 2.1)
    objectives.check_waited(None, 1000)

    assert late.value.retry_after_s == pytest.approx(5.0)
