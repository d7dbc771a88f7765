"""The view of the workers: what joins, what leaves, and what an outage does to it."""

import asyncio

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

from mesh.registry import RegisteredWorker, WorkerLoad
from scheduler_svc.cluster import Cluster
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
    async with asyncio.timeout(2):
        await joined.wait()

    running.cancel()
    await asyncio.wait([running])
    assert running.cancelled()
