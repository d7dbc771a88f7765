"""Applying rules to one request: bytes in, bytes out, and what was done.

Kinds act in this order, whatever their order in the file: rewrite_model, rename, drop,
default, clamp, force, reject. `deploy/openresty/lua/pdmesh/engine.lua` is this file in Lua.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gateway.rules import headers as header_rules
from gateway.rules.conditions import Facts
from gateway.rules.edits import Edits
from gateway.rules.headers import Header
from gateway.rules.model import Action, Rule, RuleSet

ACTIONS_HEADER = "x-pdmesh-param-actions"
_MAX_ACTIONS_BYTES = 1024
_UNSAFE = re.compile(rb"[^A-Za-z0-9_.:/>\[\]-]")


@dataclass(frozen=True)
class RuleRequest:
    """A request as the client sent it. `payload` is what `body` says, already validated."""

    body: bytes
    payload: Mapping[str, Any]
    route: str
    headers: Sequence[Header] = ()
    # The caller's API key by name, and its group.
    key: str = ""
    key_group: str = ""


@dataclass(frozen=True)
class Rejection:
    """The answer that a `reject` rule gives."""

    status: int
    message: str
    code: str | None
    param: str | None


@dataclass(frozen=True)
class Outcome:
    """What is forwarded, or the refusal, and the actions in the order they were taken."""

    body: bytes
    headers: tuple[Header, ...]
    actions: tuple[Action, ...] = ()
    rejection: Rejection | None = None


def apply(rules: RuleSet, request: RuleRequest) -> Outcome:
    """Apply the rules; a body that none of them touches comes back as the same object."""
    facts = _facts(request)
    edits = Edits(request.body)
    facts = _rewrite_model(rules, facts, edits)
    matched = [rule for rule in rules.rules if rule.when.holds(facts)]
    _edit(matched, edits)
    rejection = _reject(matched, request, edits)
    headers, header_actions = header_rules.forwarded(request.headers, rules, matched)
    return Outcome(edits.render(), tuple(headers), (*edits.actions, *header_actions), rejection)


def forward(rules: RuleSet, request: RuleRequest) -> Outcome:
    """For requests without a body: only headers are decided about."""
    facts = _facts(request)
    matched = [rule for rule in rules.rules if rule.when.holds(facts)]
    headers, actions = header_rules.forwarded(request.headers, rules, matched)
    return Outcome(request.body, tuple(headers), tuple(actions))


def actions_header(actions: Sequence[Action]) -> str:
    """The value of `x-pdmesh-param-actions`: bounded, and safe in a header."""
    parts: list[str] = []
    room = _MAX_ACTIONS_BYTES
    for index, action in enumerate(actions):
        text = _UNSAFE.sub(_percent, str(action).encode()).decode()
        room -= len(text) + 2
        if room < 0:
            parts.append(f"+{len(actions) - index}")
            break
        parts.append(text)
    return ", ".join(parts)


def _facts(request: RuleRequest) -> Facts:
    model = request.payload.get("model")
    if not isinstance(model, str):
        model = None
    return Facts(
        route=request.route,
        model=model,
        served_model=model,
        payload=request.payload,
        headers=header_rules.index(request.headers),
        key=request.key,
        key_group=request.key_group,
    )


def _rewrite_model(rules: RuleSet, facts: Facts, edits: Edits) -> Facts:
    """The first matching rule that has a name for the client's model gives the new one."""
    if facts.model is None:
        return facts
    for rule in rules.rules:
        if not rule.rewrite_model or not rule.when.holds(facts):
            continue
        for rewrite in rule.rewrite_model:
            if rewrite.glob.matches(facts.model):
                if rewrite.name != facts.model:
                    edits.rewrite_model(rule, rewrite.name)
                return replace(facts, served_model=rewrite.name)
    return facts


def _edit(matched: Sequence[Rule], edits: Edits) -> None:
    for rule in matched:
        for rename in rule.rename:
            edits.rename(rule, rename)
    for rule in matched:
        for target in rule.drop:
            edits.drop(rule, target)
    for rule in matched:
        if rule.default:
            edits.default(rule, rule.default)
    for rule in matched:
        for clamp in rule.clamp:
            edits.clamp(rule, clamp)
    for rule in matched:
        for force in rule.force:
            edits.force(rule, force)


def _reject(matched: Sequence[Rule], request: RuleRequest, edits: Edits) -> Rejection | None:
    for rule in matched:
        reject = rule.reject
        if reject is None:
            continue
        if reject.condition is not None:
            payload = edits.payload() if edits.actions else request.payload
            if not reject.condition.holds(payload):
                continue
        edits.reject(rule)
        return Rejection(reject.status, reject.message, reject.code, reject.param)
    return None


def _percent(match: re.Match[bytes]) -> bytes:
    return b"%%%02X" % match.group()[0]
