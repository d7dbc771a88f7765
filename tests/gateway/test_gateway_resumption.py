"""Workers that die, hang or lose KV: the client gets every token once."""

import asyncio
from typing import Any

import grpc
import httpx
import pytest

from mesh.errors import (
    DeadlineExceeded,
    InternalError,
    KvLeaseExpired,
    KvTransferFailed,
    QueueFull,
    WorkerUnavailable,
)
from tests.gateway.fake_tokenizer import EOS
from tests.gateway.fake_workers import Fault
from tests.gateway.fakes import FakeMesh
from tests.gateway.running import chat, events, eventually, parse_events, run_gateway, text_of

CHAT = "/v1/chat/completions"
HELLO = "Hello, world!"
NUM_TOKENS = len(HELLO) + 1

FAILURES: list[dict[str, Any]] = [
    {"error": WorkerUnavailable("draining")},
    {"error": KvLeaseExpired("late")},
    {"error": KvTransferFailed("lost")},
    {"error": QueueFull("too many wait")},
    # Neither an error nor a finish.
    {},
]


async def ask(http: httpx.AsyncClient, **more: Any) -> tuple[str, dict[str, Any], list[Any]]:
    payloads = await events(
        http, CHAT, chat(stream=True, stream_options={"include_usage": True}, **more)
    )
    assert payloads[-1] == "[DONE]"
    assert payloads[-2]["choices"] == []
    return text_of(payloads), payloads[-2]["usage"], payloads


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("after", [0, 1, 5, len(HELLO) - 1])
@pytest.mark.parametrize("failure", FAILURES)
async def test_decode_that_fails_goes_on_without_losing_or_repeating_a_token(
    http: httpx.AsyncClient, mesh: FakeMesh, after: int, failure: dict[str, Any], local: bool
) -> None:
    # KV-26
    mesh.scheduler.local = local
    mesh.decode.faults = [Fault(after=after, **failure)]

    text, usage, _ = await ask(http, seed=11)

    assert text == HELLO
    assert usage["completion_tokens"] == NUM_TOKENS
    requests = [request for decode in mesh.decodes for request in decode.requests]
    assert {request.sampling_params.seed for request in requests} == {11}
    await mesh.quiet()
    await eventually(lambda: mesh.tokenizer.num_open == 0 and not mesh.prefill.held)


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("after", [4, 6])
async def test_stop_string_that_the_failure_divides_is_found(
    http: httpx.AsyncClient, mesh: FakeMesh, after: int, local: bool
) -> None:
    # KV-26: what was held back for it on the first worker is not lost, and not sent.
    mesh.scheduler.local = local
    mesh.decode.faults = [Fault(after=after, error=WorkerUnavailable("gone"))]

    text, usage, payloads = await ask(http, stop="lo, wo")

    assert text == "Hel"
    assert usage["completion_tokens"] == len("Hello, wo")
    assert [p["choices"][0]["finish_reason"] for p in payloads[:-2]][-1] == "stop"
    assert sum(len(decode.requests) for decode in mesh.decodes) == 2


async def test_resumption_starts_from_the_tokens_that_exist(
    http: httpx.AsyncClient, mesh: FakeMesh
) -> None:
    mesh.decode.faults = [Fault(after=3, error=WorkerUnavailable("gone"))]

    await ask(http)

    second = mesh.prefill.requests[1]
    assert bytes(second.output_token_ids) == b"Hell"
    assert list(mesh.scheduler.admits[1].excluded_worker_ids) == ["decode-0"]
    assert bytes(mesh.decodes[1].requests[0].output_token_ids) == b"Hello"
    assert mesh.scheduler.admits[1].max_tokens == mesh.scheduler.admits[0].max_tokens - 4


@pytest.mark.parametrize("failure", FAILURES)
async def test_prefill_that_fails_is_retried(failure: dict[str, Any]) -> None:
    async with FakeMesh(num_prefill=2) as mesh, run_gateway(mesh) as gateway:
        mesh.prefill.faults = [Fault(**failure)]
        async with httpx.AsyncClient(base_url=gateway.url) as http:
            text, usage, _ = await ask(http)

        assert text == HELLO
        assert usage["completion_tokens"] == NUM_TOKENS


