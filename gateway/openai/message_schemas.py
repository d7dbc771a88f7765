"""Messages and tools as JSON Schema: what `gateway.openai.messages` checks, for readers.

Its checks stay plain code: they name the part of a message that is wrong, which a schema with
alternatives cannot.
"""

from typing import Any

# Assistants that call tools say nothing, and tools may have nothing to say.
SILENT_ROLES = ("assistant", "tool", "function")
ROLES = ("system", "developer", "user", *SILENT_ROLES)

_NAMED = {
    "type": "object",
    "properties": {"name": {"type": "string", "minLength": 1}},
    "required": ["name"],
}
_CONTENT = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                "required": ["type", "text"],
            },
        },
    ]
}
_TOOL_CALLS = {
    "anyOf": [
        {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"id": {}, "type": {}, "function": _NAMED},
                "required": ["function"],
            },
        },
        {"type": "null"},
    ]
}


def _message(roles: tuple[str, ...], content: dict[str, Any], required: list[str]) -> Any:
    return {
        "type": "object",
        "properties": {
            "role": {"enum": list(roles)},
            "content": content,
            "name": {"type": ["string", "null"]},
            "tool_calls": _TOOL_CALLS,
            "tool_call_id": {},
        },
        "required": required,
    }


MESSAGES_SCHEMA: dict[str, Any] = {
    "type": "array",
    "minItems": 1,
    "items": {
        "anyOf": [
            _message(("system", "developer", "user"), _CONTENT, ["role", "content"]),
            _message(SILENT_ROLES, {"anyOf": [_CONTENT, {"type": "null"}]}, ["role"]),
        ]
    },
}

TOOLS_SCHEMA: dict[str, Any] = {
    "anyOf": [
        {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"type": {"const": "function"}, "function": _NAMED},
                "required": ["type", "function"],
            },
        },
        {"type": "null"},
    ]
}
