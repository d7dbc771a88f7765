"""Real transfer agents in this process: each is a machine of its own, on loopback."""

from collections.abc import Sequence
from contextlib import AsyncExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kv_transfer_svc.agent import TransferAgent
from kv_transfer_svc.app import SERVICE_NAME
from kv_transfer_svc.fill_watch import FillWatch
from kv_transfer_svc.network import Network
from kv_transfer_svc.peers import Peers
from kv_transfer_svc.pulls import Pull
from kv_transfer_svc.runs import BlockRun
from kv_transfer_svc.segments import Segment, SegmentSpec, SegmentTable
from kv_transfer_svc.service import KvTransferServicer
from kv_transfer_svc.tiers.cold_tiers import ColdTiers
from kv_transfer_svc.tiers.disk_store import DiskStore
from kv_transfer_svc.tiers.host_pool import HostPool
from kv_transfer_svc.tls import TlsFiles
from kv_transfer_svc.transports.base import RemoteSource, Transport
from kv_transfer_svc.transports.block_server import BlockServer
from kv_transfer_svc.transports.mooncake import MooncakeTransport
from kv_transfer_svc.transports.shared_memory import SharedMemoryTransport
from kv_transfer_svc.transports.tcp import TcpTransport
from mesh.block_index import Tier
from mesh.client import Channels
from mesh.server import MeshServer
from mesh.v1 import kv_transfer_pb2_grpc

TierChange = tuple[str, Tier, Sequence[bytes], Sequence[bytes]]


@dataclass
class RunningAgent:
    """One machine's agent; stopping it is the machine's end."""

    agent: TransferAgent
    address: str
    stack: AsyncExitStack
    # What the colder tiers gained and lost: model, tier, keys gained, keys lost.
    changes: list[TierChange]

    def attach(self, spec: SegmentSpec) -> Segment:
        return self.stack.enter_context(self.agent.segments.attached(spec))

    async def stop(self) -> None:
        await self.stack.aclose()


async def start_agent(
    transport: Transport | None = None,
    *,
    listen: str = "127.0.0.1:0",
    tls: TlsFiles | None = None,
    host_memory_bytes: int = 0,
    disk: DiskStore | None = None,
    mooncake: MooncakeTransport | None = None,
    **settings: Any,
) -> RunningAgent:
    async with AsyncExitStack() as stack:
        segments = SegmentTable()
        block_server = stack.enter_context(
            BlockServer(
                segments,
                "127.0.0.1",
                tls=tls.server_context() if tls else None,
                stall_timeout_s=settings.get("stall_timeout_s", 5.0),
            )
        )
        tcp = TcpTransport(tls=tls.client_context() if tls else None, **settings)
        stack.enter_context(closing(tcp))
        peers = Peers(await stack.enter_async_context(Channels()))
        if transport is None:
            transport = stack.enter_context(closing(SharedMemoryTransport(1)))
        changes: list[TierChange] = []
        tiers: ColdTiers | None = None
        if host_memory_bytes or disk is not None:
            tiers = await stack.enter_async_context(
                ColdTiers(HostPool(host_memory_bytes), disk, lambda *change: changes.append(change))
            )
        if mooncake is not None:
            stack.enter_context(closing(mooncake))
            segments.on_detach(mooncake.conceal)
        fill_watch = stack.enter_context(closing(FillWatch(segments)))
        network = Network(peers, tcp, block_server, fill_watch, mooncake)
        agent = TransferAgent(segments, transport, network, tiers)
        server = MeshServer(listen)
        server.add(
            kv_transfer_pb2_grpc.add_KvTransferServiceServicer_to_server,
            KvTransferServicer(agent),
            SERVICE_NAME,
        )
        address = await server.start()
        stack.push_async_callback(server.stop, 0)
        return RunningAgent(agent, address, stack.pop_all(), changes)


def pull_from(source: RunningAgent, source_ids: list[int], destination_ids: list[int]) -> Pull:
    """From engine `p` of another machine to engine `d`."""
    return Pull("p", source_ids, "d", destination_ids, source_address=source.address)


def read_blocks(spec: SegmentSpec) -> Any:
    """What a segment's file contains, a row for each block."""
    blocks = np.frombuffer(Path(spec.path).read_bytes(), np.uint8)[: spec.num_bytes]
    return blocks.reshape(spec.num_blocks, spec.block_bytes)


async def read_one(here: RunningAgent, source: RemoteSource, destination: Segment) -> int:
    """Block 1 of a source, by the transport alone."""
    assert here.agent.network is not None
    return await here.agent.network.tcp.read(
        source, destination, [BlockRun(1, 1, 1)], np.empty(0, np.uint32)
    )
