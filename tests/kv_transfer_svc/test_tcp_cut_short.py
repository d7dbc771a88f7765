"""Pulls over TCP that end before their time: no byte is written after that."""

import asyncio
import socket
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kv_transfer_svc.segments import SegmentSpec
from kv_transfer_svc.transports import block_wire
from mesh.errors import KvTransferFailed
from tests.transfer_agents import pull_from, read_blocks

MakeSegment = Callable[..., SegmentSpec]
StartAgent = Callable[..., Any]

# Large enough for several streams and for more than a socket's buffers hold.
BIG = {"num_blocks": 64, "block_bytes": 1 << 19}
ALL = list(range(64))


async def test_cancelled_pull_writes_nothing_after_its_end(
    start: StartAgent, make_segment: MakeSegment, monkeypatch: pytest.MonkeyPatch
) -> None:
    # KV-21
    here, there = await start(), await start()
    there.attach(make_segment("p", **BIG))
    destination = make_segment("d", **BIG)
    here.attach(destination)
    sent, may_go_on = threading.Event(), threading.Event()
    send_piece = block_wire.send_piece

    def slow_piece(connection: socket.socket, payload: memoryview) -> None:
        if sent.is_set():
            may_go_on.wait(60)
        send_piece(connection, payload)
        sent.set()

    monkeypatch.setattr(block_wire, "send_piece", slow_piece)
    pulling = asyncio.create_task(here.agent.pull(pull_from(there, ALL, ALL)))
    await asyncio.to_thread(sent.wait)

    pulling.cancel()
    async with asyncio.timeout(20):
        await asyncio.wait([pulling])
    at_its_end = read_blocks(destination)
    may_go_on.set()
    await there.stop()

    assert pulling.cancelled()
    assert here.agent.stats.num_active_pulls == 0
    assert np.array_equal(read_blocks(destination), at_its_end)


async def test_connection_of_a_cancelled_pull_serves_nobody_else(
    start: StartAgent, make_segment: MakeSegment
) -> None:
    here, there = await start(), await start()
    source, destination = make_segment("p", **BIG), make_segment("d", **BIG)
    there.attach(source)
    here.attach(destination)
    chance = np.random.default_rng(2)

    for _ in range(20):
        pulling = asyncio.create_task(here.agent.pull(pull_from(there, ALL, ALL)))
        await asyncio.wait([pulling], timeout=chance.random() * 0.02)
        pulling.cancel()
        await asyncio.wait([pulling])
    order = chance.permutation(64).tolist()
    await here.agent.pull(pull_from(there, order, ALL))

    assert np.array_equal(read_blocks(destination), read_blocks(source)[order])


async def test_agent_killed_in_the_middle_of_a_pull_fails_it_at_once(
    start: StartAgent, make_segment: MakeSegment, monkeypatch: pytest.MonkeyPatch
) -> None:
    # KV-19
    here, there = await start(stall_timeout_s=60), await start()
    there.attach(make_segment("p", **BIG))
    here.attach(make_segment("d", **BIG))
    has_begun = threading.Event()
    send_piece = block_wire.send_piece

    def slow_piece(connection: socket.socket, payload: memoryview) -> None:
        has_begun.set()
        send_piece(connection, payload)
        threading.Event().wait(0.05)

    monkeypatch.setattr(block_wire, "send_piece", slow_piece)
    pulling = asyncio.create_task(here.agent.pull(pull_from(there, ALL, ALL)))
    await asyncio.to_thread(has_begun.wait)

    await there.stop()

    async with asyncio.timeout(20):
        with pytest.raises(KvTransferFailed):
            await pulling
