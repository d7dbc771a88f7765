"""Rules applied to decoded JSON, as simply as can be: what the engine must mean.

Edits only: conditions, headers and bytes are tested elsewhere.
"""

import copy
import json
from typing import Any

from gateway.rules.conditions import ALIASES
from gateway.rules.model import Clamp, Fill, Force, Rule, Target


def expected(rules: list[Rule], sent: dict[str, Any]) -> dict[str, Any]:
    """The body after rename, drop, default, clamp and force of rules that all match."""
    body = copy.deepcopy(sent)
    # What the client sent under any name that the operator gave it.
    sent_as = [copy.deepcopy(body)]
    for rule in rules:
        for rename in rule.rename:
            _rename(body, rename.target, rename.new_key)
            sent_as.append(copy.deepcopy(body))
    for rule in rules:
        for target in rule.drop:
            holder = _holder(body, target)
            if holder is not None:
                holder.pop(target.keys[-1], None)
    for rule in rules:
        for fill in rule.default:
            names = ALIASES.get(fill.key, ())
            if not any(name in one for name in names for one in (body, *sent_as)):
                _fill(body, sent_as, fill)
    for rule in rules:
        for clamp in rule.clamp:
            _clamp(body, clamp)
    forced: list[tuple[str, ...]] = []
    for rule in rules:
        for force in rule.force:
            _force(body, force, forced)
    return body


def _holder(body: Any, target: Target) -> dict[str, Any] | None:
    for key in target.keys[:-1]:
        body = body.get(key) if isinstance(body, dict) else None
    return body if isinstance(body, dict) else None


def _rename(body: dict[str, Any], target: Target, new_key: str) -> None:
    holder = _holder(body, target)
    if holder is not None and target.keys[-1] in holder and new_key not in holder:
        holder[new_key] = holder.pop(target.keys[-1])


def _fill(body: dict[str, Any], sent_as: list[dict[str, Any]], fill: Fill) -> None:
    sent = [one[fill.key] for one in sent_as if fill.key in one]
    if fill.key not in body:
        if not sent:
            body[fill.key] = json.loads(fill.value)
        return
    value = body[fill.key]
    inner = [one for one in sent if isinstance(one, dict)]
    was_empty = value == {} and not any(inner)
    if isinstance(value, dict) and not was_empty:
        for member in fill.members:
            _fill(value, inner, member)


def _spellings(holder: dict[str, Any], target: Target) -> list[str]:
    key = target.keys[-1]
    names = ALIASES.get(key, (key,)) if len(target.keys) == 1 else (key,)
    return [name for name in names if name in holder]


def _clamp(body: dict[str, Any], clamp: Clamp) -> None:
    holder = _holder(body, clamp.target)
    for name in _spellings(holder, clamp.target) if holder is not None else ():
        assert holder is not None
        value = holder[name]
        if isinstance(value, bool) or not isinstance(value, int | float):
            continue
        if clamp.min is not None and float(value) < clamp.min:
            holder[name] = json.loads(clamp.min_text)
        elif clamp.max is not None and float(value) > clamp.max:
            holder[name] = json.loads(clamp.max_text)


def _force(body: dict[str, Any], force: Force, forced: list[tuple[str, ...]]) -> None:
    keys = force.target.keys
    if any(_overlap(keys, earlier) for earlier in forced):
        return
    forced.append(keys)
    holder = body
    for key in keys[:-1]:
        if not isinstance(holder.get(key), dict):
            holder[key] = {}
        holder = holder[key]
    for name in _spellings(holder, force.target) or [keys[-1]]:
        holder[name] = json.loads(force.value)


def _overlap(one: tuple[str, ...], other: tuple[str, ...]) -> bool:
    one, other = (_slot(one), _slot(other))
    length = min(len(one), len(other))
    return one[:length] == other[:length]


def _slot(keys: tuple[str, ...]) -> tuple[str, ...]:
    return (ALIASES.get(keys[0], keys)[0], *keys[1:])
