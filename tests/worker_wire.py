"""Workers' services on real loopback servers, with whatever engine the test gives them."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
from google.protobuf.timestamp_pb2 import Timestamp

from decode_svc.feeds import Feeds
from decode_svc.generation import Generator
from decode_svc.kv_import import KvImporter, KvImportLimits
from decode_svc.service import DecodeServicer
from mesh.client import Channels, connect
from mesh.errors import InvalidRequest, KvLeaseExpired, MeshError
from mesh.server import MeshServer
from mesh.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    kv_transfer_pb2,
    kv_transfer_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    types_pb2,
)
from prefill_svc.handovers import Handovers
from prefill_svc.leases import LeaseTable
from prefill_svc.service import Holder, PrefillServicer, lease_end
from worker.engine_port import EnginePort
from worker.streams import ActiveStreams

MODEL = "tiny"


@asynccontextmanager
async def serving(server: MeshServer) -> AsyncIterator[grpc.aio.Channel]:
    """Start a server and connect to it; both end with the block."""
    address = await server.start()
    channel = connect(address)
    try:
        yield channel
    finally:
        await channel.close()
        await server.stop(1)


class PrefillRig:
    """A PrefillService over an engine, with its parts in reach."""

    def __init__(self, engine: EnginePort, *, lease_s: float = 30.0) -> None:
        self.server = MeshServer()
        self.streams = ActiveStreams()
        self.handovers = Handovers()
        self.leases = LeaseTable(lease_end(engine, self.handovers), lease_s=lease_s)
        holder = Holder("e-prefill", lambda: self.server.address, "127.0.0.1:1", "f1")
        self.servicer = PrefillServicer(
            MODEL, engine, self.streams, self.leases, self.handovers, holder
        )
        self.server.add(
            prefill_pb2_grpc.add_PrefillServiceServicer_to_server,
            self.servicer,
            "mesh.v1.PrefillService",
        )


@asynccontextmanager
async def prefill_stub(
    rig: PrefillRig,
) -> AsyncIterator["prefill_pb2_grpc.PrefillServiceAsyncStub"]:
    async with rig.leases, serving(rig.server) as channel:
        yield prefill_pb2_grpc.PrefillServiceStub(channel)


async def wait_until(holds: Callable[[], bool]) -> None:
    """For what no event announces."""
    async with asyncio.timeout(20):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def sampling(max_tokens: int = 8, **given: object) -> types_pb2.SamplingParams:
    return types_pb2.SamplingParams(max_tokens=max_tokens, **given)  # type: ignore[arg-type]


def prefill_request(
    request_id: str = "r1",
    prompt: list[int] | None = None,
    output: list[int] | None = None,
    params: types_pb2.SamplingParams | None = None,
    model: str = MODEL,
) -> prefill_pb2.PrefillRequest:
    return prefill_pb2.PrefillRequest(
        request_id=request_id,
        model=model,
        prompt_token_ids=prompt or [5, 6, 7],
        output_token_ids=output or [],
        sampling_params=params or sampling(),
    )


def decode_request(
    request_id: str = "r1",
    prompt: list[int] | None = None,
    output: list[int] | None = None,
    params: types_pb2.SamplingParams | None = None,
    kv_handle: types_pb2.KvHandle | None = None,
    model: str = MODEL,
) -> decode_pb2.DecodeRequest:
    return decode_pb2.DecodeRequest(
        request_id=request_id,
        model=model,
        prompt_token_ids=prompt or [5, 6, 7],
        output_token_ids=output or [],
        sampling_params=params or sampling(),
        kv_handle=kv_handle,
    )


class ScriptedHolder(prefill_pb2_grpc.PrefillServiceServicer):
    """A prefill worker that only has leases, which are as live as the test says."""

    def __init__(self) -> None:
        self.was_live = True
        self.answers = asyncio.Event()
        self.answers.set()
        self.released: list[str] = []
        self.renewed: asyncio.Queue[str] = asyncio.Queue()
        self.lease_s = 30.0
        self.is_expired = False
        self.followed: asyncio.Queue[str] = asyncio.Queue()
        self.progress: asyncio.Queue[prefill_pb2.WatchKvResponse | MeshError] = asyncio.Queue()

    def Prefill(self, request: prefill_pb2.PrefillRequest, context: Any) -> Any:
        raise InvalidRequest("this worker only holds")

    async def WatchKv(
        self, request: prefill_pb2.WatchKvRequest, context: Any
    ) -> AsyncGenerator[prefill_pb2.WatchKvResponse, None]:
        self.followed.put_nowait(request.handle_id)
        yield prefill_pb2.WatchKvResponse()
        while True:
            progress = await self.progress.get()
            if isinstance(progress, MeshError):
                raise progress
            yield progress

    async def RenewKv(
        self, request: prefill_pb2.RenewKvRequest, context: Any
    ) -> prefill_pb2.RenewKvResponse:
        self.renewed.put_nowait(request.handle_id)
        if self.is_expired:
            raise KvLeaseExpired("over")
        return prefill_pb2.RenewKvResponse(lease_expires_at=after(self.lease_s))

    async def ReleaseKv(
        self, request: prefill_pb2.ReleaseKvRequest, context: Any
    ) -> prefill_pb2.ReleaseKvResponse:
        await self.answers.wait()
        self.released.append(request.handle_id)
        return prefill_pb2.ReleaseKvResponse(was_live=self.was_live)

    async def GetLoad(
        self, request: prefill_pb2.PrefillServiceGetLoadRequest, context: Any
    ) -> prefill_pb2.PrefillServiceGetLoadResponse:
        return prefill_pb2.PrefillServiceGetLoadResponse()


class ScriptedAgent(kv_transfer_pb2_grpc.KvTransferServiceServicer):
    """A transfer agent that moves nothing, when the test lets it."""

    def __init__(self) -> None:
        self.pulls: asyncio.Queue[kv_transfer_pb2.PullRequest] = asyncio.Queue()
        self.last_deadline_s = 0.0
        self.may_finish = asyncio.Event()
        self.may_finish.set()
        self.error: MeshError | None = None
        # What a pull brings that follows a prefill.
        self.next_token_id: int | None = None
        self.num_active_pulls = 0
        self.loads: asyncio.Queue[kv_transfer_pb2.LoadBlocksRequest] = asyncio.Queue()
        self.stores: asyncio.Queue[kv_transfer_pb2.StoreBlocksRequest] = asyncio.Queue()
        self.refused = asyncio.Event()
        # How many of the blocks that are asked for the colder tiers have.
        self.num_tier_blocks = 0
        self.attached: asyncio.Queue[kv_transfer_pb2.AttachSegmentRequest] = asyncio.Queue()
        self.may_detach = asyncio.Event()

    async def AttachSegment(
        self, request: kv_transfer_pb2.AttachSegmentRequest, context: Any
    ) -> AsyncGenerator[kv_transfer_pb2.AttachSegmentResponse, None]:
        if self.error is not None:
            raise self.error
        self.attached.put_nowait(request)
        yield kv_transfer_pb2.AttachSegmentResponse()
        await self.may_detach.wait()

    async def Pull(
        self, request: kv_transfer_pb2.PullRequest, context: Any
    ) -> kv_transfer_pb2.PullResponse:
        self.num_active_pulls += 1
        copying = asyncio.create_task(self._copy())
        self.last_deadline_s = context.time_remaining()
        self.pulls.put_nowait(request)
        # As the contract says: a copy in flight outlives the call that was cancelled.
        await asyncio.shield(copying)
        if self.error is not None:
            raise self.error
        return kv_transfer_pb2.PullResponse(
            payload_bytes=100 * len(request.source_block_ids), next_token_id=self.next_token_id
        )

    async def LoadBlocks(
        self, request: kv_transfer_pb2.LoadBlocksRequest, context: Any
    ) -> kv_transfer_pb2.LoadBlocksResponse:
        self.loads.put_nowait(request)
        await self.may_finish.wait()
        if self.error is not None:
            raise self.error
        return kv_transfer_pb2.LoadBlocksResponse(num_blocks=self.num_tier_blocks)

    async def StoreBlocks(
        self, request: kv_transfer_pb2.StoreBlocksRequest, context: Any
    ) -> kv_transfer_pb2.StoreBlocksResponse:
        if self.error is not None:
            self.refused.set()
            raise self.error
        self.stores.put_nowait(request)
        return kv_transfer_pb2.StoreBlocksResponse(num_stored=len(request.keys))

    async def Locate(
        self, request: kv_transfer_pb2.LocateRequest, context: Any
    ) -> kv_transfer_pb2.LocateResponse:
        return kv_transfer_pb2.LocateResponse()

    def WatchBlocks(self, request: kv_transfer_pb2.WatchBlocksRequest, context: Any) -> Any:
        raise InvalidRequest("this agent only says that it copies")

    async def GetStats(
        self, request: kv_transfer_pb2.GetStatsRequest, context: Any
    ) -> kv_transfer_pb2.GetStatsResponse:
        return kv_transfer_pb2.GetStatsResponse(num_active_pulls=self.num_active_pulls)

    async def _copy(self) -> None:
        await self.may_finish.wait()
        self.num_active_pulls -= 1


class DecodeRig:
    """A DecodeService over an engine, with a scripted prefill worker and transfer agent."""

    def __init__(self, engine: EnginePort, limits: KvImportLimits | None = None) -> None:
        self.server = MeshServer()
        self.streams = ActiveStreams()
        self.feeds = Feeds()
        self.channels = Channels()
        self.holder = ScriptedHolder()
        self.agent = ScriptedAgent()
        self.holder_server = MeshServer()
        self.agent_server = MeshServer()
        self.importer = KvImporter(
            engine,
            self.channels,
            engine_id="e-decode",
            transfer_address="127.0.0.1:1",
            layout_fingerprint="f1",
            block_size=4,
            limits=limits or KvImportLimits(),
        )
        self.server.add(
            decode_pb2_grpc.add_DecodeServiceServicer_to_server,
            DecodeServicer(
                MODEL, engine, Generator(engine, self.streams, self.importer), self.feeds
            ),
            "mesh.v1.DecodeService",
        )
        self.holder_server.add(
            prefill_pb2_grpc.add_PrefillServiceServicer_to_server,
            self.holder,
            "mesh.v1.PrefillService",
        )
        self.agent_server.add(
            kv_transfer_pb2_grpc.add_KvTransferServiceServicer_to_server,
            self.agent,
            "mesh.v1.KvTransferService",
        )

    def handle(
        self, num_tokens: int, *block_ids: int, layout_fingerprint: str = "f1"
    ) -> types_pb2.KvHandle:
        return types_pb2.KvHandle(
            handle_id="h1",
            engine_id="e-prefill",
            block_ids=block_ids,
            num_tokens=num_tokens,
            lease_expires_at=after(self.holder.lease_s),
            holder_address=self.holder_server.address,
            transfer_address=self.agent_server.address,
            layout_fingerprint=layout_fingerprint,
        )


@asynccontextmanager
async def decode_stub(rig: DecodeRig) -> AsyncIterator["decode_pb2_grpc.DecodeServiceAsyncStub"]:
    async with (
        serving(rig.holder_server),
        serving(rig.agent_server),
        rig.channels,
        rig.importer,
        serving(rig.server) as channel,
    ):
        rig.importer.transfer_address = rig.agent_server.address
        yield decode_pb2_grpc.DecodeServiceStub(channel)


def after(delay_s: float) -> Timestamp:
    timestamp = Timestamp()
    timestamp.FromNanoseconds(time.time_ns() + int(delay_s * 1e9))
    return timestamp
