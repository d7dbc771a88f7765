"""Defaults as a tree of keys, and what they have in common with forced values."""

import json
from typing import Any

from gateway.rules.conditions import ALIASES
from gateway.rules.document import ObjectNode
from gateway.rules.model import Fill


def graft(tree: dict[str, Any], keys: tuple[str, ...], text: str) -> bool:
    """Put a value into the tree of defaults; False when something is there already."""
    for key in keys[:-1]:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            return False
    if keys[-1] in tree:
        return False
    tree[keys[-1]] = text
    return True


def to_fills(tree: dict[str, Any]) -> tuple[Fill, ...]:
    """The tree as fills: a branch's value is the object of its members."""
    fills = []
    for key, value in tree.items():
        if isinstance(value, dict):
            members = to_fills(value)
            text = ",".join(
                f"{json.dumps(fill.key, ensure_ascii=False)}:{fill.value}" for fill in members
            )
            fills.append(Fill(key, f"{{{text}}}", members))
        else:
            fills.append(Fill(key, value, _members_of(value)))
    return tuple(fills)


def _members_of(text: str) -> tuple[Fill, ...]:
    """The members of a JSON object as fills; none for other values."""
    if not text.startswith("{"):
        return ()
    node = ObjectNode(text.encode())
    return tuple(
        Fill(member.key, member.value.decode(), _members_of(member.value.decode()))
        for member in node.members
    )


def leaves(keys: tuple[str, ...], text: str) -> list[tuple[str, ...]]:
    """The paths of all values that are filled one by one."""
    members = _members_of(text)
    if not members:
        return [keys]
    return [leaf for fill in members for leaf in leaves((*keys, fill.key), fill.value)]


def is_same_place(forced: tuple[str, ...], filled: tuple[str, ...]) -> bool:
    """Whether one path is, or lies under, the other; aliases are one key."""
    length = min(len(forced), len(filled))
    if forced[:length] == filled[:length]:
        return True
    return length == 1 and filled[0] in ALIASES.get(forced[0], ())
