"""KV that another worker computed: pulled, or computed here where it cannot be."""

import asyncio
from typing import Any

import grpc
import pytest

from decode_svc.kv_import import KvImportLimits
from engine.request import RequestTimings, TooManyWaiting
from mesh.errors import InternalError, KvTransferFailed, MeshError
from mesh.v1 import prefill_pb2, prefill_pb2_grpc, types_pb2
from tests.decode_svc.decode_calls import (
    PROMPT,
    Stub,
    failure_of,
    gives_up_soon,
    remote_request,
    tokens_of,
)
from tests.scripted_engine import ScriptedEngineLoop
from tests.worker_wire import DecodeRig, decode_request, decode_stub, wait_until


async def test_remote_kv_is_pulled_confirmed_and_then_decoded_from(
    rig: DecodeRig, stub: Stub, engine: ScriptedEngineLoop
) -> None:
    events = aiter(stub.Decode(remote_request(rig), timeout=20))
    run = await engine.next_run()
    assert run.request.remote_kv

    run.want_remote_kv(1, 21)
    pull = await asyncio.wait_for(rig.agent.pulls.get(), 20)
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
    events = aiter(stub.Decode(remote_request(rig), timeout=20))
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
    events = aiter(stub.Decode(remote_request(rig, **changes), timeout=20))
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
    events = aiter(stub.Decode(remote_request(rig), timeout=20))
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
    call = stub.Decode(remote_request(rig), timeout=20)
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
    call = stub.Decode(request, timeout=20)
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
    call = stub.Decode(request, timeout=20)
    run = await engine.next_run()

    run.want_remote_kv(0, 20, 21)

    assert await engine.next_kv_answer() == (run.request.request_id, False)
    call.cancel()


@gives_up_soon
async def test_frozen_prefill_worker_is_not_waited_for(
    rig: DecodeRig, stub: Stub, engine: ScriptedEngineLoop
) -> None:
    # KV-19, SIGSTOP: it holds the connection and says nothing.
    rig.holder.answers.clear()
    call = stub.Decode(remote_request(rig), timeout=20)
    run = await engine.next_run()

    run.want_remote_kv(0, 20, 21)

    assert await engine.next_kv_answer() == (run.request.request_id, False)
    call.cancel()
    assert rig.holder.released == []

    # It thaws with its lease: told again, it need not wait for that to end.
    rig.holder.answers.set()
    async with asyncio.timeout(20):
        while not rig.holder.released:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@gives_up_soon
async def test_frozen_agent_costs_its_timeout_and_the_blocks_stay_reserved(
    rig: DecodeRig, stub: Stub, engine: ScriptedEngineLoop
) -> None:
    # KV-21: the copy may still write, so the request starts over in other blocks.
    rig.agent.may_finish.clear()
    events = aiter(stub.Decode(remote_request(rig), timeout=20))
    first = await engine.next_run()
    first.want_remote_kv(0, 20, 21)

    second = await engine.next_run()
    await asyncio.wait_for(first.closed.wait(), 20)
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
    call = stub.Decode(remote_request(rig), timeout=20)
    run = await engine.next_run()

    for _ in range(3):
        assert await asyncio.wait_for(rig.holder.renewed.get(), 20) == "h1"

    run.want_remote_kv(0, 20, 21)
    assert await engine.next_kv_answer() == (run.request.request_id, True)
    call.cancel()


async def test_lease_lost_while_waiting_is_not_read_under(
    rig: DecodeRig, stub: Stub, engine: ScriptedEngineLoop
) -> None:
    rig.holder.lease_s = 0.3
    rig.holder.is_expired = True
    call = stub.Decode(remote_request(rig), timeout=20)
    run = await engine.next_run()
    await asyncio.wait_for(rig.holder.renewed.get(), 20)
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

    await asyncio.wait_for(run.closed.wait(), 20)
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

    await asyncio.wait_for(run.closed.wait(), 20)
    await wait_until(lambda: rig.holder.released == ["h1"])
    assert engine.kv_answers.empty()
    rig.agent.may_finish.set()
    answered_id, _ = await engine.next_kv_answer()
    assert answered_id == run.request.request_id
    await asyncio.wait_for(rig.importer.wait_until_idle(), 20)
    assert engine.kv_answers.empty()


async def test_blocks_that_the_agent_may_still_write_to_stay_reserved_at_the_end(
    rig: DecodeRig, stub: Stub, engine: ScriptedEngineLoop
) -> None:
    # KV-21
    rig.agent.may_finish.clear()
    call = stub.Decode(remote_request(rig))
    run = await engine.next_run()
    run.want_remote_kv(0, 20, 21)
    await rig.agent.pulls.get()
    call.cancel()
    await asyncio.wait_for(run.closed.wait(), 20)

    await asyncio.wait_for(rig.importer.__aexit__(), 20)

    assert engine.kv_answers.empty()


async def test_refused_request_gives_its_handle_back(
    rig: DecodeRig, stub: Stub, engine: ScriptedEngineLoop
) -> None:
    # vllm#41269: blocks stranded because the consumer refused before admission.
    engine.refusal = TooManyWaiting("8 wait")

    await failure_of(stub, remote_request(rig))

    await wait_until(lambda: rig.holder.released == ["h1"])


async def test_callers_deadline_bounds_the_transfer(
    engine: ScriptedEngineLoop,
) -> None:
    # GR-06
    rig = DecodeRig(engine, KvImportLimits(pull_timeout_s=60, release_timeout_s=60))
    async with decode_stub(rig) as stub:
        rig.agent.may_finish.clear()
        call = stub.Decode(remote_request(rig), timeout=1)
        run = await engine.next_run()
        run.want_remote_kv(0, 20, 21)
        await rig.agent.pulls.get()

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()

        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert 0 < rig.agent.last_deadline_s < 1
        await asyncio.wait_for(run.closed.wait(), 20)
        await wait_until(lambda: rig.holder.released == ["h1"])
        rig.agent.may_finish.set()
