"""Connections between agents' data ports: none is kept for ever, and a full table is bearable."""

import errno
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from kv_transfer_svc.segments import SegmentTable
from kv_transfer_svc.transports import block_server, block_wire
from kv_transfer_svc.transports.base import RemoteSource
from kv_transfer_svc.transports.block_server import BlockServer
from kv_transfer_svc.transports.connections import Connections
from tests.fakes import FakeClock


@pytest.fixture
def port() -> Iterator[int]:
    with BlockServer(SegmentTable(), "127.0.0.1") as server:
        yield server.port


def source_at(port: int) -> RemoteSource:
    return RemoteSource("p", 1, 1, "f", ("127.0.0.1", port), b"", uses_tls=False)


def test_reader_that_rests_is_hung_up_on() -> None:
    """Else those of machines that are gone would in the end be all that may connect."""
    with (
        BlockServer(SegmentTable(), "127.0.0.1", idle_timeout_s=0.01) as server,
        socket.create_connection(("127.0.0.1", server.port), timeout=20) as reader,
    ):
        assert reader.recv(1) == b""


def test_connection_that_has_rested_is_not_used_again(port: int) -> None:
    clock = FakeClock()
    with closing(Connections(20, 20, None, clock)) as connections:
        with connections.lend(source_at(port)) as first:
            pass
        clock.advance(block_wire.MAX_REST_S)
        with connections.lend(source_at(port)) as soon:
            pass
        clock.advance(block_wire.MAX_REST_S + 1)
        with connections.lend(source_at(port)) as late:
            pass

    assert soon is first
    assert late is not first
    assert first.fileno() == -1


def test_connections_to_an_agent_that_is_asked_no_more_end_with_the_next_read(port: int) -> None:
    clock = FakeClock()
    with (
        closing(Connections(20, 20, None, clock)) as connections,
        BlockServer(SegmentTable(), "127.0.0.1") as other,
    ):
        with connections.lend(source_at(other.port)) as unused:
            pass
        clock.advance(block_wire.MAX_REST_S + 1)
        with connections.lend(source_at(port)):
            assert unused.fileno() == -1


class Exhausted(socket.socket):
    """A listener of a process that has no descriptor left."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__()
        self.num_accepts = 0
        self.was_asked = threading.Event()

    def accept(self) -> tuple[socket.socket, Any]:
        self.num_accepts += 1
        self.was_asked.set()
        raise OSError(errno.EMFILE, "too many open files")


def test_port_without_descriptors_rests_between_its_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    listener = Exhausted()
    monkeypatch.setattr(socket, "create_server", lambda *_, **__: listener)
    monkeypatch.setattr(block_server, "_ACCEPT_DELAY_S", 60)

    with BlockServer(SegmentTable(), "127.0.0.1"):
        assert listener.was_asked.wait(20)

    # The last one is how it learns of the end.
    assert listener.num_accepts == 2
