"""Placements: a scheduler's decision, held for as long as a request needs it."""

import asyncio
import logging
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from typing import Any

import grpc

from gateway.generation import Job
from mesh.client import mesh_errors
from mesh.errors import DeadlineExceeded, WorkerUnavailable
from mesh.telemetry import Stopwatch
from mesh.v1 import scheduler_pb2, scheduler_pb2_grpc, types_pb2

logger = logging.getLogger(__name__)

_MODES = {
    scheduler_pb2.PLACEMENT_MODE_DISAGGREGATED: "disaggregated",
    scheduler_pb2.PLACEMENT_MODE_LOCAL: "local",
}


class HeldPlacement:
    """Where a job runs; the scheduler charges the workers until it is left."""

    def __init__(
        self,
        call: "grpc.aio.StreamStreamCall[scheduler_pb2.PlaceRequest, Any]",
        placement: scheduler_pb2.Placement,
    ) -> None:
        self._call = call
        self.decode = placement.decode
        # None: the decode worker computes the prompt too.
        self.prefill = placement.prefill if placement.HasField("prefill") else None
        self.mode = _MODES.get(placement.mode, "")

    async def prefill_done(self) -> None:
        """Move the charge from the prefill to the decode worker."""
        message = scheduler_pb2.PlaceRequest(prefill_done=scheduler_pb2.PlaceRequest.PrefillDone())
        try:
            await self._call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            # The scheduler is gone and the charge with it; the workers are not.
            logger.warning("placement lost", extra={"error": repr(error)})


class Scheduler:
    """Asks for placements."""

    def __init__(self, channel: grpc.aio.Channel, *, queue_timeout_s: float) -> None:
        self._stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        self._queue_timeout_s = queue_timeout_s

    @asynccontextmanager
    async def place(
        self, job: Job, excluded_worker_ids: Collection[str]
    ) -> AsyncIterator[HeldPlacement]:
        """Wait for a placement and hold it; leaving gives it back, however it is left."""
        stopwatch = Stopwatch()
        call = self._stub.Place(timeout=job.deadline.remaining_s())
        try:
            placement = await self._ask(call, _admit(job, excluded_worker_ids), job)
            job.trace.add(types_pb2.STAGE_QUEUE, stopwatch.elapsed_ms)
            yield placement
        finally:
            call.cancel()

    async def get_state(self, timeout_s: float) -> scheduler_pb2.GetStateResponse:
        """The workers that are alive, as the scheduler sees them."""
        with mesh_errors():
            return await self._stub.GetState(scheduler_pb2.GetStateRequest(), timeout=timeout_s)

    async def _ask(
        self,
        call: "grpc.aio.StreamStreamCall[scheduler_pb2.PlaceRequest, scheduler_pb2.PlaceResponse]",
        admit: scheduler_pb2.PlaceRequest,
        job: Job,
    ) -> HeldPlacement:
        wait_s = job.deadline.remaining_s(self._queue_timeout_s)
        try:
            async with asyncio.timeout(wait_s):
                with mesh_errors():
                    await call.write(admit)
                    response = await call.read()
        except TimeoutError:
            raise DeadlineExceeded(f"no worker became free within {wait_s:.3g} s") from None
        if not isinstance(response, scheduler_pb2.PlaceResponse):
            raise WorkerUnavailable("the scheduler ended the call without a placement")
        return HeldPlacement(call, response.placement)


def _admit(job: Job, excluded_worker_ids: Collection[str]) -> scheduler_pb2.PlaceRequest:
    return scheduler_pb2.PlaceRequest(
        admit=scheduler_pb2.PlaceRequest.Admit(
            request_id=job.request_id,
            model=job.model,
            # A resumed request is placed where its output is cached too.
            prompt_token_ids=[*job.prompt_token_ids, *job.output_token_ids],
            max_tokens=job.sampling_params.max_tokens - len(job.output_token_ids),
            cache_salt=job.request.cache_salt,
            excluded_worker_ids=sorted(excluded_worker_ids),
            priority=job.request.priority,
        )
    )
