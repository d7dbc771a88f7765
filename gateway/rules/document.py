"""A JSON object open for editing: what is not edited keeps its bytes.

`deploy/openresty/lua/pdmesh/document.lua` is this file in Lua: same edits, same bytes.
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from gateway.rules.scanner import decode_string, outline, skip_space, skip_string, skip_value


class Member:
    """One key with its value, and the white space around them."""

    __slots__ = ("_child", "_value", "colon", "key", "key_text", "lead", "trail")

    def __init__(
        self, key: str, key_text: bytes, value: bytes, lead: bytes, colon: bytes, trail: bytes
    ) -> None:
        self.key = key
        self.key_text = key_text
        self.lead = lead
        self.colon = colon
        self.trail = trail
        self._value = value
        self._child: ObjectNode | None = None

    @property
    def value(self) -> bytes:
        """The text of the value as it stands."""
        return self._value if self._child is None else self._child.render()

    @value.setter
    def value(self, text: bytes) -> None:
        self._value = text
        self._child = None

    def open(self) -> "ObjectNode | None":
        """The value for editing, when it is an object."""
        if self._child is None and self._value.startswith(b"{"):
            self._child = ObjectNode(self._value)
        return self._child

    def render(self) -> bytes:
        return self.lead + self.key_text + self.colon + self.value + self.trail


class ObjectNode:
    """The members of one object.

    A key stays claimed after its member was dropped or renamed: the client did decide it.
    """

    def __init__(self, text: bytes) -> None:
        self.members: list[Member] = []
        self.claimed: set[str] = set()
        at = skip_space(text, 1)
        # White space of an object without members.
        self._blank = text[1:at]
        if text[at] == ord("}"):
            return
        outlined = outline(text)
        at = 0
        while text[at] != ord("}"):
            at = self._read(text, outlined, at + 1)

    def get(self, key: str) -> Member | None:
        """The member of that name, however its key is spelled."""
        if key not in self.claimed:
            return None
        return next((member for member in self.members if member.key == key), None)

    def insert(self, key: str, value: bytes) -> Member:
        """Add a member behind the last value."""
        lead, trail = self._blank, b""
        if self.members:
            last = self.members[-1]
            lead, trail = b"", last.trail
            last.trail = b""
        member = Member(key, encode_string(key), value, lead, b":", trail)
        self.members.append(member)
        self.claimed.add(key)
        return member

    def remove(self, member: Member) -> None:
        self.members.remove(member)
        if not self.members:
            self._blank = b""

    def rename(self, member: Member, key: str) -> None:
        member.key = key
        member.key_text = encode_string(key)
        self.claimed.add(key)

    def render(self) -> bytes:
        if not self.members:
            return b"{" + self._blank + b"}"
        return b"{" + b",".join([member.render() for member in self.members]) + b"}"

    def _read(self, text: bytes, outlined: bytes, at: int) -> int:
        """Take the member at `at`; returns the position of the comma or brace behind it."""
        key_at = skip_space(text, at)
        key_end = skip_string(outlined, key_at)
        value_at = skip_space(text, skip_space(text, key_end) + 1)
        value_end = skip_value(text, outlined, value_at)
        end = skip_space(text, value_end)
        key_text = text[key_at:key_end]
        key = decode_string(key_text)
        self.members.append(
            Member(
                key,
                key_text,
                text[value_at:value_end],
                lead=text[at:key_at],
                colon=text[key_end:value_at],
                trail=text[value_end:end],
            )
        )
        self.claimed.add(key)
        return end


class Decoded(Mapping[str, Any]):
    """An object as Python values, each decoded when it is asked for."""

    def __init__(self, node: ObjectNode) -> None:
        self._node = node

    def __getitem__(self, key: str) -> Any:
        member = self._node.get(key)
        if member is None:
            raise KeyError(key)
        return json.loads(member.value)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self._node.get(key) is not None

    def __iter__(self) -> Iterator[str]:
        return (member.key for member in self._node.members)

    def __len__(self) -> int:
        return len(self._node.members)


class Document:
    """A whole body: one object with white space around it. The body must be valid."""

    def __init__(self, body: bytes) -> None:
        begin = skip_space(body, 0)
        end = body.rindex(b"}") + 1
        self._lead = body[:begin]
        self._trail = body[end:]
        self.root = ObjectNode(body[begin:end])

    def render(self) -> bytes:
        return self._lead + self.root.render() + self._trail


def encode_string(text: str) -> bytes:
    """A JSON string token."""
    return json.dumps(text, ensure_ascii=False).encode()
