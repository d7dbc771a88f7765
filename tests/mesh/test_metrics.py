import math
import urllib.request
from collections.abc import Callable, Iterator
from enum import StrEnum

import pytest
from prometheus_client.parser import text_string_to_metric_families

from mesh import instruments, metrics
from mesh.errors import REASONS
from mesh.ports import find_free_ports


def samples() -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = metrics.render()[0].decode()
    found: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            # A label that only other series have is an empty one here.
            series = sample.name, tuple(sorted(one for one in sample.labels.items() if one[1]))
            assert series not in found, "Prometheus refuses a scrape that has a series twice"
            found[series] = sample.value
    return found


def value(name: str, **labels: str) -> float:
    return samples().get((name, tuple(sorted(labels.items()))), 0.0)


def test_counters_are_rendered_for_prometheus() -> None:
    before = value("pdmesh_disagg_decision_total", decision="local", reason="isl_bounding")

    metrics.DISAGG_DECISIONS.add(2, {"decision": "local", "reason": "isl_bounding"})

    after = value("pdmesh_disagg_decision_total", decision="local", reason="isl_bounding")
    assert after == before + 2
    assert metrics.render()[1].startswith("text/plain")


def test_a_rare_counter_is_there_before_it_counts() -> None:
    metrics.BREAKER_OPENINGS.begin()
    metrics.LEASE_EXPIRIES.begin()

    named = samples()
    for failure in ("lost", "faulty"):
        series = "pdmesh_scheduler_breaker_openings_total", (("failure", failure),)
        assert named[series] >= 0
    assert named["pdmesh_kv_cache_lease_expiries_total", ()] >= 0


def test_a_member_of_an_enumeration_is_the_series_of_its_value() -> None:
    class Decision(StrEnum):
        LOCAL = "local"

    before = value("pdmesh_disagg_decision_total", decision="local", reason="forced")

    for decision in ("local", Decision.LOCAL):
        metrics.DISAGG_DECISIONS.add(1, {"decision": decision, "reason": "forced"})

    after = value("pdmesh_disagg_decision_total", decision="local", reason="forced")
    assert after == before + 2


def test_labels_are_the_same_in_whichever_order_they_are_given() -> None:
    name, series = "pdmesh_disagg_decision_total", {"decision": "local", "reason": "explore"}
    before = value(name, **series)

    for labels in (series, dict(reversed(series.items()))):
        metrics.DISAGG_DECISIONS.add(1, labels)

    assert value(name, **series) == before + 2


# OB-05
def test_labels_from_clients_never_add_more_than_one_series() -> None:
    metrics.MODELS.allow("served")
    for model in ("served", "first unknown"):
        metrics.REQUESTS.add(1, {"outcome": "ok", "gen_ai.request.model": model})
        metrics.TIME_TO_FIRST_TOKEN.record(0.1, {"gen_ai.request.model": model})
    before = len(samples())

    for number in range(5000):
        labels = {"gen_ai.request.model": f"random-{number}"}
        metrics.REQUESTS.add(1, {"outcome": "ok", **labels})
        metrics.TIME_TO_FIRST_TOKEN.record(0.1, labels)

    assert len(samples()) == before
    assert value("pdmesh_requests_total", outcome="ok", gen_ai_request_model="other") >= 5001


# OB-05
def test_allowed_values_are_bounded_too() -> None:
    values = instruments.Values("a", max_values=3)

    values.allow("b", "c", "d")

    assert [values.pick(name) for name in "abcd"] == ["a", "b", "c", "other"]


def test_a_label_that_was_not_declared_is_a_bug() -> None:
    with pytest.raises(KeyError):
        metrics.LEASE_EXPIRIES.add(1, {"request_id": "req-1"})


def test_every_reason_of_the_taxonomy_has_its_own_series() -> None:
    assert [metrics.REASONS.pick(reason) for reason in REASONS] == list(REASONS)


