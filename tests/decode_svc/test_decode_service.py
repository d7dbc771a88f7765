"""DecodeService over the wire: scripted engine, scripted prefill worker and transfer agent."""

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from decode_svc.kv_import import KvImportLimits
from engine.request import FinishReason, InvalidLogits, RequestTimings, TooManyWaiting
from engine.sampling import Candidate, TokenLogprobs
from mesh.errors import (
    InternalError,
    KvTransferFailed,
    MeshError,
    ModelNotFound,
    QueueFull,
    WorkerUnavailable,
    from_rpc_error,
)
from mesh.v1 import decode_pb2, prefill_pb2, prefill_pb2_grpc, types_pb2
from tests.scripted_engine import ScriptedEngineLoop
from tests.worker_wire import DecodeRig, decode_request, decode_stub, sampling, wait_until

if TYPE_CHECKING:
    from mesh.v1.decode_pb2_grpc import DecodeServiceAsyncStub as Stub
else:
    Stub = Any

PROMPT = [5, 6, 7, 8, 9, 10]


@pytest.fixture
def engine() -> ScriptedEngineLoop:
    return ScriptedEngineLoop()


@pytest.fixture
async def rig(engine: ScriptedEngineLoop) -> DecodeRig:
    return DecodeRig(engine, KvImportLimits(pull_timeout_s=0.3, release_timeout_s=0.3))


@pytest.fixture
async def stub(rig: DecodeRig) -> AsyncIterator[Stub]:
    async with decode_stub(rig) as stub:
        yield stub


def remote_request(
    rig: DecodeRig, num_tokens: int = 6, layout_fingerprint: str = "f1"
) -> decode_pb2.DecodeRequest:
    """Six prompt tokens in blocks of four, and the first token."""
    handle = rig.handle(num_tokens, 11, 12, layout_fingerprint=layout_fingerprint)
    return decode_request(prompt=PROMPT, output=[3], kv_handle=handle)


async def failure_of(stub: Stub, request: decode_pb2.DecodeRequest) -> MeshError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in stub.Decode(request, timeout=5):
            pass
    return from_rpc_error(caught.value)


def tokens_of(events: list[decode_pb2.DecodeResponse]) -> list[int]:
    return [token_id for event in events for token_id in event.tokens.token_ids]


async def test_local_request_streams_tokens_and_then_its_end(
    stub: Stub, engine: ScriptedEngineLoop
) -> None:
    events = aiter(stub.Decode(decode_request(prompt=PROMPT), timeout=5))
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
    events = aiter(stub.Decode(decode_request(prompt=PROMPT), timeout=5))
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
    events = aiter(stub.Decode(decode_request(prompt=PROMPT), timeout=5))
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


async def test_remote_kv_is_pulled_confirmed_and_then_decoded_from(
    rig: DecodeRig, stub: Stub, engine: ScriptedEngineLoop
) -> None:
    events = aiter(stub.Decode(remote_request(rig), timeout=5))
    run = await engine.next_run()
    assert run.request.remote_kv

    run.want_remote_kv(1, 21)
    pull = await asyncio.wait_for(rig.agent.pulls.get(), 1)
    answer = await engine.next_kv_answer()
    run.finish(4, timings=RequestTimings(remote_kv_s=0.001, decode_wait_s=0.002, decode_s=0.003))
    collected = [event async for event in events]

    # Only the blocks that are missing here; the first token is not sent again.
    assert (list(pull.source_block_ids), list(pull.destination_block_ids)) == ([12], [21])
    assert (pull.source_engine_id, pull.destination_engine_id) == ("e-prefill", "e-decode")
    assert answer == (run.request.request_id, True)
    assert tokens_of(collected) == [4]
    assert collected[-1].finished.kv_transfer_bytes == 100
    assert {timing.stage for timing in collected[-1].finished.timings} == {
        types_pb2.STAGE_KV_TRANSFER,
        types_pb2.STAGE_DECODE_WAIT,
        types_pb2.STAGE_DECODE_STEPS,
    }
    assert rig.holder.released == ["h1"]


