"""PrefillService over the wire, with a scripted engine."""

import asyncio
import random
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from engine.request import (
    DuplicateRequest,
    EngineError,
    EngineStopped,
    FinishReason,
    InvalidLogits,
    InvalidParameter,
    RequestTooLarge,
    TooManyWaiting,
)
from engine.sampling import SamplingParams
from mesh.errors import (
    ContextLengthExceeded,
    InternalError,
    InvalidRequest,
    KvLeaseExpired,
    MeshError,
    ModelNotFound,
    QueueFull,
    WorkerUnavailable,
    from_rpc_error,
)
from mesh.v1 import prefill_pb2, types_pb2
from tests.scripted_engine import ScriptedEngineLoop
from tests.worker_wire import PrefillRig, prefill_request, prefill_stub, wait_until

if TYPE_CHECKING:
    from mesh.v1.prefill_pb2_grpc import PrefillServiceAsyncStub as Stub
else:
    Stub = Any


@pytest.fixture
def engine() -> ScriptedEngineLoop:
    return ScriptedEngineLoop()


@pytest.fixture
async def rig(engine: ScriptedEngineLoop) -> PrefillRig:
    return PrefillRig(engine)


@pytest.fixture
async def stub(rig: PrefillRig) -> AsyncIterator[Stub]:
    async with prefill_stub(rig) as stub:
        yield stub


async def failure_of(stub: Stub, request: prefill_pb2.PrefillRequest) -> MeshError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in stub.Prefill(request, timeout=20):
            pass
    return from_rpc_error(caught.value)


async def test_progress_first_token_and_leased_blocks_come_back(
    rig: PrefillRig, stub: Stub, engine: ScriptedEngineLoop
) -> None:
    events = aiter(stub.Prefill(prefill_request("r1", prompt=[5, 6, 7])))
    run = await engine.next_run()

    run.progress(2)
    progress = await anext(events)
    run.hold(9, 3, 1, num_cached_tokens=1)
    (finished,) = [event.finished async for event in events]

    assert progress.progress.num_computed_tokens == 2
    assert list(finished.first_token.token_ids) == [9]
    assert not finished.HasField("finish_reason")
    assert finished.num_cached_tokens == 1
    handle = finished.kv_handle
    assert list(handle.block_ids) == [3, 1]
    assert handle.num_tokens == 3
    assert (handle.engine_id, handle.layout_fingerprint) == ("e-prefill", "f1")
    assert handle.holder_address == rig.server.address
    assert 25 < handle.lease_expires_at.ToNanoseconds() / 1e9 - time.time() <= 30
    stages = {timing.stage: timing.duration_ms for timing in finished.timings}
    assert stages == pytest.approx(
        {types_pb2.STAGE_PREFILL_WAIT: 1.0, types_pb2.STAGE_PREFILL_COMPUTE: 2.0}
    )
    assert len(rig.leases) == 1


async def test_engine_gets_what_the_caller_said_and_its_own_defaults_for_the_rest(
    stub: Stub, engine: ScriptedEngineLoop
) -> None:
    params = types_pb2.SamplingParams(
        max_tokens=7,
        temperature=0.0,
        top_k=0,
        seed=-1,
        num_logprobs=0,
        stop_token_ids=[4],
        logit_bias={3: -100.0},
        bad_words=[types_pb2.TokenSequence(token_ids=[1, 2])],
    )
    call = stub.Prefill(prefill_request(prompt=[1, 2], output=[3], params=params))

    request = (await engine.next_run()).request
    call.cancel()

    assert request.prompt_token_ids == [1, 2]
    assert request.output_token_ids == [3]
    assert request.hold_blocks
    assert request.sampling_params == SamplingParams(
        max_tokens=7,
        temperature=0.0,
        seed=-1,
        num_logprobs=0,
        stop_token_ids=frozenset({4}),
        logit_bias={3: -100.0},
        bad_words=((1, 2),),
    )


