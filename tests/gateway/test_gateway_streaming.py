"""Streams: their chunks, their framing, their errors, their silence."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import sse
from gateway.config import GatewayConfig
from mesh.config import load
from mesh.errors import (
    InternalError,
    InvalidRequest,
    KvLeaseExpired,
    KvTransferFailed,
    QueueFull,
    WorkerUnavailable,
)
from tests.gateway.fake_tokenizer import EOS, MODEL
from tests.gateway.fake_workers import Fault
from tests.gateway.fakes import FakeMesh
from tests.gateway.running import (
    chat,
    completion,
    events,
    eventually,
    parse_events,
    run_gateway,
    text_of,
)

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
HELLO = "Hello, world!"


async def test_chat_stream_has_openais_chunks(http: httpx.AsyncClient, mesh: FakeMesh) -> None:
    mesh.model.default = [*b"ab", EOS]
    payloads = await events(http, CHAT, chat(stream=True))

    assert payloads[-1] == "[DONE]"
    chunks = payloads[:-1]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert all(chunk["id"].startswith("chatcmpl-") for chunk in chunks)
    assert [chunk["choices"] for chunk in chunks] == [
        [
            {
                "index": 0,
                "delta": {"role": "assistant", "content": ""},
                "logprobs": None,
                "finish_reason": None,
            }
        ],
        [{"index": 0, "delta": {"content": "a"}, "logprobs": None, "finish_reason": None}],
        [{"index": 0, "delta": {"content": "b"}, "logprobs": None, "finish_reason": None}],
        [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}],
    ]
    assert all("usage" not in chunk for chunk in chunks)


async def test_completion_stream_has_openais_chunks(
    http: httpx.AsyncClient, mesh: FakeMesh
) -> None:
    mesh.model.default = [*b"ab", EOS]
    *chunks, done = await events(http, COMPLETIONS, completion(stream=True))

    assert done == "[DONE]"
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a", "b", ""]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "stop"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_headers_keep_proxies_from_holding_the_stream(
    http: httpx.AsyncClient, path: str
) -> None:
    # NG-06, NG-07
    body = chat(stream=True) if path == CHAT else completion(stream=True)
    response = await http.post(path, json=body, headers={"accept-encoding": "gzip"})

    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache, no-transform"
    assert response.headers["x-accel-buffering"] == "no"
    assert "content-encoding" not in response.headers
    assert "content-length" not in response.headers


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}])
async def test_no_usage_chunk_unless_asked_for(http: httpx.AsyncClient, options: Any) -> None:
    # ST-01
    payloads = await events(http, CHAT, chat(stream=True, stream_options=options))

    assert all(payload["choices"] for payload in payloads[:-1])
    assert all(payload.get("usage") is None for payload in payloads[:-1])


@pytest.mark.parametrize(("path", "make"), [(CHAT, chat), (COMPLETIONS, completion)])
async def test_usage_chunk_comes_once_before_the_end(
    http: httpx.AsyncClient, path: str, make: Any
) -> None:
    # ST-01
    whole = (await http.post(path, json=make(temperature=0))).json()
    payloads = await events(
        http, path, make(temperature=0, stream=True, stream_options={"include_usage": True})
    )

    *chunks, usage, done = payloads
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"] == whole["usage"]
    assert all(chunk["choices"] for chunk in chunks)
    assert all(chunk["usage"] is None for chunk in chunks)


async def test_continuous_usage_counts_up(http: httpx.AsyncClient) -> None:
    payloads = await events(
        http,
        CHAT,
        chat(stream=True, stream_options={"continuous_usage_stats": True, "include_usage": True}),
    )

    counts = [payload["usage"]["completion_tokens"] for payload in payloads[:-1]]
    assert counts == sorted(counts)
    assert counts[-1] == len(HELLO) + 1


async def test_stop_string_is_held_back_and_counted(http: httpx.AsyncClient) -> None:
    # ST-13 (c)
    body = chat(stop="wor", stream_options={"include_usage": True}, stream=True)
    payloads = await events(http, CHAT, body)
    whole = (await http.post(CHAT, json=chat(stop="wor"))).json()
    kept = (await http.post(CHAT, json=chat(stop="wor", include_stop_str_in_output=True))).json()

    assert text_of(payloads) == whole["choices"][0]["message"]["content"] == "Hello, "
    assert kept["choices"][0]["message"]["content"] == "Hello, wor"
    assert whole["choices"][0]["finish_reason"] == "stop"
    assert payloads[-2]["usage"]["completion_tokens"] == len("Hello, wor")
    assert whole["usage"]["completion_tokens"] == len("Hello, wor")


async def test_stop_string_ends_the_decode(http: httpx.AsyncClient, mesh: FakeMesh) -> None:
    mesh.model.default = [*b"one two", *([ord("x")] * 900)]
    mesh.decode.steps = asyncio.Semaphore(6)

    response = await http.post(CHAT, json=chat(stop="two"))
    await mesh.quiet()

    assert response.json()["choices"][0]["message"]["content"] == "one "
    # The seventh token came from prefill's worker plus six steps; no more were taken.
    assert mesh.decode.num_steps == 6
    await eventually(lambda: mesh.tokenizer.num_open == 0)


FINISHES = [
    ({"logit_bias": {str(EOS): 100}}, [EOS], "", "stop", 1),
    ({"max_tokens": 1}, [*b"ab", EOS], "a", "length", 1),
    ({"max_tokens": 2}, [*b"ab", EOS], "ab", "length", 2),
    ({"max_tokens": 3}, [*b"ab", EOS], "ab", "stop", 3),
    ({"max_tokens": 5, "stop": "cd"}, [*b"abccd"], "abc", "stop", 5),
    ({"stop_token_ids": [ord("b")]}, [*b"abc", EOS], "a", "stop", 2),
    ({"stop_token_ids": [ord("a")]}, [*b"abc", EOS], "", "stop", 1),
    ({"ignore_eos": True, "max_tokens": 3}, [ord("a"), EOS, ord("b")], "ab", "length", 3),
    (
        {"ignore_eos": True, "max_tokens": 3, "skip_special_tokens": False},
        [ord("a"), EOS, ord("b")],
        "a<eos>b",
        "length",
        3,
    ),
]


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize(("more", "answer", "text", "reason", "count"), FINISHES)
async def test_finish_reason_says_what_ended_the_text(
    http: httpx.AsyncClient,
    mesh: FakeMesh,
    more: dict[str, Any],
    answer: list[int],
    text: str,
    reason: str,
    count: int,
    local: bool,
) -> None:
    # ST-13
    mesh.model.default = answer
    mesh.scheduler.local = local
    whole = (await http.post(CHAT, json=chat(**more))).json()
    payloads = await events(
        http, CHAT, chat(stream=True, stream_options={"include_usage": True}, **more)
    )

    assert whole["choices"][0]["message"]["content"] == text_of(payloads) == text
    reasons = [p["choices"][0]["finish_reason"] for p in payloads[:-2]]
    assert [one for one in reasons if one] == [reason] == [whole["choices"][0]["finish_reason"]]
    assert whole["usage"]["completion_tokens"] == count
    assert payloads[-2]["usage"]["completion_tokens"] == count


TRICKY = (
    'line\nbreak\r\n\ttab "quoted" \\ é 你好 👩\u200d👧 '
    "\u2028 \u2029 \x85 \x0b \x0c data: x\n\n end"
)


async def test_every_character_survives_the_framing(
    http: httpx.AsyncClient, client: openai.AsyncOpenAI, mesh: FakeMesh
) -> None:
    mesh.model.default = [*TRICKY.encode(), EOS]

    payloads = await events(http, CHAT, chat(stream=True))
    stream = await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], stream=True
    )
    parts = [chunk.choices[0].delta.content or "" async for chunk in stream]

    assert text_of(payloads) == TRICKY
    assert "".join(parts) == TRICKY


@given(st.text())
def test_an_event_is_one_line_for_every_line_reader(text: str) -> None:
    framed = sse.event({"text": text}).decode()

    assert framed.endswith("\n\n")
    assert framed.splitlines() == [framed[:-2], ""]
    assert json.loads(framed.removeprefix("data: ")) == {"text": text}


async def test_character_split_over_tokens_comes_whole(
    http: httpx.AsyncClient, mesh: FakeMesh
) -> None:
    mesh.model.default = [*"👩".encode(), EOS]
    payloads = await events(http, CHAT, chat(stream=True))

    contents = [p["choices"][0]["delta"].get("content") for p in payloads[:-1]]
    assert contents == ["", "👩", None]


EARLY = [
    (QueueFull("full", retry_after_s=7), 429, "queue_full"),
    (WorkerUnavailable("nobody"), 503, "server_is_overloaded"),
    (InvalidRequest("never fits"), 400, None),
    (InternalError("secret"), 500, None),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("error", "status", "code"), EARLY)
async def test_failure_before_the_first_token_keeps_its_status(
    http: httpx.AsyncClient,
    mesh: FakeMesh,
    error: Any,
    status: int,
    code: str | None,
    stream: bool,
) -> None:
    # ST-15
    mesh.scheduler.error = error
    response = await http.post(CHAT, json=chat(stream=stream))

    assert response.status_code == status
    assert response.headers["content-type"] == "application/json"
    assert response.json()["error"]["code"] == code
    assert "secret" not in response.text
    if status in (429, 503):
        assert int(response.headers["retry-after"]) >= 1
    if status == 429:
        assert response.headers["retry-after"] == "7"


async def test_worker_lost_for_good_ends_the_stream_with_an_error(
    http: httpx.AsyncClient, mesh: FakeMesh
) -> None:
    # ST-03
    for decode in mesh.decodes:
        decode.faults = [Fault(after=2, error=WorkerUnavailable("gone"), num_calls=9)]
    payloads = await events(http, CHAT, chat(stream=True))

    *chunks, error, done = payloads
    assert done == "[DONE]"
    assert error["error"]["type"] == "service_unavailable_error"
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
    assert text_of(chunks)
    assert HELLO.startswith(text_of(chunks))
    await mesh.quiet()
    await eventually(lambda: mesh.tokenizer.num_open == 0 and not mesh.prefill.held)


async def test_tokenizer_that_fails_a_sequence_ends_the_stream_with_an_error(
    http: httpx.AsyncClient, mesh: FakeMesh
) -> None:
    # ST-03
    mesh.tokenizer.error_from = 0
    early = await http.post(CHAT, json=chat(stream=True))
    mesh.reset()
    assert early.status_code == 500

    mesh.decode.steps = asyncio.Semaphore(5)
    async with http.stream("POST", CHAT, json=chat(stream=True)) as response:
        text = ""
        async for part in response.aiter_text():
            text += part
            if "o" in text_of(parse_events(text)) and mesh.tokenizer.error_from is None:
                mesh.tokenizer.error_from = 0
                mesh.decode.steps.release()
    payloads = parse_events(text)

    assert response.status_code == 200
    assert payloads[-1] == "[DONE]"
    assert payloads[-2]["error"]["type"] == "server_error"
    assert all(p["choices"][0]["finish_reason"] is None for p in payloads[:-2])
    await mesh.quiet()


async def test_openai_client_raises_the_error_of_a_broken_stream(
    client: openai.AsyncOpenAI, mesh: FakeMesh
) -> None:
    # ST-03
    mesh.decode.faults = [Fault(after=3, error=InternalError("bug"))]
    stream = await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], stream=True
    )

    with pytest.raises(openai.APIError):
        async for _ in stream:
            pass


@pytest.mark.parametrize(
    "error", [KvTransferFailed("lost"), KvLeaseExpired("late"), WorkerUnavailable("gone")]
)
async def test_failed_transfer_is_retried_or_an_error_never_half_an_answer(
    http: httpx.AsyncClient, mesh: FakeMesh, error: Any
) -> None:
    # ST-04
    mesh.decode.faults = [Fault(error=error)]
    once = await http.post(CHAT, json=chat())
    for decode in mesh.decodes:
        decode.faults = [Fault(error=error, num_calls=9)]
    always = await http.post(CHAT, json=chat())

    assert once.status_code == 200
    assert once.json()["choices"][0]["message"]["content"] == HELLO
    assert always.status_code == 503
    assert always.json()["error"]["type"] == "service_unavailable_error"


async def test_silence_before_the_first_token_is_filled_with_comments(mesh: FakeMesh) -> None:
    # ST-10
    mesh.prefill.start_gate = asyncio.Event()
    async with (
        run_gateway(mesh, stream_header_wait_s=0.05, keep_alive_interval_s=0.05) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=20) as http,
        http.stream("POST", CHAT, json=chat(stream=True)) as response,
    ):
        text = ""
        async for part in response.aiter_text():
            text += part
            if text.count(": keep-alive\n\n") >= 3:
                mesh.prefill.start_gate.set()

    assert response.status_code == 200
    assert text.startswith(": keep-alive\n\n: keep-alive\n\n: keep-alive\n\n")
    assert "data: \n" not in text
    assert text_of(parse_events(text)) == HELLO


def test_shipped_times_keep_proxies_from_ending_a_quiet_stream() -> None:
    # ST-10: the comments come more often than idle timeouts, and nginx waits longer than we do.
    shipped = load(GatewayConfig)
    conf = Path("deploy/openresty/nginx.conf").read_text()
    [nginx_timeout_s] = re.findall(r"proxy_read_timeout (\d+)s;", conf)

    assert shipped.stream_header_wait_s <= 15
    assert shipped.keep_alive_interval_s <= 15
    assert int(nginx_timeout_s) > shipped.request_timeout_s


async def test_openai_client_reads_a_stream_with_comments(mesh: FakeMesh) -> None:
    # ST-10
    mesh.prefill.start_gate = asyncio.Event()
    async with (
        run_gateway(mesh, stream_header_wait_s=0, keep_alive_interval_s=0.02) as gateway,
        openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none") as client,
    ):
        stream = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "hi"}], stream=True
        )
        mesh.prefill.start_gate.set()
        parts = [chunk.choices[0].delta.content or "" async for chunk in stream]

    assert "".join(parts) == HELLO


async def test_error_after_an_early_start_is_an_event(mesh: FakeMesh) -> None:
    # ST-10
    mesh.scheduler.gate = asyncio.Event()
    mesh.scheduler.error = QueueFull("full")
    async with (
        run_gateway(mesh, stream_header_wait_s=0, keep_alive_interval_s=5) as gateway,
        httpx.AsyncClient(base_url=gateway.url, timeout=20) as http,
        http.stream("POST", CHAT, json=chat(stream=True)) as response,
    ):
        mesh.scheduler.gate.set()
        text = (await response.aread()).decode()

    assert response.status_code == 200
    error, done = parse_events(text)
    assert error["error"]["code"] == "queue_full"
    assert done == "[DONE]"


async def test_each_token_is_sent_as_it_comes(http: httpx.AsyncClient, mesh: FakeMesh) -> None:
    # NG-06
    mesh.decode.steps = asyncio.Semaphore(0)
    async with http.stream("POST", CHAT, json=chat(stream=True)) as response:
        text = ""
        async for part in response.aiter_text():
            text += part
            # The next token exists only once this one has arrived.
            mesh.decode.steps.release()

    assert text_of(parse_events(text)) == HELLO
