"""LangChain's client, real, against the gateway."""

import pytest
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_openai import ChatOpenAI
from openai import BadRequestError

from tests.gateway.fake_tokenizer import MODEL
from tests.gateway.fakes import FakeMesh
from tests.gateway.running import RunningGateway

MESSAGES = [SystemMessage("be brief"), HumanMessage("hi")]


@pytest.fixture
def model(gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> ChatOpenAI:
    # It would report runs to its makers' service if the environment asked for it.
    monkeypatch.setenv("LANGSMITH_TRACING", "false")
    return ChatOpenAI(
        model=MODEL,
        base_url=f"{gateway.url}/v1",
        api_key="none",  # type: ignore[arg-type]
        max_retries=0,
        temperature=0,
        stream_usage=True,
    )


async def test_invoke_returns_text_and_usage(model: ChatOpenAI) -> None:
    answer = await model.ainvoke(MESSAGES)

    assert answer.content == "Hello, world!"
    assert answer.response_metadata["finish_reason"] == "stop"
    assert answer.usage_metadata is not None
    assert answer.usage_metadata["output_tokens"] == len("Hello, world!") + 1
    assert answer.usage_metadata["input_token_details"] == {"cache_read": 0}


async def test_stream_adds_up_to_the_answer(model: ChatOpenAI) -> None:
    chunks = [chunk async for chunk in model.astream(MESSAGES)]

    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    assert whole.content == "Hello, world!"
    assert whole.usage_metadata is not None
    assert whole.usage_metadata["output_tokens"] == len("Hello, world!") + 1


async def test_batch_answers_each(model: ChatOpenAI) -> None:
    answers = await model.abatch([MESSAGES, [HumanMessage("again")]])

    assert [answer.content for answer in answers] == ["Hello, world!"] * 2


async def test_conversation_with_tools_reaches_the_template(
    model: ChatOpenAI, mesh: FakeMesh
) -> None:
    look = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    call = {"name": "look", "args": {"at": "sky"}, "id": "1", "type": "tool_call"}
    await model.bind_tools([look]).ainvoke(
        [*MESSAGES, AIMessage("", tool_calls=[call]), ToolMessage("blue", tool_call_id="1")]
    )

    [chat] = mesh.tokenizer.chats
    assert '"look"' in chat.tools_json
    assert '"tool_call_id"' in chat.messages_json


async def test_logprobs_arrive(model: ChatOpenAI) -> None:
    answer = await model.bind(logprobs=True, top_logprobs=2).ainvoke(MESSAGES)

    content = answer.response_metadata["logprobs"]["content"]
    assert "".join(one["token"] for one in content[:-1]) == "Hello, world!"


async def test_output_of_a_forced_shape_is_refused_by_name(model: ChatOpenAI) -> None:
    shaped = model.with_structured_output({"title": "A", "type": "object", "properties": {}})

    with pytest.raises(BadRequestError) as caught:
        await shaped.ainvoke(MESSAGES)
    assert caught.value.code == "unsupported_parameter"
