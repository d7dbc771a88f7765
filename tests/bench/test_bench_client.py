"""One streamed request: what counts as a token, as its time, and as a failure."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from mesh.bench.client import Endpoint, PlannedRequest, Recording, open_client, request_body
from tests.bench.fake_endpoint import (
    FakeEndpoint,
    chat_event,
    send,
    serving,
    text_event,
    usage_event,
)


@pytest.fixture
async def endpoint() -> AsyncIterator[FakeEndpoint]:
    async with serving(FakeEndpoint()) as endpoint:
        yield endpoint


class NoticedRecording(Recording):
    """Tells when something has been read."""

    def __init__(self, group: str, started_at: float) -> None:
        self.came = asyncio.Event()
        super().__init__(group, started_at)

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "ended_at" and value is not None:
            self.came.set()


async def ask(endpoint: FakeEndpoint, num_tokens: int = 3, **options: Any) -> Recording:
    recording = Recording("requests", 0.0)
    async with open_client(Endpoint(endpoint.url, "m", **options)) as client:
        await client.stream(PlannedRequest([5, 6], num_tokens), recording)
    return recording


async def test_every_token_event_has_a_time_and_usage_counts_them(endpoint: FakeEndpoint) -> None:
    recording = await ask(endpoint)

    assert recording.error is None
    assert len(recording.token_times) == 3
    assert recording.token_times == sorted(recording.token_times)
    assert (recording.num_prompt_tokens, recording.num_output_tokens) == (2, 3)


async def test_the_body_asks_for_a_whole_greedy_streamed_answer(endpoint: FakeEndpoint) -> None:
    await ask(endpoint, api_key="k", extra_body={"top_p": 0.5})

    assert endpoint.bodies == [
        {
            "model": "m",
            "prompt": [5, 6],
            "max_tokens": 3,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            "top_p": 0.5,
        }
    ]
    assert endpoint.headers[0]["Authorization"] == "Bearer k"


async def test_servers_without_ignore_eos_are_not_sent_it(endpoint: FakeEndpoint) -> None:
    await ask(endpoint, ignore_eos=False)

    assert "ignore_eos" not in endpoint.bodies[0]


async def test_the_role_event_of_a_chat_is_no_token(endpoint: FakeEndpoint) -> None:
    recording = await ask(endpoint, api="chat")

    assert recording.error is None
    assert len(recording.token_times) == 3


async def test_a_token_whose_text_is_empty_counts(endpoint: FakeEndpoint) -> None:
    async def half_a_character(body: dict[str, Any], response: web.StreamResponse) -> None:
        await send(response, chat_event({"role": "assistant", "content": ""}))
        await send(response, chat_event({"content": ""}))
        await send(response, chat_event({"content": "é"}))
        await send(response, chat_event({}, "stop"))
        await response.write(b"data: [DONE]\n\n")

    endpoint.handler = half_a_character

    recording = await ask(endpoint, api="chat")

    assert len(recording.token_times) == 2
    # This server counts nothing, so events are all there is.
    assert recording.num_output_tokens == 2


async def test_cached_tokens_are_kept(endpoint: FakeEndpoint) -> None:
    async def cached(body: dict[str, Any], response: web.StreamResponse) -> None:
        await send(response, text_event("x"))
        await send(response, text_event("", "length"))
        await send(response, usage_event(64, 1, num_cached=48))
        await response.write(b"data: [DONE]\n\n")

    endpoint.handler = cached

    assert (await ask(endpoint)).num_cached_tokens == 48


async def test_a_refusal_is_an_error_with_its_status(endpoint: FakeEndpoint) -> None:
    endpoint.status = 429

    recording = await ask(endpoint)

    assert recording.error is not None
    assert recording.error.startswith("HTTP 429")
    assert not recording.token_times


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([b'data: {"error": {"message": "lost"}}\n\n', b"data: [DONE]\n\n"], "lost"),
        ([b"data: nonsense\n\n"], "not JSON"),
        # A stream that just stops, however politely, is no answer.
        ([], "without its end"),
        ([b"data: [DONE]\n\n"], "without its end"),
        ([b'data: {"choices": [{"text": "x", "finish_reason": "stop"}]}\n\n'], "without its end"),
    ],
)
async def test_a_stream_that_fails_is_an_error_and_not_a_short_answer(
    endpoint: FakeEndpoint, events: list[bytes], expected: str
) -> None:
    async def fail(body: dict[str, Any], response: web.StreamResponse) -> None:
        await send(response, text_event("x"))
        for event in events:
            await response.write(event)

    endpoint.handler = fail

    recording = await ask(endpoint)

    assert recording.error is not None
    assert expected in recording.error


async def test_a_broken_connection_is_an_error(endpoint: FakeEndpoint) -> None:
    async def hang_up(body: dict[str, Any], response: web.StreamResponse) -> None:
        await send(response, text_event("x"))
        assert response._req is not None
        transport = response._req.transport
        assert transport is not None
        transport.abort()

    endpoint.handler = hang_up

    recording = await ask(endpoint)

    assert recording.error is not None


async def test_nobody_listening_is_an_error() -> None:
    recording = Recording("requests", 0.0)

    async with open_client(Endpoint("http://127.0.0.1:1", "m")) as client:
        await client.stream(PlannedRequest("hi", 1), recording)

    assert recording.error is not None
    assert "127.0.0.1:1" in recording.error


async def test_a_request_that_is_cut_keeps_what_came(endpoint: FakeEndpoint) -> None:
    async def never_end(body: dict[str, Any], response: web.StreamResponse) -> None:
        await send(response, text_event("x"))
        await asyncio.Event().wait()

    endpoint.handler = never_end
    recording = NoticedRecording("requests", 0.0)
    async with open_client(Endpoint(endpoint.url, "m")) as client:
        task = asyncio.create_task(client.stream(PlannedRequest("hi", 9), recording))
        await recording.came.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    assert recording.was_cut
    assert recording.error is None
    assert len(recording.token_times) == 1


def test_chats_carry_the_shared_prefix_as_system_message() -> None:
    body = request_body(Endpoint("u", "m", api="chat"), PlannedRequest("hi", 1, system="be kind"))

    assert [message["role"] for message in body["messages"]] == ["system", "user"]
