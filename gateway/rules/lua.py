"""A RuleSet as a Lua table, for the OpenResty twin."""

from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from gateway.rules import headers as header_rules
from gateway.rules.conditions import ALIASES
from gateway.rules.document import encode_string
from gateway.rules.model import RuleSet

# What the Lua code expects; it refuses tables of another format.
FORMAT = 1


def compile_to_lua(rules: RuleSet, source: str) -> str:
    """Lua source that returns the rules, and the lists that both engines share."""
    table = {
        "format": FORMAT,
        "rules": [_rule(rule) for rule in rules.rules],
        "forward_headers": rules.forward_headers,
        "aliases": ALIASES,
        "headers": {
            "forwarded": header_rules.FORWARDED,
            "never": header_rules.NEVER,
            "never_prefixes": header_rules.NEVER_PREFIXES,
            "credentials": header_rules.CREDENTIALS,
        },
    }
    name = source.encode("ascii", "backslashreplace").decode().replace("\n", " ")
    return (
        f"-- Made by `pdmesh rules compile` from {name}. Do not edit.\nreturn {_literal(table)}\n"
    )


def matches_on_keys(rules: RuleSet) -> list[str]:
    """Names of the rules that need to know the caller's API key."""
    return [
        rule.name
        for rule in rules.rules
        if rule.when.key is not None or rule.when.key_group is not None
    ]


def _rule(rule: Any) -> dict[str, Any]:
    """A rule with the texts that its edits insert."""
    plain = _fields(rule)
    plain["rewrite_model"] = [
        _fields(one) | {"text": encode_string(one.name).decode()} for one in rule.rewrite_model
    ]
    plain["rename"] = [
        _fields(one) | {"new_key_text": encode_string(one.new_key).decode()} for one in rule.rename
    ]
    plain["default"] = [_fill(fill) for fill in rule.default]
    plain["force"] = [
        _fields(one) | {"key_texts": [encode_string(key).decode() for key in one.target.keys]}
        for one in rule.force
    ]
    return plain


def _fill(fill: Any) -> dict[str, Any]:
    return _fields(fill) | {
        "key_text": encode_string(fill.key).decode(),
        "members": [_fill(member) for member in fill.members],
    }


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in fields(value)}


def _literal(value: Any) -> str:
    if is_dataclass(value):
        value = _fields(value)
    if isinstance(value, dict):
        # An absent key is nil.
        pairs = (f"[{_literal(k)}]={_literal(v)}" for k, v in value.items() if v is not None)
        return "{" + ",".join(pairs) + "}"
    if isinstance(value, list | tuple):
        return "{" + ",".join(map(_literal, value)) + "}"
    if isinstance(value, Enum):
        # The one step of a path that is neither key nor index.
        return "true"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    assert isinstance(value, str), value
    return '"' + "".join(_lua_byte(byte) for byte in value.encode()) + '"'


def _lua_byte(byte: int) -> str:
    if 0x20 <= byte < 0x7F and byte not in b'"\\':
        return chr(byte)
    return f"\\{byte:03d}"
