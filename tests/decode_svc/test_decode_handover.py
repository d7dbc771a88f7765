"""Decode calls that come before prefill has finished: what is pulled when, and what ends them."""

import asyncio
import time

import grpc
import pytest

from decode_svc.kv_holder import RemoteKv
from engine.request import RequestTimings
from mesh.errors import KvLeaseExpired, KvTransferFailed, from_rpc_error
from mesh.v1 import decode_pb2, prefill_pb2, types_pb2
from tests.decode_svc.decode_calls import Stub, gives_up_soon
from tests.scripted_engine import ScriptedEngineLoop
from tests.worker_wire import DecodeRig, decode_request, wait_until

# Three blocks of four, the last one partly filled.
PROMPT = [*range(5, 15)]


def early_request(rig: DecodeRig, layout_fingerprint: str = "f1") -> decode_pb2.DecodeRequest:
    handle = rig.handle(10, 11, 12, 13, layout_fingerprint=layout_fingerprint)
    handle.block_generations.extend([1, 1, 2])
    request = decode_request(prompt=PROMPT, kv_handle=handle)
    request.awaits_first_token = True
    return request


def computed(rig: DecodeRig, first_token_id: int) -> None:
    message = prefill_pb2.WatchKvResponse(first_token_id=first_token_id)
    message.sampled_at.GetCurrentTime()
    rig.holder.progress.put_nowait(message)


async def next_pull(rig: DecodeRig) -> tuple[list[int], list[int], list[int]]:
    """Source blocks, their generations, destination blocks."""
    pull = await asyncio.wait_for(rig.agent.pulls.get(), 20)
    assert pull.source_address == rig.agent_server.address
    assert pull.follows
    return (
        list(pull.source_block_ids),
        list(pull.source_generations),
        list(pull.destination_block_ids),
    )


async def test_one_pull_follows_the_prefill_and_brings_its_token(
    rig: DecodeRig, stub: Stub, engine: ScriptedEngineLoop
) -> None:
    rig.agent.may_finish.clear()
    events = aiter(stub.Decode(early_request(rig), timeout=20))
    run = await engine.next_run()
    assert (run.request.remote_kv, run.request.remote_token) == (True, True)
    run.want_remote_kv(0, 3, 4, 5)

    assert await next_pull(rig) == ([11, 12, 13], [1, 1, 2], [3, 4, 5])
    assert engine.kv_answers.empty()
    rig.agent.next_token_id = 9
    rig.agent.may_finish.set()

    # The prefill worker has not said a word of it yet.
    assert await engine.next_kv_answer() == (run.request.request_id, True)
    assert engine.given_tokens[run.request.request_id] == [9]
    assert rig.holder.released == []
    computed(rig, first_token_id=9)
    run.finish(1)
    answer = [event async for event in events]
    assert list(answer[0].tokens.token_ids) == [1]
    assert answer[-1].finished.kv_transfer_bytes == 300
    await wait_until(lambda: rig.holder.released == ["h1"])


async def test_token_that_comes_first_waits_for_the_blocks(
    rig: DecodeRig, stub: Stub, engine: ScriptedEngineLoop
) -> None:
    rig.agent.may_finish.clear()
    events = aiter(stub.Decode(early_request(rig), timeout=20))
    run = await engine.next_run()
    run.want_remote_kv(0, 3, 4, 5)
    await next_pull(rig)

    computed(rig, first_token_id=9)
    await asyncio.sleep(0.1)
    assert engine.kv_answers.empty()
    rig.agent.may_finish.set()

    assert await engine.next_kv_answer() == (run.request.request_id, True)
    assert engine.given_tokens[run.request.request_id] == [9]
    run.finish(1)
    assert [event async for event in events]


