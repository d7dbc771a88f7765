"""Log-probabilities in the shapes of both APIs."""

from typing import Any

import httpx
import openai
import pytest

from tests.gateway.fake_tokenizer import EOS, MODEL
from tests.gateway.fakes import FakeMesh
from tests.gateway.running import chat, completion, events

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


async def test_chat_logprobs_describe_every_token(
    client: openai.AsyncOpenAI, mesh: FakeMesh
) -> None:
    mesh.model.default = [*"aé".encode(), EOS]
    made = await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hi"}],
        logprobs=True,
        top_logprobs=2,
    )

    logprobs = made.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [one.bytes for one in logprobs.content] == [[97], [0xC3], [0xA9], list(b"<eos>")]
    assert logprobs.content[0].token == "a"
    assert logprobs.content[0].logprob == -0.5
    top = logprobs.content[0].top_logprobs
    assert [(one.token, one.logprob) for one in top] == [("a", -0.5), ("b", -1.5)]


@pytest.mark.parametrize("top", [None, 0])
async def test_logprobs_without_alternatives(http: httpx.AsyncClient, top: int | None) -> None:
    response = (await http.post(CHAT, json=chat(logprobs=True, top_logprobs=top))).json()

    content = response["choices"][0]["logprobs"]["content"]
    assert all(entry["top_logprobs"] == [] for entry in content)
    assert "".join(entry["token"] for entry in content[:-1]) == "Hello, world!"


@pytest.mark.parametrize("logprobs", [None, False])
async def test_no_logprobs_unless_asked_for(http: httpx.AsyncClient, logprobs: Any) -> None:
    response = (await http.post(CHAT, json=chat(logprobs=logprobs))).json()

    assert response["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("more", [{}, {"stop": "wor"}, {"stop": "zz"}, {"max_tokens": 3}])
async def test_streamed_logprobs_equal_the_whole(
    http: httpx.AsyncClient, more: dict[str, Any]
) -> None:
    body = chat(logprobs=True, top_logprobs=1, **more)
    whole = (await http.post(CHAT, json=body)).json()
    payloads = await events(http, CHAT, body | {"stream": True})

    streamed = [
        entry
        for payload in payloads[:-1]
        for entry in (payload["choices"][0]["logprobs"] or {}).get("content", [])
    ]
    content = whole["choices"][0]["logprobs"]["content"]
    assert streamed == content
    assert len(content) == whole["usage"]["completion_tokens"]


async def test_completion_logprobs_are_parallel_lists(
    http: httpx.AsyncClient, mesh: FakeMesh
) -> None:
    mesh.model.default = [*"aéb".encode(), EOS]
    body = completion(logprobs=1)
    whole = (await http.post(COMPLETIONS, json=body)).json()
    payloads = await events(http, COMPLETIONS, body | {"stream": True})

    logprobs = whole["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["a", "\ufffd", "\ufffd", "b", "<eos>"]
    assert logprobs["token_logprobs"] == [-0.5] * 5
    assert logprobs["text_offset"] == [0, 1, 1, 2, 3]
    assert logprobs["top_logprobs"][0] == {"a": -0.5}
    for name in logprobs:
        streamed = [
            one
            for payload in payloads[:-1]
            for one in (payload["choices"][0]["logprobs"] or {}).get(name, [])
        ]
        assert streamed == logprobs[name]


async def test_produced_token_is_among_the_alternatives(
    http: httpx.AsyncClient, mesh: FakeMesh
) -> None:
    mesh.model.default = [*b"a", EOS]
    response = (await http.post(COMPLETIONS, json=completion(logprobs=0))).json()

    assert response["choices"][0]["logprobs"]["top_logprobs"][0] == {"a": -0.5}
