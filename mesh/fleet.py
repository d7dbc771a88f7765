"""The workers of a mesh that runs on one machine: drained, replaced, more and fewer."""

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import grpc

from mesh.errors import InvalidRequest, WorkerUnavailable
from mesh.home import MeshState, ServiceRecord
from mesh.server import MeshServer
from mesh.supervisor import ServiceSpec, StartFailed
from mesh.telemetry import Stopwatch
from mesh.v1 import supervisor_pb2, supervisor_pb2_grpc

logger = logging.getLogger(__name__)

ROLES = ("prefill", "decode")
MAX_WORKERS = 64
# What a worker needs to end after its streams have.
EXIT_GRACE_S = 5.0

T = TypeVar("T")


class Processes(Protocol):
    """The part of `mesh.supervisor.Supervisor` that workers come from."""

    def state(self) -> MeshState: ...

    async def add(self, spec: ServiceSpec, timeout_s: float) -> None: ...

    async def remove(self, name: str, grace_s: float) -> bool: ...


class WorkerSource(Protocol):
    """The part of `mesh.launch.Launch` that tells how workers are run."""

    def worker(self, role: str, index: int) -> ServiceSpec: ...

    def drain_timeout_s(self, role: str) -> float: ...


@dataclass(frozen=True)
class Drained:
    """How a worker ended."""

    drain_s: float
    was_killed: bool


@dataclass(frozen=True)
class Scaled:
    """Which workers came and went, by id."""

    started: tuple[str, ...] = ()
    drained: tuple[str, ...] = ()


class Fleet:
    """Changes the workers of a running mesh, one change at a time.

    A change that has begun is carried through, whatever becomes of whoever asked for it.
    """

    def __init__(
        self, processes: Processes, source: WorkerSource, *, start_timeout_s: float = 120.0
    ) -> None:
        self._processes = processes
        self._source = source
        self._start_timeout_s = start_timeout_s
        self._changing = asyncio.Lock()
        self._changes: set[asyncio.Task[Any]] = set()

    async def drain(self, worker_id: str, *, restart: bool, force: bool) -> Drained:
        """End a worker, and start it again if asked to."""
        return await self._carry_through(self._drain(worker_id, restart, force))

    async def scale(self, role: str, num_workers: int) -> Scaled:
        """Have so many workers of a role."""
        if role not in ROLES:
            raise InvalidRequest(f"no workers of role {role!r}: there are {' and '.join(ROLES)}")
        least = 1 if role == "decode" else 0
        if not least <= num_workers <= MAX_WORKERS:
            raise InvalidRequest(f"{num_workers} {role} workers: from {least} to {MAX_WORKERS}")
        return await self._carry_through(self._scale(role, num_workers))

    async def close(self) -> None:
        """Break off what is under way: the whole mesh ends."""
        for change in self._changes:
            change.cancel()
        await asyncio.gather(*self._changes, return_exceptions=True)

    async def _carry_through(self, change: Coroutine[Any, Any, T]) -> T:
        async def in_turn() -> T:
            async with self._changing:
                return await change

        task = asyncio.create_task(in_turn())
        self._changes.add(task)
        task.add_done_callback(self._changes.discard)
        return await asyncio.shield(task)

    async def _drain(self, worker_id: str, restart: bool, force: bool) -> Drained:
        worker = self._find(worker_id)
        if worker.role == "decode" and len(self._workers("decode")) == 1 and not force:
            raise InvalidRequest(f"{worker_id} is the last decode worker here: say --force")
        drained = await self._end(worker)
        if restart:
            await self._start(worker.role, _index(worker))
        return drained

    async def _scale(self, role: str, num_workers: int) -> Scaled:
        workers = sorted(self._workers(role), key=_index)
        if len(workers) > num_workers:
            surplus = workers[num_workers:]
            await asyncio.gather(*(self._end(worker) for worker in surplus))
            return Scaled(drained=tuple(worker.worker_id for worker in surplus))
        taken = {_index(worker) for worker in workers}
        free = [index for index in range(MAX_WORKERS) if index not in taken]
        started = [await self._start(role, index) for index in free[: num_workers - len(workers)]]
        return Scaled(started=tuple(started))

    async def _start(self, role: str, index: int) -> str:
        spec = self._source.worker(role, index)
        try:
            await self._processes.add(spec, self._start_timeout_s)
        except StartFailed as error:
            raise WorkerUnavailable(str(error)) from error
        logger.info("worker joined", extra={"worker_id": spec.worker_id})
        return spec.worker_id

    async def _end(self, worker: ServiceRecord) -> Drained:
        stopwatch = Stopwatch()
        grace_s = self._source.drain_timeout_s(worker.role) + EXIT_GRACE_S
        ended = await self._processes.remove(worker.name, grace_s)
        drained = Drained(stopwatch.elapsed_s, was_killed=not ended)
        extra = {"worker_id": worker.worker_id, "drain_s": drained.drain_s}
        logger.info("worker drained", extra=extra)
        return drained

    def _workers(self, role: str) -> list[ServiceRecord]:
        return [one for one in self._processes.state().services if one.role == role]

    def _find(self, worker_id: str) -> ServiceRecord:
        workers = [worker for role in ROLES for worker in self._workers(role)]
        for worker in workers:
            if worker.worker_id == worker_id:
                return worker
        raise InvalidRequest(
            f"no worker {worker_id!r} runs under this `pdmesh up`: there are "
            f"{', '.join(worker.worker_id for worker in workers)}. A worker that was started "
            "otherwise drains on SIGTERM"
        )


def _index(worker: ServiceRecord) -> int:
    return int(worker.name.rpartition("-")[2])


class SupervisorServicer(supervisor_pb2_grpc.SupervisorServiceServicer):
    """The fleet on the wire."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    async def DrainWorker(
        self,
        request: supervisor_pb2.DrainWorkerRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> supervisor_pb2.DrainWorkerResponse:
        drained = await self._fleet.drain(
            request.worker_id, restart=request.restart, force=request.force
        )
        return supervisor_pb2.DrainWorkerResponse(
            drain_seconds=drained.drain_s, was_killed=drained.was_killed
        )

    async def ScaleWorkers(
        self,
        request: supervisor_pb2.ScaleWorkersRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> supervisor_pb2.ScaleWorkersResponse:
        scaled = await self._fleet.scale(request.role, request.num_workers)
        return supervisor_pb2.ScaleWorkersResponse(
            started_worker_ids=scaled.started, drained_worker_ids=scaled.drained
        )


@asynccontextmanager
async def serving_fleet(fleet: Fleet, address: str) -> AsyncIterator[None]:
    """Take orders at `address` for the block."""
    server = MeshServer(address)
    server.add(
        supervisor_pb2_grpc.add_SupervisorServiceServicer_to_server,
        SupervisorServicer(fleet),
        "mesh.v1.SupervisorService",
    )
    await server.start()
    try:
        yield
    finally:
        await server.stop(0)
        await fleet.close()
