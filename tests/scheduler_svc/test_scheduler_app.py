"""The scheduler on a real Redis: workers by heartbeat, prefixes by the block index, outages."""

import asyncio
import os
import random
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from mesh import metrics
from mesh.block_keys import BlockKeys
from mesh.client import connect
from mesh.ports import find_free_ports
from mesh.registry import (
    BlockIndex,
    Heartbeat,
    WorkerLoad,
    WorkerRecord,
    WorkerRegistry,
    connect_redis,
)
from mesh.v1 import scheduler_pb2, scheduler_pb2_grpc
from scheduler_svc.app import running_scheduler
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.loads import HeldPlacement
from scheduler_svc.scheduler import AdmitRequest, Scheduler
from scheduler_svc.workers import RequestFacts
from tests.loop_clock import LoopClock
from tests.paper_workers import registered
from tests.valkey import RedisProxy

ROOT = Path(__file__).parents[2]
TOKEN_IDS = list(range(100))


@asynccontextmanager
async def living(redis_url: str, *records: WorkerRecord) -> AsyncIterator[BlockIndex]:
    """Keep workers registered; the index is theirs to publish to."""
    redis = connect_redis(redis_url)
    registry = WorkerRegistry(redis)
    beats = [
        Heartbeat(registry, record, lambda: WorkerLoad(100, 100), interval_s=0.05)
        for record in records
    ]
    try:
        for beat in beats:
            await beat.__aenter__()
        yield BlockIndex(redis)
        for beat in beats:
            await beat.__aexit__()
    finally:
        await redis.aclose()


def make_config(redis_url: str, **settings: float) -> SchedulerConfig:
    fields = {"redis_url": redis_url, "refresh_interval_s": 0.02, "predicted_ttl_s": 0}
    return SchedulerConfig.model_validate({**fields, **settings})


async def placed(scheduler: Scheduler, salt: str = "") -> HeldPlacement:
    """A placement that is given back at once."""
    facts = RequestFacts("smol", len(TOKEN_IDS), 16)
    async with scheduler.hold(AdmitRequest(facts, TOKEN_IDS, salt), timeout_s=5) as held:
        return held


async def test_request_goes_where_its_prefix_is_and_salts_are_kept_apart(redis_url: str) -> None:
    # KV-03, KV-04
    records = [registered(f"p{n}", "prefill").record for n in range(3)]
    async with (
        living(redis_url, *records, registered("d0").record) as index,
        running_scheduler(make_config(redis_url)) as scheduler,
    ):
        keys = BlockKeys("f1").chain(TOKEN_IDS, 16, "t1")
        await index.publish("smol", "p1", "1", keys[:4], [])
        await until(partial(_is_placed_by_prefix, scheduler, "t1"))

        warm = [(await placed(scheduler, "t1")).decision.prefill for _ in range(5)]
        cold = [(await placed(scheduler, "t2")).decision.prefill for _ in range(20)]

    assert {part.worker.worker_id for part in warm if part} == {"p1"}
    assert {part.num_cached_tokens for part in warm if part} == {64}
    assert {part.num_cached_tokens for part in cold if part} == {0}
    assert len({part.worker.worker_id for part in cold if part}) > 1


async def test_blocks_of_a_former_incarnation_are_credited_to_nobody(redis_url: str) -> None:
    # KV-23
    async with (
        living(redis_url, registered("p0", "prefill", incarnation="2").record) as index,
        living(redis_url, registered("d0").record),
        running_scheduler(make_config(redis_url)) as scheduler,
    ):
        keys = BlockKeys("f1").chain(TOKEN_IDS, 16)
        await index.publish("smol", "p0", "1", keys, [])

        prefill = (await placed(scheduler)).decision.prefill

    assert prefill is not None
    assert prefill.num_cached_tokens == 0


async def test_requests_are_placed_while_redis_hangs_and_by_prefix_again_after_it(
    redis_url: str, redis_proxy: RedisProxy
) -> None:
    # RD-03
    records = [registered(f"p{n}", "prefill").record for n in range(3)]
    async with (
        living(redis_url, *records, registered("d0").record) as index,
        # A placement that asked Redis would wait for Redis' own timeout, 0.5 s.
        running_scheduler(make_config(redis_proxy.url, lookup_timeout_s=5)) as scheduler,
        LoopClock() as clock,
    ):
        keys = BlockKeys("f1").chain(TOKEN_IDS, 16)
        await index.publish("smol", "p1", "1", keys, [])
        await until(partial(_is_copied, len(keys)))

        redis_proxy.is_black_hole = True
        waits_s = []
        for _ in range(20):
            started_s = clock.now_s
            await placed(scheduler)
            waits_s.append(clock.now_s - started_s)
        redis_proxy.is_black_hole = False
        redis_proxy.cut()

        # Redis is off the path, and the copy of the index stands.
        assert max(waits_s) < 0.2
        assert await _is_placed_by_prefix(scheduler)
        await index.publish("smol", "p1", "1", BlockKeys("f1").chain(TOKEN_IDS, 16, "new"), [])
        await until(partial(_is_placed_by_prefix, scheduler, "new"))