async def test_request_that_ends_with_its_first_token_holds_nothing(
    rig: PrefillRig, stub: Stub, engine: ScriptedEngineLoop
) -> None:
    call = stub.Prefill(prefill_request())
    (await engine.next_run()).finish(2, FinishReason.STOP)

    (event,) = [event async for event in call]

    assert event.finished.finish_reason == types_pb2.FINISH_REASON_STOP
    assert event.finished.matched_stop_token_id == 2
    assert not event.finished.HasField("kv_handle")
    assert len(rig.leases) == 0


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (InvalidParameter("top_p", "top_p is 2"), InvalidRequest),
        (RequestTooLarge("9 tokens, 8 fit"), ContextLengthExceeded),
        (TooManyWaiting("8 wait"), QueueFull),
        (DuplicateRequest("r1"), InvalidRequest),
        # SA-16: no usable distribution is an error, never a token.
        (InvalidLogits("at position 3"), InternalError),
        (EngineStopped("crashed"), WorkerUnavailable),
        (EngineError("something new"), InternalError),
    ],
)
async def test_engine_errors_keep_their_meaning_on_the_wire(
    stub: Stub, engine: ScriptedEngineLoop, error: EngineError, expected: type[MeshError]
) -> None:
    engine.refusal = error

    received = await failure_of(stub, prefill_request())

    assert type(received) is expected
    # Why an engine crashed is for the log alone.
    assert (str(received) == str(error)) == (not isinstance(error, EngineStopped))
    if isinstance(error, InvalidParameter):
        assert received.param == "top_p"
    if isinstance(error, TooManyWaiting):
        assert received.retry_after_s == 1.0


async def test_another_model_is_not_found_here(stub: Stub) -> None:
    error = await failure_of(stub, prefill_request(model="other"))

    assert isinstance(error, ModelNotFound)


async def test_error_after_progress_is_the_streams_end(
    stub: Stub, engine: ScriptedEngineLoop
) -> None:
    call = stub.Prefill(prefill_request(), timeout=20)
    run = await engine.next_run()
    run.progress(2)
    await call.read()

    run.fail(InvalidLogits("at position 3"))

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert isinstance(from_rpc_error(caught.value), InternalError)
    await asyncio.wait_for(run.closed.wait(), 20)


async def test_cancelling_aborts_the_engine_and_leaves_no_hold(
    rig: PrefillRig, stub: Stub, engine: ScriptedEngineLoop
) -> None:
    # ST-05 at the worker.
    call = stub.Prefill(prefill_request())
    run = await engine.next_run()

    call.cancel()

    await asyncio.wait_for(run.closed.wait(), 20)
    await wait_until(lambda: run.request.request_id in engine.released_holds)
    assert len(rig.streams) == 0


async def test_cancelling_between_the_engines_end_and_the_answer_leaves_no_hold(
    engine: ScriptedEngineLoop,
) -> None:
    rig = PrefillRig(engine)
    await rig.server.start()
    context: Any = None
    async with aclosing(rig.servicer.Prefill(prefill_request(), context)) as responses:
        answering = asyncio.ensure_future(anext(responses))
        run = await engine.next_run()
        run.hold(9, 3)
        assert (await answering).HasField("finished")
        assert len(rig.leases) == 1
        # What the interceptor does when the write of this message is cancelled.

    assert len(rig.leases) == 0
    assert engine.released_holds == [run.request.request_id]
    await rig.server.stop(0)


async def test_whenever_callers_leave_every_hold_is_given_back_once(
    engine: ScriptedEngineLoop,
) -> None:
    rig = PrefillRig(engine, lease_s=0.1)
    delays = random.Random(1)
    held: list[str] = []
    async with prefill_stub(rig) as stub:
        for index in range(40):
            call = stub.Prefill(prefill_request(f"r{index}"))
            run = await engine.next_run()
            run.hold(9, 3)
            held.append(run.request.request_id)
            await asyncio.sleep(delays.choice([0, 0, 0.0002, 0.001, 0.003]))
            call.cancel()

        await wait_until(lambda: set(held) <= set(engine.released_holds))
        await wait_until(lambda: not rig.leases and not rig.streams)

    assert sorted(engine.released_holds) == sorted(held)


async def test_caller_that_vanishes_after_the_answer_is_outlived_by_the_lease_only(
    engine: ScriptedEngineLoop,
) -> None:
    rig = PrefillRig(engine, lease_s=0.5)
    async with prefill_stub(rig) as stub:
        call = stub.Prefill(prefill_request())
        run = await engine.next_run()
        run.hold(9, 3)
        assert [event.HasField("finished") async for event in call] == [True]
        assert engine.released_holds == []

        await wait_until(lambda: engine.released_holds == [run.request.request_id])


async def test_lease_is_renewed_and_released_over_the_wire(
    rig: PrefillRig, stub: Stub, engine: ScriptedEngineLoop
) -> None:
    handle_id = await finish_one(stub, engine)

    renewed = await stub.RenewKv(prefill_pb2.RenewKvRequest(handle_id=handle_id))
    first = await stub.ReleaseKv(prefill_pb2.ReleaseKvRequest(handle_id=handle_id))
    second = await stub.ReleaseKv(prefill_pb2.ReleaseKvRequest(handle_id=handle_id))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.RenewKv(prefill_pb2.RenewKvRequest(handle_id=handle_id))

    assert renewed.lease_expires_at.ToNanoseconds() / 1e9 > time.time() + 25
    assert (first.was_live, second.was_live) == (True, False)
    assert isinstance(from_rpc_error(caught.value), KvLeaseExpired)
    assert engine.released_holds == [handle_id]


