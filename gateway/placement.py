"""Placements: a scheduler's decision, held for as long as a request needs it."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Collection
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc

from gateway.attempts import worker_failure
from gateway.generation import Chunk, Job, PriorityClass
from gateway.peers import ask_any, first_answer
from mesh.client import mesh_errors
from mesh.errors import DeadlineExceeded, MeshError, WorkerUnavailable
from mesh.telemetry import use_span
from mesh.v1 import scheduler_pb2, scheduler_pb2_grpc, types_pb2

logger = logging.getLogger(__name__)

_END_TIMEOUT_S = 2.0

_MODES = {
    scheduler_pb2.PLACEMENT_MODE_DISAGGREGATED: "disaggregated",
    scheduler_pb2.PLACEMENT_MODE_LOCAL: "local",
}
_CLASSES = {
    PriorityClass.ONLINE: types_pb2.PRIORITY_CLASS_ONLINE,
    PriorityClass.OFFLINE: types_pb2.PRIORITY_CLASS_OFFLINE,
}


class HeldPlacement:
    """Where a job runs; the scheduler charges the workers until it is left.

    Renewed from the event loop that serves the job: should that hang, the scheduler takes the
    placement back.
    """

    def __init__(
        self,
        call: "grpc.aio.StreamStreamCall[scheduler_pb2.PlaceRequest, Any]",
        placement: scheduler_pb2.Placement,
    ) -> None:
        self._call = call
        # It has been told how the placement went, and may read it before the call ends.
        self.is_settled = False
        self.decode = placement.decode
        # None: the decode worker computes the prompt too.
        self.prefill = placement.prefill if placement.HasField("prefill") else None
        self.mode = _MODES.get(placement.mode, "")
        self._is_prefill_done = False
        # A call takes one message at a time.
        self._writing = asyncio.Lock()
        self._renewing = asyncio.create_task(self._renew(placement.lease_ms / 1000))

    async def observed(
        self, job: Job, chunks: AsyncGenerator[Chunk, None]
    ) -> AsyncGenerator[Chunk, None]:
        """The decode worker's chunks; the scheduler hears of the first and of the last.

        Closing it closes them."""
        async with aclosing(chunks):
            async for chunk in chunks:
                if chunk.finish is not None:
                    # Before it is passed on: whoever gets it may leave at once.
                    await self._finished(job, len(job.output_token_ids) + len(chunk.token_ids))
                yield chunk
                if not self._is_prefill_done and chunk.token_ids and chunk.finish is None:
                    # After it was passed on: the client waits for the first token.
                    await self.prefill_done(job)

    async def prefill_done(self, job: Job) -> None:
        """The first token exists: the prefill worker is free of the request."""
        self._is_prefill_done = True
        done = scheduler_pb2.PlaceRequest.PrefillDone(
            timings=_timings(job), num_cached_tokens=job.trace.num_cached_tokens or 0
        )
        await self._tell(scheduler_pb2.PlaceRequest(prefill_done=done))

    async def _finished(self, job: Job, num_output_tokens: int) -> None:
        """The sequence is complete: the scheduler learns how long it took, and charges no more."""
        finished = scheduler_pb2.PlaceRequest.Finished(
            timings=_timings(job),
            num_output_tokens=num_output_tokens,
            num_cached_tokens=job.trace.num_cached_tokens or 0,
        )
        self.is_settled = True
        await self._tell(scheduler_pb2.PlaceRequest(finished=finished))

    async def failed(self, worker_id: str, error: MeshError) -> None:
        """A worker failed the request, for a reason that others may want to know."""
        failure = worker_failure(error)
        if failure is None:
            return
        told = scheduler_pb2.PlaceRequest.Failed(worker_id=worker_id, failure=failure)
        self.is_settled = True
        await self._tell(scheduler_pb2.PlaceRequest(failed=told))

    async def end(self) -> None:
        """Give the placement back once the scheduler has heard everything."""
        try:
            if self.is_settled:
                # A cancelled call's last message may never be read.
                async with asyncio.timeout(_END_TIMEOUT_S):
                    async with self._writing:
                        self._renewing.cancel()
                        await self._call.done_writing()
                    await self._call.code()
        except (TimeoutError, grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            logger.debug("placement did not end in order", extra={"error": repr(error)})
        finally:
            self.drop()

    def drop(self) -> None:
        """Give it back at once, with whatever the scheduler has not read yet."""
        self._renewing.cancel()
        self._call.cancel()

    async def _renew(self, lease_s: float) -> None:
        renew = scheduler_pb2.PlaceRequest(renew=scheduler_pb2.PlaceRequest.Renew())
        while lease_s and not self._call.done():
            await asyncio.sleep(lease_s / 3)
            if self.is_settled:
                return
            await self._tell(renew)

    async def _tell(self, message: scheduler_pb2.PlaceRequest) -> None:
        try:
            async with self._writing:
                await self._call.write(message)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError) as error:
            # The scheduler is gone and the charge with it; the workers are not.
            logger.warning("placement lost", extra={"error": repr(error)})


def _timings(job: Job) -> list[types_pb2.StageTiming]:
    """Nothing of a resumed job, whose stages are those of several placements."""
    if job.trace.num_attempts > 1:
        return []
    return [
        types_pb2.StageTiming(stage=stage, duration_ms=duration_ms)
        for stage, duration_ms in job.trace.timeline.so_far().items()
    ]


class Scheduler:
    """Asks for placements."""

    def __init__(
        self, channel: grpc.aio.Channel, *, queue_timeout_s: float, patience_s: float
    ) -> None:
        self._stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        self._queue_timeout_s = queue_timeout_s
        self._patience_s = patience_s
        self._ending: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def place(
        self, job: Job, excluded_worker_ids: Collection[str]
    ) -> AsyncIterator[HeldPlacement]:
        """Wait for a placement and hold it; leaving gives it back, however it is left."""
        job.trace.timeline.enter(types_pb2.STAGE_QUEUE)
        admit = _admit(job, excluded_worker_ids)
        placement = await ask_any(lambda: self._ask(admit, job), patience_s=self._patience_s)
        try:
            yield placement
        finally:
            if placement.is_settled:
                # Nobody has to wait for it.
                task = asyncio.create_task(placement.end())
                self._ending.add(task)
                task.add_done_callback(self._ending.discard)
            else:
                placement.drop()

    async def close(self) -> None:
        """Wait for placements that are ending."""
        await asyncio.gather(*self._ending)

    async def get_state(self, timeout_s: float) -> scheduler_pb2.GetStateResponse:
        """The workers that are alive, as a scheduler sees them."""

        async def ask(left_s: float) -> scheduler_pb2.GetStateResponse:
            with mesh_errors():
                return await self._stub.GetState(scheduler_pb2.GetStateRequest(), timeout=left_s)

        return await first_answer(ask, timeout_s=timeout_s)

    async def _ask(self, admit: scheduler_pb2.PlaceRequest, job: Job) -> HeldPlacement:
        """One scheduler's placement; the call that holds it ends here unless there is one."""
        wait_s = job.deadline.remaining_s(self._queue_timeout_s)
        with use_span(job.trace.attempt_span):
            call = self._stub.Place(timeout=job.deadline.remaining_s())
        try:
            async with asyncio.timeout(wait_s):
                with mesh_errors():
                    await call.write(admit)
                    response = await call.read()
        except TimeoutError:
            call.cancel()
            raise DeadlineExceeded(f"no worker became free within {wait_s:.3g} s") from None
        except BaseException:
            call.cancel()
            raise
        if not isinstance(response, scheduler_pb2.PlaceResponse):
            call.cancel()
            raise WorkerUnavailable("the scheduler ended the call without a placement")
        job.trace.timeline.reported(response.placement.timings)
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
            priority_class=_CLASSES[job.request.priority_class],
            ttft_objective_ms=job.request.ttft_objective_ms,
            tenant=job.request.tenant,
        )
    )
