"""The scheduler's process: parts put together and run until a signal."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from functools import partial

from mesh import metrics
from mesh.registry import BlockIndex, WorkerRegistry, connect_redis
from mesh.server import MeshServer, serve
from mesh.v1 import scheduler_pb2, scheduler_pb2_grpc
from scheduler_svc.cluster import Cluster
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.prefix_lookup import IndexLookup
from scheduler_svc.scheduler import Scheduler
from scheduler_svc.service import SchedulerServicer
from scheduler_svc.workers import Role

SERVICE_NAME = scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"].full_name


async def run(config: SchedulerConfig) -> None:
    """Serve until a signal, then drain."""
    async with running_scheduler(config) as scheduler:
        server = MeshServer(config.listen)
        server.add(
            scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server,
            SchedulerServicer(scheduler, config.max_queue_wait_s),
            SERVICE_NAME,
        )
        await serve(
            server,
            drain=scheduler.drain,
            drain_timeout_s=config.drain_timeout_s,
            parent_pid=config.parent_pid,
        )


@asynccontextmanager
async def running_scheduler(config: SchedulerConfig) -> AsyncIterator[Scheduler]:
    """A scheduler whose view of the workers is kept up to date for the block."""
    redis = connect_redis(config.redis_url)
    try:
        cluster = Cluster(
            WorkerRegistry(redis),
            interval_s=config.refresh_interval_s,
            max_outage_s=config.max_outage_s,
        )
        lookup = IndexLookup(BlockIndex(redis), timeout_s=config.lookup_timeout_s)
        scheduler = Scheduler(cluster, lookup, config.placement, config.queue)
        await cluster.refresh()
        # A group, so that a fault in the refreshing ends the process instead of leaving it blind.
        async with asyncio.TaskGroup() as tasks:
            refreshing = tasks.create_task(cluster.run(), name="cluster")
            with _gauges(scheduler):
                yield scheduler
            refreshing.cancel()
    finally:
        await redis.aclose()


def _gauges(scheduler: Scheduler) -> ExitStack:
    """Report queue, placements and workers until the stack is closed."""
    stack = ExitStack()
    stack.callback(metrics.NUM_QUEUED.watch(lambda: scheduler.num_waiting))
    stack.callback(metrics.NUM_PLACEMENTS.watch(lambda: scheduler.num_placements))
    for role in Role:
        count = partial(scheduler.num_workers, role)
        stack.callback(metrics.NUM_WORKERS.watch(count, {"role": role}))
    return stack
