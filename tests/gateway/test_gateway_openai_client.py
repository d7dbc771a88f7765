"""The official client against the gateway: it must not be able to tell the difference."""

import json
from collections.abc import Mapping
from typing import Any, get_type_hints

import openai
import pytest
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params
from pydantic import BaseModel

from gateway.openai.chat import ChatRequest
from gateway.openai.completions import CompletionRequest
from gateway.openai.unsupported import CHAT, COMPLETIONS
from mesh.errors import DeadlineExceeded, InternalError, MeshError, QueueFull, WorkerUnavailable
from tests.gateway.fake_tokenizer import MODEL
from tests.gateway.fakes import FakeMesh
from tests.gateway.running import run_gateway


async def test_chat_completion_has_openais_shape(client: openai.AsyncOpenAI) -> None:
    made = await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], temperature=0
    )

    assert made.object == "chat.completion"
    assert made.id.startswith("chatcmpl-")
    assert made.model == MODEL
    [choice] = made.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == "Hello, world!"
    assert choice.finish_reason == "stop"
    assert made.usage is not None
    assert made.usage.prompt_tokens == len(b"user: hi\n")
    assert made.usage.completion_tokens == len(b"Hello, world!") + 1
    assert made.usage.total_tokens == made.usage.prompt_tokens + made.usage.completion_tokens
    assert made.usage.prompt_tokens_details is not None
    assert made.usage.prompt_tokens_details.cached_tokens == 0


async def test_streamed_text_equals_the_whole_answer(client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], stream=True
    )
    chunks = [chunk async for chunk in stream]

    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello, world!"
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["stop"]
    assert len({chunk.id for chunk in chunks}) == 1


async def test_completion_has_openais_shape(client: openai.AsyncOpenAI) -> None:
    made = await client.completions.create(model=MODEL, prompt="hi", max_tokens=5)

    assert made.object == "text_completion"
    assert made.id.startswith("cmpl-")
    assert made.choices[0].text == "Hello"
    assert made.choices[0].finish_reason == "length"


async def test_models_are_listed_and_found(client: openai.AsyncOpenAI) -> None:
    models = [model async for model in client.models.list()]
    model = await client.models.retrieve(MODEL)

    assert [one.id for one in models] == [MODEL]
    assert model.owned_by == "pdmesh"
    with pytest.raises(openai.NotFoundError) as caught:
        await client.models.retrieve("nothing")
    assert caught.value.code == "model_not_found"


EVERY_CHAT_PARAMETER: dict[str, Any] = {
    "n": 2,
    "temperature": 0.5,
    "top_p": 0.9,
    "seed": 7,
    "max_completion_tokens": 5,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "logit_bias": {"65": -100},
    "stop": ["zzz"],
    "logprobs": True,
    "top_logprobs": 2,
    "user": "ada",
    "safety_identifier": "ada",
    "prompt_cache_key": "a",
    "metadata": {"team": "a"},
    "service_tier": "auto",
    "store": False,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
    "modalities": ["text"],
    "tools": [{"type": "function", "function": {"name": "look", "parameters": {}}}],
}
MORE: dict[str, Any] = {
    "top_k": 5,
    "min_p": 0.1,
    "repetition_penalty": 1.1,
    "min_tokens": 1,
    "ignore_eos": True,
    "stop_token_ids": [3],
    "bad_words": ["damn"],
    "include_stop_str_in_output": True,
    "skip_special_tokens": False,
    "priority": 1,
    "cache_salt": "mine",
}
# Of chats alone.
TEMPLATE = {"chat_template_kwargs": {"a": 1}, "add_generation_prompt": True}
CONVERSATION: list[Any] = [
    {"role": "developer", "content": "be brief"},
    {"role": "system", "content": "be kind"},
    {"role": "user", "name": "ada", "content": [{"type": "text", "text": "a"}]},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": "seen"},
]


@pytest.mark.parametrize("stream", [False, True])
async def test_every_parameter_of_a_chat_is_taken_with_its_meaning(
    client: openai.AsyncOpenAI, mesh: FakeMesh, stream: bool
) -> None:
    made = await client.chat.completions.create(
        model=MODEL,
        messages=CONVERSATION,
        stream=stream,
        extra_body=MORE | TEMPLATE,
        **EVERY_CHAT_PARAMETER,
    )
    if isinstance(made, openai.AsyncStream):
        tiers = {chunk.service_tier async for chunk in made}
        assert tiers == {"default"}
    else:
        assert [one.message.content for one in made.choices] == ["Hello"] * 2
        assert made.service_tier == "default"

    params = mesh.prefill.requests[0].sampling_params
    expected = {
        "max_tokens": 5,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "seed": 7,
        "min_tokens": 1,
        "ignore_eos": True,
        "num_logprobs": 2,
    }
    assert {name: getattr(params, name) for name in expected} == expected
    assert dict(params.logit_bias) == {65: -100}
    assert list(params.stop_token_ids) == [3]
    assert [bytes(word.token_ids) for word in params.bad_words] == [b"damn"]
    assert {admit.priority for admit in mesh.scheduler.admits} == {1}
    assert {one.cache_salt for one in mesh.prefill.requests} == {"mine"}
    [chat] = mesh.tokenizer.chats
    assert json.loads(chat.messages_json) == CONVERSATION
    assert json.loads(chat.tools_json) == EVERY_CHAT_PARAMETER["tools"]
    assert json.loads(chat.template_kwargs_json) == {"a": 1}