@pytest.mark.parametrize(
    ("histogram", "name", "first", "last", "num_buckets"),
    [
        (
            metrics.REQUEST_DURATION,
            "gen_ai_server_request_duration_seconds",
            0.01,
            81.92,
            14,
        ),
        (
            metrics.TIME_TO_FIRST_TOKEN,
            "gen_ai_server_time_to_first_token_seconds",
            0.001,
            10,
            16,
        ),
        (
            metrics.TIME_PER_OUTPUT_TOKEN,
            "gen_ai_server_time_per_output_token_seconds",
            0.01,
            2.5,
            13,
        ),
    ],
)
def test_genai_histograms_have_the_standard_buckets(
    histogram: instruments.Histogram, name: str, first: float, last: float, num_buckets: int
) -> None:
    histogram.record(0.05)

    bounds = sorted(
        {float(dict(labels)["le"]) for sample, labels in samples() if sample == f"{name}_bucket"}
    )
    assert (bounds[0], bounds[-2], bounds[-1]) == (first, last, math.inf)
    assert len(bounds) == num_buckets + 1


def test_a_histogram_counts_from_below_and_a_bound_belongs_to_the_bucket_under_it() -> None:
    name = "gen_ai_server_time_per_output_token_seconds"
    series = {"gen_ai_request_model": "other"}
    bounds = {"below": "0.01", "next": "0.025", "all": "+Inf"}

    def counts() -> dict[str, float]:
        return {key: value(f"{name}_bucket", **series, le=le) for key, le in bounds.items()}

    before, total = counts(), value(f"{name}_sum", **series)
    for seconds in (0.01, 0.011, 99.0):
        metrics.TIME_PER_OUTPUT_TOKEN.record(seconds, {"gen_ai.request.model": "no such model"})
    after = counts()

    assert {key: after[key] - before[key] for key in bounds} == {"below": 1, "next": 2, "all": 3}
    assert value(f"{name}_count", **series) == after["all"]
    assert value(f"{name}_sum", **series) - total == pytest.approx(99.021)


def test_gauges_report_what_is_watched_until_it_is_not() -> None:
    num_free = 7
    unwatch = metrics.NUM_FREE_BLOCKS.watch(lambda: num_free)
    assert value("pdmesh_kv_cache_free_blocks") == 7

    num_free = 3
    assert value("pdmesh_kv_cache_free_blocks") == 3

    unwatch()
    unwatch()
    assert ("pdmesh_kv_cache_free_blocks", ()) not in samples()


def test_gauges_tell_their_watchers_apart_by_label() -> None:
    stops = [
        metrics.NUM_WORKERS.watch(lambda: 2, {"role": "prefill"}),
        metrics.NUM_WORKERS.watch(lambda: 3, {"role": "decode"}),
    ]

    assert value("pdmesh_scheduler_workers", role="prefill") == 2
    assert value("pdmesh_scheduler_workers", role="decode") == 3
    for stop in stops:
        stop()


def test_what_is_counted_elsewhere_is_a_counter_here() -> None:
    num_preemptions = 5
    unwatch = metrics.PREEMPTIONS.watch(lambda: num_preemptions)
    try:
        assert value("pdmesh_preemptions_total") == 5
        num_preemptions = 6
        assert value("pdmesh_preemptions_total") == 6
    finally:
        unwatch()


def test_every_instrument_is_described_once() -> None:
    names = [one.name for one in metrics.describe()]

    assert len(names) == len(set(names)) > 30
    assert all(one.text and one.service for one in metrics.describe())


@pytest.fixture
def stop_listening() -> Iterator[list[Callable[[], None]]]:
    stops: list[Callable[[], None]] = []
    yield stops
    for stop in stops:
        stop()


def test_metrics_are_served_over_http(stop_listening: list[Callable[[], None]]) -> None:
    [port] = find_free_ports(1)

    stop_listening.append(metrics.listen(f"127.0.0.1:{port}"))

    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
        assert "pdmesh_disagg_decision" in response.read().decode()
        assert response.headers["content-type"].startswith("text/plain")


def test_a_gauge_that_fails_does_not_take_the_others_down() -> None:
    def fail() -> float:
        raise ValueError("engine is gone")

    stops = [metrics.NUM_LEASES.watch(fail), metrics.NUM_RUNNING.watch(lambda: 1)]

    assert value("pdmesh_engine_running") == 1
    for stop in stops:
        stop()
