"""Blocks between machines over TLS."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kv_transfer_svc.runs import BlockRun
from kv_transfer_svc.segments import SegmentSpec
from kv_transfer_svc.tls import TlsFiles
from kv_transfer_svc.transports.tcp import TcpTransport
from mesh.errors import KvTransferFailed
from tests.transfer_agents import pull_from, read_blocks

MakeSegment = Callable[..., SegmentSpec]
StartAgent = Callable[..., Any]

# Large enough for several streams and for more than a socket's buffers hold.
BIG = {"num_blocks": 64, "block_bytes": 1 << 19}
ALL = list(range(64))


async def test_blocks_arrive_over_tls(
    start: StartAgent, make_segment: MakeSegment, tls_files: TlsFiles
) -> None:
    here, there = await start(tls=tls_files), await start(tls=tls_files)
    source, destination = make_segment("p", **BIG), make_segment("d", **BIG)
    there.attach(source)
    here.attach(destination)

    for _ in range(2):
        await here.agent.pull(pull_from(there, ALL, ALL))

    assert np.array_equal(read_blocks(destination), read_blocks(source))


async def test_cancelled_read_over_tls_ends_at_once(
    start: StartAgent, make_segment: MakeSegment, tls_files: TlsFiles
) -> None:
    here = await start(tls=tls_files, stall_timeout_s=60)
    there = await start(tls=tls_files)
    there.attach(make_segment("p", **BIG))
    here.attach(make_segment("d", **BIG))

    for delay_s in (0.001, 0.005, 0.01, 0.02):
        pulling = asyncio.create_task(here.agent.pull(pull_from(there, ALL, ALL)))
        await asyncio.wait([pulling], timeout=delay_s)
        pulling.cancel()
        async with asyncio.timeout(20):
            await asyncio.wait([pulling])


async def test_agents_with_and_without_tls_do_not_talk(
    start: StartAgent, make_segment: MakeSegment, tls_files: TlsFiles
) -> None:
    here, there = await start(), await start(tls=tls_files)
    there.attach(make_segment("p"))
    here.attach(make_segment("d"))

    with pytest.raises(KvTransferFailed, match="has no TLS certificate"):
        await here.agent.pull(pull_from(there, [1], [1]))


async def test_agent_without_a_certificate_of_the_authority_reads_nothing(
    start: StartAgent, make_segment: MakeSegment, tls_files: TlsFiles
) -> None:
    there = await start(tls=tls_files)
    there.attach(make_segment("p"))
    assert there.agent.network is not None
    context = tls_files.client_context()
    bare = type(context)(context.protocol)
    bare.load_verify_locations(tls_files.authority)
    here = await start()
    destination = here.attach(make_segment("d"))
    located = await here.agent.network.peers.locate(there.address, "p")
    stranger = TcpTransport(tls=bare)
    try:
        with pytest.raises(KvTransferFailed):
            await stranger.read(located, destination, [BlockRun(1, 1, 1)], np.empty(0, np.uint32))
    finally:
        await asyncio.to_thread(stranger.close)
