"""What each kind of rule does to a body, recorded as actions.

`deploy/openresty/lua/pdmesh/edits.lua` is this file in Lua: same edits, same order.
"""

import re
from collections.abc import Mapping
from typing import Any

from gateway.rules.conditions import ALIASES
from gateway.rules.document import Decoded, Document, Member, ObjectNode, encode_string
from gateway.rules.model import Action, Clamp, Fill, Force, Rename, Rule, Target

_NUMBER = re.compile(rb"[-0-9]")


class Edits:
    """One body under edit. It is opened when the first rule wants to change something."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._document: Document | None = None
        self._forced: list[tuple[str, ...]] = []
        self.actions: list[Action] = []

    def render(self) -> bytes:
        """The body as it stands; the very object that came in when nothing was done."""
        if self._document is None or not self.actions:
            return self._body
        return self._document.render()

    def payload(self) -> Mapping[str, Any]:
        """What the body says as it stands."""
        return Decoded(self._root())

    def rewrite_model(self, rule: Rule, name: str) -> None:
        member = self._root().get("model")
        if member is not None:
            member.value = encode_string(name)
            self._record("rewrite_model", name, rule)

    def rename(self, rule: Rule, rename: Rename) -> None:
        """Leaves both keys alone when the new one is taken."""
        node = self._node(rename.target)
        member = node and node.get(rename.target.keys[-1])
        if node and member and node.get(rename.new_key) is None:
            node.rename(member, rename.new_key)
            self._record("rename", f"{rename.target.text}->{rename.new_key}", rule)

    def drop(self, rule: Rule, target: Target) -> None:
        node = self._node(target)
        member = node and node.get(target.keys[-1])
        if node and member:
            node.remove(member)
            self._record("drop", target.text, rule)

    def default(self, rule: Rule, fills: tuple[Fill, ...]) -> None:
        """Fill what the client left out, and nothing else."""
        root = self._root()
        for fill in fills:
            if root.claimed.isdisjoint(ALIASES.get(fill.key, ())):
                self._fill(rule, root, fill, "")

    def clamp(self, rule: Rule, clamp: Clamp) -> None:
        """Bound a number, in every spelling of the key that is there."""
        node = self._node(clamp.target)
        for member in _spellings(node, clamp.target):
            if not _NUMBER.match(member.value):
                continue
            number = float(member.value)
            if clamp.min is not None and number < clamp.min:
                member.value = clamp.min_text.encode()
            elif clamp.max is not None and number > clamp.max:
                member.value = clamp.max_text.encode()
            else:
                continue
            self._record("clamp", _path(clamp.target, member.key), rule)

    def force(self, rule: Rule, force: Force) -> None:
        """Set a value. Of overlapping paths the first one counts."""
        keys = force.target.keys
        if any(_overlap(keys, earlier) for earlier in self._forced):
            return
        self._forced.append(keys)
        node = self._root()
        for key in keys[:-1]:
            member = node.get(key) or node.insert(key, b"{}")
            child = member.open()
            if child is None:
                member.value = b"{}"
                child = member.open()
                assert child is not None
            node = child
        members = _spellings(node, force.target)
        if not members:
            node.insert(keys[-1], force.value.encode())
            self._record("force", force.target.text, rule)
        for member in members:
            if member.value != force.value.encode():
                member.value = force.value.encode()
                self._record("force", _path(force.target, member.key), rule)

    def reject(self, rule: Rule) -> None:
        self._record("reject", rule.name, rule)

    def _fill(self, rule: Rule, node: ObjectNode, fill: Fill, prefix: str) -> None:
        path = prefix + fill.key
        if fill.key not in node.claimed:
            node.insert(fill.key, fill.value.encode())
            self._record("default", path, rule)
            return
        member = node.get(fill.key)
        child = member.open() if member and fill.members else None
        # An empty object is an answer too.
        if child is not None and child.claimed:
            for inner in fill.members:
                self._fill(rule, child, inner, f"{path}.")

    def _root(self) -> ObjectNode:
        if self._document is None:
            self._document = Document(self._body)
        return self._document.root

    def _node(self, target: Target) -> ObjectNode | None:
        """The object that holds the last key of the target."""
        node: ObjectNode | None = self._root()
        for key in target.keys[:-1]:
            member = node.get(key) if node else None
            node = member.open() if member else None
        return node

    def _record(self, kind: str, path: str, rule: Rule) -> None:
        self.actions.append(Action(kind, path, rule.name))


def _spellings(node: ObjectNode | None, target: Target) -> list[Member]:
    """The members that mean the target's last key."""
    if node is None:
        return []
    key = target.keys[-1]
    names = ALIASES.get(key, (key,)) if len(target.keys) == 1 else (key,)
    members = [node.get(name) for name in names]
    return [member for member in members if member is not None]


def _path(target: Target, key: str) -> str:
    """The target as this client spells it."""
    return target.text if key == target.keys[-1] else key


def _overlap(one: tuple[str, ...], other: tuple[str, ...]) -> bool:
    length = min(len(one), len(other))
    return one[:length] == other[:length] or (
        length == 1 and one[0] in ALIASES and other[0] in ALIASES[one[0]]
    )
