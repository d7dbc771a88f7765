"""OpenAI's x-ratelimit headers."""

from collections.abc import Sequence

from gateway.limits.scopes import Level, Scope, Verdict

RATE_LIMIT_HEADERS = tuple(
    f"x-ratelimit-{what}-{kind}"
    for what in ("limit", "remaining", "reset")
    for kind in ("requests", "tokens")
)

_MS = 1
_S = 1000 * _MS
_MINUTE = 60 * _S


def limit_headers(scopes: Sequence[Scope], verdict: Verdict) -> dict[str, str]:
    """Of each kind of limit, the one of which the smallest part is left."""
    headers: dict[str, str] = {}
    pairs = list(zip(scopes, verdict.levels, strict=True))
    for kind in ("requests", "tokens"):
        limited = [
            (limit, *_left(level, kind))
            for scope, level in pairs
            if (limit := getattr(scope.limits, f"{kind}_per_minute")) is not None
        ]
        if not limited:
            continue
        limit, left, full_ms = min(limited, key=lambda one: one[1] / one[0])
        headers[f"x-ratelimit-limit-{kind}"] = str(limit)
        headers[f"x-ratelimit-remaining-{kind}"] = str(left)
        headers[f"x-ratelimit-reset-{kind}"] = duration(full_ms)
    return headers


def duration(ms: int) -> str:
    """As OpenAI writes it: 6m0s, 1.5s, 20ms."""
    if ms < _S:
        return f"{max(0, ms)}ms"
    if ms < _MINUTE:
        return f"{ms / _S:.3f}".rstrip("0").rstrip(".") + "s"
    # Rounded up: who comes back then finds what was promised.
    seconds = -(-ms // _S)
    return f"{seconds // 60}m{seconds % 60}s"


def _left(level: Level, kind: str) -> tuple[int, int]:
    if kind == "requests":
        return level.requests, level.requests_full_ms
    return level.tokens, level.tokens_full_ms
