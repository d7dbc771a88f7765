"""A request's tokens, its end, and where its time goes."""

import pytest

from engine.request import FinishReason, Request, RequestStatus, RequestTimings
from engine.sampling import SamplingParams

EOS = frozenset({2, 0})


def make_request(params: SamplingParams, output: list[int], prompt: int = 5) -> Request:
    return Request("r", list(range(10, 10 + prompt)), params, output_token_ids=output)


@pytest.mark.parametrize("start", range(6))
@pytest.mark.parametrize("end", range(6))
def test_a_slice_of_token_ids_equals_the_slice_of_all_of_them(start: int, end: int) -> None:
    request = make_request(SamplingParams(9), [7, 8, 9], prompt=3)

    assert request.slice_token_ids(start, end) == request.token_ids[start:end]


@pytest.mark.parametrize(
    ("params", "output", "expected"),
    [
        (SamplingParams(3), [5], None),
        (SamplingParams(3), [5, 5, 5], FinishReason.LENGTH),
        (SamplingParams(3), [2], FinishReason.STOP),
        (SamplingParams(3), [0], FinishReason.STOP),
        # An end token exactly at the cap is a stop.
        (SamplingParams(3), [5, 5, 2], FinishReason.STOP),
        (SamplingParams(3, ignore_eos=True), [2], None),
        (SamplingParams(3, ignore_eos=True), [5, 5, 2], FinishReason.LENGTH),
        (SamplingParams(3, stop_token_ids=frozenset({17})), [17], FinishReason.STOP),
        # What the caller names as a stop token is one, even if it is the model's own.
        (SamplingParams(3, ignore_eos=True, stop_token_ids=frozenset({2})), [2], FinishReason.STOP),
    ],
)
def test_a_sequence_ends_by_its_last_token_before_it_ends_by_length(
    params: SamplingParams, output: list[int], expected: FinishReason | None
) -> None:
    assert make_request(params, output).finish_reason(EOS, max_model_len=100) is expected


def test_a_sequence_ends_when_the_window_is_full() -> None:
    request = make_request(SamplingParams(50), [5, 5], prompt=5)

    assert request.finish_reason(EOS, max_model_len=8) is None
    assert request.finish_reason(EOS, max_model_len=7) is FinishReason.LENGTH


def test_every_moment_of_a_local_request_belongs_to_one_stage() -> None:
    request = make_request(SamplingParams(9), [])

    request.arrive(0, now=10.0)
    request.enter(RequestStatus.RUNNING, now=11.0)
    request.append(5, now=13.0)
    request.enter(RequestStatus.PREEMPTED, now=17.0)
    request.enter(RequestStatus.RUNNING, now=25.0)
    request.append(6, now=41.0)

    assert request.timings(now=41.0) == RequestTimings(
        wait_s=1.0, prefill_s=2.0, decode_wait_s=8.0, decode_s=20.0
    )


def test_every_moment_of_a_remote_request_belongs_to_one_stage() -> None:
    request = Request("r", [1, 2], SamplingParams(9), [3], remote_kv=True)

    request.arrive(0, now=10.0)
    request.enter(RequestStatus.WAITING_FOR_REMOTE_KVS, now=11.0)
    request.has_remote_kv = True
    request.enter(RequestStatus.RUNNING, now=13.0)
    request.append(6, now=17.0)

    assert request.timings(now=17.0) == RequestTimings(
        decode_wait_s=1.0, remote_kv_s=2.0, decode_s=4.0
    )


def test_a_remote_request_whose_kv_failed_waits_again_and_prefills_here() -> None:
    request = Request("r", [1, 2], SamplingParams(9), [3], remote_kv=True)

    request.arrive(0, now=10.0)
    request.enter(RequestStatus.WAITING_FOR_REMOTE_KVS, now=11.0)
    request.enter(RequestStatus.WAITING, now=13.0)
    request.enter(RequestStatus.RUNNING, now=17.0)
    request.append(6, now=25.0)
    request.append(7, now=41.0)

    assert request.timings(now=41.0) == RequestTimings(
        decode_wait_s=5.0, remote_kv_s=2.0, prefill_s=8.0, decode_s=16.0
    )
