"""A JSON object open for editing: what is not edited keeps its bytes.

`deploy/openresty/lua/pdmesh/document.lua` is this file in Lua: same edits, same bytes.
"""

import json

from gateway.rules.scanner import decode_string, match_key, skip_space, skip_value


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
        at = 0
        while text[at] != ord("}"):
            at = self._read(text, at + 1)

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

    def _read(self, text: bytes, at: int) -> int:
        """Take the member at `at`; returns the position of the comma or brace behind it."""
        match = match_key(text, at)
        lead, key_text, colon = match.groups()
        begin = match.end()
        end = skip_value(text, begin)
        at = skip_space(text, end)
        key = decode_string(key_text)
        self.members.append(Member(key, key_text, text[begin:end], lead, colon, text[end:at]))
        self.claimed.add(key)
        return at


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
