"""The official client against the gateway: it must not be able to tell the difference."""

import openai
import pytest

from tests.gateway.fakes import MODEL


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
