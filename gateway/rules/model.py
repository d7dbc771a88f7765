"""A rules file, understood: plain data for the engine and for the Lua compiler."""

from dataclasses import dataclass, field

from gateway.rules.conditions import Predicate, When
from gateway.rules.paths import Glob


@dataclass(frozen=True)
class Target:
    """Where an edit goes: keys of nested objects, from the root."""

    text: str
    keys: tuple[str, ...]


@dataclass(frozen=True)
class ModelRewrite:
    """The first glob that matches the client's name gives the new one."""

    glob: Glob
    name: str


@dataclass(frozen=True)
class Rename:
    target: Target
    new_key: str


@dataclass(frozen=True)
class Fill:
    """A default for one key. An object's members are filled one by one."""

    key: str
    # The value as JSON.
    value: str
    members: "tuple[Fill, ...]" = ()


@dataclass(frozen=True)
class Clamp:
    """Bounds with the text that replaces what lies outside."""

    target: Target
    min: float | None = None
    min_text: str = ""
    max: float | None = None
    max_text: str = ""


@dataclass(frozen=True)
class Force:
    target: Target
    # The value as JSON.
    value: str


@dataclass(frozen=True)
class Reject:
    """The answer instead of the model's; `condition` sees the body as it would be forwarded."""

    message: str
    status: int = 400
    code: str | None = None
    param: str | None = None
    condition: Predicate | None = None


@dataclass(frozen=True)
class SetHeader:
    name: str
    value: str


@dataclass(frozen=True)
class Rule:
    """What to do with the requests that `when` holds for."""

    name: str
    when: When = field(default_factory=When)
    rewrite_model: tuple[ModelRewrite, ...] = ()
    rename: tuple[Rename, ...] = ()
    drop: tuple[Target, ...] = ()
    default: tuple[Fill, ...] = ()
    clamp: tuple[Clamp, ...] = ()
    force: tuple[Force, ...] = ()
    reject: Reject | None = None
    set_headers: tuple[SetHeader, ...] = ()
    remove_headers: tuple[str, ...] = ()


@dataclass(frozen=True)
class RuleSet:
    """All rules in file order, and the headers that pass besides the usual ones."""

    rules: tuple[Rule, ...] = ()
    forward_headers: tuple[Glob, ...] = ()


@dataclass(frozen=True)
class Action:
    """One thing that a rule did to a request."""

    kind: str
    path: str
    rule: str

    def __str__(self) -> str:
        return f"{self.kind}:{self.path}"
