"""Workers' services on real loopback servers, with whatever engine the test gives them."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc

from mesh.client import connect
from mesh.server import MeshServer
from mesh.v1 import decode_pb2, prefill_pb2, prefill_pb2_grpc, types_pb2
from prefill_svc.leases import LeaseTable
from prefill_svc.service import Holder, PrefillServicer
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
        self.leases = LeaseTable(engine.release_hold, lease_s=lease_s)
        holder = Holder("e-prefill", lambda: self.server.address, "127.0.0.1:1", "f1")
        self.servicer = PrefillServicer(MODEL, engine, self.streams, self.leases, holder)
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


async def wait_until(holds: Callable[[], bool], timeout_s: float = 1.0) -> None:
    """For what no event announces; a cancellation takes effect within a second."""
    async with asyncio.timeout(timeout_s):
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
