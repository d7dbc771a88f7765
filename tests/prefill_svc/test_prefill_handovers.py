"""Prefills that are followed, and the leases that are open meanwhile."""

import asyncio

import pytest

from mesh.errors import KvLeaseExpired, from_rpc_error
from mesh.v1 import prefill_pb2
from prefill_svc.handovers import Handovers, SampledToken
from prefill_svc.leases import LeaseTable
from tests.fakes import FakeClock
from tests.scripted_engine import ScriptedEngineLoop
from tests.worker_wire import PrefillRig, prefill_request, prefill_stub


async def test_all_who_wait_learn_the_first_token_and_so_do_those_who_come_later() -> None:
    handovers = Handovers()
    handovers.begin("h")
    waiting = [asyncio.create_task(handovers.first_token("h")) for _ in range(3)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)

    handovers.finish("h", SampledToken(0, 1.5))

    assert await asyncio.gather(*waiting) == 3 * [SampledToken(0, 1.5)]
    assert await handovers.first_token("h") == SampledToken(0, 1.5)


async def test_one_who_waits_no_more_takes_the_token_from_nobody() -> None:
    handovers = Handovers()
    handovers.begin("h")
    leaving, staying = (asyncio.create_task(handovers.first_token("h")) for _ in range(2))
    await asyncio.sleep(0)

    leaving.cancel()
    await asyncio.wait([leaving])
    handovers.finish("h", SampledToken(7))

    assert await staying == SampledToken(7)


async def test_those_who_wait_learn_that_a_handover_is_over() -> None:
    # KV-19
    handovers = Handovers()
    handovers.begin("h")
    waiting = [asyncio.create_task(handovers.first_token("h")) for _ in range(3)]
    await asyncio.sleep(0)

    handovers.end("h")

    for task in waiting:
        with pytest.raises(KvLeaseExpired, match="is over"):
            await task
    with pytest.raises(KvLeaseExpired):
        await handovers.first_token("h")
    assert len(handovers) == 0
    handovers.finish("h", SampledToken(7))


def test_open_lease_does_not_expire_before_its_time_runs() -> None:
    clock = FakeClock()
    ended: list[str] = []
    leases = LeaseTable(ended.append, lease_s=10, clock=clock)
    leases.open("h")

    clock.advance(1000)
    leases.expire()
    assert leases.is_live("h")
    assert leases.renew("h") == 10
    clock.advance(1000)
    assert leases.is_live("h")

    leases.grant("h")
    clock.advance(10)
    assert not leases.is_live("h")
    assert ended == ["h"]


def test_open_lease_can_be_released() -> None:
    ended: list[str] = []
    leases = LeaseTable(ended.append, lease_s=10)
    leases.open("h")

    assert leases.release("h")
    assert not leases.release("h")
    assert ended == ["h"]


@pytest.fixture
async def rig() -> PrefillRig:
    return PrefillRig(ScriptedEngineLoop())


async def test_first_chunk_brings_the_handle_and_the_watch_the_token(rig: PrefillRig) -> None:
    engine = rig.servicer._engine
    assert isinstance(engine, ScriptedEngineLoop)
    async with prefill_stub(rig) as stub:
        call = stub.Prefill(prefill_request(prompt=[*range(5, 15)]))
        events = aiter(call)
        run = await engine.next_run()
        run.progress(4, (1, 2, 3), (7, 7, 7))
        first = (await anext(events)).progress
        handle = first.kv_handle
        watching = aiter(stub.WatchKv(prefill_pb2.WatchKvRequest(handle_id=handle.handle_id)))
        assert not (await anext(watching)).HasField("first_token_id")
        run.progress(8, (1, 2, 3), (7, 7, 7))
        second = (await anext(events)).progress
        run.hold(9, 1, 2, 3)
        finished = (await anext(events)).finished
        last = await anext(watching)

    assert list(handle.block_ids) == [1, 2, 3]
    assert list(handle.block_generations) == [7, 7, 7]
    assert (handle.num_tokens, first.num_computed_tokens) == (10, 4)
    assert not second.HasField("kv_handle")
    assert finished.kv_handle.handle_id == handle.handle_id
    assert last.first_token_id == 9
    assert last.HasField("sampled_at")


async def test_preempted_prefill_ends_its_handover(rig: PrefillRig) -> None:
    # KV-20: the blocks that the handle names are not its own any more.
    engine = rig.servicer._engine
    assert isinstance(engine, ScriptedEngineLoop)
    async with prefill_stub(rig) as stub:
        events = aiter(stub.Prefill(prefill_request()))
        run = await engine.next_run()
        run.progress(4, (1, 2), (7, 7))
        handle = (await anext(events)).progress.kv_handle
        run.progress(4, (5, 6), (3, 3))
        await anext(events)
        with pytest.raises(Exception, match="is over") as caught:
            async for _ in stub.WatchKv(prefill_pb2.WatchKvRequest(handle_id=handle.handle_id)):
                pass
        run.hold(9, 5, 6)
        finished = (await anext(events)).finished

    assert isinstance(from_rpc_error(caught.value), KvLeaseExpired)  # type: ignore[arg-type]
    assert not finished.HasField("kv_handle")
    assert list(finished.first_token.token_ids) == [9]
    assert engine.released_holds.count(handle.handle_id) == 2
    assert len(rig.leases) == len(rig.handovers) == 0


async def test_sequence_that_is_over_with_its_first_token_ends_its_handover(
    rig: PrefillRig,
) -> None:
    engine = rig.servicer._engine
    assert isinstance(engine, ScriptedEngineLoop)
    async with prefill_stub(rig) as stub:
        events = aiter(stub.Prefill(prefill_request()))
        run = await engine.next_run()
        run.progress(4, (1, 2), (7, 7))
        await anext(events)
        run.finish(2)
        finished = (await anext(events)).finished

    assert not finished.HasField("kv_handle")
    assert len(rig.leases) == len(rig.handovers) == 0
