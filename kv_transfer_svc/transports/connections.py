"""Connections to other agents' data ports."""

import math
import socket
import ssl
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kv_transfer_svc.transports import block_wire
from kv_transfer_svc.transports.base import Address, RemoteSource
from mesh.errors import KvTransferFailed

_MAX_IDLE = 16


class Connections:
    """They are opened when needed and kept for a next read that comes soon."""

    def __init__(
        self,
        connect_timeout_s: float,
        stall_timeout_s: float,
        tls: ssl.SSLContext | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._connect_timeout_s = connect_timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._tls = tls
        self._lock = threading.Lock()
        self._clock = clock
        # With the time since when each has rested.
        self._idle: dict[Address, list[tuple[float, socket.socket]]] = defaultdict(list)

    @contextmanager
    def lend(self, source: RemoteSource) -> Iterator[socket.socket]:
        """A connection for one read; after a failure nobody gets it again."""
        self._close_rested()
        connection = self._take_idle(source.data_address) or self._connect(source)
        try:
            yield connection
        except BaseException:
            connection.close()
            raise
        with self._lock:
            idle = self._idle[source.data_address]
            idle.append((self._clock(), connection))
            surplus = idle.pop(0)[1] if len(idle) > _MAX_IDLE else None
        if surplus is not None:
            surplus.close()

    def close(self) -> None:
        self._close_older_than(math.inf)

    def _close_rested(self) -> None:
        """Those that the other side is about to close, or is not there any more to do so."""
        self._close_older_than(self._clock() - block_wire.MAX_REST_S)

    def _close_older_than(self, time_s: float) -> None:
        with self._lock:
            for address, idle in list(self._idle.items()):
                while idle and idle[0][0] < time_s:
                    idle.pop(0)[1].close()
                if not idle:
                    del self._idle[address]

    def _take_idle(self, address: Address) -> socket.socket | None:
        while True:
            with self._lock:
                idle = self._idle.get(address)
                connection = idle.pop()[1] if idle else None
                if not idle:
                    self._idle.pop(address, None)
            if connection is None or not block_wire.has_ended(connection):
                return connection
            connection.close()

    def _connect(self, source: RemoteSource) -> socket.socket:
        if source.uses_tls != (self._tls is not None):
            ours, theirs = ("has", "none") if self._tls is not None else ("has no", "one")
            raise KvTransferFailed(f"this agent {ours} TLS certificate, the other has {theirs}")
        host, _ = source.data_address
        connection = socket.create_connection(source.data_address, self._connect_timeout_s)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection, server_hostname=host)
            connection.settimeout(self._stall_timeout_s)
        except BaseException:
            connection.close()
            raise
        return connection
