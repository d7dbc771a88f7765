"""SchedulerService over the wire: what callers tell of times and of workers that fail."""

import asyncio
from typing import Any

import pytest

from mesh import metrics
from mesh.errors import ContextLengthExceeded, QueueFull
from mesh.v1 import scheduler_pb2, types_pb2
from tests.fakes import FakeClock
from tests.paper_workers import registered
from tests.scheduler_svc.served import Call, Mesh, PlaceRequest, Serve, admit


async def test_objective_that_cannot_be_met_is_refused_at_once_with_a_delay(serve: Serve) -> None:
    mesh = await serve()
    await _measure(mesh, num_requests=20, prefill_ms=2000)
    before = _num_rejections("ttft_objective")

    with pytest.raises(QueueFull) as caught:
        await Call(mesh, admit(ttft_objective_ms=500)).placement()

    assert caught.value.retry_after_s is not None
    assert 1 <= caught.value.retry_after_s <= 3
    assert _num_rejections("ttft_objective") == before + 1
    patient = Call(mesh, admit(ttft_objective_ms=60_000))
    await patient.placement()
    await patient.close()


async def _measure(mesh: Mesh, num_requests: int, prefill_ms: float) -> None:
    """Requests that tell how long they took, as the gateway does."""
    for number in range(num_requests):
        call = Call(mesh, admit(160 + number))
        await call.placement()
        await call.tell(
            PlaceRequest(
                prefill_done=PlaceRequest.PrefillDone(
                    timings=[_timing(types_pb2.STAGE_PREFILL_COMPUTE, prefill_ms)]
                )
            )
        )
        await call.tell(
            PlaceRequest(
                finished=PlaceRequest.Finished(
                    timings=[
                        _timing(types_pb2.STAGE_PREFILL_COMPUTE, prefill_ms),
                        _timing(types_pb2.STAGE_KV_TRANSFER, 50),
                        _timing(types_pb2.STAGE_DECODE_STEPS, 150),
                    ],
                    num_output_tokens=16,
                )
            )
        )
        await call.close()


def _timing(stage: types_pb2.Stage.ValueType, duration_ms: float) -> types_pb2.StageTiming:
    return types_pb2.StageTiming(stage=stage, duration_ms=duration_ms)


def _num_rejections(reason: str) -> float:
    for line in metrics.render()[0].decode().splitlines():
        if line.startswith("pdmesh_scheduler_rejections_total") and f'"{reason}"' in line:
            return float(line.rpartition(" ")[2])
    return 0


async def test_state_says_when_this_deployment_is_better_off_local(serve: Serve) -> None:
    mesh = await serve(local_margin=0)
    await _measure(mesh, num_requests=20, prefill_ms=100)
    [verdict] = (await mesh.state()).verdicts
    assert verdict.advice == scheduler_pb2.DisaggregationVerdict.ADVICE_UNSPECIFIED
    assert verdict.prefill_tokens_per_second > 0
    assert verdict.transfer_tokens_per_second > 0

    reasons = set()
    for _ in range(40):
        call = Call(mesh, admit())
        reasons.add((await call.placement()).reason)
        await call.close()

    # An idle decode worker computes as fast, and nothing has to move.
    assert "local_cheaper" in reasons
    [verdict] = (await mesh.state()).verdicts
    assert verdict.model == "smol"
    assert verdict.advice == scheduler_pb2.DisaggregationVerdict.ADVICE_LOCAL
    assert 0 < verdict.local_ms < verdict.remote_ms


def failed(worker_id: str, failure: scheduler_pb2.WorkerFailure.ValueType) -> Any:
    return PlaceRequest(failed=PlaceRequest.Failed(worker_id=worker_id, failure=failure))


async def breaker_states(mesh: Mesh) -> dict[str, str]:
    workers = (await mesh.state()).workers
    return {one.worker_id: scheduler_pb2.BreakerState.Name(one.breaker)[14:] for one in workers}


async def test_worker_that_was_lost_gets_nothing_until_a_probe_finds_it_well(serve: Serve) -> None:
    clock = FakeClock()
    mesh = await serve(registered("d0"), registered("d1"), breaker_first_open_s=1, clock=clock)
    first = Call(mesh)
    lost = (await first.placement()).decode.worker_id
    other = {"d0": "d1", "d1": "d0"}[lost]

    await first.tell(failed(lost, scheduler_pb2.WORKER_FAILURE_LOST))
    await first.close()

    assert await breaker_states(mesh) == {lost: "OPEN", other: "CLOSED"}
    calls = [Call(mesh) for _ in range(4)]
    assert {(await call.placement()).decode.worker_id for call in calls} == {other}
    clock.advance(1)
    assert await breaker_states(mesh) == {lost: "HALF_OPEN", other: "CLOSED"}
    # The idle one is the cheaper one, but one request is enough to find out.
    probe, next_one = Call(mesh), Call(mesh)
    assert (await probe.placement()).decode.worker_id == lost
    assert (await next_one.placement()).decode.worker_id == other
    await probe.tell(PlaceRequest(finished=PlaceRequest.Finished(num_output_tokens=1)))
    await probe.close()
    assert await breaker_states(mesh) == {lost: "CLOSED", other: "CLOSED"}


async def test_requests_wait_for_the_breaker_of_the_only_worker(serve: Serve) -> None:
    mesh = await serve(registered("d0"), breaker_first_open_s=0.5)
    first = Call(mesh)
    await first.placement()
    await first.tell(failed("d0", scheduler_pb2.WORKER_FAILURE_LOST))
    await first.close()

    waiting = Call(mesh)
    placing = asyncio.ensure_future(waiting.placement())
    await mesh.until(num_waiting=1)
    # No heartbeat, no other request: only time goes by.
    placement = await asyncio.wait_for(placing, 20)

    assert placement.decode.worker_id == "d0"
    with pytest.raises(ContextLengthExceeded):
        await Call(mesh, admit(5000)).placement()


async def test_prompts_are_computed_locally_while_every_prefill_worker_is_out(serve: Serve) -> None:
    mesh = await serve(breaker_first_open_s=60)
    first = Call(mesh)
    assert (await first.placement()).prefill.worker_id == "p0"
    await first.tell(failed("p0", scheduler_pb2.WORKER_FAILURE_LOST))
    await first.close()

    placement = await Call(mesh).placement()

    assert placement.mode == scheduler_pb2.PLACEMENT_MODE_LOCAL
    assert placement.reason == "no_prefill_worker"