async def test_prompt_that_is_all_here_is_not_pulled_but_released(
    rig: DecodeRig, stub: Stub, engine: ScriptedEngineLoop
) -> None:
    events = aiter(stub.Decode(remote_request(rig), timeout=5))
    run = await engine.next_run()

    run.want_remote_kv(2)

    assert await engine.next_kv_answer() == (run.request.request_id, True)
    await wait_until(lambda: rig.holder.released == ["h1"])
    run.finish(4)
    assert tokens_of([event async for event in events]) == [4]
    assert rig.agent.pulls.empty()
    assert rig.holder.released == ["h1"]


@pytest.mark.parametrize(
    "changes",
    [
        # KV-20: never from less than the whole prompt, never from another layout.
        {"layout_fingerprint": "f2"},
        {"num_tokens": 5},
    ],
)
async def test_handle_that_does_not_fit_is_released_and_the_prompt_computed_here(
    rig: DecodeRig, stub: Stub, engine: ScriptedEngineLoop, changes: dict[str, Any]
) -> None:
    events = aiter(stub.Decode(remote_request(rig, **changes), timeout=5))
    run = await engine.next_run()

    assert not run.request.remote_kv
    assert run.request.output_token_ids == [3]
    await wait_until(lambda: rig.holder.released == ["h1"])
    run.finish(4)
    assert tokens_of([event async for event in events]) == [4]


async def test_handle_with_too_few_blocks_is_not_used(
    rig: DecodeRig, stub: Stub, engine: ScriptedEngineLoop
) -> None:
    # KV-20
    handle = rig.handle(6, 11)
    call = stub.Decode(decode_request(prompt=PROMPT, output=[3], kv_handle=handle))

    run = await engine.next_run()

    assert not run.request.remote_kv
    call.cancel()


async def test_bytes_read_under_a_lease_that_was_over_are_discarded(
    rig: DecodeRig, stub: Stub, engine: ScriptedEngineLoop
) -> None:
    # KV-20; field.md 2.8, hole (b)
    rig.holder.was_live = False
    events = aiter(stub.Decode(remote_request(rig), timeout=5))
    run = await engine.next_run()

    run.want_remote_kv(0, 20, 21)

    assert await engine.next_kv_answer() == (run.request.request_id, False)
    run.finish(4)
    assert tokens_of([event async for event in events]) == [4]


@pytest.mark.parametrize("error", [KvTransferFailed("not attached"), InternalError("bug")])
async def test_refused_pull_falls_back_to_computing_here(
    rig: DecodeRig, stub: Stub, engine: ScriptedEngineLoop, error: MeshError
) -> None:
    # KV-19: no wait, no second transfer; the handle goes back at once.
    rig.agent.error = error
    call = stub.Decode(remote_request(rig), timeout=5)
    run = await engine.next_run()

    run.want_remote_kv(0, 20, 21)

    assert await engine.next_kv_answer() == (run.request.request_id, False)
    await wait_until(lambda: rig.holder.released == ["h1"])
    call.cancel()


async def test_agent_that_is_gone_falls_back_to_computing_here(
    rig: DecodeRig, stub: Stub, engine: ScriptedEngineLoop
) -> None:
    # KV-19
    request = remote_request(rig)
    await rig.agent_server.stop(0)
    call = stub.Decode(request, timeout=5)
    run = await engine.next_run()

    run.want_remote_kv(0, 20, 21)

    assert await engine.next_kv_answer() == (run.request.request_id, False)
    call.cancel()


async def test_prefill_worker_that_is_gone_falls_back_to_computing_here(
    rig: DecodeRig, stub: Stub, engine: ScriptedEngineLoop
) -> None:
    # KV-19: the copy worked, but nobody can say that its source stayed as it was.
    request = remote_request(rig)
    await rig.holder_server.stop(0)
    call = stub.Decode(request, timeout=5)
    run = await engine.next_run()

    run.want_remote_kv(0, 20, 21)

    assert await engine.next_kv_answer() == (run.request.request_id, False)
    call.cancel()


