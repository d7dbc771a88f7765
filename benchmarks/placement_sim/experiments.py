"""What is asked of the simulation: hits, goodput under overload, and the cost of placing."""

import asyncio
import gc
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from benchmarks.placement_sim.simulation import Fleet, NoIndex, Outcome, Run, TableReplica, simulate
from benchmarks.placement_sim.trace import TraceRequest, TraceShape, faster, generate
from benchmarks.placement_sim.virtual_workers import (
    MODEL,
    Hardware,
    VirtualDecode,
    VirtualPrefill,
    VirtualRegistry,
)
from mesh.block_index import shelf_name
from mesh.block_keys import BlockKeys
from scheduler_svc.admission import QueueSettings
from scheduler_svc.block_table import BlockTable
from scheduler_svc.cluster import Cluster
from scheduler_svc.objectives import Objectives
from scheduler_svc.placement import PlacementSettings
from scheduler_svc.predicted_blocks import PredictedBlocks
from scheduler_svc.prefix_lookup import IndexLookup, LocalLookup
from scheduler_svc.scheduler import AdmitRequest, Scheduler
from scheduler_svc.workers import RequestFacts

POLICIES = {
    "round robin": {"is_round_robin": True},
    "by load": {"has_index": False},
    "pdmesh": {},
}


@dataclass(frozen=True, slots=True)
class Summary:
    """One run in a line."""

    num_requests: int
    num_served: int
    hit_rate: float
    ttft_p50_s: float
    ttft_p99_s: float
    tbt_mean_s: float
    # Requests that met both objectives, for each second of the trace.
    goodput_per_s: float


@dataclass(frozen=True, slots=True)
class Promise:
    """When a request counts as served well."""

    ttft_s: float = 4.0
    tbt_s: float = 0.05

    def is_kept(self, outcome: Outcome) -> bool:
        return (
            outcome.ttft_s is not None
            and outcome.tbt_s is not None
            and outcome.ttft_s <= self.ttft_s
            and outcome.tbt_s <= self.tbt_s
        )


def summarize(outcomes: Sequence[Outcome], promise: Promise) -> Summary:
    served = [one for one in outcomes if one.ttft_s is not None]
    ttfts = sorted(one.ttft_s or 0.0 for one in served)
    duration_s = max(one.arrived_s for one in outcomes) or 1.0
    return Summary(
        num_requests=len(outcomes),
        num_served=len(served),
        hit_rate=sum(one.num_cached_tokens for one in served)
        / max(1, sum(one.num_prompt_tokens for one in served)),
        ttft_p50_s=_percentile(ttfts, 0.5),
        ttft_p99_s=_percentile(ttfts, 0.99),
        tbt_mean_s=sum(one.tbt_s or 0.0 for one in served) / max(1, len(served)),
        goodput_per_s=sum(map(promise.is_kept, outcomes)) / duration_s,
    )


def hit_rates(trace: list[TraceRequest], fleet: Fleet) -> dict[str, Summary]:
    """The same trace under each policy."""
    return {
        name: summarize(
            simulate(replace(Run(trace, fleet), **changes)),  # type: ignore[arg-type]
            Promise(),
        )
        for name, changes in POLICIES.items()
    }


@dataclass(frozen=True, slots=True)
class Overload:
    """Goodput by load, with and without early rejection."""

    sustainable_per_s: float
    # Load as a multiple of the sustainable one.
    loads: list[float]
    without_rejection: list[Summary]
    with_rejection: list[Summary]


def overload(
    trace: list[TraceRequest],
    fleet: Fleet,
    loads: Sequence[float],
    promise: Promise,
    *,
    num_probes: int = 6,
) -> Overload:
    """Find the load at which 95% are served well, and go beyond it."""
    own_per_s = len(trace) / (trace[-1].timestamp / 1000)
    low, high = 0.1, 8.0
    for _ in range(num_probes):
        factor = (low * high) ** 0.5
        outcomes = simulate(Run(faster(trace, factor), fleet))
        is_sustained = sum(map(promise.is_kept, outcomes)) >= 0.95 * len(outcomes)
        low, high = (factor, high) if is_sustained else (low, factor)
    objectives = Objectives(online_ttft_s=promise.ttft_s, tbt_s=promise.tbt_s)
    runs = [Run(faster(trace, low * load), fleet) for load in loads]
    return Overload(
        sustainable_per_s=low * own_per_s,
        loads=list(loads),
        without_rejection=[summarize(simulate(run), promise) for run in runs],
        with_rejection=[
            summarize(simulate(replace(run, objectives=objectives)), promise) for run in runs
        ],
    )


