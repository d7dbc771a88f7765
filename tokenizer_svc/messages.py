"""The JSON of a chat request, checked and brought into the form that templates know."""

import json
from typing import Any

import orjson

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})

_IMAGE_PARTS = frozenset({"image", "image_url", "input_image"})
# Clients know reasoning by several names; the first is the one that templates read.
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")
# What only the service itself may say. `chat_template` would be code from a request.
_RESERVED_VARIABLES = frozenset(
    {"messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template"}
)

Message = dict[str, Any]


class ChatError(Exception):
    """The chat cannot be rendered; `param` says which part of the request is to blame."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


def parse_messages(messages_json: str) -> list[Message]:
    """Read OpenAI messages: every message has a known role and its content as text."""
    messages = _load(messages_json, "messages")
    if not isinstance(messages, list):
        raise ChatError("messages must be an array", "messages")
    if not messages:
        raise ChatError("messages is empty: at least one message is needed", "messages")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def parse_tools(tools_json: str) -> list[dict[str, Any]] | None:
    """Read tool definitions; none at all and an empty list mean the same."""
    tools = _load(tools_json, "tools") if tools_json else None
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list):
        raise ChatError("tools must be an array", "tools")
    for i, tool in enumerate(tools):
        if not isinstance(tool, dict):
            raise ChatError("a tool must be an object", f"tools[{i}]")
    return tools


def parse_template_kwargs(kwargs_json: str) -> dict[str, Any]:
    """Read extra template variables; those that the service sets cannot be replaced."""
    kwargs = _load(kwargs_json, "chat_template_kwargs") if kwargs_json else None
    if kwargs is None:
        return {}
    if not isinstance(kwargs, dict):
        raise ChatError("chat_template_kwargs must be an object", "chat_template_kwargs")
    for name in kwargs:
        if name in _RESERVED_VARIABLES or name.endswith("_token"):
            raise ChatError(f"{name} cannot be set by a request", f"chat_template_kwargs.{name}")
    return kwargs


def _load(text: str, param: str) -> Any:
    try:
        # orjson is strict (no NaN, no unpaired surrogates, bounded depth) but would
        # round long integers, which a template may print: the values come from json.
        orjson.loads(text)
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ChatError(f"{param} is not valid JSON: {error}", param) from error


def _message(message: Any, at: str) -> Message:
    if not isinstance(message, dict):
        raise ChatError("a message must be an object", at)
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise ChatError(f"role must be one of {', '.join(sorted(ROLES))}", f"{at}.role")
    for field in ("name", "tool_call_id"):
        if not isinstance(message.get(field), str | None):
            raise ChatError(f"{field} must be a string", f"{at}.{field}")
    # Templates print a null as the word "None", so what is null is left out; but all
    # of them expect content, and null, absent and "" mean the same.
    checked = {key: value for key, value in message.items() if value is not None}
    checked["content"] = _content(message.get("content"), f"{at}.content")
    if tool_calls := _tool_calls(checked.pop("tool_calls", None), f"{at}.tool_calls"):
        checked["tool_calls"] = tool_calls
    return _with_reasoning(checked)


def _content(content: Any, at: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ChatError("content must be a string, null or an array of parts", at)
    return "".join(_part(part, at, j) for j, part in enumerate(content))


def _part(part: Any, at: str, index: int) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str):
        raise ChatError("a content part must be an object with a type", f"{at}[{index}]")
    if kind in _IMAGE_PARTS:
        raise ChatError("this model does not accept images", at)
    if kind != "text":
        raise ChatError(f"this model does not accept parts of type {kind!r}", f"{at}[{index}]")
    text = part.get("text")
    if not isinstance(text, str):
        raise ChatError("the text of a text part must be a string", f"{at}[{index}].text")
    return text


def _tool_calls(tool_calls: Any, at: str) -> list[dict[str, Any]]:
    if tool_calls is None:
        return []
    if not isinstance(tool_calls, list):
        raise ChatError("tool_calls must be an array", at)
    return [_tool_call(call, f"{at}[{i}]") for i, call in enumerate(tool_calls)]


def _tool_call(call: Any, at: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ChatError("a tool call must have a function with a name", f"{at}.function")
    arguments = function.get("arguments", {})
    if not isinstance(arguments, str | dict):
        raise ChatError("arguments must be a string", f"{at}.function.arguments")
    return {**call, "function": {**function, "arguments": _arguments(arguments)}}


def _arguments(arguments: str | dict[str, Any]) -> str | dict[str, Any]:
    """Arguments as an object, which templates print as JSON; other text stays as it is."""
    if isinstance(arguments, dict):
        return arguments
    try:
        parsed = _load(arguments, "arguments")
    except ChatError:
        return arguments
    return parsed if isinstance(parsed, dict) else arguments


def _with_reasoning(message: Message) -> Message:
    for field in _REASONING_FIELDS:
        if field in message:
            return {"thinking": message[field], **message, "reasoning_content": message[field]}
    return message