@gives_up_soon
async def test_long_prefill_is_no_reason_to_give_up_a_pull(
    rig: DecodeRig, stub: Stub, engine: ScriptedEngineLoop
) -> None:
    rig.agent.may_finish.clear()
    events = aiter(stub.Decode(early_request(rig), timeout=20))
    run = await engine.next_run()
    run.want_remote_kv(0, 3, 4, 5)
    await next_pull(rig)

    await asyncio.sleep(2 * rig.importer.limits.pull_timeout_s)
    assert engine.kv_answers.empty()
    rig.agent.next_token_id = 9
    rig.agent.may_finish.set()

    assert await engine.next_kv_answer() == (run.request.request_id, True)
    run.finish(1)
    assert [event async for event in events]


async def test_blocks_that_are_here_are_left_out(
    rig: DecodeRig, stub: Stub, engine: ScriptedEngineLoop
) -> None:
    events = aiter(stub.Decode(early_request(rig), timeout=20))
    run = await engine.next_run()
    run.want_remote_kv(1, 4, 5)

    computed(rig, first_token_id=9)

    assert await next_pull(rig) == ([12, 13], [1, 2], [4, 5])
    run.finish(1)
    assert [event async for event in events]


async def test_prefill_that_fails_fails_the_call_before_any_token(
    rig: DecodeRig, stub: Stub, engine: ScriptedEngineLoop
) -> None:
    # KV-20
    rig.agent.may_finish.clear()
    events = aiter(stub.Decode(early_request(rig), timeout=20))
    run = await engine.next_run()
    run.want_remote_kv(0, 3, 4, 5)
    await next_pull(rig)

    rig.holder.progress.put_nowait(KvLeaseExpired("the prefill of h1 is over"))

    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await anext(events)
    error = from_rpc_error(caught.value)
    assert isinstance(error, KvTransferFailed)
    assert "is over" in str(error)
    # Not while the agent may still write to the blocks.
    assert engine.kv_answers.empty()
    rig.agent.may_finish.set()
    assert await engine.next_kv_answer() == (run.request.request_id, False)
    await asyncio.wait_for(run.closed.wait(), 20)


async def test_pull_that_fails_waits_for_the_token_and_computes_here(
    rig: DecodeRig, stub: Stub, engine: ScriptedEngineLoop
) -> None:
    # KV-19
    rig.agent.error = KvTransferFailed("engine e-prefill is not attached here")
    events = aiter(stub.Decode(early_request(rig), timeout=20))
    run = await engine.next_run()
    run.want_remote_kv(0, 3, 4, 5)
    await next_pull(rig)
    computed(rig, first_token_id=9)

    assert await engine.next_kv_answer() == (run.request.request_id, False)
    assert engine.given_tokens[run.request.request_id] == [9]
    assert rig.agent.pulls.empty()
    run.finish(1)
    assert [event async for event in events]


async def test_handle_that_does_not_fit_is_followed_for_its_token_only(
    rig: DecodeRig, stub: Stub, engine: ScriptedEngineLoop
) -> None:
    # KV-25
    events = aiter(stub.Decode(early_request(rig, "f2"), timeout=20))
    computed(rig, first_token_id=9)

    run = await engine.next_run()
    run.finish(1)

    assert run.request.output_token_ids == [9]
    assert not run.request.remote_kv
    assert [event async for event in events]
    assert rig.agent.pulls.empty()


@gives_up_soon
async def test_frozen_agent_costs_its_timeout_and_no_token(
    rig: DecodeRig, stub: Stub, engine: ScriptedEngineLoop
) -> None:
    # KV-21
    rig.agent.may_finish.clear()
    events = aiter(stub.Decode(early_request(rig), timeout=20))
    run = await engine.next_run()
    run.want_remote_kv(0, 3, 4, 5)
    computed(rig, first_token_id=9)

    again = await engine.next_run()
    assert again.request.output_token_ids == [9]
    assert engine.kv_answers.empty()
    again.finish(1)
    assert [event async for event in events]
    rig.agent.may_finish.set()
    assert await engine.next_kv_answer() == (run.request.request_id, False)


