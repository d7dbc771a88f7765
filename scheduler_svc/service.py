"""SchedulerService on the wire: translate, hold a place while the call is open."""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import AsyncExitStack
from dataclasses import asdict
from typing import Any

import grpc

from mesh import metrics
from mesh.client import remaining_s
from mesh.errors import DeadlineExceeded, InvalidRequest
from mesh.registry import RegisteredWorker
from mesh.telemetry import Span, Stopwatch, span
from mesh.v1 import scheduler_pb2, scheduler_pb2_grpc, types_pb2
from scheduler_svc.admission import PriorityClass
from scheduler_svc.breakers import BreakerState, Failure
from scheduler_svc.loads import HeldPlacement
from scheduler_svc.mode import Advice, PlacementMode
from scheduler_svc.placement import Assignment, Decision
from scheduler_svc.scheduler import AdmitRequest, ModelCosts, Scheduler, StageTimes
from scheduler_svc.workers import RequestFacts

logger = logging.getLogger(__name__)

_ADMIT_TIMEOUT_S = 10.0

_MODES = {
    PlacementMode.DISAGGREGATED: scheduler_pb2.PLACEMENT_MODE_DISAGGREGATED,
    PlacementMode.LOCAL: scheduler_pb2.PLACEMENT_MODE_LOCAL,
}
_CLASSES = {
    types_pb2.PRIORITY_CLASS_UNSPECIFIED: PriorityClass.ONLINE,
    types_pb2.PRIORITY_CLASS_ONLINE: PriorityClass.ONLINE,
    types_pb2.PRIORITY_CLASS_OFFLINE: PriorityClass.OFFLINE,
}
_FAILURES = {
    scheduler_pb2.WORKER_FAILURE_LOST: Failure.LOST,
    scheduler_pb2.WORKER_FAILURE_FAULTY: Failure.FAULTY,
}
_BREAKER_STATES = {
    BreakerState.CLOSED: scheduler_pb2.BREAKER_STATE_CLOSED,
    BreakerState.OPEN: scheduler_pb2.BREAKER_STATE_OPEN,
    BreakerState.HALF_OPEN: scheduler_pb2.BREAKER_STATE_HALF_OPEN,
}
_ADVICE = {
    Advice.UNKNOWN: scheduler_pb2.DisaggregationVerdict.ADVICE_UNSPECIFIED,
    Advice.DISAGGREGATE: scheduler_pb2.DisaggregationVerdict.ADVICE_DISAGGREGATE,
    Advice.LOCAL: scheduler_pb2.DisaggregationVerdict.ADVICE_LOCAL,
    Advice.SHARED_CORES: scheduler_pb2.DisaggregationVerdict.ADVICE_SHARED_CORES,
}


