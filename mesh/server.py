"""A gRPC server with health, reflection, signals and drain."""

import asyncio
import gc
import logging
import signal
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from mesh.client import DEFAULT_MAX_MESSAGE_BYTES, KEEPALIVE_OPTIONS
from mesh.interceptors import CallInterceptor
from mesh.local_calls.server import LocalCallServicer
from mesh.parent_death import die_with_parent
from mesh.probes import DRAINING
from mesh.v1 import local_call_pb2_grpc

logger = logging.getLogger(__name__)

# After a drain only stragglers are left; they get this long to end by themselves.
_STOP_GRACE_S = 1.0

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class MeshServer:
    """Owns a grpc.aio server; every service on it has the mesh's interceptors."""

    def __init__(
        self,
        address: str = "127.0.0.1:0",
        *,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    ) -> None:
        self._listen = address
        self._server = grpc.aio.server(
            interceptors=[CallInterceptor()], options=_options(max_message_bytes)
        )
        self._local_calls = LocalCallServicer(max_message_bytes)
        self._health = health.aio.HealthServicer()
        self._service_names = [health.SERVICE_NAME, reflection.SERVICE_NAME]
        self._address: str | None = None
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        local_call_pb2_grpc.add_LocalCallServiceServicer_to_server(self._local_calls, self._server)

    def add(
        self,
        add_to_server: Callable[[Any, grpc.aio.Server], None],
        servicer: Any,
        service_full_name: str,
    ) -> None:
        """Register a servicer with the function its generated stub brings."""
        both: Any = _Both(self._server, self._local_calls)
        add_to_server(servicer, both)
        self._service_names.append(service_full_name)

    async def start(self) -> str:
        """Listen and serve; returns the bound "host:port"."""
        reflection.enable_server_reflection(self._service_names, self._server)
        port = self._server.add_insecure_port(self._listen)
        host = self._listen.rpartition(":")[0]
        self._address = f"{host}:{port}"
        await self._local_calls.start()
        await self._server.start()
        await self.set_serving(True)
        return self._address

    @property
    def address(self) -> str:
        """Where the server listens; known once it was started."""
        if self._address is None:
            raise RuntimeError("the server was not started")
        return self._address

    async def set_serving(self, serving: bool) -> None:
        """What health checks answer, for the whole server and for each service."""
        status = _SERVING if serving else _NOT_SERVING
        for name in ("", *self._service_names):
            await self._health.set(name, status)

    async def enter_drain(self) -> None:
        """Answer NOT_SERVING from now on, whatever `set_serving` says later."""
        await self._health.set(DRAINING, _NOT_SERVING)
        await self._health.enter_graceful_shutdown()

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, give running ones `grace_s`, then cancel them."""
        await self.enter_drain()
        # Together: each waits for calls, and the other's hold nobody up.
        await asyncio.gather(self._local_calls.stop(grace_s), self._server.stop(grace_s))


class _Both:
    """What generated code adds a servicer to: its methods are called by gRPC and locally."""

    def __init__(self, server: grpc.aio.Server, local_calls: LocalCallServicer) -> None:
        self._server = server
        self._local_calls = local_calls

    def add_generic_rpc_handlers(self, handlers: "Sequence[grpc.GenericRpcHandler]") -> None:
        self._server.add_generic_rpc_handlers(handlers)
        self._local_calls.add(handlers)

    def add_registered_method_handlers(self, service_name: str, handlers: Any) -> None:
        self._server.add_registered_method_handlers(service_name, handlers)


async def serve(
    server: MeshServer,
    *,
    drain: Callable[[], Awaitable[None]] | None,
    drain_timeout_s: float,
    on_started: Callable[[str], Awaitable[None]] | None = None,
    parent_pid: int | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, then drain; a second signal stops at once.

    With `drain`, calls are still accepted while it runs: it decides what to refuse.
    Without it, new calls are refused and running ones get `drain_timeout_s`.
    """
    if parent_pid is not None:
        die_with_parent(parent_pid)
    with _Signals() as signals:
        address = await server.start()
        logger.info("serving", extra={"address": address})
        try:
            if on_started is not None:
                await on_started(address)
            # What exists now stays: the collector need not look through it again and again,
            # for tens of milliseconds in which nobody is answered.
            gc.collect()
            gc.freeze()
            await signals.first.wait()
            logger.info("draining", extra={"drain_timeout_s": drain_timeout_s})
            await server.enter_drain()
            await _unless(signals.second, _drain(server, drain, drain_timeout_s))
        finally:
            await server.stop(0)
            logger.info("stopped")


async def _drain(
    server: MeshServer, drain: Callable[[], Awaitable[None]] | None, timeout_s: float
) -> None:
    if drain is None:
        await server.stop(timeout_s)
        return
    try:
        async with asyncio.timeout(timeout_s):
            await drain()
    except TimeoutError:
        logger.warning("drain timed out", extra={"drain_timeout_s": timeout_s})
    await server.stop(_STOP_GRACE_S)


async def _unless(stop: asyncio.Event, work: Awaitable[None]) -> None:
    """Run `work` to its end, or cancel it when `stop` is set."""
    working = asyncio.ensure_future(work)
    stopping = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        working.cancel()
        stopping.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)


class _Signals:
    """The first and the second SIGTERM or SIGINT, as events."""

    def __init__(self) -> None:
        self.first = asyncio.Event()
        self.second = asyncio.Event()

    def __enter__(self) -> "_Signals":
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._received)
        return self

    def __exit__(self, *exc_info: object) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)

    def _received(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


def _options(max_message_bytes: int) -> list[tuple[str, Any]]:
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        # Two processes on one port would each get half of the calls.
        ("grpc.so_reuseport", 0),
        # Clients ping every 3 s; the default calls that abuse and hangs up.
        ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
        # A caller that is cut off is noticed too, and its calls are cancelled.
        *KEEPALIVE_OPTIONS,
    ]
