"""Connections between agents' data ports: none is kept for ever, and a full table is bearable."""

import errno
import socket
import threading
from typing import Any

import pytest

from kv_transfer_svc.segments import SegmentTable
from kv_transfer_svc.transports import block_server
from kv_transfer_svc.transports.block_server import BlockServer


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
