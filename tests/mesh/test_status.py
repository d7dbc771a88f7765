"""What `pdmesh status` says of workers and of disaggregation."""

import pytest

from mesh.cli.status import describe_verdict, elsewhere, progress, verdict_line, verdicts
from mesh.v1 import scheduler_pb2

Verdict = scheduler_pb2.DisaggregationVerdict


@pytest.mark.parametrize(
    ("advice", "word", "sentence"),
    [
        (Verdict.ADVICE_LOCAL, "local", "m: do not disaggregate here: to the first token 51 ms"),
        (
            Verdict.ADVICE_SHARED_CORES,
            "shared_cores",
            "m: do not disaggregate here: prefill and decode workers compute on the same cores: to",
        ),
        (Verdict.ADVICE_DISAGGREGATE, "disaggregate", "m: disaggregation pays: to the first"),
        (Verdict.ADVICE_UNSPECIFIED, "unknown", "m: too little is measured"),
    ],
)
def test_a_verdict_is_a_word_for_scripts_and_a_sentence_for_people(
    advice: "Verdict.Advice.ValueType", word: str, sentence: str
) -> None:
    found = describe_verdict(
        Verdict(model="m", advice=advice, num_placements=40, local_ms=51.26, remote_ms=80)
    )

    assert found["advice"] == word
    assert found["local_ms"] == 51.3
    assert verdict_line(found).startswith(sentence)


def test_verdicts_are_those_of_every_scheduler() -> None:
    services = [{"disaggregation": [{"model": "a"}]}, {}, {"disaggregation": [{"model": "b"}]}]

    assert [one["model"] for one in verdicts({"services": services})] == ["a", "b"]


def test_workers_that_were_started_otherwise_are_shown_once() -> None:
    by_hand = {"worker_id": "by-hand", "address": "a"}
    scheduler = {"worker_id": "s", "workers": [{"worker_id": "decode-0"}, by_hand]}
    services = [{"worker_id": "decode-0"}, scheduler, {**scheduler, "worker_id": "t"}]

    assert elsewhere({"services": services}) == [by_hand]


@pytest.mark.parametrize(
    ("state", "running", "waiting", "expected"),
    [
        ("ok", 0, 0, "idle"),
        ("ok", 1, 0, "ok"),
        ("ok", 0, 1, "ok"),
        ("unhealthy", 1, 0, "stalled"),
        ("unhealthy", 0, 0, "idle"),
    ],
)
def test_a_worker_is_idle_or_at_work_or_stalled(
    state: str, running: int, waiting: int, expected: str
) -> None:
    assert progress(state, {"running": running, "waiting": waiting}) == expected
