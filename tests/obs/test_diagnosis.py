"""From numbers to likely causes."""

from typing import Any

import pytest

from mesh.diagnosis import diagnose_now, diagnose_request
from mesh.metrics import STAGES


def request(stages_ms: dict[str, float], **more: Any) -> dict[str, Any]:
    return {"stages_ms": stages_ms, "total_ms": sum(stages_ms.values()), "attempts": 1, **more}


def worker(**more: Any) -> dict[str, Any]:
    idle = {"worker_id": "d", "role": "decode", "kv_cache_usage": 0.1, "waiting": 0, "running": 1}
    return {**idle, **more}


def live(**more: Any) -> dict[str, Any]:
    well: dict[str, Any] = {
        "problems": [],
        "queued": 0,
        "num_requests": 100,
        "num_failed": 0,
        "cache_hit_rate": 0.5,
        "ttft_ms": {"p50": 100.0, "p90": 150.0, "p99": 200.0},
        "tpot_ms": None,
        "mean_stages_ms": {"rules": 1.0},
        "workers": [worker()],
    }
    return {**well, **more}


@pytest.mark.parametrize("stage", sorted(STAGES.names))
def test_whichever_stage_takes_the_time_is_named_first(stage: str) -> None:
    stages = {"rules": 2.0, "decode_steps": 300.0} | {stage: 900.0}

    [first, *_] = diagnose_request(request(stages))

    assert first.stage == stage
    assert "900 ms" in first.what
    assert first.why
    assert first.to_try


def test_the_requests_own_numbers_are_part_of_the_story() -> None:
    slow = request(
        {"prefill_compute": 500.0, "decode_steps": 400.0},
        prompt_tokens=1000,
        cached_tokens=100,
        completion_tokens=20,
        tpot_ms=20.0,
        batch_size=7.5,
    )

    prefill, decode = diagnose_request(slow)

    assert "900 of 1000 prompt tokens were not cached" in prefill.what
    assert "20 tokens at 20.0 ms, in a batch of 7.5" in decode.what


def test_failures_resumptions_and_preemptions_come_before_stages() -> None:
    unlucky = request(
        {"decode_steps": 900.0}, error="WORKER_UNAVAILABLE", attempts=3, preemptions=2
    )

    stages = [finding.stage for finding in diagnose_request(unlucky)]

    assert stages == ["error", "attempts", "preemptions", "decode_steps"]


def test_a_quick_request_has_nothing_to_be_found() -> None:
    assert diagnose_request(request({"decode_steps": 15.0})) == []


def test_a_mesh_that_is_well_has_nothing_to_be_found() -> None:
    assert diagnose_now(live()) == []


@pytest.mark.parametrize(
    ("change", "stage"),
    [
        ({"problems": ["scheduler: UNAVAILABLE"]}, "health"),
        ({"num_failed": 5}, "errors"),
        ({"queued": 3}, "queue"),
        ({"cache_hit_rate": 0.01}, "cache"),
        ({"ttft_ms": {"p50": 10.0, "p90": 20.0, "p99": 900.0}}, "ttft_ms"),
        ({"workers": [worker(kv_cache_usage=0.97)]}, "workers"),
        ({"workers": [worker(waiting=9)]}, "workers"),
        ({"mean_stages_ms": {"queue": 500.0, "rules": 1.0}}, "queue"),
    ],
)
def test_each_sign_of_trouble_is_found_alone(change: dict[str, Any], stage: str) -> None:
    assert [finding.stage for finding in diagnose_now(live(**change))] == [stage]
