"""The loops: how many requests are in flight, when they start, and what a window keeps."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from itertools import repeat

import pytest

from mesh.bench.client import Endpoint, PlannedRequest, Recording, open_client
from mesh.bench.load import Intruder, LoadGenerator
from mesh.bench.results import summarize_round
from mesh.bench.workloads import TimedRequest
from tests.bench.fake_endpoint import FakeEndpoint, serving

REQUEST = PlannedRequest("hi", 2)


@pytest.fixture
async def endpoint() -> AsyncIterator[FakeEndpoint]:
    async with serving(FakeEndpoint(pause_s=0.005)) as endpoint:
        yield endpoint


async def test_a_closed_loop_keeps_so_many_in_flight_and_never_more(
    endpoint: FakeEndpoint,
) -> None:
    requests: Iterator[PlannedRequest] = repeat(REQUEST, 12)

    async with open_client(Endpoint(endpoint.url, "m")) as client:
        window = await LoadGenerator(client.stream).closed_loop(requests, 3)

    assert len(window.recordings) == 12
    assert all(recording.is_complete for recording in window.recordings)
    assert endpoint.max_active == 3


async def test_a_closed_loop_asks_nothing_new_when_the_time_is_up(endpoint: FakeEndpoint) -> None:
    async with open_client(Endpoint(endpoint.url, "m")) as client:
        window = await LoadGenerator(client.stream).closed_loop(repeat(REQUEST), 2, duration_s=0.2)

    assert window.length_s == pytest.approx(0.2)
    assert window.ends_at is not None
    assert all(recording.started_at < window.ends_at for recording in window.recordings)
    assert all(recording.is_complete for recording in window.recordings)


async def test_what_outlives_the_grace_time_is_cut_and_kept(endpoint: FakeEndpoint) -> None:
    endpoint.pause_s = 0.02
    endless = PlannedRequest("hi", 1000)

    async with open_client(Endpoint(endpoint.url, "m")) as client:
        window = await LoadGenerator(client.stream).closed_loop(
            repeat(endless), 2, duration_s=0.2, grace_s=0.1
        )

    assert [recording.was_cut for recording in window.recordings] == [True, True]
    assert all(recording.token_times for recording in window.recordings)
    group = summarize_round(window).groups["requests"]
    assert (group.num_cut, group.num_errors) == (2, 0)
    # Only what came within the 0.2 s counts, though more came.
    num_events = sum(len(recording.token_times) for recording in window.recordings)
    assert 0 < group.output_tokens_per_s * 0.2 < num_events


async def test_an_open_loop_does_not_wait_for_answers(endpoint: FakeEndpoint) -> None:
    endpoint.pause_s = 0.1
    timed = [TimedRequest(0.01 * index, REQUEST) for index in range(8)]

    async with open_client(Endpoint(endpoint.url, "m")) as client:
        window = await LoadGenerator(client.stream).open_loop(timed, grace_s=10)

    assert endpoint.max_active > 4
    starts = [recording.started_at - window.started_at for recording in window.recordings]
    assert sorted(starts) == pytest.approx([0.01 * index for index in range(8)])


async def test_a_late_client_is_charged_to_the_answer_not_hidden() -> None:
    async def send(request: PlannedRequest, recording: Recording) -> None:
        recording.token_times.append(time.perf_counter())
        # The client is busy with something else: the next send will be late.
        time.sleep(0.05)  # noqa: ASYNC251

    window = await LoadGenerator(send).open_loop(
        [TimedRequest(0.0, REQUEST), TimedRequest(0.01, REQUEST)], grace_s=1
    )

    second = window.recordings[1]
    assert second.late_s > 0.02
    assert second.token_times[0] - second.started_at > 0.02
    assert summarize_round(window).max_late_ms > 20


async def test_intruders_come_one_at_a_time_beside_the_streams(endpoint: FakeEndpoint) -> None:
    long = PlannedRequest("long", 1, group="long prompts")
    intruder = Intruder(repeat(long), every_s=0.01, delay_s=0.05)

    async with open_client(Endpoint(endpoint.url, "m")) as client:
        window = await LoadGenerator(client.stream).closed_loop(
            repeat(REQUEST), 2, duration_s=0.3, intruder=intruder
        )

    groups = summarize_round(window).groups
    assert groups["long prompts"].num_requests == 1
    assert groups["requests"].num_requests > 2
    assert endpoint.max_active == 3


async def test_failures_are_counted_and_the_loop_goes_on(endpoint: FakeEndpoint) -> None:
    endpoint.status = 503

    async with open_client(Endpoint(endpoint.url, "m")) as client:
        window = await LoadGenerator(client.stream).closed_loop(repeat(REQUEST, 2), 1)

    group = summarize_round(window).groups["requests"]
    assert (group.num_requests, group.num_errors) == (2, 2)
    assert group.errors[0].startswith("2 x HTTP 503")


async def test_a_broken_sender_is_a_bug_and_not_an_answer() -> None:
    async def send(request: PlannedRequest, recording: Recording) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await LoadGenerator(send).closed_loop(repeat(REQUEST, 1), 1)


async def test_cancelling_a_run_ends_its_requests(endpoint: FakeEndpoint) -> None:
    endpoint.pause_s = 60.0
    async with open_client(Endpoint(endpoint.url, "m")) as client:
        run = asyncio.create_task(LoadGenerator(client.stream).closed_loop(repeat(REQUEST), 2))
        async with asyncio.timeout(20):
            await endpoint.until_active(2)

        run.cancel()
        await asyncio.wait({run}, timeout=20)

        assert run.cancelled()
        async with asyncio.timeout(20):
            await endpoint.until_active(0)
