"""The scheduler's process: parts put together and run until a signal."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from functools import partial

from mesh import metrics
from mesh.registry import (
    BlockIndex,
    WorkerChanges,
    WorkerRegistry,
    connect_redis,
    new_incarnation,
)
from mesh.server import MeshServer, serve
from mesh.v1 import scheduler_pb2, scheduler_pb2_grpc
from scheduler_svc.block_replica import BlockReplica
from scheduler_svc.breakers import BreakerState
from scheduler_svc.cluster import Cluster
from scheduler_svc.config import SchedulerConfig
from scheduler_svc.peers import Peers
from scheduler_svc.predicted_blocks import PredictedBlocks
from scheduler_svc.prefix_lookup import IndexLookup, LocalLookup
from scheduler_svc.replicas import Replicas
from scheduler_svc.scheduler import Scheduler
from scheduler_svc.service import SchedulerServicer
from scheduler_svc.workers import Role

# While nothing happens, Redis is asked so rarely. Its answers wait until there is news, which is
# why the timeout of the client that follows is longer.
_IDLE_S = 2.0
_FOLLOW_TIMEOUT_S = 3.0

SERVICE_NAME = scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"].full_name


async def run(config: SchedulerConfig) -> None:
    """Serve until a signal, then drain."""
    async with running_scheduler(config) as scheduler:
        server = MeshServer(config.listen)
        server.add(
            scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server,
            SchedulerServicer(scheduler, config.max_queue_wait_s, lease_s=config.placement_lease_s),
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
    """A scheduler whose view of workers and blocks is kept up to date for the block."""
    redis = connect_redis(config.redis_url)
    following = connect_redis(config.redis_url, timeout_s=_FOLLOW_TIMEOUT_S)
    try:
        cluster = Cluster(
            WorkerRegistry(redis),
            interval_s=config.refresh_interval_s,
            max_outage_s=config.max_outage_s,
        )
        cluster.watch(WorkerChanges(following).wait, _IDLE_S)
        index = BlockIndex(redis)
        # A group, so that a fault in the refreshing ends the process instead of leaving it blind.
        async with asyncio.TaskGroup() as tasks:
            replicas = Replicas(
                partial(BlockReplica, BlockIndex(following), max_wait_s=_IDLE_S), tasks
            )
            lookup = LocalLookup(
                replicas,
                IndexLookup(index, timeout_s=config.lookup_timeout_s),
                PredictedBlocks(ttl_s=config.predicted_ttl_s),
            )
            scheduler = Scheduler(
                cluster,
                lookup,
                config.placement,
                config.queue,
                config.objectives,
                breakers=config.breakers,
            )
            # A process that has its predecessor's id is still another scheduler.
            peers = Peers(redis, f"{config.worker_id}@{new_incarnation()}")
            cluster.share_charges(lambda: scheduler.charges, peers.exchange)
            cluster.on_refresh(lambda: _follow_all(replicas, cluster))
            await cluster.refresh()
            refreshing = tasks.create_task(cluster.run(), name="cluster")
            with _gauges(scheduler, replicas):
                yield scheduler
            refreshing.cancel()
            replicas.stop()
    finally:
        await redis.aclose()
        await following.abandon()


def _follow_all(replicas: Replicas, cluster: Cluster) -> None:
    for view in cluster.views:
        replicas.follow(view.model)


def _gauges(scheduler: Scheduler, replicas: Replicas) -> ExitStack:
    """Report queue, placements, workers and blocks until the stack is closed."""
    stack = ExitStack()
    stack.callback(
        metrics.NUM_INDEXED_BLOCKS.watch(lambda: sum(one.num_blocks for one in replicas.values()))
    )
    stack.callback(metrics.NUM_QUEUED.watch(lambda: scheduler.num_waiting))
    stack.callback(metrics.NUM_PLACEMENTS.watch(lambda: scheduler.num_placements))
    for state in (BreakerState.OPEN, BreakerState.HALF_OPEN):
        in_state = partial(_num_breakers, scheduler, state)
        stack.callback(metrics.BREAKERS.watch(in_state, {"state": state}))
    for role in Role:
        count = partial(scheduler.num_workers, role)
        stack.callback(metrics.NUM_WORKERS.watch(count, {"role": role}))
    return stack


def _num_breakers(scheduler: Scheduler, state: BreakerState) -> int:
    return sum(one is state for one in scheduler.breakers.states.values())
