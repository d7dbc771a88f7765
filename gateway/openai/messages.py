"""Messages of a chat: their shape, as far as every template relies on it."""

import json
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, WithJsonSchema

from gateway.generation import ChatPrompt
from gateway.openai.message_schemas import MESSAGES_SCHEMA, ROLES, SILENT_ROLES, TOOLS_SCHEMA
from mesh.errors import InvalidRequest
from mesh.v1 import tokenizer_pb2


def check_messages(value: object) -> list[dict[str, Any]]:
    """The messages as the client wrote them, unknown keys included."""
    if not isinstance(value, list) or not value:
        raise InvalidRequest("messages should be a list of messages, not empty", param="messages")
    for index, message in enumerate(value):
        _check_message(message, f"messages[{index}]")
    return value


def check_tools(value: object) -> list[dict[str, Any]]:
    """Tool definitions; none and an empty list mean the same."""
    if value is None:
        return []
    if not isinstance(value, list):
        raise InvalidRequest("tools should be a list", param="tools")
    for index, tool in enumerate(value):
        where = f"tools[{index}]"
        if not isinstance(tool, dict) or tool.get("type") != "function":
            raise InvalidRequest(f'{where} should be an object of type "function"', param=where)
        function = tool.get("function")
        if not isinstance(function, dict) or not _is_name(function.get("name")):
            raise InvalidRequest(f"{where}.function should have a name", param=f"{where}.function")
    return value


class ChatFields(BaseModel):
    """Messages and how to render them."""

    model_config = ConfigDict(strict=True, extra="ignore")

    messages: Annotated[
        list[dict[str, Any]], BeforeValidator(check_messages), WithJsonSchema(MESSAGES_SCHEMA)
    ]
    tools: Annotated[
        list[dict[str, Any]], BeforeValidator(check_tools), WithJsonSchema(TOOLS_SCHEMA)
    ] = []
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def chat_prompt(self, *, with_tools: bool = True) -> ChatPrompt:
        """The prompt for the tokenizer; messages go on as the client wrote them."""
        continues = bool(self.continue_final_message)
        if continues and self.add_generation_prompt:
            raise InvalidRequest(
                "continue_final_message and add_generation_prompt exclude each other",
                param="continue_final_message",
            )
        opens = self.add_generation_prompt
        return ChatPrompt(
            tokenizer_pb2.Chat(
                messages_json=_to_json(self.messages),
                tools_json=_to_json(self.tools) if self.tools and with_tools else "",
                template_kwargs_json=(
                    _to_json(self.chat_template_kwargs) if self.chat_template_kwargs else ""
                ),
                add_generation_prompt=not continues if opens is None else opens,
                continue_final_message=continues,
            )
        )


def _to_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _check_message(message: object, where: str) -> None:
    if not isinstance(message, dict):
        raise InvalidRequest(f"{where} should be an object", param=where)
    role = message.get("role")
    if role not in ROLES:
        raise InvalidRequest(
            f"{where}.role should be one of {', '.join(ROLES)}", param=f"{where}.role"
        )
    _check_content(message, role, where)
    name = message.get("name")
    if name is not None and not isinstance(name, str):
        raise InvalidRequest(f"{where}.name should be a string", param=f"{where}.name")
    _check_tool_calls(message.get("tool_calls"), f"{where}.tool_calls")


def _check_content(message: Mapping[str, Any], role: str, where: str) -> None:
    content = message.get("content")
    if content is None:
        # Assistants that call tools say nothing, and tools may have nothing to say.
        if role not in SILENT_ROLES:
            raise InvalidRequest(f"{where}.content is missing", param=f"{where}.content")
        return
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        raise InvalidRequest(
            f"{where}.content should be a string or a list of parts", param=f"{where}.content"
        )
    for index, part in enumerate(content):
        _check_part(part, f"{where}.content[{index}]")


def _check_part(part: object, where: str) -> None:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise InvalidRequest(f"{where} should be an object with a type", param=where)
    if part["type"] != "text":
        raise InvalidRequest(
            f"{where}: this model takes text, not {part['type'][:40]!r}", param=where
        )
    if not isinstance(part.get("text"), str):
        raise InvalidRequest(f"{where}.text should be a string", param=where)


def _check_tool_calls(value: object, where: str) -> None:
    if value is None:
        return
    if not isinstance(value, list):
        raise InvalidRequest(f"{where} should be a list", param=where)
    for index, call in enumerate(value):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not _is_name(function.get("name")):
            raise InvalidRequest(
                f"{where}[{index}].function should have a name", param=f"{where}[{index}]"
            )


def _is_name(value: object) -> bool:
    return isinstance(value, str) and value != ""
