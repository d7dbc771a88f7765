"""Messages and tools: what the tokenizer is given, and what is refused by its place."""

import json
from typing import Any

import httpx
import pytest

from tests.gateway.asking import CHAT, COMPLETIONS, refused
from tests.gateway.fake_tokenizer import MODEL
from tests.gateway.fakes import FakeMesh
from tests.gateway.running import chat


async def test_tools_are_rendered_unless_the_client_forbids_their_use(
    http: httpx.AsyncClient, mesh: FakeMesh
) -> None:
    tools = [{"type": "function", "function": {"name": "df", "parameters": {}}}]

    await http.post(CHAT, json=chat(tools=tools))
    assert '"name": "df"' in mesh.tokenizer.chats[-1].tools_json
    await http.post(CHAT, json=chat(tools=tools, tool_choice="none"))
    assert mesh.tokenizer.chats[-1].tools_json == ""


async def test_template_options_reach_the_tokenizer(
    http: httpx.AsyncClient, mesh: FakeMesh
) -> None:
    await http.post(CHAT, json=chat(chat_template_kwargs={"x": 1}, continue_final_message=True))
    sent = mesh.tokenizer.chats[-1]
    assert sent.template_kwargs_json == '{"x": 1}'
    assert (sent.continue_final_message, sent.add_generation_prompt) == (True, False)

    await http.post(CHAT, json=chat())
    assert mesh.tokenizer.chats[-1].add_generation_prompt

    error = await refused(http, CHAT, chat(continue_final_message=True, add_generation_prompt=True))
    assert error["param"] == "continue_final_message"


@pytest.mark.parametrize("content", [{"content": None}, {}, {"content": ""}])
async def test_tool_calls_come_without_content(
    http: httpx.AsyncClient, mesh: FakeMesh, content: dict[str, Any]
) -> None:
    # GW-16
    call = {"id": "c1", "type": "function", "function": {"name": "df", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "check disk"},
        {"role": "assistant", "tool_calls": [call], **content},
        {"role": "tool", "tool_call_id": "c1", **content},
        {"role": "user", "content": "so?"},
    ]

    response = await http.post(CHAT, json={"model": MODEL, "messages": messages})

    assert response.status_code == 200
    prompt = bytes(mesh.prefill.requests[-1].prompt_token_ids)
    assert prompt == b"user: check disk\nassistant: \ntool: \nuser: so?\n"


@pytest.mark.parametrize("role", ["user", "system", "assistant", "tool", "developer"])
async def test_text_parts_reach_the_tokenizer_in_every_role(
    http: httpx.AsyncClient, mesh: FakeMesh, role: str
) -> None:
    # GW-17
    parts = [{"type": "text", "text": "Say "}, {"type": "text", "text": "hello"}]
    messages = [{"role": role, "content": parts}, {"role": "user", "content": "hi"}]

    response = await http.post(CHAT, json={"model": MODEL, "messages": messages})

    assert response.status_code == 200
    assert json.loads(mesh.tokenizer.chats[-1].messages_json) == messages


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:,x"}},
        {"type": "input_audio", "input_audio": {}},
        {"text": "no type"},
        {"type": "text"},
        {"type": "text", "text": None},
        "bare",
        7,
        None,
    ],
)
async def test_part_that_is_no_text_is_refused_by_place(http: httpx.AsyncClient, part: Any) -> None:
    # GW-17
    content = [{"type": "text", "text": "a"}, part]
    error = await refused(
        http, CHAT, {"model": MODEL, "messages": [{"role": "user", "content": content}]}
    )

    assert error["param"] == "messages[0].content[1]"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (None, "messages"),
        ("hi", "messages"),
        ({}, "messages"),
        ([{}], "messages[0].role"),
        ([{"role": "robot", "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        (["hi"], "messages[0]"),
        ([{"role": "user", "content": "x", "name": 5}], "messages[0].name"),
        ([{"role": "assistant", "tool_calls": [{}]}], "messages[0].tool_calls[0]"),
    ],
)
async def test_bad_messages_are_refused_by_place(
    http: httpx.AsyncClient, messages: Any, param: str
) -> None:
    # GW-18
    error = await refused(http, CHAT, {"model": MODEL, "messages": messages})

    assert error["param"] == param


async def test_missing_messages_and_prompt_are_refused(http: httpx.AsyncClient) -> None:
    # GW-18
    assert (await refused(http, CHAT, {"model": MODEL}))["param"] == "messages"
    assert (await refused(http, COMPLETIONS, {"model": MODEL}))["param"] == "prompt"


async def test_empty_user_content_is_a_prompt(http: httpx.AsyncClient) -> None:
    # GW-18
    assert (await http.post(CHAT, json=chat(""))).status_code == 200