@dataclass(frozen=True, slots=True)
class PlacementCost:
    """Processor time of one placement, in milliseconds: queue, lookup, choice and charges.

    Wall time is the same on a machine that does nothing else, and says nothing on others.
    """

    num_workers: int
    num_blocks: int
    p50_ms: float
    p99_ms: float
    wall_p99_ms: float


def placement_cost(num_workers: int, num_blocks: int, num_requests: int = 400) -> PlacementCost:
    """For prompts of 8,000 tokens in blocks of 512, of which some are known."""
    return asyncio.run(_placement_cost(num_workers, num_blocks, num_requests))


async def _placement_cost(num_workers: int, num_blocks: int, num_requests: int) -> PlacementCost:
    table, hardware, chance = BlockTable(), Hardware(), random.Random(1)
    prefills = [VirtualPrefill(f"p{n}", 1000, table, hardware) for n in range(num_workers // 2)]
    decodes = [VirtualDecode(f"d{n}", 1000, hardware) for n in range(num_workers // 2)]
    cluster = Cluster(VirtualRegistry([*prefills, *decodes]))
    await cluster.refresh()
    prompts = [[chance.randrange(50_000)] * 8000 for _ in range(64)]
    _fill(table, prefills, prompts, num_blocks)
    lookup = LocalLookup({MODEL: TableReplica(table)}, IndexLookup(NoIndex()), PredictedBlocks())
    scheduler = Scheduler(cluster, lookup, PlacementSettings(max_num_seqs=10_000), QueueSettings())
    # A production process does the same once it is up.
    gc.collect()
    gc.freeze()
    times_ms, wall_ms = [], []
    for number in range(num_requests):
        token_ids = prompts[number % len(prompts)][: chance.randrange(4000, 8000)]
        request = AdmitRequest(RequestFacts(MODEL, len(token_ids), 128), token_ids)
        started, wall_started = time.thread_time(), time.perf_counter()
        async with scheduler.hold(request, timeout_s=10):
            times_ms.append(1000 * (time.thread_time() - started))
            wall_ms.append(1000 * (time.perf_counter() - wall_started))
    gc.unfreeze()
    times_ms.sort()
    return PlacementCost(
        num_workers,
        table.num_blocks,
        _percentile(times_ms, 0.5),
        _percentile(times_ms, 0.99),
        _percentile(sorted(wall_ms), 0.99),
    )


def _fill(
    table: BlockTable,
    prefills: Sequence[VirtualPrefill],
    prompts: Sequence[list[int]],
    num_blocks: int,
) -> None:
    """Random blocks, spread over the workers; each prompt is on a few of them."""
    chance = random.Random(2)
    shelves = [shelf_name(one.record.worker_id, "1", "device") for one in prefills]
    for prompt in prompts:
        keys = BlockKeys("virtual").chain(prompt, 512)
        for shelf in chance.sample(shelves, min(8, len(shelves))):
            table.add(shelf, keys[: chance.randrange(4, len(keys))])
    while table.num_blocks < num_blocks:
        for shelf in shelves:
            table.add(shelf, [chance.randbytes(16) for _ in range(1000)])
            if table.num_blocks >= num_blocks:
                break


def default_trace(num_requests: int, requests_per_s: float, seed: int) -> list[TraceRequest]:
    return generate(TraceShape(num_requests=num_requests, requests_per_s=requests_per_s, seed=seed))


def as_json(summaries: dict[str, Summary]) -> dict[str, dict[str, float]]:
    return {name: asdict(summary) for name, summary in summaries.items()}


def _percentile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
