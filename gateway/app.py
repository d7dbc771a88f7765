"""The gateway as a process: the REST API and InferenceService in one event loop."""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Iterator

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from gateway.config import GatewayConfig
from gateway.core import Core, open_core
from gateway.errors import to_answer
from gateway.http_protocol import http_protocol
from gateway.inference import InferenceServicer
from gateway.keys.access import KeyMiddleware
from gateway.limits.headers import RATE_LIMIT_HEADERS
from gateway.middleware import DisconnectMiddleware, RequestIdMiddleware
from gateway.routes import build_routes
from gateway.rules.engine import ACTIONS_HEADER
from mesh.errors import MeshError, WorkerUnavailable
from mesh.server import MeshServer, serve
from mesh.v1 import inference_pb2, inference_pb2_grpc

logger = logging.getLogger(__name__)

# Of the time to drain, kept for telling those who are still waiting.
_FAREWELL_S = 1.0
_BACKLOG = 2048
# To scripts of other sites, where `cors_origins` lets them call.
_EXPOSED_HEADERS = [
    "x-request-id",
    "retry-after",
    "server-timing",
    ACTIONS_HEADER,
    *RATE_LIMIT_HEADERS,
]


def build_app(core: Core) -> Starlette:
    """The ASGI application."""
    return Starlette(
        routes=build_routes(core),
        middleware=_middleware(core),
        exception_handlers={HTTPException: _answer_error, MeshError: _answer_error},
    )


def _middleware(core: Core) -> list[Middleware]:
    """From the outside in."""
    outermost = [Middleware(RequestIdMiddleware)]
    if origins := core.config.cors_origins:
        # Outside of keys: a browser asks for permission without one.
        cors = Middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=_EXPOSED_HEADERS,
        )
        outermost.append(cors)
    return [*outermost, Middleware(KeyMiddleware, keys=core.keys), Middleware(DisconnectMiddleware)]


async def _answer_error(request: Request, error: Exception) -> Response:
    answer = to_answer(error)
    return JSONResponse(answer.body, answer.status, answer.headers)


class RestServer:
    """uvicorn on this process's loop; signals are somebody else's business."""

    def __init__(self, core: Core) -> None:
        config = core.config
        self._core = core
        self._server = _Server(
            uvicorn.Config(
                build_app(core),
                host=config.host,
                port=config.port,
                http=http_protocol(
                    max_header_bytes=config.max_header_bytes,
                    header_timeout_s=config.header_timeout_s,
                    client_timeout_s=config.client_timeout_s,
                    max_connections=config.max_connections,
                ),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                # A pipelined request must not inherit the id and trace of the one before it.
                reset_contextvars=True,
                timeout_graceful_shutdown=1,
            )
        )
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Listen; returns the bound "host:port"."""
        host, port = self._core.config.host, self._core.config.port
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        except OSError as error:
            raise SystemExit(f"cannot listen on {host} port {port}: {error.strerror}") from error
        bound_host, bound_port = listener.getsockname()[:2]
        address = (
            f"[{bound_host}]:{bound_port}" if ":" in bound_host else f"{bound_host}:{bound_port}"
        )
        self._serving = asyncio.create_task(self._server.serve([listener]), name="rest")
        logger.info("serving REST", extra={"address": address})
        return address

    async def drain(self) -> None:
        """Refuse new requests, let running ones finish, then end the rest with an error."""
        self._core.health.drain()
        self._core.in_flight.drain()
        self._server.refuse()
        try:
            async with asyncio.timeout(max(0.0, self._core.config.drain_timeout_s - _FAREWELL_S)):
                await self._core.in_flight.wait_idle()
        except TimeoutError:
            logger.warning("ending requests", extra={"requests": self._core.in_flight.num_requests})
            self._core.in_flight.fail(WorkerUnavailable("the gateway is shutting down"))
            await self._core.in_flight.wait_idle()

    async def stop(self) -> None:
        """End every connection."""
        self._server.should_exit = True
        if self._serving is not None:
            await asyncio.wait({self._serving})


class _Server(uvicorn.Server):
    def refuse(self) -> None:
        """Take no new connections, and close each that there is after the answer under way.

        Not uvicorn's own end, which soon cancels what still runs.
        """
        if not self.started:
            # Nobody was let in yet, and nobody will be.
            self.should_exit = True
            return
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def run(config: GatewayConfig) -> None:
    """Serve until a signal, then drain. Raises RulesInvalid, or KeyBookError."""
    async with open_core(config) as core:
        if config.rules_path is not None:
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, core.rules.reload_soon)
        rest = RestServer(core)
        server = MeshServer(config.inference_listen)
        server.add(
            inference_pb2_grpc.add_InferenceServiceServicer_to_server,
            InferenceServicer(core),
            inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name,
        )
        try:
            # First: once gRPC answers, whoever looks after this process takes what answers at
            # the REST port for it, and that may be another program.
            await rest.start()
            await serve(
                server,
                drain=rest.drain,
                drain_timeout_s=config.drain_timeout_s,
                parent_pid=config.parent_pid,
            )
        finally:
            await rest.stop()
