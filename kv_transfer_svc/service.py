"""KvTransferService on the wire: a segment is attached for as long as its call is open."""

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import grpc

from kv_transfer_svc.agent import Store, TransferAgent
from kv_transfer_svc.pulls import Pull
from kv_transfer_svc.segments import SegmentSpec
from mesh.errors import KvTransferFailed, WorkerUnavailable
from mesh.telemetry import span
from mesh.v1 import kv_transfer_pb2, kv_transfer_pb2_grpc, types_pb2

logger = logging.getLogger(__name__)


class KvTransferServicer(kv_transfer_pb2_grpc.KvTransferServiceServicer):
    def __init__(self, agent: TransferAgent) -> None:
        self._agent = agent

    async def AttachSegment(
        self,
        request: kv_transfer_pb2.AttachSegmentRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncGenerator[kv_transfer_pb2.AttachSegmentResponse, None]:
        spec = SegmentSpec(
            request.engine_id,
            request.path,
            request.block_bytes,
            request.num_blocks,
            request.layout_fingerprint,
            request.generations_offset if request.HasField("generations_offset") else None,
            dict(request.layout),
            request.has_marks,
        )
        extra = {"engine_id": spec.engine_id, "num_blocks": spec.num_blocks}
        with self._agent.segments.attached(spec):
            logger.info("segment attached", extra=extra)
            try:
                has_tiers = self._agent.tiers is not None
                yield kv_transfer_pb2.AttachSegmentResponse(has_tiers=has_tiers)
                # The engine keeps the call open: its hanging up cancels this wait.
                await self._agent.draining.wait()
                raise WorkerUnavailable("the transfer agent is draining")
            finally:
                logger.info("segment detached", extra=extra)

    async def Pull(
        self,
        request: kv_transfer_pb2.PullRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> kv_transfer_pb2.PullResponse:
        pull = Pull(
            request.source_engine_id,
            list(request.source_block_ids),
            request.destination_engine_id,
            list(request.destination_block_ids),
            list(request.source_generations),
            request.source_address,
            request.request_id,
            request.follows,
        )
        with span("kv.pull", {"pdmesh.kv.num_blocks": len(pull.source_block_ids)}) as current:
            moved = await self._agent.pull(pull)
            current.set_attributes(
                {
                    "pdmesh.kv.bytes": moved.num_bytes,
                    "pdmesh.kv.num_runs": moved.num_runs,
                    "pdmesh.kv.gb_per_s": moved.gb_per_s,
                    "pdmesh.kv.transport": moved.transport,
                }
            )
        return kv_transfer_pb2.PullResponse(
            payload_bytes=moved.num_bytes,
            next_token_id=moved.next_token_id,
            timings=[
                types_pb2.StageTiming(
                    stage=types_pb2.STAGE_KV_TRANSFER, duration_ms=moved.copy_s * 1000
                )
            ],
        )

    async def WatchBlocks(
        self,
        request: kv_transfer_pb2.WatchBlocksRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncGenerator[kv_transfer_pb2.WatchBlocksResponse, None]:
        if self._agent.network is None:
            raise KvTransferFailed("this agent sends nothing to other machines")
        progress = self._agent.network.fill_watch.follow(
            request.engine_id, list(request.block_ids), list(request.generations)
        )
        async with aclosing(progress):
            async for filled in progress:
                yield kv_transfer_pb2.WatchBlocksResponse(
                    num_filled=filled.num_blocks, next_token_id=filled.next_token_id
                )

    async def StoreBlocks(
        self,
        request: kv_transfer_pb2.StoreBlocksRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> kv_transfer_pb2.StoreBlocksResponse:
        stored = Store(
            request.engine_id,
            request.model,
            list(request.keys),
            list(request.block_ids),
            list(request.generations),
        )
        return kv_transfer_pb2.StoreBlocksResponse(num_stored=await self._agent.store(stored))

    async def LoadBlocks(
        self,
        request: kv_transfer_pb2.LoadBlocksRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> kv_transfer_pb2.LoadBlocksResponse:
        with span("kv.load", {"pdmesh.kv.num_blocks": len(request.keys)}) as current:
            loaded = await self._agent.load(
                request.engine_id,
                list(request.keys),
                list(request.block_ids),
                request.request_id,
            )
            current.set_attributes(
                {
                    "pdmesh.kv.num_loaded_blocks": loaded.num_blocks,
                    "pdmesh.kv.num_disk_blocks": loaded.num_disk_blocks,
                }
            )
        return kv_transfer_pb2.LoadBlocksResponse(
            num_blocks=loaded.num_blocks, num_disk_blocks=loaded.num_disk_blocks
        )

    async def Locate(
        self,
        request: kv_transfer_pb2.LocateRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> kv_transfer_pb2.LocateResponse:
        if self._agent.network is None:
            raise KvTransferFailed("this agent sends nothing to other machines")
        block_server = self._agent.network.block_server
        mooncake = self._agent.network.mooncake
        with self._agent.segments.in_use(request.engine_id) as (segment,):
            spec = segment.spec
            response = kv_transfer_pb2.LocateResponse(
                data_port=block_server.port,
                token=block_server.token,
                uses_tls=block_server.uses_tls,
                block_bytes=spec.block_bytes,
                num_blocks=spec.num_blocks,
                layout_fingerprint=spec.layout_fingerprint,
                layout=spec.layout,
            )
            if mooncake is not None:
                response.mooncake.rpc_port = mooncake.rpc_port
                response.mooncake.address = mooncake.expose(segment)
                if spec.generations_offset is not None:
                    response.mooncake.generations_offset = spec.generations_offset
        return response

    async def GetStats(
        self,
        request: kv_transfer_pb2.GetStatsRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> kv_transfer_pb2.GetStatsResponse:
        stats, tiers = self._agent.stats, self._agent.tiers
        response = kv_transfer_pb2.GetStatsResponse(
            num_segments=len(self._agent.segments),
            num_active_pulls=self._agent.num_active_pulls(request.request_id),
            num_pulls=stats.num_pulls,
            payload_bytes=self._agent.num_bytes,
            copy_seconds=stats.copy_s,
        )
        if tiers is not None:
            response.num_host_blocks = len(tiers.host)
            response.num_disk_blocks = len(tiers.disk) if tiers.disk is not None else 0
            response.num_host_hits = tiers.stats.num_host_hits
            response.num_disk_hits = tiers.stats.num_disk_hits
        return response
