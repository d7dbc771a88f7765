"""When a rule applies: tests of the request as the client sent it."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from gateway.rules.paths import Glob, Path, values_at

# Two spellings of one parameter. Whoever sees one of them sees the other.
ALIASES: dict[str, tuple[str, ...]] = {
    name: names
    for names in (("max_tokens", "max_completion_tokens"), ("stop", "stop_sequences"))
    for name in names
}

JSON_TYPES = ("null", "boolean", "number", "string", "array", "object")

JsonType = Literal["null", "boolean", "number", "string", "array", "object"]


@dataclass(frozen=True)
class Facts:
    """What conditions see of a request."""

    route: str
    # The name that the client sent; None when it sent none, or no string.
    model: str | None
    # The name after `rewrite_model`.
    served_model: str | None
    payload: Mapping[str, Any]
    # Lower-case names.
    headers: Mapping[str, tuple[str, ...]]
    # The caller's API key by name, and its group; empty when unknown.
    key: str = ""
    key_group: str = ""


@dataclass(frozen=True)
class Test:
    """Holds when one of the values at the path passes every test."""

    path: Path
    exists: bool = True
    # Canonical texts.
    one_of: tuple[str, ...] | None = None
    like: tuple[Glob, ...] | None = None
    type: JsonType | None = None
    gt: float | None = None
    gte: float | None = None
    lt: float | None = None
    lte: float | None = None

    def holds(self, payload: Mapping[str, Any]) -> bool:
        passed = any(self._passes(value) for value in self._values(payload))
        return passed if self.exists else not passed

    def _values(self, payload: Mapping[str, Any]) -> Iterable[Any]:
        first = self.path.steps[0]
        if isinstance(first, str):
            for name in ALIASES.get(first, (first,)):
                if name in payload:
                    yield from values_at(payload[name], self.path.steps[1:])

    def _passes(self, value: Any) -> bool:
        return (
            (self.type is None or json_type(value) == self.type)
            and (self.one_of is None or canonical(value) in self.one_of)
            and (self.like is None or _is_like(value, self.like))
            and self._is_in_range(value)
        )

    def _is_in_range(self, value: Any) -> bool:
        if self.gt is None and self.gte is None and self.lt is None and self.lte is None:
            return True
        number = to_double(value)
        return number is not None and (
            (self.gt is None or number > self.gt)
            and (self.gte is None or number >= self.gte)
            and (self.lt is None or number < self.lt)
            and (self.lte is None or number <= self.lte)
        )


@dataclass(frozen=True)
class Combination:
    """`all`, `any` or `not` of other predicates."""

    op: Literal["all", "any", "not"]
    of: "tuple[Predicate, ...]"

    def holds(self, payload: Mapping[str, Any]) -> bool:
        if self.op == "all":
            return all(predicate.holds(payload) for predicate in self.of)
        some = any(predicate.holds(payload) for predicate in self.of)
        return some if self.op == "any" else not some


Predicate = Test | Combination


@dataclass(frozen=True)
class HeaderTest:
    """A header that is there (with one of some values), or is not."""

    name: str
    present: bool = True
    globs: tuple[Glob, ...] | None = None

    def holds(self, headers: Mapping[str, tuple[str, ...]]) -> bool:
        values = headers.get(self.name, ())
        if self.globs is None:
            return bool(values) == self.present
        return any(glob.matches(value) for value in values for glob in self.globs)


@dataclass(frozen=True)
class When:
    """All of it must hold; None is no condition."""

    model: tuple[Glob, ...] | None = None
    served_model: tuple[Glob, ...] | None = None
    route: tuple[Glob, ...] | None = None
    key: tuple[Glob, ...] | None = None
    key_group: tuple[Glob, ...] | None = None
    headers: tuple[HeaderTest, ...] = ()
    body: Predicate | None = field(default=None)

    def holds(self, facts: Facts) -> bool:
        return (
            _matches(self.route, facts.route)
            and _matches(self.model, facts.model)
            and _matches(self.served_model, facts.served_model)
            and _matches(self.key, facts.key or None)
            and _matches(self.key_group, facts.key_group or None)
            and all(test.holds(facts.headers) for test in self.headers)
            and (self.body is None or self.body.holds(facts.payload))
        )


def canonical(value: Any) -> str:
    """One text for all spellings of a JSON value; numbers are compared as doubles."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f"{len(value.encode())}:{value}"
    if isinstance(value, list):
        return f"[{','.join(map(canonical, value))}]"
    if isinstance(value, dict):
        items = sorted((canonical(key), canonical(one)) for key, one in value.items())
        return f"{{{','.join(f'{key}={one}' for key, one in items)}}}"
    # -0 equals 0.
    return f"{_to_double(value) + 0.0:.17g}"


def json_type(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, str):
        return "string"
    if isinstance(value, list):
        return "array"
    return "object" if isinstance(value, dict) else "number"


def to_double(value: Any) -> float | None:
    """A JSON number as a double; None for everything else."""
    return _to_double(value) if json_type(value) == "number" else None


def _to_double(number: int | float) -> float:
    try:
        return float(number)
    except OverflowError:
        return float("inf") if number > 0 else float("-inf")


def _matches(globs: tuple[Glob, ...] | None, text: str | None) -> bool:
    return globs is None or (text is not None and any(glob.matches(text) for glob in globs))


def _is_like(value: Any, globs: tuple[Glob, ...]) -> bool:
    return isinstance(value, str) and any(glob.matches(value) for glob in globs)
