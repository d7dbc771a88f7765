"""Redis dies, restarts empty or hangs: requests go on, and the index is whole again in time."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import psutil

from mesh import metrics
from mesh.block_index import BlockIndex
from mesh.block_keys import BlockKeys
from mesh.block_publisher import BlockPublisher
from mesh.ports import find_free_ports
from mesh.redis_client import connect_redis
from mesh.registry import Heartbeat, WorkerLoad, WorkerRegistry
from scheduler_svc.app import running_scheduler
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.loads import HeldPlacement
from scheduler_svc.scheduler import AdmitRequest, Scheduler
from scheduler_svc.workers import RequestFacts
from tests.loop_clock import LoopClock
from tests.paper_workers import registered
from tests.valkey import RedisProxy, running_valkey

# On the clock of the loop, as all bounds here.
WHOLE_AGAIN_S = 5.0
# Whoever waits for Redis waits for its timeout, 0.5 s.
NO_WAIT_S = 0.2
TOKEN_IDS = list(range(200))
KEYS = BlockKeys("f1").chain(TOKEN_IDS, 16)


@dataclass
class Changes:
    stored: list[bytes]
    removed: list[bytes]


@asynccontextmanager
async def living_worker(redis_url: str, worker_id: str, held: list[bytes]) -> AsyncIterator[None]:
    """What a worker process keeps up in Redis, with the settings that it has."""
    record = registered(worker_id, "prefill" if worker_id[0] == "p" else "decode").record
    redis = connect_redis(redis_url)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(redis.aclose)
        publisher = await stack.enter_async_context(
            BlockPublisher(BlockIndex(redis), "smol", worker_id, "1")
        )
        publisher.offer(Changes(held, []))
        registry = WorkerRegistry(redis)
        await stack.enter_async_context(
            Heartbeat(registry, record, lambda: WorkerLoad(100, 100), interval_s=0.2)
        )
        yield


@asynccontextmanager
async def mesh(redis_url: str, *, scheduler_url: str = "") -> AsyncIterator[Scheduler]:
    """Three prefill workers, of which one has the prefix, a decode worker and a scheduler."""
    config = SchedulerConfig.model_validate(
        {
            "redis_url": scheduler_url or redis_url,
            "predicted_ttl_s": 0,
            # Else a placement that asked Redis would give up before it can be told from others.
            "lookup_timeout_s": 5,
        }
    )
    async with (
        living_worker(redis_url, "p0", []),
        living_worker(redis_url, "p1", KEYS),
        living_worker(redis_url, "p2", []),
        living_worker(redis_url, "d0", []),
        running_scheduler(config) as scheduler,
    ):
        await until(_is_copied)
        assert await _is_by_prefix(scheduler)
        yield scheduler


async def placed(scheduler: Scheduler) -> HeldPlacement:
    facts = RequestFacts("smol", len(TOKEN_IDS), 16)
    async with scheduler.hold(AdmitRequest(facts, TOKEN_IDS), timeout_s=5) as held:
        return held


async def _is_copied() -> bool:
    """Whether some scheduler has a local copy of the index."""
    lines = metrics.render()[0].decode().splitlines()
    return f"pdmesh_scheduler_indexed_blocks {len(KEYS)}.0" in lines


async def _is_by_prefix(scheduler: Scheduler) -> bool:
    prefill = (await placed(scheduler)).decision.prefill
    return prefill is not None and prefill.num_cached_tokens == 192


async def until(condition: Callable[[], Awaitable[bool]], timeout_s: float = 30) -> None:
    async with asyncio.timeout(timeout_s):
        # Redis is polled, and so are those who poll it.
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


async def slowest_placement_s(scheduler: Scheduler, during_s: float) -> float:
    slowest = 0.0
    async with LoopClock() as clock:
        while clock.now_s < during_s:
            started_s = clock.now_s
            await placed(scheduler)
            slowest = max(slowest, clock.now_s - started_s)
            await asyncio.sleep(0.01)
    return slowest


async def _has_all(redis_url: str) -> bool:
    """Whether Redis itself knows everything again."""
    redis = connect_redis(redis_url, timeout_s=10)
    try:
        workers = await WorkerRegistry(redis).list()
        found = await BlockIndex(redis).longest_prefix("smol", KEYS)
    finally:
        await redis.aclose()
    return len(workers) == 4 and {k: v.num_blocks for k, v in found.items()} == {"p1@1": 12}


# RD-03
async def test_redis_that_restarts_empty_is_whole_again_within_five_seconds() -> None:
    [port] = find_free_ports(1)
    url = f"redis://127.0.0.1:{port}/0"
    async with AsyncExitStack() as stack:
        with running_valkey(port):
            scheduler = await stack.enter_async_context(mesh(url))
        # It is gone.
        assert await slowest_placement_s(scheduler, during_s=3) < NO_WAIT_S
        assert await _is_by_prefix(scheduler)

        with running_valkey(port):
            async with LoopClock() as since_return:
                await until(lambda: _has_all(url))
            assert since_return.now_s < WHOLE_AGAIN_S
            assert await _is_by_prefix(scheduler)
            # A new scheduler learns all of it from Redis.
            async with running_scheduler(
                SchedulerConfig.model_validate({"redis_url": url, "predicted_ttl_s": 0})
            ) as newcomer:
                await until(lambda: _is_by_prefix(newcomer))
            await stack.aclose()


# RD-03
async def test_redis_that_hangs_delays_nobody_and_is_followed_again_afterwards(
    redis_url: str, redis_proxy: RedisProxy
) -> None:
    async with mesh(redis_url, scheduler_url=redis_proxy.url) as scheduler:
        redis_proxy.is_black_hole = True
        assert await slowest_placement_s(scheduler, during_s=3) < NO_WAIT_S
        redis_proxy.is_black_hole = False
        redis_proxy.cut()

        async with living_worker(redis_url, "p3", KEYS):

            async def is_known() -> bool:
                return any(one.record.worker_id == "p3" for one in scheduler.workers)

            async with LoopClock() as since_return:
                await until(is_known)
            assert since_return.now_s < WHOLE_AGAIN_S


# RD-03
async def test_redis_that_is_frozen_delays_nobody_and_is_whole_when_it_thaws() -> None:
    [port] = find_free_ports(1)
    url = f"redis://127.0.0.1:{port}/0"
    with running_valkey(port):
        [process] = [one for one in psutil.Process().children() if _listens_on(one, port)]
        async with mesh(url) as scheduler:
            process.suspend()
            try:
                # Longer than records of workers live.
                assert await slowest_placement_s(scheduler, during_s=4) < NO_WAIT_S
                assert await _is_by_prefix(scheduler)
            finally:
                process.resume()
            async with LoopClock() as since_thaw:
                await until(lambda: _has_all(url))
                await until(lambda: _is_by_prefix(scheduler))
            assert len(scheduler.workers) == 4
            assert since_thaw.now_s < WHOLE_AGAIN_S


def _listens_on(process: psutil.Process, port: int) -> bool:
    return any(
        one.status == psutil.CONN_LISTEN and one.laddr.port == port
        for one in process.net_connections()
    )


# RD-03
async def test_mesh_that_starts_without_redis_is_whole_soon_after_it_comes() -> None:
    [port] = find_free_ports(1)
    url = f"redis://127.0.0.1:{port}/0"
    config = SchedulerConfig.model_validate({"redis_url": url, "predicted_ttl_s": 0})
    async with AsyncExitStack() as stack:
        for worker_id, held in (("p0", []), ("p1", KEYS), ("p2", []), ("d0", [])):
            await stack.enter_async_context(living_worker(url, worker_id, held))
        scheduler = await stack.enter_async_context(running_scheduler(config))
        assert not scheduler.workers

        with running_valkey(port):

            async def is_known() -> bool:
                return len(scheduler.workers) == 4 and await _is_by_prefix(scheduler)

            async with LoopClock() as since_coming:
                await until(lambda: _has_all(url))
                await until(is_known)
            assert since_coming.now_s < WHOLE_AGAIN_S
            await stack.aclose()


async def test_schedulers_learn_of_each_other_and_one_may_die(redis_url: str) -> None:
    config = SchedulerConfig.model_validate({"redis_url": redis_url, "max_num_seqs": 2})
    request = AdmitRequest(RequestFacts("smol", len(TOKEN_IDS), 16), TOKEN_IDS)
    async with mesh(redis_url), running_scheduler(config) as survivor, AsyncExitStack() as stack:
        dying = await stack.enter_async_context(running_scheduler(config))
        await until(lambda: _knows_workers(dying))
        for _ in range(2):
            await stack.enter_async_context(dying.hold(request, timeout_s=5))

        # The decode worker is full by the other's charges.
        async def is_full() -> bool:
            try:
                async with asyncio.timeout(0.1), survivor.hold(request, timeout_s=5):
                    return False
            except TimeoutError:
                return True

        await until(is_full)
        await stack.aclose()

        async with survivor.hold(request, timeout_s=30):
            pass


async def _knows_workers(scheduler: Scheduler) -> bool:
    return len(scheduler.workers) == 4
