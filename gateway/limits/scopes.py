"""Questions to limits and their answers, whoever decides."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from gateway.keys.model import Caller, Limits
from gateway.limits.scripts import ScopeKeys, scope_keys

LimitName = Literal["requests", "tokens", "concurrency"]

NEVER = -1
_NUM_RESULTS_OF_SCOPE = 4


@dataclass(frozen=True)
class Scope:
    """Limits that count together: those of a key, or of all keys of a group."""

    keys: ScopeKeys
    limits: Limits
    # For people.
    name: str

    def arguments(self) -> list[int]:
        """As the scripts want them: 0 is no limit."""
        limits = self.limits
        return [
            limits.requests_per_minute or 0,
            limits.tokens_per_minute or 0,
            limits.max_concurrency or 0,
        ]


@dataclass(frozen=True)
class Level:
    """What a scope has left after a decision."""

    requests: int
    requests_full_ms: int
    tokens: int
    tokens_full_ms: int


@dataclass(frozen=True)
class Verdict:
    """A decision about one request."""

    is_admitted: bool
    # What refused it, if something did.
    limit: LimitName | None
    scope_index: int
    # Until another try can succeed, or NEVER.
    wait_ms: int
    levels: tuple[Level, ...]

    @classmethod
    def parse(cls, answer: Sequence[int | bytes]) -> "Verdict":
        """What the script answers."""
        admitted, limit, scope_index, wait_ms, *rest = answer
        numbers = [int(number) for number in rest]
        names: dict[bytes, LimitName] = {
            b"requests": "requests",
            b"tokens": "tokens",
            b"concurrency": "concurrency",
        }
        assert isinstance(limit, bytes), "the script answers a text here"
        return cls(
            is_admitted=bool(admitted),
            limit=names.get(limit),
            scope_index=int(scope_index),
            wait_ms=int(wait_ms),
            levels=tuple(
                Level(*numbers[at : at + _NUM_RESULTS_OF_SCOPE])
                for at in range(0, len(numbers), _NUM_RESULTS_OF_SCOPE)
            ),
        )


class Decider(Protocol):
    """Counts what scopes have used. `gateway.limits.scripts` says how."""

    async def admit(self, lease: str, num_tokens: int, scopes: Sequence[Scope]) -> Verdict: ...

    async def settle(self, lease: str, surplus: int, scopes: Sequence[Scope]) -> None:
        """The request is over; it used `surplus` tokens less than it had reserved."""
        ...


def scopes_of(caller: Caller) -> tuple[Scope, ...]:
    """Those that limit this caller; most callers have one or none."""
    scopes = []
    if caller.key_limits:
        keys = scope_keys(caller.group, caller.key_id)
        scopes.append(Scope(keys, caller.key_limits, f"key {caller.key}"))
    if caller.group_limits:
        scopes.append(Scope(scope_keys(caller.group), caller.group_limits, f"group {caller.group}"))
    return tuple(scopes)
