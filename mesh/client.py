"""Channels to other services: limits, keepalive, bounded retries, context, errors."""

import asyncio
import ipaddress
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import grpc

from mesh.errors import InternalError, MeshError, WorkerUnavailable, from_rpc_error
from mesh.interceptors import INTERNAL_MESSAGE
from mesh.local_calls.client import LocalCall, LocalLink, Method, to_method
from mesh.telemetry import request_id_var, trace_headers

DEFAULT_MAX_MESSAGE_BYTES = 16 * 1024 * 1024

# A peer that stops answering (frozen, cut off) is noticed within 6 s, calls or no calls.
# gRPC's own threads answer pings, so a busy interpreter does not look dead.
KEEPALIVE_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.keepalive_time_ms", 3_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    # Counts for gRPC's bandwidth pings, which otherwise hold the keepalive back for 60 s.
    ("grpc.http2.ping_timeout_ms", 3_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)

# gRPC rounds timeouts up, by as much as 1 %: without this they would grow from hop to hop.
_ROUNDING = 0.99

# The server answers a call's headers as soon as it accepts it, which ends gRPC's
# retries: only a call that no server has accepted is sent again.
_SERVICE_CONFIG = {
    "loadBalancingConfig": [{"round_robin": {}}],
    "methodConfig": [
        {
            "name": [{}],
            "retryPolicy": {
                "maxAttempts": 4,
                "initialBackoff": "0.1s",
                "maxBackoff": "1s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["UNAVAILABLE"],
            },
        }
    ],
    "retryThrottling": {"maxTokens": 20, "tokenRatio": 0.5},
}


# A longer request takes long anyway, and would hold up what comes behind it on its socket.
_MAX_LOCAL_REQUEST_BYTES = 1 << 18


def connect(
    address: str | Sequence[str],
    *,
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
    calls_locally: bool = False,
) -> grpc.aio.Channel:
    """Open a channel; several addresses are used in turn.

    With `calls_locally`, calls to a single peer go over a socket of this machine where they can
    (`mesh/local_calls`).

    Calls carry the request id and the current span. The connection is made on the
    first call and made again, with bounded backoff, for as long as the channel lives.
    """
    channel = grpc.aio.insecure_channel(_target(address), options=_options(max_message_bytes))
    is_one_peer = isinstance(address, str) or len(address) == 1
    link = LocalLink(channel, max_message_bytes) if calls_locally and is_one_peer else None
    return _ContextChannel(channel, link)


# Long enough for keepalive to end what still runs on a connection to a process that is gone.
_RETIREMENT_S = 10.0


@dataclass
class _Peer:
    channel: grpc.aio.Channel
    # The newest process there of which a caller knew.
    incarnation: str
    used_at: float


