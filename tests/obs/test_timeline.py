"""Every moment of a request belongs to one stage, whatever happens in whatever order."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.timeline import Timeline
from mesh.v1 import types_pb2
from mesh.v1.types_pb2 import (
    STAGE_DECODE_STEPS,
    STAGE_DECODE_WAIT,
    STAGE_DETOKENIZE,
    STAGE_KV_TRANSFER,
    STAGE_NETWORK,
    STAGE_PREFILL_COMPUTE,
    STAGE_PREFILL_WAIT,
    STAGE_QUEUE,
    STAGE_RULES,
    STAGE_TOKENIZE,
    STAGE_WRITE,
)
from tests.fakes import FakeClock

Timings = list[types_pb2.StageTiming]


def timings(**durations_ms: float) -> Timings:
    return [
        types_pb2.StageTiming(
            stage=types_pb2.Stage.Value(f"STAGE_{name.upper()}"), duration_ms=duration_ms
        )
        for name, duration_ms in durations_ms.items()
    ]


class Request:
    """A timeline, and a clock in milliseconds."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.timeline = Timeline(clock=self.clock)

    def spend(self, duration_ms: float) -> None:
        self.clock.advance(duration_ms / 1000)

    def expect(self, **stages_ms: float) -> None:
        expected = {types_pb2.Stage.Value(f"STAGE_{k.upper()}"): v for k, v in stages_ms.items()}
        assert self.timeline.stages_ms == pytest.approx(expected)


def test_stages_follow_each_other_without_a_gap() -> None:
    request = Request()
    request.spend(1)
    request.timeline.enter(STAGE_RULES)
    request.spend(2)
    request.timeline.enter(STAGE_TOKENIZE)
    request.spend(10)
    request.timeline.reported(timings(tokenize=7))
    request.timeline.enter(STAGE_WRITE)
    request.spend(4)
    request.timeline.enter(STAGE_WRITE)

    request.expect(network=1 + 3, rules=2, tokenize=7, write=4)


def test_a_call_that_says_nothing_spent_its_time_in_the_stage_it_was_made_for() -> None:
    request = Request()
    request.timeline.enter(STAGE_QUEUE)
    request.spend(5)
    request.timeline.reported([])

    request.expect(queue=5)


def test_work_beside_a_streaming_worker_counts_only_where_its_next_message_waited() -> None:
    request = Request()
    request.timeline.begin_stream()
    request.spend(30)
    request.timeline.received(timings(kv_transfer=8, decode_wait=4, decode_steps=10))
    for _ in range(3):
        # Hidden: the worker needs longer for its next token.
        request.timeline.enter(STAGE_DETOKENIZE)
        request.spend(2)
        request.timeline.enter(STAGE_NETWORK)
        request.spend(8)
        request.timeline.received()
    # Exposed: the next message is there already.
    request.timeline.enter(STAGE_DETOKENIZE)
    request.spend(20)
    request.timeline.enter(STAGE_NETWORK)
    request.spend(0.5)
    request.timeline.received()
    request.timeline.end_stream(timings(kv_transfer=8, decode_wait=4, decode_steps=44))

    # 80.5 ms, of which the worker claims 56.
    request.expect(kv_transfer=8, decode_wait=4, decode_steps=44, detokenize=20, network=4.5)


def test_before_the_first_token_the_worker_has_already_told_where_the_time_went() -> None:
    request = Request()
    request.timeline.enter(STAGE_RULES)
    request.spend(1)
    request.timeline.begin_stream()
    request.spend(30)
    request.timeline.received(timings(prefill_wait=5, prefill_compute=20))
    request.timeline.enter(STAGE_DETOKENIZE)
    request.spend(2)
    request.timeline.enter(STAGE_NETWORK)

    assert request.timeline.so_far() == pytest.approx(
        {
            STAGE_RULES: 1,
            STAGE_PREFILL_WAIT: 5,
            STAGE_PREFILL_COMPUTE: 20,
            STAGE_NETWORK: 5,
            STAGE_DETOKENIZE: 2,
        }
    )


def test_a_stream_that_is_cut_keeps_what_the_worker_said_with_its_first_token() -> None:
    request = Request()
    request.timeline.begin_stream()
    request.spend(30)
    request.timeline.received(timings(prefill_wait=5, prefill_compute=20))
    request.spend(50)
    request.timeline.received()
    request.timeline.enter(STAGE_DETOKENIZE)
    request.spend(3)
    request.timeline.end_stream()
    request.timeline.end_stream()

    request.expect(prefill_wait=5, prefill_compute=20, decode_steps=50, detokenize=3, network=5)


