"""Which request headers travel on, and which names rules may not touch.

`deploy/openresty/lua/pdmesh/headers.lua` applies the same lists, compiled into its rules.
"""

import re
from collections.abc import Iterable, Sequence

from gateway.rules.model import Action, Rule, RuleSet
from gateway.rules.paths import Glob

Header = tuple[str, str]

# Names with an underscore are refused: nginx drops such headers, and CGI would confuse them.
NAME = re.compile(r"[a-z0-9!#$%&'+.^`|~-]+")
VALUE = re.compile(r"[\x21-\x7e](?:[\x20-\x7e]*[\x21-\x7e])?")

# Forwarded without being asked for.
FORWARDED = (
    "accept",
    "accept-language",
    "content-type",
    "traceparent",
    "tracestate",
    "user-agent",
    "x-request-id",
)

HOP_BY_HOP = (
    "connection",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
)
# They describe this connection or this body, and are made anew for the next.
_FRAMING = ("accept-encoding", "content-encoding", "content-length", "expect", "host")
NEVER = (*HOP_BY_HOP, *_FRAMING, "cookie", "cookie2", "set-cookie")
# Ours, or telemetry about the client's machine.
NEVER_PREFIXES = ("x-pdmesh-", "x-stainless-")
# They pass only when the rules file spells them out; no glob reaches them.
CREDENTIALS = ("api-key", "authorization", "x-api-key", "x-goog-api-key")

_RESERVED = (*NEVER, *CREDENTIALS, "content-type", "traceparent", "tracestate", "x-request-id")


def is_reserved(name: str) -> bool:
    """Whether rules may neither set nor remove the header."""
    return name in _RESERVED or name.startswith(NEVER_PREFIXES)


def can_be_allowed(name: str) -> bool:
    """Whether the rules file may let the header pass."""
    return name not in NEVER and not name.startswith(NEVER_PREFIXES)


def index(headers: Iterable[Header]) -> dict[str, tuple[str, ...]]:
    """All values of each header, by lower-case name."""
    found: dict[str, tuple[str, ...]] = {}
    for name, value in headers:
        lower = name.lower()
        if "_" not in lower:
            found[lower] = (*found.get(lower, ()), value)
    return found


def forwarded(
    headers: Sequence[Header], rules: RuleSet, matched: Sequence[Rule]
) -> tuple[list[Header], list[Action]]:
    """The headers to send on, and the actions taken for rules.

    The first matching rule in file order that names a header decides about it.
    """
    listed = _named_by_connection(headers)
    passing = [
        (name.lower(), value)
        for name, value in headers
        if _passes(name.lower(), listed, rules.forward_headers)
    ]
    present = {name for name, _ in passing}
    actions: list[Action] = []
    changes: dict[str, str | None] = {}
    for rule in matched:
        for name in rule.remove_headers:
            if name not in changes:
                changes[name] = None
                if name in present:
                    actions.append(Action("remove_header", name, rule.name))
        for header in rule.set_headers:
            if header.name not in changes:
                changes[header.name] = header.value
                actions.append(Action("set_header", header.name, rule.name))
    kept = [(name, value) for name, value in passing if name not in changes]
    added = [(name, value) for name, value in changes.items() if value is not None]
    return kept + added, actions


def _named_by_connection(headers: Iterable[Header]) -> frozenset[str]:
    return frozenset(
        option.strip().lower()
        for name, value in headers
        if name.lower() == "connection"
        for option in value.split(",")
    )


def _passes(name: str, listed: frozenset[str], allowed: tuple[Glob, ...]) -> bool:
    if name in listed or "_" in name or not can_be_allowed(name):
        return False
    if name in FORWARDED:
        return True
    if name in CREDENTIALS:
        return Glob((name,)) in allowed
    return any(glob.matches(name) for glob in allowed)
