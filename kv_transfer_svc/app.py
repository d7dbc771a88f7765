"""The transfer agent's process: parts put together and run until a signal."""

from contextlib import closing

from kv_transfer_svc.agent import TransferAgent
from kv_transfer_svc.config import KvTransferConfig
from kv_transfer_svc.segments import SegmentTable
from kv_transfer_svc.service import KvTransferServicer
from kv_transfer_svc.transports.shared_memory import SharedMemoryTransport
from mesh import metrics
from mesh.server import MeshServer, serve
from mesh.v1 import kv_transfer_pb2, kv_transfer_pb2_grpc

SERVICE_NAME = kv_transfer_pb2.DESCRIPTOR.services_by_name["KvTransferService"].full_name


async def run(config: KvTransferConfig) -> None:
    """Serve until a signal, then drain."""
    with closing(SharedMemoryTransport(config.num_copy_threads)) as transport:
        agent = TransferAgent(SegmentTable(), transport)
        metrics.NUM_SEGMENTS.watch(lambda: len(agent.segments))
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
            parent_pid=config.parent_pid,
        )