async def test_scheduler_that_waits_for_news_ends_at_once(redis_url: str) -> None:
    async with living(redis_url, registered("d0").record) as index, AsyncExitStack() as stack:
        await stack.enter_async_context(running_scheduler(make_config(redis_url)))
        await index.publish("smol", "d0", "1", BlockKeys("f1").chain(TOKEN_IDS, 16), [])
        # What follows is the wait for the next change.
        await until(partial(_is_copied, len(TOKEN_IDS) // 16))

        async with LoopClock() as since_told:
            await stack.aclose()
        assert since_told.now_s < 1


async def _is_placed_by_prefix(scheduler: Scheduler, salt: str = "") -> bool:
    prefill = (await placed(scheduler, salt)).decision.prefill
    return prefill is not None and prefill.num_cached_tokens > 0


async def _is_copied(num_blocks: int) -> bool:
    """Whether the scheduler has a local copy of the index."""
    lines = metrics.render()[0].decode().splitlines()
    return f"pdmesh_scheduler_indexed_blocks {num_blocks}.0" in lines


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(30):
        # The scheduler polls Redis, and we the scheduler.
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def test_worker_that_leaves_is_not_chosen_any_more(redis_url: str) -> None:
    async with (
        living(redis_url, registered("d0").record),
        running_scheduler(make_config(redis_url)) as scheduler,
    ):
        async with living(redis_url, registered("d1").record):
            await _until_workers(scheduler, {"d0", "d1"})
        await _until_workers(scheduler, {"d0"})

        chosen = {(await placed(scheduler)).decision.decode.worker.worker_id for _ in range(10)}

    assert chosen == {"d0"}


async def _until_workers(scheduler: Scheduler, worker_ids: set[str]) -> None:
    async with asyncio.timeout(30):
        # The scheduler polls Redis, and we the scheduler.
        while {one.record.worker_id for one in scheduler.workers} != worker_ids:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_random_holders_leave_no_charge(redis_url: str) -> None:
    # KV-16
    records = [registered("p0", "prefill").record, registered("d0").record]
    async with (
        living(redis_url, *records),
        running_scheduler(make_config(redis_url)) as scheduler,
    ):
        chance = random.Random(11)

        async def hold() -> None:
            facts = RequestFacts("smol", len(TOKEN_IDS), chance.choice([1, 400]))
            async with scheduler.hold(AdmitRequest(facts, TOKEN_IDS), timeout_s=20) as held:
                if chance.random() < 0.5:
                    scheduler.prefill_done(held)
                await asyncio.sleep(chance.random() * 0.005)

        holders = [asyncio.create_task(hold()) for _ in range(150)]
        for holder in chance.sample(holders, 60):
            await asyncio.sleep(chance.random() * 0.004)
            holder.cancel()
        await asyncio.wait(holders)

        assert [one.exception() for one in holders if not one.cancelled()] == [None] * sum(
            not one.cancelled() for one in holders
        )
        assert (scheduler.num_placements, scheduler.num_waiting) == (0, 0)
        assert {scheduler.charged(worker).num_requests for worker in scheduler.workers} == {0}


@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGINT])
async def test_process_serves_until_a_signal_and_ends_in_order(
    redis_url: str, signal_number: signal.Signals
) -> None:
    address = f"127.0.0.1:{find_free_ports(1)[0]}"
    env = {name: value for name, value in os.environ.items() if not name.startswith("PDMESH_")}
    env |= {"PDMESH_LISTEN": address, "PDMESH_REDIS_URL": redis_url}
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "scheduler_svc", env=env, cwd=ROOT, stdout=asyncio.subprocess.DEVNULL
    )
    try:
        async with connect(address) as channel:
            health: Any = health_pb2_grpc.HealthStub(channel)  # its type stubs name no methods
            answer = await health.Check(
                health_pb2.HealthCheckRequest(service="mesh.v1.SchedulerService"),
                wait_for_ready=True,
                timeout=30,
            )
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            state = await stub.GetState(scheduler_pb2.GetStateRequest(), timeout=5)
            assert list(state.workers) == []

        process.send_signal(signal_number)
        assert await asyncio.wait_for(process.wait(), 10) == 0
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