async def test_every_parameter_of_a_completion_is_taken(
    client: openai.AsyncOpenAI, mesh: FakeMesh
) -> None:
    made = await client.completions.create(
        model=MODEL,
        prompt=["ab", "cd"],
        best_of=1,
        echo=True,
        frequency_penalty=0.1,
        logit_bias={"65": -100},
        logprobs=2,
        max_tokens=3,
        n=2,
        presence_penalty=0.1,
        seed=-1,
        stop="zzz",
        suffix="",
        temperature=0.1,
        top_p=0.5,
        user="ada",
        extra_body=MORE,
    )

    assert [one.text for one in made.choices] == ["abHel", "abHel", "cdHel", "cdHel"]
    assert mesh.prefill.requests[0].sampling_params.num_prompt_logprobs == 2


async def test_last_message_is_continued(client: openai.AsyncOpenAI, mesh: FakeMesh) -> None:
    await client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hi"}, {"role": "assistant", "content": "He"}],
        extra_body={"continue_final_message": True, "add_generation_prompt": False},
    )

    [chat] = mesh.tokenizer.chats
    assert chat.continue_final_message
    assert not chat.add_generation_prompt


async def test_stream_helper_builds_the_whole_answer(client: openai.AsyncOpenAI) -> None:
    async with client.chat.completions.stream(
        model=MODEL,
        messages=[{"role": "user", "content": "hi"}],
        stream_options={"include_usage": True},
        logprobs=True,
    ) as stream:
        deltas = [event.delta async for event in stream if event.type == "content.delta"]
        final = await stream.get_final_completion()

    assert "".join(deltas) == "Hello, world!"
    assert final.choices[0].message.content == "Hello, world!"
    assert final.choices[0].logprobs is not None
    assert final.usage is not None
    assert final.usage.completion_tokens == len("Hello, world!") + 1


async def test_raw_and_streaming_responses_show_the_request_id(client: openai.AsyncOpenAI) -> None:
    raw = await client.models.with_raw_response.list(extra_headers={"x-request-id": "mine"})
    async with client.completions.with_streaming_response.create(
        model=MODEL, prompt="a", max_tokens=1
    ) as response:
        body: Any = await response.json()

    assert raw.request_id == "mine"
    assert response.request_id
    assert body["choices"][0]["text"] == "H"


@pytest.mark.parametrize("stream", [False, True])
async def test_full_mesh_is_tried_again_when_it_said(
    client: openai.AsyncOpenAI, mesh: FakeMesh, stream: bool
) -> None:
    mesh.scheduler.full = {b"hi": 1}
    made = await client.with_options(max_retries=1).completions.create(
        model=MODEL, prompt="hi", stream=stream
    )
    if isinstance(made, openai.AsyncStream):
        assert "".join([chunk.choices[0].text async for chunk in made]) == "Hello, world!"
    else:
        assert made.choices[0].text == "Hello, world!"

    assert len(mesh.scheduler.admits) == 2


ERRORS: list[tuple[MeshError | None, dict[str, Any], type[openai.APIError], str | None]] = [
    (None, {"temperature": 3}, openai.BadRequestError, None),
    (None, {"max_tokens": 2000}, openai.BadRequestError, "context_length_exceeded"),
    (None, {"suffix": "x"}, openai.BadRequestError, "unsupported_parameter"),
    (None, {"model": "nothing"}, openai.NotFoundError, "model_not_found"),
    (QueueFull("full", retry_after_s=3), {}, openai.RateLimitError, "queue_full"),
    (WorkerUnavailable("gone"), {}, openai.InternalServerError, "server_is_overloaded"),
    (DeadlineExceeded("slow"), {}, openai.InternalServerError, "timeout"),
    (InternalError("bug"), {}, openai.InternalServerError, None),
]


@pytest.mark.parametrize(("error", "more", "kind", "code"), ERRORS)
@pytest.mark.parametrize("stream", [False, True])
async def test_errors_arrive_as_their_classes(
    client: openai.AsyncOpenAI,
    mesh: FakeMesh,
    error: MeshError | None,
    more: dict[str, Any],
    kind: type[openai.APIError],
    code: str | None,
    stream: bool,
) -> None:
    mesh.scheduler.error = error
    body: dict[str, Any] = {"model": MODEL, "prompt": "hi", "stream": stream} | more
    with pytest.raises(kind) as caught:
        await client.completions.create(**body)

    assert type(caught.value) is kind
    assert caught.value.code == code
    assert isinstance(caught.value, openai.APIStatusError)
    assert caught.value.request_id


async def test_failure_in_a_stream_is_raised_to_its_reader(
    client: openai.AsyncOpenAI, mesh: FakeMesh
) -> None:
    mesh.model.failing = {b"hi"}
    stream = await client.completions.create(model=MODEL, prompt="hi", stream=True)

    with pytest.raises(openai.APIError, match="server had an error"):
        [chunk async for chunk in stream]


async def test_a_body_that_is_too_large_is_refused_as_such(mesh: FakeMesh) -> None:
    async with (
        run_gateway(mesh, max_body_bytes=2000) as gateway,
        openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client,
    ):
        with pytest.raises(openai.APIStatusError) as caught:
            await client.completions.create(model=MODEL, prompt="x" * 3000)

    assert caught.value.status_code == 413
    assert caught.value.code == "request_too_large"


@pytest.mark.parametrize(
    ("params", "kind", "refused"),
    [
        (chat_params.CompletionCreateParamsStreaming, ChatRequest, CHAT),
        (completion_params.CompletionCreateParamsStreaming, CompletionRequest, COMPLETIONS),
    ],
)
def test_every_parameter_of_the_client_is_taken_or_refused(
    params: type, kind: type[BaseModel], refused: Mapping[str, object]
) -> None:
    # GW-15
    assert set(get_type_hints(params)) <= kind.model_fields.keys() | refused.keys()
