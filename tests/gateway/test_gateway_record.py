"""What a request's record makes of the moments at which its tokens came."""

import logging

import pytest

from gateway.dashboard.recent import RecentRequests
from gateway.generation import Deadline, Delta, GenerationRequest, Job, TextPrompt
from gateway.record import RequestRecord
from gateway.timeline import Timeline
from mesh.telemetry import INVALID_SPAN
from mesh.v1 import types_pb2
from tests.fakes import FakeClock


def job() -> Job:
    params = types_pb2.SamplingParams(max_tokens=100)
    return Job(
        request_id="r",
        model="smol",
        prompt_token_ids=(1,),
        sampling_params=params,
        end_token_ids=frozenset(),
        request=GenerationRequest(prompts=(TextPrompt("x"),), sampling_params=params),
        deadline=Deadline(60),
    )


def test_time_per_token_is_that_of_one_choice_also_where_choices_follow_each_other(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = FakeClock()
    began_at = clock.now
    record = RequestRecord("r", "text_completion", recent=RecentRequests())
    record.timeline = Timeline(clock=clock)
    jobs = [job(), job()]
    record.serve([[one] for one in jobs])
    for index, moments_s in ((0, (1.0, 1.5)), (1, (9.0, 9.25, 9.5))):
        for moment_s in moments_s:
            clock.now = began_at + moment_s
            jobs[index].num_completion_tokens += 1
            record.note(index, Delta("x", [7]))

    with caplog.at_level(logging.INFO):
        record.finish(None, INVALID_SPAN)

    [line] = [one.__dict__ for one in caplog.records if one.message == "request finished"]
    assert line["ttft_ms"] == 1000
    assert line["tpot_ms"] == 250
