"""The AttachSegment call is held open, and made again for as long as it takes."""

import asyncio

import pytest

from mesh.client import connect
from mesh.errors import InvalidRequest
from mesh.server import MeshServer
from mesh.v1 import kv_transfer_pb2, kv_transfer_pb2_grpc
from tests.worker_wire import ScriptedAgent, wait_until
from worker.segment_attachment import SegmentAttachment

SEGMENT = kv_transfer_pb2.AttachSegmentRequest(engine_id="e1", path="/dev/shm/x", num_blocks=4)


def server_of(agent: ScriptedAgent, address: str = "127.0.0.1:0") -> MeshServer:
    server = MeshServer(address)
    server.add(
        kv_transfer_pb2_grpc.add_KvTransferServiceServicer_to_server,
        agent,
        "mesh.v1.KvTransferService",
    )
    return server


async def test_segment_stays_attached_until_the_block_ends() -> None:
    agent = ScriptedAgent()
    server = server_of(agent)
    channel = connect(await server.start())
    async with SegmentAttachment(channel, SEGMENT) as attachment:
        await asyncio.wait_for(attachment.attached.wait(), 20)
        assert (await agent.attached.get()).engine_id == "e1"

    await wait_until(lambda: not attachment.attached.is_set())
    await channel.close()
    await server.stop(0)


@pytest.mark.parametrize("way", ["the agent ends the call", "the agent restarts"])
async def test_broken_attachment_is_made_again(way: str) -> None:
    # KV-23: the same address, another process.
    agent = ScriptedAgent()
    server = server_of(agent)
    address = await server.start()
    channel = connect(address)
    async with SegmentAttachment(channel, SEGMENT) as attachment:
        await asyncio.wait_for(agent.attached.get(), 20)

        if way == "the agent restarts":
            await server.stop(0)
            server = server_of(agent, address)
            await server.start()
        else:
            agent.may_detach.set()

        await asyncio.wait_for(agent.attached.get(), 20)
        agent.may_detach.clear()
        await asyncio.wait_for(attachment.attached.wait(), 20)
    await channel.close()
    await server.stop(0)


async def test_agent_that_refuses_is_asked_again() -> None:
    agent = ScriptedAgent()
    agent.error = InvalidRequest("no such file")
    server = server_of(agent)
    channel = connect(await server.start())
    async with SegmentAttachment(channel, SEGMENT) as attachment:
        await asyncio.sleep(0)
        assert not attachment.attached.is_set()

        agent.error = None

        await asyncio.wait_for(attachment.attached.wait(), 20)
    await channel.close()
    await server.stop(0)