async def test_caller_that_leaves_ends_the_following(
    rig: DecodeRig, stub: Stub, engine: ScriptedEngineLoop
) -> None:
    # KV-16
    call = stub.Decode(early_request(rig), timeout=20)
    run = await engine.next_run()
    run.want_remote_kv(0, 3, 4, 5)
    await asyncio.wait_for(rig.holder.followed.get(), 20)

    call.cancel()

    assert await engine.next_kv_answer() == (run.request.request_id, False)
    await asyncio.wait_for(run.closed.wait(), 20)


async def test_time_before_the_first_token_is_not_decodes(
    rig: DecodeRig, stub: Stub, engine: ScriptedEngineLoop
) -> None:
    # OB-01
    events = aiter(stub.Decode(early_request(rig), timeout=20))
    run = await engine.next_run()
    run.want_remote_kv(0, 3, 4, 5)
    await next_pull(rig)
    await asyncio.sleep(0.3)
    computed(rig, first_token_id=9)
    await engine.next_kv_answer()
    # As the engine counts: it knows nothing of the prefill.
    run.finish(1, timings=RequestTimings(decode_wait_s=0.1, remote_kv_s=0.25, decode_s=0.01))

    last = [event async for event in events][-1]

    stages = {timing.stage: timing.duration_ms for timing in last.finished.timings}
    assert types_pb2.STAGE_DECODE_WAIT not in stages
    assert stages.get(types_pb2.STAGE_KV_TRANSFER, 0.0) <= 50
    assert stages[types_pb2.STAGE_DECODE_STEPS] == pytest.approx(10)


async def test_overlap_counts_from_when_the_engine_has_the_request(rig: DecodeRig) -> None:
    # What passes before is in none of the engine's times, and taking it off them would hide as
    # much of the transfer.
    handle = types_pb2.KvHandle(handle_id="h1", holder_address="127.0.0.1:1")
    claim = rig.importer.claim("r", RemoteKv(handle, awaits_first_token=True))
    assert claim.overlap_s(since=3.0) == 0

    claim.first_token_at = 5.0

    assert claim.overlap_s(since=3.0) == 2.0
    assert claim.overlap_s(since=5.5) == 0


async def test_time_before_the_first_token_is_not_lost_to_kv_that_does_not_fit(
    rig: DecodeRig, stub: Stub, engine: ScriptedEngineLoop
) -> None:
    # OB-01: the engine hears of the request only when there is a token to go on from.
    events = aiter(stub.Decode(early_request(rig, layout_fingerprint="other"), timeout=20))
    await asyncio.sleep(0.3)
    computed(rig, first_token_id=9)
    run = await engine.next_run()
    run.finish(1, timings=RequestTimings(prefill_s=0.02, decode_s=0.01))

    last = [event async for event in events][-1]

    stages = {timing.stage: timing.duration_ms for timing in last.finished.timings}
    assert stages.get(types_pb2.STAGE_KV_TRANSFER, 0.0) <= 50


async def test_clock_that_is_ahead_does_not_make_the_transfer_vanish(
    rig: DecodeRig, stub: Stub, engine: ScriptedEngineLoop
) -> None:
    rig.agent.may_finish.clear()
    events = aiter(stub.Decode(early_request(rig), timeout=20))
    run = await engine.next_run()
    run.want_remote_kv(0, 3, 4, 5)
    await next_pull(rig)
    rig.agent.next_token_id = 9
    rig.agent.may_finish.set()
    await engine.next_kv_answer()
    await asyncio.sleep(0.2)
    tomorrow = prefill_pb2.WatchKvResponse(first_token_id=9)
    tomorrow.sampled_at.FromSeconds(int(time.time()) + 86_400)
    rig.holder.progress.put_nowait(tomorrow)
    await wait_until(lambda: rig.holder.released == ["h1"])
    run.finish(1, timings=RequestTimings(remote_kv_s=0.15, decode_s=0.01))

    last = [event async for event in events][-1]

    # The blocks were here before the message: what came after them counts.
    stages = {timing.stage: timing.duration_ms for timing in last.finished.timings}
    assert 0 < stages[types_pb2.STAGE_KV_TRANSFER] < 150
