"""What the numbers mean: percentiles, pace, goodput, and what may be read back."""

import json
from pathlib import Path
from typing import Any

import pytest

from mesh.bench.client import Recording
from mesh.bench.results import (
    BenchResult,
    Distribution,
    InvalidResult,
    Objectives,
    pool,
    summarize_round,
)
from tests.bench.made import point, recording, result, window


def test_percentiles_are_interpolated_between_ranks() -> None:
    found = Distribution.of(float(value) for value in range(1, 102))

    assert found is not None
    assert (found.p50, found.p90, found.p99, found.max) == (51.0, 91.0, 100.0, 101.0)
    assert found.mean == 51.0
    assert len(found.curve) == 101


def test_there_is_no_distribution_of_nothing() -> None:
    assert Distribution.of([]) is None


def test_a_request_has_a_ttft_a_pace_and_gaps() -> None:
    group = summarize_round(window([recording(ttft_s=0.2, tpot_s=0.01, num_tokens=11)])).groups[
        "requests"
    ]

    assert group.ttft_ms is not None
    assert group.ttft_ms.p50 == pytest.approx(200)
    assert group.tpot_ms is not None
    assert group.tpot_ms.p50 == pytest.approx(10)
    assert group.itl_ms is not None
    assert group.itl_ms.count == 10
    assert group.itl_ms.p99 == pytest.approx(10)
    assert group.e2e_ms is not None
    assert group.e2e_ms.p50 == pytest.approx(300)
    assert group.output_tokens_per_s == pytest.approx(11)


def test_pace_counts_tokens_where_an_event_brings_several() -> None:
    several = Recording(
        "requests",
        0.0,
        token_times=[0.1, 0.2, 0.3],
        ended_at=0.3,
        num_prompt_tokens=4,
        num_completion_tokens=9,
    )

    group = summarize_round(window([several])).groups["requests"]

    assert group.tpot_ms is not None
    assert group.tpot_ms.p50 == pytest.approx(25)
    assert group.events_per_token == pytest.approx(1 / 3, abs=1e-3)


def test_tokens_after_the_end_count_for_no_throughput() -> None:
    late = recording(0.0, ttft_s=0.5, tpot_s=0.1, num_tokens=10)

    group = summarize_round(window([late], length_s=1.0)).groups["requests"]

    assert group.output_tokens_per_s == pytest.approx(5, abs=1)
    assert group.num_requests == 1


def test_goodput_counts_only_requests_that_meet_every_objective() -> None:
    objectives = Objectives.parse(["ttft:150", "tpot:20"])
    recordings = [
        recording(),
        recording(ttft_s=0.2),
        recording(tpot_s=0.03),
        Recording("requests", 0.0, error="HTTP 500"),
    ]

    group = summarize_round(window(recordings, length_s=2.0), objectives).groups["requests"]

    assert group.goodput is not None
    assert group.goodput.requests_per_s == pytest.approx(0.5)
    assert group.goodput.share == 0.25


@pytest.mark.parametrize("pair", ["ttft", "ttft:", "ttft:x", "ttft:0", "itl:5", "e2e:-1"])
def test_an_objective_that_says_nothing_is_refused(pair: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        Objectives.parse([pair])


def test_no_objectives_are_none() -> None:
    assert Objectives.parse([]) is None


def test_pooled_rates_are_medians_of_rounds_and_latencies_are_of_all_requests() -> None:
    windows = [
        window([recording(ttft_s=ttft_s)] * n) for ttft_s, n in ((0.1, 1), (0.2, 2), (0.3, 9))
    ]
    rounds = [summarize_round(each) for each in windows]

    group = pool(windows, rounds)["requests"]

    assert group.num_requests == 12
    assert group.output_tokens_per_s == pytest.approx(16)
    assert group.ttft_ms is not None
    assert group.ttft_ms.p50 == pytest.approx(300)


def test_a_result_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    made = result([point("1 at once", 1, [window([recording()])])])

    path.write_bytes(made.to_json())

    assert BenchResult.read(path) == made


def without_percentiles(value: dict[str, Any]) -> None:
    del value["points"][0]["pooled"]["requests"]["ttft_ms"]["p99"]


def without_a_fact(value: dict[str, Any]) -> None:
    del value["facts"]["hardware"]


def of_another_kind(value: dict[str, Any]) -> None:
    value["format"] = "something/1"


@pytest.mark.parametrize("spoil", [without_percentiles, without_a_fact, of_another_kind])
def test_an_incomplete_result_is_not_read(tmp_path: Path, spoil: Any) -> None:
    value = json.loads(result([point("1 at once", 1, [window([recording()])])]).to_json())
    spoil(value)
    path = tmp_path / "r.json"
    path.write_text(json.dumps(value))

    with pytest.raises(InvalidResult, match=r"r\.json"):
        BenchResult.read(path)


def test_a_missing_result_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidResult, match="No such file"):
        BenchResult.read(tmp_path / "none.json")
