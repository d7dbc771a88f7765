"""A scheduler behind a real port, and callers like the gateway."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import grpc

from mesh.client import connect, mesh_errors
from mesh.server import MeshServer
from mesh.v1 import scheduler_pb2, scheduler_pb2_grpc
from scheduler_svc.admission import QueueSettings
from scheduler_svc.app import SERVICE_NAME
from scheduler_svc.breakers import BreakerSettings
from scheduler_svc.cluster import Cluster
from scheduler_svc.objectives import Objectives
from scheduler_svc.placement import PlacementSettings
from scheduler_svc.prefix_lookup import PrefixQuery
from scheduler_svc.scheduler import Scheduler
from scheduler_svc.service import SchedulerServicer
from scheduler_svc.workers import Hits
from tests.paper_workers import PaperRegistry, registered

PlaceRequest = scheduler_pb2.PlaceRequest
PREFILL_DONE = PlaceRequest(prefill_done=PlaceRequest.PrefillDone())
RENEW = PlaceRequest(renew=PlaceRequest.Renew())


class PaperLookup:
    """Answers with `answer`, once `answering` is set."""

    def __init__(self) -> None:
        self.answer: Hits = {}
        self.answering = asyncio.Event()
        self.answering.set()
        self.asked = asyncio.Event()
        self.error: BaseException | None = None
        self.queries: list[PrefixQuery] = []
        self.placements: list[list[str]] = []
        self.knows_all = True

    async def hits(self, query: PrefixQuery) -> Hits:
        self.queries.append(query)
        self.asked.set()
        await self.answering.wait()
        if self.error is not None:
            raise self.error
        return self.answer

    def latest(self, query: PrefixQuery, known: Hits) -> Hits:
        return known

    def placed(self, query: PrefixQuery, holder_ids: Collection[str]) -> None:
        self.placements.append(list(holder_ids))

    def is_complete(self, model: str) -> bool:
        return self.knows_all


@dataclass
class Mesh:
    """A served scheduler and the strings behind it."""

    stub: Any
    scheduler: Scheduler
    registry: PaperRegistry
    cluster: Cluster
    lookup: PaperLookup

    async def state(self) -> scheduler_pb2.GetStateResponse:
        state: scheduler_pb2.GetStateResponse = await self.stub.GetState(
            scheduler_pb2.GetStateRequest()
        )
        return state

    async def until(self, num_waiting: int = 0, num_placements: int = 0) -> None:
        """Until the scheduler holds just this; the test's timeout is the bound."""
        async with asyncio.timeout(20):
            while True:
                state = await self.state()
                if (state.num_waiting, state.num_placements) == (num_waiting, num_placements):
                    return

    async def num_placements(self) -> dict[str, int]:
        return {worker.worker_id: worker.num_placements for worker in (await self.state()).workers}


Serve = Callable[..., Awaitable[Mesh]]


async def start_scheduler(
    stack: AsyncExitStack,
    *workers: Any,
    has_workers: bool = True,
    max_num_waiting: int = 256,
    max_wait_s: float = 30,
    objectives: Objectives | None = None,
    quantum: int = 2048,
    lease_s: float = 15.0,
    breaker_first_open_s: float = 1.0,
    clock: Callable[[], float] = time.monotonic,
    **settings: Any,
) -> Mesh:
    """A scheduler that ends with `stack`; a prefill and a decode worker unless told otherwise."""
    usual = (registered("p0", "prefill"), registered("d0")) if has_workers else ()
    registry = PaperRegistry(*(workers or usual))
    cluster, lookup = Cluster(registry), PaperLookup()
    scheduler = Scheduler(
        cluster,
        lookup,
        PlacementSettings(**settings),
        QueueSettings(max_num_waiting=max_num_waiting, quantum=quantum),
        objectives,
        breakers=BreakerSettings(first_open_s=breaker_first_open_s),
        clock=clock,
    )
    await cluster.refresh()
    server = MeshServer("127.0.0.1:0")
    server.add(
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server,
        SchedulerServicer(scheduler, max_wait_s, lease_s=lease_s),
        SERVICE_NAME,
    )
    address = await server.start()
    stack.push_async_callback(server.stop, 0)
    channel = connect(address)
    stack.push_async_callback(channel.close)
    stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
    return Mesh(stub, scheduler, registry, cluster, lookup)


def admit(num_prompt_tokens: int = 160, max_tokens: int = 16, **changes: Any) -> Any:
    fields = {"request_id": "r1", "model": "smol", **changes}
    return PlaceRequest(
        admit=PlaceRequest.Admit(
            prompt_token_ids=range(num_prompt_tokens), max_tokens=max_tokens, **fields
        )
    )


class Call:
    """One Place call, opened like the gateway does."""

    def __init__(self, mesh: Mesh, request: Any = None, **options: Any) -> None:
        self._request = request or admit()
        self._call = mesh.stub.Place(**options)

    async def placement(self) -> scheduler_pb2.Placement:
        with mesh_errors():
            await self._call.write(self._request)
            response = await self._call.read()
            if response is grpc.aio.EOF:
                # The status is that of the call.
                raise grpc.aio.AioRpcError(
                    await self._call.code(),
                    await self._call.initial_metadata(),
                    await self._call.trailing_metadata(),
                    await self._call.details(),
                )
            placement: scheduler_pb2.Placement = response.placement
            return placement

    async def prefill_done(self) -> None:
        await self._call.write(PREFILL_DONE)

    async def tell(self, message: Any) -> None:
        await self._call.write(message)

    async def end(self) -> None:
        """Until the scheduler has ended the call; raises its error."""
        with mesh_errors():
            await self._call.read()

    def cancel(self) -> None:
        self._call.cancel()

    async def close(self) -> None:
        await self._call.done_writing()
        assert await self._call.code() is grpc.StatusCode.OK
