"""The Python engine behind Starlette and uvicorn: one listening socket for each rule set."""

import asyncio
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from gateway.body import parse_object, read_body
from gateway.errors import envelope, to_answer
from gateway.rules.engine import ACTIONS_HEADER, RuleRequest, actions_header, apply, forward
from gateway.rules.model import RuleSet
from gateway.rules.scanner import find_problem
from mesh.errors import InvalidRequest
from tests.rules.wire import Background
from tests.rules.wire import forward as send_on

MAX_BODY_BYTES = 10 * 1024 * 1024
# The keys that the tests' nginx.conf knows too.
KEYS = {"Bearer k-ada": ("ada", "research"), "Bearer k-bob": ("bob", "batch")}


def _build(rules_by_port: dict[int, RuleSet], upstream_port: int) -> Starlette:
    async def handle(request: Request) -> Response:
        rules = rules_by_port[request.scope["server"][1]]
        headers = [(n.decode("latin-1"), v.decode("latin-1")) for n, v in request.headers.raw]
        key, key_group = KEYS.get(request.headers.get("authorization", ""), ("", ""))
        body = b""
        try:
            body = await read_body(request.headers, request.receive, MAX_BODY_BYTES, 10)
            has_body = bool(body) or request.method in ("POST", "PUT", "PATCH")
            payload = parse_object(body) if has_body else {}
        except InvalidRequest as error:
            answer = to_answer(error)
            # The gateway's own parser has other words for the same faults.
            message = find_problem(body) if type(error) is InvalidRequest else str(error)
            told = answer.body["error"]
            return JSONResponse(
                envelope(message or "", type=told["type"], param=told["param"], code=told["code"]),
                answer.status,
            )
        asked = RuleRequest(body, payload, request.url.path, headers, key, key_group)
        outcome = apply(rules, asked) if has_body else forward(rules, asked)
        told_headers = {}
        if outcome.actions:
            told_headers[ACTIONS_HEADER] = actions_header(outcome.actions)
        if outcome.rejection is not None:
            rejection = outcome.rejection
            kind = "rate_limit_error" if rejection.status == 429 else "invalid_request_error"
            refusal = envelope(
                rejection.message, type=kind, param=rejection.param, code=rejection.code
            )
            return JSONResponse(refusal, rejection.status, told_headers)
        echoed = await send_on(
            upstream_port, request.method, request.url.path, list(outcome.headers), outcome.body
        )
        return Response(
            echoed.body, echoed.status, told_headers, echoed.headers.get("content-type")
        )

    methods = ["GET", "POST", "PUT", "PATCH", "DELETE"]
    return Starlette(routes=[Route("/{path:path}", handle, methods=methods)])


def _listener() -> socket.socket:
    # asyncio switches Nagle's algorithm off only where the protocol is named.
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    return listener


@contextmanager
def run_python_edge(
    background: Background, rule_sets: Sequence[RuleSet], upstream_port: int
) -> Iterator[list[int]]:
    """Yields the port of each rule set."""
    sockets = [_listener() for _ in rule_sets]
    ports = [one.getsockname()[1] for one in sockets]
    server = uvicorn.Server(
        uvicorn.Config(
            _build(dict(zip(ports, rule_sets, strict=True)), upstream_port),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_keep_alive=120,
        )
    )

    async def serve() -> None:
        config = server.config
        config.load()
        server.lifespan = config.lifespan_class(config)
        await server.startup(sockets=sockets)

    async def stop() -> None:
        server.force_exit = True
        await asyncio.wait_for(server.shutdown(sockets=sockets), 10)

    background.run(serve())
    try:
        yield ports
    finally:
        background.run(stop())