async def test_lost_kv_does_not_exclude_the_worker(http: httpx.AsyncClient, mesh: FakeMesh) -> None:
    mesh.decode.faults = [Fault(error=KvLeaseExpired("late"))]

    await ask(http)

    assert list(mesh.scheduler.admits[1].excluded_worker_ids) == []
    assert len(mesh.decode.requests) == 2


async def test_sole_worker_gets_a_second_chance(http: httpx.AsyncClient, mesh: FakeMesh) -> None:
    mesh.scheduler.decodes = [mesh.decode]
    try:
        mesh.decode.faults = [Fault(after=2, error=WorkerUnavailable("restarting"))]
        text, _, _ = await ask(http)
    finally:
        mesh.scheduler.decodes = [*mesh.decodes]

    assert text == HELLO


async def test_attempts_are_bounded(http: httpx.AsyncClient, mesh: FakeMesh) -> None:
    for decode in mesh.decodes:
        decode.faults = [Fault(error=KvTransferFailed("lost"), num_calls=99)]

    response = await http.post(CHAT, json=chat())

    assert response.status_code == 503
    assert len(mesh.scheduler.admits) == 3


@pytest.mark.parametrize(
    "error", [InternalError("NaN"), DeadlineExceeded("late"), RuntimeError("a bug")]
)
async def test_failure_that_would_happen_everywhere_is_not_retried(
    http: httpx.AsyncClient, mesh: FakeMesh, error: Any
) -> None:
    mesh.decode.faults = [Fault(error=error)]

    response = await http.post(CHAT, json=chat())

    assert response.status_code in (500, 504)
    assert len(mesh.scheduler.admits) == 1


async def test_call_that_grpc_itself_broke_goes_on_elsewhere(
    http: httpx.AsyncClient, mesh: FakeMesh
) -> None:
    mesh.decode.faults = [Fault(after=3, status=grpc.StatusCode.INTERNAL)]

    text, _, _ = await ask(http)

    assert text == HELLO
    assert list(mesh.scheduler.admits[1].excluded_worker_ids) == ["decode-0"]


@pytest.mark.parametrize("last_token", ["eos", "cap"])
async def test_sequence_whose_last_word_got_lost_is_finished_not_continued(
    http: httpx.AsyncClient, mesh: FakeMesh, last_token: str
) -> None:
    mesh.model.default = [*b"abc", EOS if last_token == "eos" else ord("d")]
    mesh.decode.faults = [Fault(after=3, error=WorkerUnavailable("died after the last token"))]

    text, usage, payloads = await ask(http, max_tokens=4)

    assert text == ("abc" if last_token == "eos" else "abcd")
    assert usage["completion_tokens"] == 4
    reasons = [p["choices"][0]["finish_reason"] for p in payloads[:-2]]
    assert reasons[-1] == ("stop" if last_token == "eos" else "length")
    assert len(mesh.scheduler.admits) == 1


@pytest.mark.usefixtures("tracing")  # OB-03
async def test_silent_worker_is_left_within_the_stall_timeout() -> None:
    # ST-16, GR-06: a frozen process keeps its connection open.
    async with FakeMesh() as mesh, run_gateway(mesh, stall_timeout_s=0.5) as gateway:
        mesh.decode.faults = [Fault(after=4, hangs=True)]
        async with httpx.AsyncClient(base_url=gateway.url, timeout=20) as http:
            text, _, _ = await ask(http)
        await mesh.quiet()

    assert text == HELLO
    assert list(mesh.scheduler.admits[1].excluded_worker_ids) == ["decode-0"]