async def test_frozen_prefill_worker_is_not_waited_for(
    rig: DecodeRig, stub: Stub, engine: ScriptedEngineLoop
) -> None:
    # KV-19, SIGSTOP: it holds the connection and says nothing.
    rig.holder.answers.clear()
    call = stub.Decode(remote_request(rig), timeout=5)
    run = await engine.next_run()

    run.want_remote_kv(0, 20, 21)

    assert await engine.next_kv_answer() == (run.request.request_id, False)
    call.cancel()
    assert rig.holder.released == []

    # It thaws with its lease: told again, it need not wait for that to end.
    rig.holder.answers.set()
    async with asyncio.timeout(5):
        while not rig.holder.released:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_frozen_agent_costs_its_timeout_and_the_blocks_stay_reserved(
    rig: DecodeRig, stub: Stub, engine: ScriptedEngineLoop
) -> None:
    # KV-21: the copy may still write, so the request starts over in other blocks.
    rig.agent.may_finish.clear()
    events = aiter(stub.Decode(remote_request(rig), timeout=5))
    first = await engine.next_run()
    first.want_remote_kv(0, 20, 21)

    second = await engine.next_run()
    await asyncio.wait_for(first.closed.wait(), 1)
    second.finish(4)
    collected = [event async for event in events]

    assert not second.request.remote_kv
    assert second.request.request_id != first.request.request_id
    assert tokens_of(collected) == [4]
    transfer_ms = [
        timing.duration_ms
        for timing in collected[-1].finished.timings
        if timing.stage == types_pb2.STAGE_KV_TRANSFER
    ]
    assert transfer_ms[0] >= 300
    assert engine.kv_answers.empty()
    assert rig.holder.released == ["h1"]

    rig.agent.may_finish.set()
    assert await engine.next_kv_answer() == (first.request.request_id, False)


async def test_lease_is_renewed_while_the_request_waits_for_room(
    rig: DecodeRig, stub: Stub, engine: ScriptedEngineLoop
) -> None:
    rig.holder.lease_s = 0.6
    call = stub.Decode(remote_request(rig), timeout=5)
    run = await engine.next_run()

    for _ in range(3):
        assert await asyncio.wait_for(rig.holder.renewed.get(), 1) == "h1"

    run.want_remote_kv(0, 20, 21)
    assert await engine.next_kv_answer() == (run.request.request_id, True)
    call.cancel()


async def test_lease_lost_while_waiting_is_not_read_under(
    rig: DecodeRig, stub: Stub, engine: ScriptedEngineLoop
) -> None:
    rig.holder.lease_s = 0.3
    rig.holder.is_expired = True
    call = stub.Decode(remote_request(rig), timeout=5)
    run = await engine.next_run()
    await asyncio.wait_for(rig.holder.renewed.get(), 1)
    # One round trip on the same connection: the refusal has arrived before its answer.
    holder = prefill_pb2_grpc.PrefillServiceStub(rig.channels.get(rig.holder_server.address))
    await holder.GetLoad(prefill_pb2.PrefillServiceGetLoadRequest())

    run.want_remote_kv(0, 20, 21)

    assert await engine.next_kv_answer() == (run.request.request_id, False)
    assert rig.agent.pulls.empty()
    call.cancel()


async def test_cancelling_while_waiting_for_room_gives_everything_back(
    rig: DecodeRig, stub: Stub, engine: ScriptedEngineLoop
) -> None:
    # ST-05 at the worker
    call = stub.Decode(remote_request(rig))
    run = await engine.next_run()

    call.cancel()

    await asyncio.wait_for(run.closed.wait(), 1)
    await wait_until(lambda: rig.holder.released == ["h1"])
    # In case the engine had asked for the KV meanwhile.
    assert await engine.next_kv_answer() == (run.request.request_id, False)


