"""One body, two engines: Python behind Starlette, and Lua in the real nginx.

What must differ between the two paths, and is set aside here: the framing that each server
makes anew (host, content-length, connection), and the request id that nginx gives to requests
that came without one. The order of different header fields has no meaning; that of repeated
ones is kept.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.rules.loader import load
from gateway.rules.model import RuleSet
from tests.rules.bodies import BODIES, broken_bodies, long_bodies
from tests.rules.nginx import Nginx, run_nginx
from tests.rules.python_edge import KEYS, run_python_edge
from tests.rules.wire import Answer, Background, Client, Header, Received, upstream

RULE_FILES = sorted((Path(__file__).parent / "rulesets").glob("*.yaml"))
# Longer bodies reach the Lua code in a file.
_BUFFER_BYTES = 16 * 1024
_REMADE = ("host", "content-length", "connection")

HEADERS = st.lists(
    st.sampled_from(
        [
            ("Authorization", "Bearer k-ada"),
            ("AUTHORIZATION", "Bearer k-bob"),
            ("Proxy-Authorization", "Basic eDp5"),
            ("Connection", "keep-alive, X-Trace-Secret , x-app-b"),
            ("X-Trace-Secret", "1"),
            ("Cookie", "a=b"),
            ("Cookie", "c=d"),
            ("x-internal-tenant", "t1"),
            ("X-Tenant", "t1-eu"),
            ("X-Tenant", "blocked"),
            ("X-Tenant", ""),
            ("x-app-a", "1"),
            ("X-App-A", "2"),
            ("x-app-b", "3"),
            ("x-app-secret", "s"),
            ("X-App_Under", "4"),
            ("TE", "trailers"),
            ("X-Stainless-Lang", "python"),
            ("X-Pdmesh-Param-Actions", "forged"),
            ("X-Api-Key", "k"),
            ("User-Agent", "test/1.0 (a; b)"),
            ("Accept", "*/*"),
            ("Accept-Encoding", "identity"),
            ("X-Request-Id", "abc-1"),
            ("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"),
        ]
    ),
    max_size=6,
    unique_by=lambda header: (header[0], header[1]),
).map(lambda headers: _without_second_key(headers))
CONTENT_TYPES = st.sampled_from(
    ["application/json"] * 12
    + ["application/json; charset=utf-8", "application/vnd.x+json", None]
    + ["text/plain", 'application/json; charset="latin-1"']
)
ROUTES = st.sampled_from(["/v1/chat/completions", "/v1/completions", "/tokenize", "/v2/x"])


def _without_second_key(headers: list[Header]) -> list[Header]:
    """nginx refuses a request with two Authorization headers."""
    seen: set[str] = set()
    kept = []
    for name, value in headers:
        if name.lower() in ("authorization", "user-agent", "proxy-authorization"):
            if name.lower() in seen:
                continue
            seen.add(name.lower())
        kept.append((name, value))
    return kept


@dataclass
class Pair:
    """Both ways to one upstream, for one rule file."""

    name: str
    python: Client
    nginx: Client
    process: Nginx


@pytest.fixture(scope="module")
def pairs(background: Background, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Pair]]:
    rule_sets = [load(path) for path in RULE_FILES]
    with upstream(background) as port, run_python_edge(background, rule_sets, port) as ports:
        made: list[Pair] = []
        yield from _with_nginx(made, rule_sets, ports, port, tmp_path_factory)


def _with_nginx(
    made: list[Pair],
    rule_sets: list[RuleSet],
    ports: list[int],
    upstream_port: int,
    folders: pytest.TempPathFactory,
) -> Iterator[list[Pair]]:
    if len(made) == len(rule_sets):
        yield made
        return
    path = RULE_FILES[len(made)]
    with run_nginx(
        folders.mktemp(path.stem), rule_sets[len(made)], [upstream_port], KNOWN_KEYS
    ) as one:
        python, nginx = Client(ports[len(made)]), Client(one.port)
        made.append(Pair(path.stem, python, nginx, one))
        yield from _with_nginx(made, rule_sets, ports, upstream_port, folders)
        python.close()
        nginx.close()
        assert "[error]" not in one.log(), one.log()


def _key_map(variable: str, position: int) -> dict[str, str]:
    lines = " ".join(f'"{value}" "{names[position]}";' for value, names in KEYS.items())
    begin = f"map $http_authorization {variable} {{\n        default"
    return {begin: f"map $http_authorization {variable} {{\n        {lines} default"}


KNOWN_KEYS = {
    **_key_map("$pdmesh_key", 0),
    **_key_map("$pdmesh_key_group", 1),
    "client_body_buffer_size 128k;": f"client_body_buffer_size {_BUFFER_BYTES};",
}


def _normalised(received: Received, sent: list[Header]) -> tuple[object, ...]:
    has_id = any(name.lower() == "x-request-id" for name, _ in sent)
    headers: dict[str, list[str]] = {}
    for name, value in received.headers:
        if name not in _REMADE and (name != "x-request-id" or has_id):
            headers.setdefault(name, []).append(value)
    return received.method, received.path, headers, received.body


def _told(answer: Answer, sent: list[Header]) -> tuple[object, ...]:
    actions = answer.headers.get("x-pdmesh-param-actions")
    if answer.status != 200:
        return answer.status, answer.json(), actions
    return answer.status, _normalised(answer.received(), sent), actions


@settings(
    max_examples=500,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(
    body=st.one_of(*[BODIES] * 6, long_bodies(_BUFFER_BYTES), broken_bodies(), broken_bodies()),
    headers=HEADERS,
    content_type=CONTENT_TYPES,
    path=ROUTES,
    chunk_bytes=st.sampled_from([None, None, 1000, 16384]),
)
# GW-01 to GW-05, GW-08, GW-10, GW-11, GW-25, NG-01 to NG-04
@pytest.mark.timeout(300)
def test_both_engines_forward_the_same_bytes_and_headers(
    pairs: list[Pair],
    body: bytes,
    headers: list[Header],
    content_type: str | None,
    path: str,
    chunk_bytes: int | None,
) -> None:
    if content_type is not None:
        headers = [*headers, ("Content-Type", content_type)]
    for pair in pairs:
        for client in (pair.nginx, pair.python):
            client.ask(body, path, "POST", headers, chunk_bytes)

        python, nginx = pair.python.answer(), pair.nginx.answer()

        assert _told(nginx, headers) == _told(python, headers), pair.name