@pytest.mark.usefixtures("tracing")
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_killed_server_is_left_at_once(role: str) -> None:
    # KV-19, OB-03
    async with FakeMesh(num_prefill=2) as mesh, run_gateway(mesh) as gateway:
        victim = mesh.prefill if role == "prefill" else mesh.decode
        victim.start_gate = asyncio.Event()
        async with httpx.AsyncClient(base_url=gateway.url, timeout=20) as http:
            asking = asyncio.create_task(ask(http))
            await victim.was_active.wait()
            await mesh.kill(victim.worker_id)
            text, usage, _ = await asking

    assert text == HELLO
    assert usage["completion_tokens"] == NUM_TOKENS


async def test_scheduler_that_dies_does_not_touch_what_is_placed() -> None:
    async with FakeMesh() as mesh, run_gateway(mesh) as gateway:
        mesh.decode.steps = asyncio.Semaphore(0)
        async with httpx.AsyncClient(base_url=gateway.url, timeout=20) as http:
            asking = asyncio.create_task(ask(http))
            await mesh.decode.was_active.wait()
            await mesh.kill("scheduler")
            for _ in range(NUM_TOKENS):
                mesh.decode.steps.release()
            text, _, _ = await asking

    assert text == HELLO


async def test_every_choice_of_several_is_resumed(http: httpx.AsyncClient, mesh: FakeMesh) -> None:
    # KV-26
    mesh.decode.faults = [Fault(after=2, error=WorkerUnavailable("gone"), num_calls=3)]

    _, usage, payloads = await ask(http, n=3)

    assert [text_of(payloads, index) for index in range(3)] == [HELLO] * 3
    assert usage["completion_tokens"] == 3 * NUM_TOKENS


async def test_cached_tokens_are_those_of_the_first_prefill(
    http: httpx.AsyncClient, mesh: FakeMesh
) -> None:
    mesh.prefill.num_cached_tokens = 4
    _, usage, _ = await ask(http)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 4}

    # What decode holds of a transferred prompt is no cache hit; in local mode it is.
    mesh.decode.num_cached_tokens = 7
    _, usage, _ = await ask(http)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 4}
    mesh.scheduler.local = True
    _, usage, _ = await ask(http)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 7}


async def test_cached_tokens_are_those_of_the_worker_that_began(
    http: httpx.AsyncClient, mesh: FakeMesh
) -> None:
    # The second worker finds the prompt and the output so far in its cache.
    mesh.scheduler.local = True
    mesh.decode.faults = [Fault(after=8, error=WorkerUnavailable("gone"))]
    mesh.decode.num_cached_tokens = 3
    mesh.decodes[1].num_cached_tokens = 16

    _, usage, _ = await ask(http)

    assert usage["prompt_tokens_details"] == {"cached_tokens": 3}


async def test_cached_tokens_are_known_when_a_stop_string_ends_the_answer(
    http: httpx.AsyncClient, mesh: FakeMesh
) -> None:
    mesh.scheduler.local = True
    mesh.decode.num_cached_tokens = 3

    text, usage, _ = await ask(http, stop="wor")

    assert text == "Hello, "
    assert usage["prompt_tokens_details"] == {"cached_tokens": 3}


async def test_resumed_request_waits_for_room_instead_of_giving_up(
    http: httpx.AsyncClient, mesh: FakeMesh
) -> None:
    mesh.decode.faults = [Fault(after=2, error=WorkerUnavailable("gone"))]
    mesh.decode.steps = asyncio.Semaphore(0)
    async with http.stream("POST", CHAT, json=chat(stream=True)) as response:
        text = ""
        async for part in response.aiter_text():
            text += part
            if text_of(parse_events(text)) == "Hel":
                # The mesh is full at the moment at which the worker dies.
                mesh.scheduler.error = QueueFull("full", retry_after_s=0.1)
                mesh.scheduler.was_asked.clear()
                asyncio.get_running_loop().create_task(_free_again(mesh))
            mesh.decode.steps.release()

    assert text_of(parse_events(text)) == HELLO


async def _free_again(mesh: FakeMesh) -> None:
    await mesh.scheduler.was_asked.wait()
    await asyncio.sleep(0)
    mesh.scheduler.error = None