class Channels:
    """One channel for each address, opened on first use and owned here.

    A process that took the place of another one, at its address, gets a channel of its own: the old
    one looks for its peer with growing pauses, and fails calls until it looks again.
    """

    def __init__(
        self,
        *,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        calls_locally: bool = False,
        max_rest_s: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """A channel for which nobody has asked in `max_rest_s` may be closed, with what still runs
        on it: addresses of workers come and go."""
        self._max_message_bytes = max_message_bytes
        self._calls_locally = calls_locally
        self._max_rest_s = max_rest_s
        self._clock = clock
        self._peers: dict[str, _Peer] = {}
        self._retiring: dict[asyncio.Task[None], grpc.aio.Channel] = {}

    def get(self, address: str, incarnation: str = "") -> grpc.aio.Channel:
        """The channel to the newest process at `address`; `incarnation` (`mesh/registry.py`) says
        that there is one, where the caller knows."""
        now = self._clock()
        peer = self._peers.get(address)
        if peer is not None and "" < peer.incarnation < incarnation:
            self._retire(address)
            peer = None
        if peer is None:
            for one in [one for one, old in self._peers.items() if self._is_unused(old, now)]:
                self._retire(one)
            channel = connect(
                address,
                max_message_bytes=self._max_message_bytes,
                calls_locally=self._calls_locally,
            )
            peer = self._peers[address] = _Peer(channel, incarnation, now)
        peer.incarnation = max(peer.incarnation, incarnation)
        peer.used_at = now
        return peer.channel

    async def forget(self, address: str) -> None:
        """Close the channel to a peer that is gone for good."""
        peer = self._peers.pop(address, None)
        if peer is not None:
            await peer.channel.close()

    async def close(self) -> None:
        retiring, self._retiring = self._retiring, {}
        for task in retiring:
            task.cancel()
        await asyncio.gather(*retiring, return_exceptions=True)
        for channel in retiring.values():
            await channel.close()
        while self._peers:
            _, peer = self._peers.popitem()
            await peer.channel.close()

    def _is_unused(self, peer: _Peer, now: float) -> bool:
        return now - peer.used_at > self._max_rest_s

    def _retire(self, address: str) -> None:
        """Give its channel to nobody any more, and close it when what runs on it has ended."""
        channel = self._peers.pop(address).channel

        async def close_later() -> None:
            await asyncio.sleep(_RETIREMENT_S)
            await channel.close()

        task = asyncio.create_task(close_later())
        self._retiring[task] = channel
        task.add_done_callback(lambda done: self._retiring.pop(done, None))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()


async def settled(channel: grpc.aio.Channel) -> None:
    """Wait, for two seconds at most, until it is known whether `channel` calls locally.

    For a call that is held open for long: it stays where it was made.
    """
    if isinstance(channel, _ContextChannel) and channel.link is not None:
        await channel.link.settled()


@contextmanager
def mesh_errors() -> Iterator[None]:
    """Turn RPC errors raised inside the block into the MeshError the server raised."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error


def is_connection_lost(error: MeshError) -> bool:
    """Whether gRPC broke the call: what a handler raises has details or a fixed text."""
    cause = error.__cause__
    return (
        isinstance(error, WorkerUnavailable | InternalError)
        and isinstance(cause, grpc.aio.AioRpcError)
        and cause.details() != INTERNAL_MESSAGE
        and not any(key == "grpc-status-details-bin" for key, _ in cause.trailing_metadata() or ())
    )


def remaining_s(context: grpc.aio.ServicerContext[Any, Any], default: float) -> float:
    """What is left of the caller's deadline: the timeout to give to the next hop.

    `default` counts when the caller set none.
    """
    left = context.time_remaining()
    return default if left is None else max(0.0, left * _ROUNDING)


def _target(address: str | Sequence[str]) -> str:
    addresses = [address] if isinstance(address, str) else list(address)
    if not addresses:
        raise ValueError("no address to connect to")
    if len(addresses) == 1:
        return addresses[0]
    versions = {_ip_version(one) for one in addresses}
    if len(versions) != 1 or None in versions:
        raise ValueError(
            f"several addresses must be IP addresses of one family, got {', '.join(addresses)}; "
            "or give one DNS name that resolves to all of them"
        )
    return f"ipv{versions.pop()}:{','.join(addresses)}"


def _ip_version(address: str) -> int | None:
    host = address.rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).version
    except ValueError:
        return None


def _options(max_message_bytes: int) -> list[tuple[str, Any]]:
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        *KEEPALIVE_OPTIONS,
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 1_000),
        ("grpc.max_reconnect_backoff_ms", 2_000),
        # Connections end with their channel instead of being shared behind its back.
        ("grpc.use_local_subchannel_pool", 1),
        # The mesh talks to its own machines: http_proxy is for the world outside.
        ("grpc.enable_http_proxy", 0),
        ("grpc.enable_retries", 1),
        ("grpc.service_config", json.dumps(_SERVICE_CONFIG)),
    ]


def _context_metadata() -> list[tuple[str, str]]:
    metadata = trace_headers()
    request_id = request_id_var.get()
    if request_id:
        metadata.append(("x-request-id", request_id))
    return metadata


class _Calls:
    """Calls of one method, in the context of whoever makes them."""

    def __init__(
        self,
        call: Callable[..., Any],
        link: LocalLink | None = None,
        method: Method | None = None,
        *,
        is_written_to: bool = False,
    ) -> None:
        self._call = call
        self._link = link
        self._method = method
        self._is_written_to = is_written_to

    def __call__(self, *args: Any, metadata: Any = None, **kwargs: Any) -> Any:
        merged = _context_metadata()
        if metadata is not None:
            merged.extend(metadata)
        local: LocalCall | None = None
        if self._link is not None and self._method is not None:
            local = self._locally(self._link, self._method, args, merged, **kwargs)
        return self._call(*args, metadata=merged, **kwargs) if local is None else local

    def _locally(
        self,
        link: LocalLink,
        method: Method,
        args: tuple[Any, ...],
        metadata: list[tuple[str, str]],
        *,
        timeout: float | None = None,
        wait_for_ready: bool | None = None,
    ) -> LocalCall | None:
        """None where gRPC must do: there is no local connection, or too much to say."""
        connection = link.connection()
        # A stream is written to where it has no iterator.
        if connection is None or self._is_written_to is bool(args):
            return None
        message = method.serialize(args[0]) if args else None
        if message is not None and len(message) > _MAX_LOCAL_REQUEST_BYTES:
            return None
        return connection.call(method, message, dict(metadata), timeout)


class _ContextChannel(grpc.aio.Channel):
    """A channel whose calls carry the request id and the current span.

    grpc.aio's client interceptors could do this too, but they wrap each call in a
    task and each stream in one more generator; here the caller gets the real call.
    """

    def __init__(self, channel: grpc.aio.Channel, link: LocalLink | None) -> None:
        self._channel = channel
        self.link = link

    def unary_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        call = self._channel.unary_unary(method, *args, **kwargs)
        return _Calls(call, self.link, to_method(method, *args, **kwargs))

    def unary_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        call = self._channel.unary_stream(method, *args, **kwargs)
        return _Calls(call, self.link, to_method(method, *args, **kwargs))

    def stream_unary(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return _Calls(self._channel.stream_unary(method, *args, **kwargs))

    def stream_stream(self, method: str, *args: Any, **kwargs: Any) -> Any:
        call = self._channel.stream_stream(method, *args, **kwargs)
        return _Calls(call, self.link, to_method(method, *args, **kwargs), is_written_to=True)

    async def close(self, grace: float | None = None) -> None:
        if self.link is not None:
            await self.link.close()
        await self._channel.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self._channel.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self._channel.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self._channel.channel_ready()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        await self.close()
