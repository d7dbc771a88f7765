"""The view of the workers: what joins, what leaves, and what an outage does to it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from mesh.config import read
from mesh.registry import RegisteredWorker, WorkerLoad
from scheduler_svc.cluster import Cluster
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.peers import Charges
from scheduler_svc.workers import ActiveLoad, Role
from tests.paper_workers import PaperRegistry, registered

DOWN = RedisConnectionError("down")


class FakeClock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make_cluster(registry: PaperRegistry, clock: FakeClock) -> Cluster:
    return Cluster(registry, max_outage_s=60, recovery_s=2, clock=clock)


def ids(cluster: Cluster) -> list[str]:
    return sorted(worker.record.worker_id for worker in cluster.workers)


async def test_workers_are_seen_as_they_register_and_report() -> None:
    load = WorkerLoad(
        num_blocks=100, num_free_blocks=60, num_running=3, num_waiting=2, num_waiting_tokens=500
    )
    cluster = make_cluster(PaperRegistry(registered("p0", "prefill", load=load)), FakeClock())

    await cluster.refresh()

    (view,) = cluster.views
    assert (view.role, view.holder_id, view.address) == (Role.PREFILL, "p0@1", "p0:1")
    assert view.reported == ActiveLoad(num_requests=5, prefill_tokens=500, blocks=40)
    assert view.charged == ActiveLoad()


async def test_worker_whose_record_is_gone_is_gone() -> None:
    registry = PaperRegistry(registered("d0"), registered("d1"))
    cluster = make_cluster(registry, FakeClock())
    await cluster.refresh()

    registry.workers = registry.workers[1:]
    await cluster.refresh()

    assert ids(cluster) == ["d1"]


async def test_worker_of_an_unknown_role_is_left_alone() -> None:
    registry = PaperRegistry(registered("d0"), registered("e0", role="encode"))  # type: ignore[arg-type]
    cluster = make_cluster(registry, FakeClock())

    await cluster.refresh()

    assert ids(cluster) == ["d0"]


async def test_new_incarnation_replaces_the_old_one() -> None:
    # KV-23
    registry = PaperRegistry(registered("d0"))
    cluster = make_cluster(registry, FakeClock())
    await cluster.refresh()

    registry.workers = [registered("d0", incarnation="2")]
    await cluster.refresh()

    assert [view.holder_id for view in cluster.views] == ["d0@2"]


@pytest.mark.parametrize("error", [DOWN, OSError("gone"), TimeoutError()])
async def test_last_snapshot_stands_while_the_registry_is_down(error: Exception) -> None:
    # RD-03
    registry, clock = PaperRegistry(registered("d0")), FakeClock()
    cluster = make_cluster(registry, clock)
    await cluster.refresh()

    registry.error = error
    clock.now = 60
    await cluster.refresh()
    assert ids(cluster) == ["d0"]
    clock.now = 61
    await cluster.refresh()

    assert ids(cluster) == []


async def test_an_hour_without_the_registry_costs_no_request() -> None:
    # RD-03
    registry, clock = PaperRegistry(registered("d0")), FakeClock()
    settings = read(SchedulerConfig)
    cluster = Cluster(registry, max_outage_s=settings.max_outage_s, clock=clock)
    await cluster.refresh()

    registry.error = DOWN
    clock.now = 3600
    await cluster.refresh()

    assert ids(cluster) == ["d0"]


async def test_registry_that_hangs_is_an_outage() -> None:
    class Hanging(PaperRegistry):
        is_hanging = False

        async def list(self) -> list[RegisteredWorker]:
            if self.is_hanging:
                await asyncio.Event().wait()
            return self.workers

    registry = Hanging(registered("d0"))
    cluster = Cluster(registry, timeout_s=0.01)
    await cluster.refresh()

    registry.is_hanging = True
    await cluster.refresh()

    assert ids(cluster) == ["d0"]


async def test_registry_that_restarted_empty_has_time_to_fill() -> None:
    # RD-03
    registry, clock = PaperRegistry(registered("d0"), registered("d1")), FakeClock()
    cluster = make_cluster(registry, clock)
    await cluster.refresh()
    registry.error = DOWN
    await cluster.refresh()

    registry.error, registry.workers = None, []
    await cluster.refresh()
    assert ids(cluster) == ["d0", "d1"]
    registry.workers = [registered("d1"), registered("d2")]
    clock.now = 1
    await cluster.refresh()
    assert ids(cluster) == ["d0", "d1", "d2"]
    clock.now = 2
    await cluster.refresh()

    assert ids(cluster) == ["d1", "d2"]


async def test_all_workers_vanishing_at_once_is_believed_only_after_a_while() -> None:
    registry, clock = PaperRegistry(registered("d0")), FakeClock()
    cluster = make_cluster(registry, clock)
    await cluster.refresh()

    registry.workers = []
    for clock.now in (0, 1, 1.9):
        await cluster.refresh()
        assert ids(cluster) == ["d0"]
    clock.now = 2
    await cluster.refresh()

    assert ids(cluster) == []


async def test_registry_that_is_down_at_the_start_is_survived() -> None:
    # RD-03
    registry = PaperRegistry(registered("d0"))
    registry.error = DOWN
    cluster = make_cluster(registry, FakeClock())
    await cluster.refresh()
    assert ids(cluster) == []

    registry.error = None
    await cluster.refresh()

    assert ids(cluster) == ["d0"]


async def test_listeners_hear_of_every_refresh() -> None:
    registry = PaperRegistry()
    cluster = make_cluster(registry, FakeClock())
    seen: list[list[str]] = []
    cluster.on_refresh(lambda: seen.append(ids(cluster)))

    await cluster.refresh()
    registry.workers = [registered("d0")]
    await cluster.refresh()
    registry.error = DOWN
    await cluster.refresh()

    assert seen == [[], ["d0"], ["d0"]]


async def test_models_are_remembered_after_their_workers() -> None:
    registry = PaperRegistry(registered("d0", model="a"), registered("d1", model="b"))
    cluster = make_cluster(registry, FakeClock())
    await cluster.refresh()
    registry.workers = registry.workers[1:]
    await cluster.refresh()

    assert cluster.has_served("a")
    assert cluster.has_served("b")
    assert not cluster.has_served("c")


async def test_running_refreshes_until_cancelled() -> None:
    registry = PaperRegistry()
    cluster = Cluster(registry, interval_s=0.001)
    joined = asyncio.Event()
    cluster.on_refresh(lambda: joined.set() if cluster.workers else None)
    running = asyncio.create_task(cluster.run())
    await asyncio.sleep(0)

    registry.workers = [registered("d0")]
    async with asyncio.timeout(20):
        await joined.wait()

    running.cancel()
    await asyncio.wait([running])
    assert running.cancelled()


class Doorbell:
    """Waits for a ring instead of the given time."""

    def __init__(self) -> None:
        self.waits: asyncio.Queue[float] = asyncio.Queue()
        self.rings: asyncio.Queue[Exception | None] = asyncio.Queue()

    async def wait(self, wait_s: float) -> None:
        self.waits.put_nowait(wait_s)
        error = await self.rings.get()
        if error is not None:
            raise error


class CountedRegistry(PaperRegistry):
    """Puts a number into `refreshes` for each time that it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.refreshes: asyncio.Queue[int] = asyncio.Queue()
        self.num_refreshes = 0

    async def list(self) -> list[RegisteredWorker]:
        self.num_refreshes += 1
        self.refreshes.put_nowait(self.num_refreshes)
        return await super().list()


