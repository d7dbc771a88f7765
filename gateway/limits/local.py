"""Limits that one gateway counts by itself, while Redis does not answer."""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gateway.limits.scopes import NEVER, Level, LimitName, Scope, Verdict

_MINUTE_MS = 60_000
_SLOT_WAIT_MS = 1000


@dataclass
class _State:
    """None is full."""

    requests: float | None = None
    tokens: float | None = None
    at: float = 0.0
    leases: dict[str, float] = field(default_factory=dict)


class LocalLimits:
    """`gateway.limits.scripts` in Python: the same decisions from the same numbers."""

    def __init__(
        self, *, lease_ms: int, clock_ms: Callable[[], float] = lambda: time.monotonic() * 1000
    ) -> None:
        self._lease_ms = lease_ms
        self._clock_ms = clock_ms
        # One for each key and group that has limits.
        self._states: dict[str, _State] = {}

    def forget(self) -> None:
        """Everything is full, and nobody is running."""
        self._states.clear()

    async def admit(self, lease: str, num_tokens: int, scopes: Sequence[Scope]) -> Verdict:
        now = self._clock_ms()
        states = [self._risen(scope, now) for scope in scopes]
        limit, index, wait_ms = _refusal(num_tokens, scopes, states)
        if limit is None:
            for scope, state in zip(scopes, states, strict=True):
                self._take(lease, num_tokens, scope, state, now)
        return Verdict(
            is_admitted=limit is None,
            limit=limit,
            scope_index=index,
            wait_ms=wait_ms,
            levels=tuple(map(_level, scopes, states)),
        )

    async def settle(self, lease: str, surplus: int, scopes: Sequence[Scope]) -> None:
        now = self._clock_ms()
        for scope in scopes:
            state = self._risen(scope, now)
            state.leases.pop(lease, None)
            maximum = scope.limits.tokens_per_minute
            if surplus and maximum is not None and state.tokens is not None:
                state.tokens = max(-maximum, min(maximum, state.tokens + surplus))
                self._states[scope.keys.bucket] = state

    def renew(self, lease: str, scope: Scope) -> None:
        """The request still runs."""
        state = self._states.get(scope.keys.bucket)
        if state is not None and lease in state.leases:
            state.leases[lease] = self._clock_ms() + self._lease_ms

    def _risen(self, scope: Scope, now: float) -> _State:
        """How it is now; only what changes more than time does is kept, as in Redis."""
        before = self._states.setdefault(scope.keys.bucket, _State(at=now))
        for lease in [one for one, ends in before.leases.items() if ends <= now]:
            del before.leases[lease]
        elapsed = now - before.at
        return _State(
            requests=_rise(before.requests, scope.limits.requests_per_minute, elapsed),
            tokens=_rise(before.tokens, scope.limits.tokens_per_minute, elapsed),
            at=now,
            leases=before.leases,
        )

    def _take(self, lease: str, num_tokens: int, scope: Scope, state: _State, now: float) -> None:
        if state.requests is not None:
            state.requests -= 1
        if state.tokens is not None:
            state.tokens -= num_tokens
        if scope.limits.max_concurrency is not None:
            state.leases[lease] = now + self._lease_ms
        self._states[scope.keys.bucket] = state


def _refusal(
    num_tokens: int, scopes: Sequence[Scope], states: Sequence[_State]
) -> tuple[LimitName | None, int, int]:
    """The limit that keeps a request waiting longest, where it is, and how long."""
    worst: tuple[LimitName | None, int, int] = (None, -1, 0)
    for index, (scope, state) in enumerate(zip(scopes, states, strict=True)):
        for limit, wait_ms in _waits(num_tokens, scope, state):
            if worst[0] is None or (worst[2] != NEVER and (wait_ms == NEVER or wait_ms > worst[2])):
                worst = (limit, index, wait_ms)
    return worst


def _waits(num_tokens: int, scope: Scope, state: _State) -> list[tuple[LimitName, int]]:
    limits = scope.limits
    waits: list[tuple[LimitName, int]] = []
    if limits.requests_per_minute and state.requests is not None and state.requests < 1:
        missing = 1 - state.requests
        waits.append(("requests", _time_for(missing, limits.requests_per_minute)))
    if limits.tokens_per_minute and state.tokens is not None and state.tokens < num_tokens:
        missing = num_tokens - state.tokens
        can_fit = num_tokens <= limits.tokens_per_minute
        wait_ms = _time_for(missing, limits.tokens_per_minute) if can_fit else NEVER
        waits.append(("tokens", wait_ms))
    if limits.max_concurrency and len(state.leases) >= limits.max_concurrency:
        waits.append(("concurrency", _SLOT_WAIT_MS))
    return waits


def _rise(level: float | None, limit: int | None, elapsed_ms: float) -> float | None:
    if limit is None:
        return None
    return limit if level is None else min(limit, level + elapsed_ms * limit / _MINUTE_MS)


def _time_for(amount: float, limit: int) -> int:
    return math.ceil(amount * _MINUTE_MS / limit)


def _level(scope: Scope, state: _State) -> Level:
    requests, tokens = state.requests or 0, state.tokens or 0
    limits = scope.limits
    max_requests, max_tokens = limits.requests_per_minute, limits.tokens_per_minute
    return Level(
        requests=max(0, math.floor(requests)),
        requests_full_ms=_time_for(max_requests - requests, max_requests) if max_requests else 0,
        tokens=max(0, math.floor(tokens)),
        tokens_full_ms=_time_for(max_tokens - tokens, max_tokens) if max_tokens else 0,
    )