async def test_cancelling_during_the_transfer_keeps_the_blocks_until_it_has_ended(
    rig: DecodeRig, stub: Stub, engine: ScriptedEngineLoop
) -> None:
    # KV-21
    rig.agent.may_finish.clear()
    call = stub.Decode(remote_request(rig))
    run = await engine.next_run()
    run.want_remote_kv(0, 20, 21)
    await rig.agent.pulls.get()

    call.cancel()

    await asyncio.wait_for(run.closed.wait(), 1)
    await wait_until(lambda: rig.holder.released == ["h1"])
    assert engine.kv_answers.empty()
    rig.agent.may_finish.set()
    answered_id, _ = await engine.next_kv_answer()
    assert answered_id == run.request.request_id
    await asyncio.wait_for(rig.importer.wait_until_idle(), 1)
    assert engine.kv_answers.empty()


async def test_cancelling_while_decoding_aborts_the_engine(
    stub: Stub, engine: ScriptedEngineLoop
) -> None:
    # ST-05 at the worker
    events = aiter(call := stub.Decode(decode_request(prompt=PROMPT)))
    run = await engine.next_run()
    run.token(1)
    await anext(events)

    call.cancel()

    await asyncio.wait_for(run.closed.wait(), 1)


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
    events = aiter(stub.Decode(decode_request(prompt=PROMPT), timeout=5))
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
    events = aiter(stub.Decode(decode_request(prompt=PROMPT), timeout=5))
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
    await asyncio.wait_for(run.closed.wait(), 1)


async def test_refused_request_gives_its_handle_back(
    rig: DecodeRig, stub: Stub, engine: ScriptedEngineLoop
) -> None:
    # vllm#41269: blocks stranded because the consumer refused before admission.
    engine.refusal = TooManyWaiting("8 wait")

    await failure_of(stub, remote_request(rig))

    await wait_until(lambda: rig.holder.released == ["h1"])


async def test_cancelled_error_from_within_still_answers(
    stub: Stub, engine: ScriptedEngineLoop
) -> None:
    # GR-04
    call = stub.Decode(decode_request(), timeout=5)
    run = await engine.next_run()

    run.fail(asyncio.CancelledError())

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(call.read(), 1)
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
    loads = await asyncio.gather(*(stub.GetLoad(request, timeout=1) for _ in range(4)))

    assert {load.load.num_blocks for load in loads} == {engine.stats.num_blocks}
    await asyncio.gather(*(asyncio.wait_for(run.closed.wait(), 1) for run in runs))


async def test_prompt_above_four_mebibytes_arrives(stub: Stub, engine: ScriptedEngineLoop) -> None:
    # GR-01
    request = decode_request(prompt=[2**21 + index for index in range(1_200_000)])
    assert request.ByteSize() > 4 * 2**20

    call = stub.Decode(request)

    assert len((await engine.next_run()).request.prompt_token_ids) == 1_200_000
    call.cancel()


async def test_callers_deadline_bounds_the_transfer(
    engine: ScriptedEngineLoop,
) -> None:
    # GR-06
    rig = DecodeRig(engine, KvImportLimits(pull_timeout_s=30, release_timeout_s=0.3))
    async with decode_stub(rig) as stub:
        rig.agent.may_finish.clear()
        call = stub.Decode(remote_request(rig), timeout=0.3)
        run = await engine.next_run()
        run.want_remote_kv(0, 20, 21)
        await rig.agent.pulls.get()

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()

        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert 0 < rig.agent.last_deadline_s < 0.3
        await asyncio.wait_for(run.closed.wait(), 1)
        await wait_until(lambda: rig.holder.released == ["h1"])
        rig.agent.may_finish.set()


async def test_absent_parameters_are_the_engines_business(
    stub: Stub, engine: ScriptedEngineLoop
) -> None:
    call = stub.Decode(decode_request(params=sampling(3, top_p=0.0)))

    params = (await engine.next_run()).request.sampling_params
    call.cancel()

    assert (params.max_tokens, params.top_p, params.temperature) == (3, 0.0, 1.0)