@asynccontextmanager
async def running(cluster: Cluster) -> AsyncIterator[None]:
    task = asyncio.create_task(cluster.run())
    try:
        async with asyncio.timeout(20):
            yield
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_idle_cluster_waits_for_news_instead_of_asking() -> None:
    registry, doorbell = CountedRegistry(), Doorbell()
    cluster = Cluster(registry, interval_s=0.001)
    cluster.watch(doorbell.wait, idle_interval_s=7)
    async with running(cluster):
        assert await registry.refreshes.get() == 1
        assert await doorbell.waits.get() == 7

        doorbell.rings.put_nowait(None)
        assert await registry.refreshes.get() == 2
        await doorbell.waits.get()

    assert registry.num_refreshes == 2


async def test_request_makes_an_idle_cluster_look_again_without_a_second_wait() -> None:
    registry, doorbell = CountedRegistry(), Doorbell()
    cluster = Cluster(registry, interval_s=0.001)
    cluster.watch(doorbell.wait, idle_interval_s=7)
    async with running(cluster):
        await registry.refreshes.get()
        await doorbell.waits.get()

        cluster.hurry()
        assert await registry.refreshes.get() == 2
        cluster.hurry()
        assert await registry.refreshes.get() == 3

    assert doorbell.waits.empty()


async def test_cluster_with_work_asks_at_its_interval() -> None:
    registry, doorbell = CountedRegistry(), Doorbell()
    cluster = Cluster(registry, interval_s=0.001)
    cluster.watch(doorbell.wait, idle_interval_s=7)

    async def exchange(own: Charges) -> Charges:
        return {}

    cluster.share_charges(lambda: {"d0@1": ActiveLoad(1)}, exchange)
    async with running(cluster):
        for number in range(1, 4):
            assert await registry.refreshes.get() == number

    assert doorbell.waits.empty()


async def test_news_that_fail_to_come_do_not_stop_the_refreshing() -> None:
    registry, doorbell = CountedRegistry(), Doorbell()
    cluster = Cluster(registry, interval_s=0.001)
    cluster.watch(doorbell.wait, idle_interval_s=7)
    async with running(cluster):
        await registry.refreshes.get()

        doorbell.rings.put_nowait(DOWN)
        assert await registry.refreshes.get() == 2


async def test_workers_that_cannot_exchange_blocks_are_told_with_what_differs(
    caplog: pytest.LogCaptureFixture,
) -> None:
    # KV-25
    ours = registered("p0", "prefill", layout_fingerprint="a", layout={"block_size": "16"})
    theirs = registered("d0", layout_fingerprint="b", layout={"block_size": "32"})
    cluster = Cluster(PaperRegistry(ours, theirs))

    await cluster.refresh()
    await cluster.refresh()

    [told] = [one for one in caplog.records if "can use a prefill worker" in one.message]
    assert told.__dict__["difference"] == "block_size is 16 here and 32 there"
