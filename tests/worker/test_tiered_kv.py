"""The colder tiers before and behind an engine whose every event the test decides."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

import pytest

from engine.block_pool import BlockEvents
from engine.request import EngineEvent, Request
from engine.sampling import SamplingParams
from mesh.client import Channels
from mesh.errors import KvTransferFailed
from mesh.server import MeshServer
from mesh.v1 import kv_transfer_pb2_grpc
from tests.scripted_engine import ScriptedEngineLoop, ScriptedRun
from tests.worker_wire import ScriptedAgent, serving, wait_until
from worker import tiered_kv
from worker.tiered_kv import TieredKv, TierOwner
from worker.transfer_agent import TransferAgent

KEYS = (b"k" * 16, b"l" * 16)


@dataclass
class Rig:
    engine: ScriptedEngineLoop
    agent: ScriptedAgent
    tiered: TieredKv
    has_tiers: bool = True

    async def start(
        self, request: Request
    ) -> tuple["asyncio.Task[list[EngineEvent]]", ScriptedRun]:
        async def run() -> list[EngineEvent]:
            return [event async for event in self.tiered.generate(request)]

        return asyncio.create_task(run()), await self.engine.next_run()


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    async with AsyncExitStack() as stack:
        server = MeshServer()
        agent = ScriptedAgent()
        server.add(
            kv_transfer_pb2_grpc.add_KvTransferServiceServicer_to_server,
            agent,
            "mesh.v1.KvTransferService",
        )
        await stack.enter_async_context(serving(server))
        channels = await stack.enter_async_context(Channels())
        engine = ScriptedEngineLoop()
        owner = TierOwner("e1", "m", lambda: made.has_tiers)
        tiered = TieredKv(engine, TransferAgent(channels, server.address), owner)
        made = Rig(engine, agent, tiered)
        await stack.enter_async_context(tiered)
        yield made
        agent.may_finish.set()


def make_request(*, remote_kv: bool = False) -> Request:
    return Request("r", [1, 2, 3], SamplingParams(4), remote_kv=remote_kv)


async def next_tier_answer(rig: Rig) -> tuple[str, int]:
    async with asyncio.timeout(20):
        return await rig.engine.tier_answers.get()


async def test_wanted_blocks_are_asked_of_the_agent_and_not_of_the_service(rig: Rig) -> None:
    rig.agent.num_tier_blocks = 1
    running, run = await rig.start(make_request())
    assert run.request.tiered_kv

    run.want_remote_kv(3, 7, 8, keys=KEYS)

    asked = await rig.agent.loads.get()
    assert (asked.engine_id, tuple(asked.keys), list(asked.block_ids)) == ("e1", KEYS, [7, 8])
    assert await next_tier_answer(rig) == ("r", 1)
    run.finish(5)
    assert len(await running) == 1


async def test_request_with_remote_kv_asks_no_tier(rig: Rig) -> None:
    running, run = await rig.start(make_request(remote_kv=True))

    assert not run.request.tiered_kv
    run.want_remote_kv(0, 7)
    run.finish(5)

    assert len(await running) == 2
    assert rig.agent.loads.empty()


async def test_agent_without_tiers_is_not_asked(rig: Rig) -> None:
    rig.has_tiers = False
    running, run = await rig.start(make_request())

    assert not run.request.tiered_kv
    rig.tiered.offer(BlockEvents([KEYS[0]], [], [1], [1]))
    run.finish(5)
    await running

    assert rig.agent.stores.empty()


async def test_agent_that_refuses_is_a_miss(rig: Rig) -> None:
    rig.agent.error = KvTransferFailed("engine e1 is not attached here")
    running, run = await rig.start(make_request())

    run.want_remote_kv(0, 7, keys=KEYS[:1])

    assert await next_tier_answer(rig) == ("r", 0)
    assert rig.engine.late == []
    run.finish(5)
    await running


async def test_frozen_agent_holds_up_the_blocks_and_not_the_request(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    # KV-21
    monkeypatch.setattr(tiered_kv, "_LOAD_TIMEOUT_S", 0.1)
    rig.agent.may_finish.clear()
    rig.agent.num_active_pulls = 1
    running, run = await rig.start(make_request())

    run.want_remote_kv(0, 7, keys=KEYS[:1])

    await wait_until(lambda: rig.engine.late == ["r"])
    assert rig.engine.tier_answers.empty()
    rig.agent.num_active_pulls = 0
    assert await next_tier_answer(rig) == ("r", 0)
    run.finish(5)
    await running


async def test_load_of_a_request_that_was_left_still_ends(rig: Rig) -> None:
    rig.agent.may_finish.clear()
    running, run = await rig.start(make_request())
    run.want_remote_kv(0, 7, keys=KEYS[:1])
    await rig.agent.loads.get()

    running.cancel()
    await asyncio.wait([running])
    assert rig.engine.tier_answers.empty()
    rig.agent.may_finish.set()

    assert (await next_tier_answer(rig))[0] == "r"


async def test_blocks_that_the_agent_may_still_write_to_stay_reserved_at_the_end(rig: Rig) -> None:
    # KV-21
    rig.agent.may_finish.clear()
    running, run = await rig.start(make_request())
    run.want_remote_kv(0, 7, keys=KEYS[:1])
    await rig.agent.loads.get()

    await rig.tiered.__aexit__()

    assert rig.engine.tier_answers.empty()
    run.finish(5)
    await running


async def test_filled_blocks_are_offered_with_their_generations(rig: Rig) -> None:
    rig.tiered.offer(BlockEvents(list(KEYS), [], [4, 5], [1, 9]))

    stored = await asyncio.wait_for(rig.agent.stores.get(), 20)

    assert (stored.engine_id, stored.model, tuple(stored.keys)) == ("e1", "m", KEYS)
    assert (list(stored.block_ids), list(stored.generations)) == ([4, 5], [1, 9])


async def test_blocks_that_came_from_a_tier_are_not_stored_again(rig: Rig) -> None:
    loaded = frozenset(KEYS[:1])
    rig.tiered.offer(BlockEvents(list(KEYS), [], [4, 5], [1, 9], from_tiers=loaded))

    stored = await asyncio.wait_for(rig.agent.stores.get(), 20)

    assert tuple(stored.keys) == KEYS[1:]


async def test_blocks_evicted_before_they_were_offered_are_not(rig: Rig) -> None:
    rig.tiered.offer(BlockEvents(list(KEYS), [], [4, 5], [1, 1]))
    rig.tiered.offer(BlockEvents([], [KEYS[0]]))

    stored = await asyncio.wait_for(rig.agent.stores.get(), 20)

    assert tuple(stored.keys) == KEYS[1:]


async def test_what_waits_for_the_agent_is_bounded(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiered_kv, "_MAX_WAITING_BLOCKS", 10)
    keys = [bytes([number]) * 16 for number in range(50)]

    rig.tiered.offer(BlockEvents(keys, [], list(range(50)), [1] * 50))

    stored = await asyncio.wait_for(rig.agent.stores.get(), 20)
    assert list(stored.keys) == keys[-10:]


async def test_agent_that_comes_back_is_offered_what_is_new(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiered_kv, "_RETRY_DELAY_S", 0.01)
    rig.agent.error = KvTransferFailed("not attached")
    rig.tiered.offer(BlockEvents([KEYS[0]], [], [4], [1]))
    await asyncio.wait_for(rig.agent.refused.wait(), 20)
    rig.agent.error = None

    rig.tiered.offer(BlockEvents([KEYS[1]], [], [5], [1]))

    assert tuple((await asyncio.wait_for(rig.agent.stores.get(), 20)).keys) == KEYS[1:]


async def test_what_was_filled_last_is_stored_before_the_end(rig: Rig) -> None:
    """Blocks that wait for others to be stored with: a restart shall find them warm."""
    rig.engine.stats = replace(rig.engine.stats, num_blocks=1000, num_free_blocks=1000)

    rig.tiered.offer(BlockEvents(stored=list(KEYS), block_ids=[7, 8], generations=[1, 1]))
    await rig.tiered.__aexit__()

    asked = rig.agent.stores.get_nowait()
    assert (tuple(asked.keys), list(asked.block_ids)) == (KEYS, [7, 8])
