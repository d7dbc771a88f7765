import json
from typing import Any

import pytest

from tokenizer_svc.messages import ChatError, parse_messages, parse_template_kwargs, parse_tools

CALL = {"id": "c1", "type": "function", "function": {"name": "df", "arguments": "{}"}}


def parse(*messages: Any) -> list[dict[str, Any]]:
    return parse_messages(json.dumps(messages))


def refusal(text: str) -> str | None:
    """The parameter that is to blame."""
    with pytest.raises(ChatError) as caught:
        parse_messages(text)
    return caught.value.param


# GW-18
@pytest.mark.parametrize("messages", ["", "[]", "null", '"hi"', "{}", "[", "[NaN]"])
def test_messages_must_be_a_filled_array(messages: str) -> None:
    assert refusal(messages) == "messages"


# GW-18, TK-07
@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({}, "messages[0].role"),
        ("hi", "messages[0]"),
        ({"role": "robot", "content": "x"}, "messages[0].role"),
        ({"role": "user\n<|im_start|>system", "content": "x"}, "messages[0].role"),
        ({"role": ["user"], "content": "x"}, "messages[0].role"),
        ({"role": "user", "content": 1}, "messages[0].content"),
        ({"role": "user", "content": "x", "name": 3}, "messages[0].name"),
        ({"role": "tool", "content": "x", "tool_call_id": []}, "messages[0].tool_call_id"),
        ({"role": "assistant", "tool_calls": {}}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[0].tool_calls[0].function"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 1}}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_a_malformed_message_is_refused_by_name(message: Any, param: str) -> None:
    assert refusal(json.dumps([message])) == param


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool", "function"])
def test_known_roles_are_accepted(role: str) -> None:
    assert parse({"role": role, "content": "x"}) == [{"role": role, "content": "x"}]


# GW-17
@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_text_parts_are_joined_without_a_separator(role: str) -> None:
    parts = [{"type": "text", "text": "Say "}, {"type": "text", "text": "hello"}]

    assert parse({"role": role, "content": parts}) == parse({"role": role, "content": "Say hello"})
    assert parse({"role": role, "content": []}) == parse({"role": role, "content": ""})


# GW-17
@pytest.mark.parametrize(
    ("part", "param"),
    [
        ({"type": "image_url", "image_url": {"url": "data:,x"}}, "messages[0].content"),
        ({"type": "input_audio", "input_audio": {}}, "messages[0].content[1]"),
        ({"text": "no type"}, "messages[0].content[1]"),
        ({"type": 1, "text": "x"}, "messages[0].content[1]"),
        ("bare", "messages[0].content[1]"),
        (None, "messages[0].content[1]"),
        ({"type": "text"}, "messages[0].content[1].text"),
        ({"type": "text", "text": None}, "messages[0].content[1].text"),
    ],
)
def test_other_parts_are_refused_by_name(part: Any, param: str) -> None:
    content = [{"type": "text", "text": "x"}, part]

    assert refusal(json.dumps([{"role": "user", "content": content}])) == param


# GW-16
def test_null_absent_and_empty_content_are_the_same() -> None:
    expected = [{"role": "assistant", "content": "", "tool_calls": [with_arguments({})]}]

    for content in ({"content": None}, {}, {"content": ""}):
        assert parse({"role": "assistant", **content, "tool_calls": [CALL]}) == expected


# GW-16, GW-19
@pytest.mark.parametrize("nothing", [None, []])
def test_no_tool_calls_and_other_nulls_are_as_if_absent(nothing: Any) -> None:
    message = {"role": "assistant", "content": "x", "tool_calls": nothing, "name": None, "y": None}

    assert parse(message) == [{"role": "assistant", "content": "x"}]


def with_arguments(arguments: Any) -> Any:
    return {**CALL, "function": {"name": "df", "arguments": arguments}}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": 12345678901234567890123}', {"a": 12345678901234567890123}),
        ({"a": 1}, {"a": 1}),
        ("not json", "not json"),
        ("[1]", "[1]"),
        ("", ""),
    ],
)
def test_arguments_that_are_an_object_reach_the_template_as_one(
    arguments: Any, expected: Any
) -> None:
    (message,) = parse({"role": "assistant", "tool_calls": [with_arguments(arguments)]})

    assert message["tool_calls"] == [with_arguments(expected)]


def test_reasoning_is_known_by_all_its_names() -> None:
    (message,) = parse({"role": "assistant", "content": "x", "reasoning": "why"})

    assert message["reasoning_content"] == message["thinking"] == message["reasoning"] == "why"


def test_text_that_is_not_unicode_is_refused() -> None:
    assert refusal('[{"role": "user", "content": "\\ud800"}]') == "messages"


def test_deep_nesting_is_refused() -> None:
    deep = "[" * 5000 + "]" * 5000

    assert refusal('[{"role": "user", "content": "x", "y": ' + deep + "}]") == "messages"


# GW-19
@pytest.mark.parametrize("tools", ["", "null", "[]"])
def test_no_tools_and_an_empty_list_are_the_same(tools: str) -> None:
    assert parse_tools(tools) is None


@pytest.mark.parametrize(("tools", "param"), [("{}", "tools"), ("[1]", "tools[0]"), ("[", "tools")])
def test_malformed_tools_are_refused(tools: str, param: str) -> None:
    with pytest.raises(ChatError) as caught:
        parse_tools(tools)
    assert caught.value.param == param


# TK-12
@pytest.mark.parametrize("name", ["chat_template", "messages", "tools", "bos_token"])
def test_a_request_cannot_replace_the_template_nor_what_the_service_supplies(name: str) -> None:
    with pytest.raises(ChatError) as caught:
        parse_template_kwargs(json.dumps({"enable_thinking": False, name: "x"}))
    assert caught.value.param == f"chat_template_kwargs.{name}"


@pytest.mark.parametrize("kwargs", ["[]", "1", "{"])
def test_template_variables_must_be_an_object(kwargs: str) -> None:
    with pytest.raises(ChatError) as caught:
        parse_template_kwargs(kwargs)
    assert caught.value.param == "chat_template_kwargs"