def test_silence_before_a_worker_is_given_up_is_a_wait() -> None:
    request = Request()
    request.timeline.begin_stream()
    request.spend(10)
    request.timeline.received()
    request.spend(5)
    request.timeline.received()
    request.spend(3000)
    request.timeline.end_stream()
    request.timeline.begin_stream()
    request.spend(100)
    request.timeline.end_stream()

    request.expect(network=10, decode_steps=5, decode_wait=3100)


def test_what_a_worker_did_while_another_stage_was_charged_is_not_charged_again() -> None:
    # A decode call that began to pull while the prompt was computed.
    request = Request()
    request.timeline.enter(STAGE_PREFILL_WAIT)
    request.spend(100)
    request.timeline.reported(timings(prefill_wait=10, prefill_compute=88))
    request.timeline.begin_stream()
    request.spend(50)
    request.timeline.received()
    request.timeline.end_stream(timings(kv_transfer=40, decode_wait=5, decode_steps=45))

    request.expect(
        network=2,
        prefill_wait=10,
        prefill_compute=88,
        kv_transfer=0,
        decode_wait=5,
        decode_steps=45,
    )
    assert request.timeline.overlap_ms == pytest.approx(40)


def test_a_choice_goes_on_where_the_request_was_and_the_request_where_the_choice_ended() -> None:
    request = Request()
    request.spend(5)
    request.timeline.enter(STAGE_QUEUE)
    choice = request.timeline.fork(STAGE_QUEUE)
    request.spend(7)
    choice.enter(STAGE_WRITE)
    request.spend(2)
    request.timeline.join(choice)
    request.timeline.enter(STAGE_WRITE)

    request.expect(network=5, queue=7, write=2)
    starts = [(one.stage, one.start_ms) for one in request.timeline.segments]
    assert starts == [
        (STAGE_NETWORK, 0),
        (STAGE_QUEUE, pytest.approx(5)),
        (STAGE_WRITE, pytest.approx(12)),
    ]


STAGES = st.sampled_from(
    [STAGE_RULES, STAGE_QUEUE, STAGE_DETOKENIZE, STAGE_WRITE, STAGE_NETWORK, STAGE_PREFILL_WAIT]
)
REPORTS = st.none() | st.lists(
    st.builds(
        lambda stage, ms: types_pb2.StageTiming(stage=stage, duration_ms=ms),
        st.sampled_from([STAGE_KV_TRANSFER, STAGE_DECODE_WAIT, STAGE_DECODE_STEPS]),
        st.floats(0, 200),
    ),
    max_size=3,
)
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["enter", "reported", "begin_stream", "received", "end_stream"]),
        STAGES,
        REPORTS,
        st.floats(0, 50),
    ),
    max_size=40,
)


@given(ACTIONS)
def test_whatever_happens_the_stages_are_all_of_the_time_and_never_overlap(
    actions: list[tuple[str, "types_pb2.Stage.ValueType", Timings | None, float]],
) -> None:
    request = Request()
    in_stream = False
    for action, stage, report, duration_ms in actions:
        request.spend(duration_ms)
        match action:
            case "enter":
                request.timeline.enter(stage)
            case "reported" if not in_stream:
                request.timeline.reported(report or [])
            case "begin_stream" if not in_stream:
                request.timeline.begin_stream()
                in_stream = True
            case "received":
                request.timeline.received(report or [])
            case "end_stream":
                request.timeline.end_stream(report)
                in_stream = False
    request.timeline.end_stream()
    request.timeline.enter(STAGE_WRITE)

    timeline = request.timeline
    assert timeline.mark_ms == pytest.approx(timeline.elapsed_ms)
    assert sum(timeline.stages_ms.values()) == pytest.approx(timeline.elapsed_ms, abs=1e-6)
    assert all(duration_ms >= 0 for duration_ms in timeline.stages_ms.values())
    ends_ms = 0.0
    for segment in timeline.segments:
        assert segment.start_ms == pytest.approx(ends_ms, abs=1e-6)
        ends_ms = segment.start_ms + segment.duration_ms
