"""DecodeService over the wire: scripted engine, scripted prefill worker and transfer agent."""

import asyncio

import grpc
import pytest

from engine.request import FinishReason, InvalidLogits, RequestTimings, TooManyWaiting
from engine.sampling import Candidate, TokenLogprobs
from mesh.errors import InternalError, ModelNotFound, QueueFull, WorkerUnavailable, from_rpc_error
from mesh.v1 import decode_pb2, types_pb2
from tests.decode_svc.decode_calls import PROMPT, Stub, failure_of, tokens_of
from tests.scripted_engine import ScriptedEngineLoop
from tests.worker_wire import DecodeRig, decode_request, sampling, wait_until


async def test_local_request_streams_tokens_and_then_its_end(
    stub: Stub, engine: ScriptedEngineLoop
) -> None:
    events = aiter(stub.Decode(decode_request(prompt=PROMPT), timeout=20))
    run = await engine.next_run()
    assert not run.request.remote_kv

    run.token(1)
    first = await anext(events)
    run.finish(
        2,
        FinishReason.STOP,
        RequestTimings(wait_s=0.001, prefill_s=0.002, decode_wait_s=0.004, decode_s=0.008),
    )
    second, last = [event async for event in events]

    assert list(first.tokens.token_ids) == [1]
    assert list(second.tokens.token_ids) == [2]
    assert last.finished.finish_reason == types_pb2.FINISH_REASON_STOP
    assert last.finished.matched_stop_token_id == 2
    assert last.finished.kv_transfer_bytes == 0
    assert {timing.stage: timing.duration_ms for timing in last.finished.timings} == pytest.approx(
        {
            types_pb2.STAGE_PREFILL_WAIT: 1,
            types_pb2.STAGE_PREFILL_COMPUTE: 2,
            types_pb2.STAGE_DECODE_WAIT: 4,
            types_pb2.STAGE_DECODE_STEPS: 8,
        }
    )


async def test_first_tokens_say_what_was_cached_for_callers_who_leave_early(
    stub: Stub, engine: ScriptedEngineLoop
) -> None:
    events = aiter(stub.Decode(decode_request(prompt=PROMPT), timeout=20))
    run = await engine.next_run()

    run.first_token(1, num_cached_tokens=0)
    first = await anext(events)
    run.finish(2)
    second, _ = [event async for event in events]

    assert first.HasField("num_cached_tokens")
    assert first.num_cached_tokens == 0
    assert not second.HasField("num_cached_tokens")


async def test_tokens_that_are_there_together_come_in_one_message(
    stub: Stub, engine: ScriptedEngineLoop
) -> None:
    events = aiter(stub.Decode(decode_request(prompt=PROMPT), timeout=20))
    run = await engine.next_run()
    logprobs = [
        TokenLogprobs(token_id, -0.5, (Candidate(token_id, -0.5), Candidate(9, -1.5)))
        for token_id in (1, 2, 3)
    ]

    for one in logprobs:
        run.token(one.token_id, one)
    event = await anext(events)

    assert list(event.tokens.token_ids) == [1, 2, 3]
    assert [one.token_id for one in event.tokens.logprobs] == [1, 2, 3]
    assert [one.token_id for one in event.tokens.logprobs[0].top] == [1, 9]
    run.finish(4)
    assert tokens_of([event async for event in events]) == [4]


async def test_cancelling_while_decoding_aborts_the_engine(
    stub: Stub, engine: ScriptedEngineLoop
) -> None:
    # ST-05 at the worker
    events = aiter(call := stub.Decode(decode_request(prompt=PROMPT)))
    run = await engine.next_run()
    run.token(1)
    await anext(events)

    call.cancel()

    await asyncio.wait_for(run.closed.wait(), 20)


async def test_errors_keep_their_meaning_on_the_wire(
    stub: Stub, engine: ScriptedEngineLoop
) -> None:
    other = await failure_of(stub, decode_request(model="other"))
    engine.refusal = TooManyWaiting("8 wait")
    full = await failure_of(stub, decode_request())

    assert isinstance(other, ModelNotFound)
    assert isinstance(full, QueueFull)


async def test_request_without_a_distribution_ends_with_an_error_after_its_tokens(
    stub: Stub, engine: ScriptedEngineLoop
) -> None:
    # SA-16
    events = aiter(stub.Decode(decode_request(prompt=PROMPT), timeout=20))
    run = await engine.next_run()
    run.token(1)

    run.fail(InvalidLogits("at position 8"))

    assert list((await anext(events)).tokens.token_ids) == [1]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await anext(events)
    assert isinstance(from_rpc_error(caught.value), InternalError)


async def test_draining_worker_refuses_and_in_the_end_cuts(
    rig: DecodeRig, stub: Stub, engine: ScriptedEngineLoop
) -> None:
    events = aiter(stub.Decode(decode_request(prompt=PROMPT), timeout=20))
    run = await engine.next_run()
    rig.streams.refuse_new()
    refused = await failure_of(stub, decode_request("new"))

    run.token(1)
    await wait_until(run.events.empty)
    rig.streams.cut()

    # The gateway goes on elsewhere from every token that was produced here.
    assert tokens_of([await anext(events)]) == [1]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await anext(events)
    assert isinstance(from_rpc_error(caught.value), WorkerUnavailable)
    assert isinstance(refused, WorkerUnavailable)
    await asyncio.wait_for(run.closed.wait(), 20)


async def test_cancelled_error_from_within_still_answers(
    stub: Stub, engine: ScriptedEngineLoop
) -> None:
    # GR-04
    call = stub.Decode(decode_request(), timeout=20)
    run = await engine.next_run()

    run.fail(asyncio.CancelledError())

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(call.read(), 20)
    assert caught.value.code() is grpc.StatusCode.INTERNAL


async def test_cancelled_streams_do_not_hold_up_other_calls(
    stub: Stub, engine: ScriptedEngineLoop
) -> None:
    # GR-03
    calls = [stub.Decode(decode_request(f"r{index}")) for index in range(20)]
    runs = [await engine.next_run() for _ in calls]
    for call in calls:
        call.cancel()

    request = decode_pb2.DecodeServiceGetLoadRequest()
    loads = await asyncio.gather(*(stub.GetLoad(request, timeout=20) for _ in range(4)))

    assert {load.load.num_blocks for load in loads} == {engine.stats.num_blocks}
    await asyncio.gather(*(asyncio.wait_for(run.closed.wait(), 20) for run in runs))


async def test_prompt_above_four_mebibytes_arrives(stub: Stub, engine: ScriptedEngineLoop) -> None:
    # GR-01
    request = decode_request(prompt=[2**21 + index for index in range(1_200_000)])
    assert request.ByteSize() > 4 * 2**20

    call = stub.Decode(request)

    assert len((await engine.next_run()).request.prompt_token_ids) == 1_200_000
    call.cancel()


async def test_absent_parameters_are_the_engines_business(
    stub: Stub, engine: ScriptedEngineLoop
) -> None:
    call = stub.Decode(decode_request(params=sampling(3, top_p=0.0)))

    params = (await engine.next_run()).request.sampling_params
    call.cancel()

    assert (params.max_tokens, params.top_p, params.temperature) == (3, 0.0, 1.0)