async def test_caller_that_never_learnt_its_handle_releases_by_request(
    rig: PrefillRig, stub: Stub, engine: ScriptedEngineLoop
) -> None:
    handle_id = await finish_one(stub, engine)
    request_id = handle_id.partition("/")[0]

    other = await stub.ReleaseKv(prefill_pb2.ReleaseKvRequest(request_id=request_id[:-1]))
    first = await stub.ReleaseKv(prefill_pb2.ReleaseKvRequest(request_id=request_id))
    second = await stub.ReleaseKv(prefill_pb2.ReleaseKvRequest(request_id=request_id))

    assert (other.was_live, first.was_live, second.was_live) == (False, True, False)
    assert engine.released_holds == [handle_id]


async def test_same_request_id_again_gets_a_handle_of_its_own(
    rig: PrefillRig, stub: Stub, engine: ScriptedEngineLoop
) -> None:
    # A gateway retries while the lease of its first try still lasts.
    handles = [await finish_one(stub, engine), await finish_one(stub, engine)]

    assert len(set(handles)) == 2
    assert len(rig.leases) == 2


async def test_load_is_reported_as_the_engine_counts_it(
    stub: Stub, engine: ScriptedEngineLoop
) -> None:
    response = await stub.GetLoad(prefill_pb2.PrefillServiceGetLoadRequest())

    assert response.load.num_blocks == engine.stats.num_blocks
    assert response.load.num_steps == engine.stats.num_steps
    assert response.load.num_prefix_cache_hits == engine.stats.num_prefix_cache_hits


async def test_draining_worker_refuses_and_in_the_end_cuts(
    rig: PrefillRig, stub: Stub, engine: ScriptedEngineLoop
) -> None:
    call = stub.Prefill(prefill_request("running"), timeout=20)
    run = await engine.next_run()
    rig.streams.refuse_new()

    refused = await failure_of(stub, prefill_request("new"))
    rig.streams.cut()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()

    assert isinstance(refused, WorkerUnavailable)
    assert isinstance(from_rpc_error(caught.value), WorkerUnavailable)
    await asyncio.wait_for(run.closed.wait(), 20)
    await asyncio.wait_for(rig.streams.wait_until_idle(), 20)


async def test_cancelled_streams_do_not_hold_up_other_calls(
    stub: Stub, engine: ScriptedEngineLoop
) -> None:
    # GR-03
    calls = [stub.Prefill(prefill_request(f"r{index}")) for index in range(20)]
    runs = [await engine.next_run() for _ in calls]
    for call in calls:
        call.cancel()

    request = prefill_pb2.PrefillServiceGetLoadRequest()
    await asyncio.gather(*(stub.GetLoad(request, timeout=20) for _ in range(4)))

    await asyncio.gather(*(asyncio.wait_for(run.closed.wait(), 20) for run in runs))


async def test_cancelled_error_from_within_still_answers(
    stub: Stub, engine: ScriptedEngineLoop
) -> None:
    # GR-04
    call = stub.Prefill(prefill_request(), timeout=20)
    run = await engine.next_run()

    run.fail(asyncio.CancelledError())

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(call.read(), 20)
    assert caught.value.code() is grpc.StatusCode.INTERNAL


async def test_prompt_above_four_mebibytes_arrives(stub: Stub, engine: ScriptedEngineLoop) -> None:
    # GR-01
    prompt = [2**21 + index for index in range(1_200_000)]
    request = prefill_request(prompt=prompt)
    assert request.ByteSize() > 4 * 2**20

    call = stub.Prefill(request)

    assert len((await engine.next_run()).request.prompt_token_ids) == len(prompt)
    call.cancel()


async def test_deadline_ends_the_work(stub: Stub, engine: ScriptedEngineLoop) -> None:
    # GR-06
    call = stub.Prefill(prefill_request(), timeout=0.5)
    run = await engine.next_run()

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()

    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await asyncio.wait_for(run.closed.wait(), 20)


async def finish_one(stub: Stub, engine: ScriptedEngineLoop) -> str:
    call = stub.Prefill(prefill_request())
    (await engine.next_run()).hold(9, 3)
    (event,) = [event async for event in call]
    return event.finished.kv_handle.handle_id