class SchedulerServicer(scheduler_pb2_grpc.SchedulerServiceServicer):
    def __init__(
        self, scheduler: Scheduler, max_queue_wait_s: float, *, lease_s: float = 15.0
    ) -> None:
        self._scheduler = scheduler
        self._max_queue_wait_s = max_queue_wait_s
        self._lease_s = lease_s

    async def Place(
        self,
        request_iterator: AsyncIterator[scheduler_pb2.PlaceRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncGenerator[scheduler_pb2.PlaceResponse, None]:
        admit = _to_admit_request(await _first(request_iterator))
        stopwatch = Stopwatch()
        timeout_s = min(remaining_s(context, self._max_queue_wait_s), self._max_queue_wait_s)
        # The call is the placement: leaving this block, in whichever way, gives it back.
        async with AsyncExitStack() as stack:
            with span("scheduler.place", _facts_attributes(admit.facts)) as current:
                held = await stack.enter_async_context(self._scheduler.hold(admit, timeout_s))
                _describe(held.decision, current)
            yield _to_response(held, stopwatch.elapsed_ms, self._lease_s)
            await self._follow(held, request_iterator)

    async def _follow(
        self, held: HeldPlacement, messages: AsyncIterator[scheduler_pb2.PlaceRequest]
    ) -> None:
        """Hear of the request until its caller ends the call, or is silent for too long.

        Keepalive finds out that a caller is dead or cut off, but not that it hangs: gRPC's own
        threads answer for it.
        """
        now = asyncio.get_running_loop().time
        try:
            async with asyncio.timeout(self._lease_s) as lease:
                async for message in messages:
                    lease.reschedule(now() + self._lease_s)
                    self._hear(held, message)
        except TimeoutError:
            metrics.PLACEMENT_LEASE_EXPIRIES.add(1)
            logger.warning("a placement's lease expired", extra={"lease_s": self._lease_s})
            raise DeadlineExceeded(
                f"nothing was heard of the placement for {self._lease_s:g} s"
            ) from None

    def _hear(self, held: HeldPlacement, message: scheduler_pb2.PlaceRequest) -> None:
        match message.WhichOneof("event"):
            case "renew":
                pass
            case "prefill_done":
                self._scheduler.prefill_done(held, _prefill_times(message.prefill_done))
            case "finished":
                self._scheduler.finished(held, _all_times(message.finished))
            case "failed":
                failure = _FAILURES.get(message.failed.failure, Failure.FAULTY)
                self._scheduler.failed(held, message.failed.worker_id, failure)
            case _:
                raise InvalidRequest("`admit` may be sent once, before all else")

    async def GetState(
        self,
        request: scheduler_pb2.GetStateRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> scheduler_pb2.GetStateResponse:
        return scheduler_pb2.GetStateResponse(
            num_waiting=self._scheduler.num_waiting,
            num_placements=self._scheduler.num_placements,
            workers=[
                _to_worker_state(
                    worker,
                    self._scheduler.charged(worker).num_requests,
                    self._scheduler.breakers.state(worker.record.holder),
                )
                for worker in self._scheduler.workers
            ],
            verdicts=[_to_verdict(*one) for one in self._scheduler.costs.items()],
        )


async def _first(
    messages: AsyncIterator[scheduler_pb2.PlaceRequest],
) -> scheduler_pb2.PlaceRequest.Admit:
    try:
        async with asyncio.timeout(_ADMIT_TIMEOUT_S):
            async for message in messages:
                if message.WhichOneof("event") == "admit":
                    return message.admit
                break
    except TimeoutError:
        raise DeadlineExceeded(f"no `admit` within {_ADMIT_TIMEOUT_S:.0f} s") from None
    raise InvalidRequest("the first message must be `admit`")


def _to_admit_request(admit: scheduler_pb2.PlaceRequest.Admit) -> AdmitRequest:
    if not admit.prompt_token_ids:
        raise InvalidRequest("prompt_token_ids is empty", param="prompt_token_ids")
    if admit.max_tokens == 0:
        raise InvalidRequest("max_tokens must be at least 1", param="max_tokens")
    return AdmitRequest(
        facts=RequestFacts(
            model=admit.model,
            num_prompt_tokens=len(admit.prompt_token_ids),
            max_tokens=admit.max_tokens,
            excluded_worker_ids=frozenset(admit.excluded_worker_ids),
        ),
        prompt_token_ids=list(admit.prompt_token_ids),
        cache_salt=admit.cache_salt,
        priority=admit.priority,
        tenant=admit.tenant,
        priority_class=_CLASSES.get(admit.priority_class, PriorityClass.ONLINE),
        ttft_objective_s=admit.ttft_objective_ms / 1000 or None,
    )


def _prefill_times(done: scheduler_pb2.PlaceRequest.PrefillDone) -> StageTimes | None:
    """None from a caller that tells only that the token exists."""
    if not done.timings:
        return None
    return StageTimes(
        prefill_compute_s=_seconds(done.timings, types_pb2.STAGE_PREFILL_COMPUTE),
        num_cached_tokens=done.num_cached_tokens,
    )


def _all_times(finished: scheduler_pb2.PlaceRequest.Finished) -> StageTimes:
    return StageTimes(
        prefill_compute_s=_seconds(finished.timings, types_pb2.STAGE_PREFILL_COMPUTE),
        kv_transfer_s=_seconds(finished.timings, types_pb2.STAGE_KV_TRANSFER),
        decode_steps_s=_seconds(finished.timings, types_pb2.STAGE_DECODE_STEPS),
        num_cached_tokens=finished.num_cached_tokens,
        num_output_tokens=finished.num_output_tokens,
    )


def _seconds(
    timings: Iterable[types_pb2.StageTiming], stage: types_pb2.Stage.ValueType
) -> float | None:
    found = [timing.duration_ms for timing in timings if timing.stage == stage]
    return sum(found) / 1000 if found else None


def _facts_attributes(facts: RequestFacts) -> dict[str, int]:
    return {
        "pdmesh.num_prompt_tokens": facts.num_prompt_tokens,
        "pdmesh.num_excluded_workers": len(facts.excluded_worker_ids),
    }


def _describe(decision: Decision, current: Span) -> None:
    """Say in trace, metrics and log what was decided and why."""
    description: dict[str, str | int] = {"mode": decision.mode, "reason": decision.reason}
    for role, part in (("prefill", decision.prefill), ("decode", decision.decode)):
        if part is not None:
            description[f"{role}.worker_id"] = part.worker.worker_id
            description[f"{role}.num_cached_tokens"] = part.num_cached_tokens
    if decision.comparison is not None:
        description["local_ms"] = round(1000 * decision.comparison.local_s)
        description["remote_ms"] = round(1000 * decision.comparison.remote_s)
    current.set_attributes({f"pdmesh.placement.{key}": one for key, one in description.items()})
    metrics.DISAGG_DECISIONS.add(1, {"decision": decision.mode, "reason": decision.reason})
    logger.debug("placed", extra=description)


def _to_response(
    held: HeldPlacement, queue_ms: float, lease_s: float
) -> scheduler_pb2.PlaceResponse:
    decision = held.decision
    placement = scheduler_pb2.Placement(
        placement_id=held.placement_id,
        mode=_MODES[decision.mode],
        decode=_to_worker_ref(decision.decode, knows_tiers=held.knows_tiers),
        reason=decision.reason,
        timings=[types_pb2.StageTiming(stage=types_pb2.STAGE_QUEUE, duration_ms=queue_ms)],
        lease_ms=int(1000 * lease_s),
    )
    if decision.prefill is not None:
        prefill = _to_worker_ref(decision.prefill, knows_tiers=held.knows_tiers)
        placement.prefill.CopyFrom(prefill)
    return scheduler_pb2.PlaceResponse(placement=placement)


def _to_worker_ref(part: Assignment, *, knows_tiers: bool) -> scheduler_pb2.WorkerRef:
    return scheduler_pb2.WorkerRef(
        worker_id=part.worker.worker_id,
        address=part.worker.address,
        incarnation=part.worker.incarnation,
        num_cached_tokens=part.num_cached_tokens,
        num_tiered_tokens=part.num_tiered_tokens if knows_tiers else None,
    )


def _to_worker_state(
    worker: RegisteredWorker, num_placements: int, breaker: BreakerState
) -> scheduler_pb2.WorkerState:
    record, load = worker.record, worker.load
    return scheduler_pb2.WorkerState(
        worker_id=record.worker_id,
        role=record.role,
        address=record.address,
        incarnation=record.incarnation,
        load=types_pb2.EngineLoad(**asdict(load)),
        num_placements=num_placements,
        breaker=_BREAKER_STATES[breaker],
    )


def _to_verdict(model: str, costs: ModelCosts) -> scheduler_pb2.DisaggregationVerdict:
    verdict = costs.comparisons.verdict()
    return scheduler_pb2.DisaggregationVerdict(
        model=model,
        advice=_ADVICE[verdict.advice],
        num_placements=verdict.num_placements,
        local_ms=1000 * verdict.local_s,
        remote_ms=1000 * verdict.remote_s,
        prefill_tokens_per_second=costs.estimates.prefill_tokens_per_second,
        transfer_tokens_per_second=costs.estimates.transfer_tokens_per_second,
    )
