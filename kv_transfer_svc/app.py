"""The transfer agent's process: parts put together and run until a signal."""

from contextlib import AsyncExitStack, closing

from kv_transfer_svc.agent import TransferAgent
from kv_transfer_svc.config import KvTransferConfig
from kv_transfer_svc.fill_watch import FillWatch
from kv_transfer_svc.network import Network
from kv_transfer_svc.peers import Peers
from kv_transfer_svc.segments import SegmentTable
from kv_transfer_svc.service import KvTransferServicer
from kv_transfer_svc.tiers.cold_tiers import ColdTiers
from kv_transfer_svc.tiers.disk_store import DiskStore
from kv_transfer_svc.tiers.host_pool import HostPool
from kv_transfer_svc.tiers.publishing import TierPublishers
from kv_transfer_svc.transports.block_server import BlockServer
from kv_transfer_svc.transports.mooncake import MooncakeTransport, open_transport
from kv_transfer_svc.transports.shared_memory import SharedMemoryTransport
from kv_transfer_svc.transports.tcp import TcpTransport
from mesh import metrics
from mesh.client import Channels
from mesh.registry import BlockIndex, connect_redis, new_incarnation
from mesh.server import MeshServer, serve
from mesh.v1 import kv_transfer_pb2, kv_transfer_pb2_grpc

SERVICE_NAME = kv_transfer_pb2.DESCRIPTOR.services_by_name["KvTransferService"].full_name


async def run(config: KvTransferConfig) -> None:
    """Serve until a signal, then drain."""
    async with AsyncExitStack() as stack:
        segments = SegmentTable()
        stack.callback(metrics.NUM_SEGMENTS.watch(lambda: len(segments)))
        block_server = stack.enter_context(
            BlockServer(
                segments,
                config.listen_host,
                config.data_port,
                tls=config.tls.server_context() if config.tls else None,
                stall_timeout_s=config.stall_timeout_s,
            )
        )
        tcp = TcpTransport(
            num_streams=config.num_streams,
            connect_timeout_s=config.connect_timeout_s,
            stall_timeout_s=config.stall_timeout_s,
            tls=config.tls.client_context() if config.tls else None,
        )
        stack.enter_context(closing(tcp))
        peers = Peers(await stack.enter_async_context(Channels()))
        shared_memory = stack.enter_context(closing(SharedMemoryTransport(config.num_copy_threads)))
        fill_watch = stack.enter_context(closing(FillWatch(segments)))
        mooncake = _open_mooncake(config, segments, stack)
        network = Network(peers, tcp, block_server, fill_watch, mooncake)
        redis = connect_redis(config.redis_url)
        stack.push_async_callback(redis.aclose)
        publishers = await stack.enter_async_context(
            TierPublishers(BlockIndex(redis), new_incarnation())
        )
        tiers = await _open_tiers(config, publishers, stack)
        agent = TransferAgent(segments, shared_memory, network, tiers)
        stack.callback(metrics.NUM_ACTIVE_PULLS.watch(lambda: agent.stats.num_active_pulls))

        async def on_started(address: str) -> None:
            publishers.begin(config.advertise_address or address)

        server = MeshServer(config.listen)
        server.add(
            kv_transfer_pb2_grpc.add_KvTransferServiceServicer_to_server,
            KvTransferServicer(agent),
            SERVICE_NAME,
        )
        await serve(
            server,
            drain=agent.drain,
            drain_timeout_s=config.drain_timeout_s,
            on_started=on_started,
            parent_pid=config.parent_pid,
        )


def _open_mooncake(
    config: KvTransferConfig, segments: SegmentTable, stack: AsyncExitStack
) -> MooncakeTransport | None:
    if config.remote_transport != "mooncake":
        return None
    mooncake = open_transport(
        config.listen_host,
        config.mooncake_protocol,
        config.mooncake_device,
        num_reads=config.num_streams,
        stall_timeout_s=config.stall_timeout_s,
    )
    segments.on_detach(mooncake.conceal)
    return stack.enter_context(closing(mooncake))


async def _open_tiers(
    config: KvTransferConfig, publishers: TierPublishers, stack: AsyncExitStack
) -> ColdTiers | None:
    host = HostPool(config.host_memory_bytes)
    disk = DiskStore(config.disk_path, config.disk_bytes) if config.disk_path else None
    if disk is None and not host.max_bytes:
        return None
    metrics.KV_TIER_BLOCKS.watch(lambda: len(host), {"tier": "host"})
    if disk is not None:
        metrics.KV_TIER_BLOCKS.watch(lambda: len(disk), {"tier": "disk"})
    return await stack.enter_async_context(ColdTiers(host, disk, publishers.on_change))
