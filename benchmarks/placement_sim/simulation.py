"""One run of a trace through the real scheduler, or past it, over virtual workers."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from itertools import cycle
from typing import Protocol

from benchmarks.placement_sim import virtual_time
from benchmarks.placement_sim.trace import BLOCK_TOKENS, TraceRequest
from benchmarks.placement_sim.virtual_workers import (
    MODEL,
    Hardware,
    VirtualDecode,
    VirtualPrefill,
    VirtualRegistry,
)
from mesh.block_keys import BlockKeys
from mesh.errors import DeadlineExceeded, QueueFull
from scheduler_svc.admission import QueueSettings
from scheduler_svc.block_table import BlockTable
from scheduler_svc.cluster import Cluster
from scheduler_svc.loads import HeldPlacement
from scheduler_svc.objectives import Objectives
from scheduler_svc.placement import ModePolicy, PlacementSettings
from scheduler_svc.predicted_blocks import PredictedBlocks
from scheduler_svc.prefix_lookup import IndexLookup, LocalLookup, Replica
from scheduler_svc.scheduler import AdmitRequest, Scheduler, StageTimes
from scheduler_svc.workers import PrefixHit, RequestFacts


@dataclass(frozen=True, slots=True)
class Fleet:
    """The workers of a run."""

    num_prefill: int
    num_decode: int
    # Of 512 tokens each.
    prefill_blocks: int = 400
    decode_blocks: int = 4000
    hardware: Hardware = field(default_factory=Hardware)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one request got; None for one that was refused."""

    arrived_s: float
    ttft_s: float | None
    tbt_s: float | None
    num_prompt_tokens: int
    num_cached_tokens: int


@dataclass(slots=True)
class Place:
    """Where a request runs, and how to tell what became of it."""

    prefill_id: str
    decode_id: str
    held: HeldPlacement | None = None


class Policy(Protocol):
    """Chooses workers; the places are held for as long as the block."""

    def hold(self, request: AdmitRequest) -> AbstractAsyncContextManager[Place]: ...

    def prefill_done(self, place: Place, times: StageTimes) -> None: ...

    def finished(self, place: Place, times: StageTimes) -> None: ...


class RoundRobin:
    """What is compared with: each pool in turns, everybody admitted."""

    def __init__(self, fleet: Fleet) -> None:
        self._prefills = cycle(range(fleet.num_prefill))
        self._decodes = cycle(range(fleet.num_decode))

    @asynccontextmanager
    async def hold(self, request: AdmitRequest) -> AsyncIterator[Place]:
        yield Place(f"p{next(self._prefills)}", f"d{next(self._decodes)}")

    def prefill_done(self, place: Place, times: StageTimes) -> None:
        """Nothing is learnt."""

    def finished(self, place: Place, times: StageTimes) -> None:
        """Nothing is learnt."""


class RealScheduler:
    """The code that runs in production, without its wire."""

    def __init__(self, scheduler: Scheduler, timeout_s: float) -> None:
        self._scheduler = scheduler
        self._timeout_s = timeout_s

    @asynccontextmanager
    async def hold(self, request: AdmitRequest) -> AsyncIterator[Place]:
        async with self._scheduler.hold(request, self._timeout_s) as held:
            prefill = held.decision.prefill
            assert prefill is not None
            yield Place(prefill.worker.worker_id, held.decision.decode.worker.worker_id, held)

    def prefill_done(self, place: Place, times: StageTimes) -> None:
        assert place.held is not None
        self._scheduler.prefill_done(place.held, times)

    def finished(self, place: Place, times: StageTimes) -> None:
        assert place.held is not None
        self._scheduler.finished(place.held, times)


class TableReplica:
    """A local copy of the index that follows the virtual workers' events."""

    def __init__(self, table: BlockTable) -> None:
        self._table = table

    @property
    def is_ready(self) -> bool:
        return True

    def longest_prefix(self, keys: Sequence[bytes]) -> dict[str, PrefixHit]:
        return self._table.longest_prefix(keys)


class NoIndex:
    async def longest_prefix(self, model: str, keys: list[bytes]) -> dict[str, PrefixHit]:
        return {}


@dataclass(frozen=True, slots=True)
class Run:
    """What is run: a trace, a fleet, and who chooses."""

    trace: list[TraceRequest]
    fleet: Fleet
    is_round_robin: bool = False
    has_index: bool = True
    objectives: Objectives = field(default_factory=Objectives)
    max_num_waiting: int = 1_000_000
    max_num_seqs: int = 64
    patience_s: float = 600.0
    seed: int = 1


def simulate(run: Run) -> list[Outcome]:
    return virtual_time.run(_simulate(run))


async def _simulate(run: Run) -> list[Outcome]:
    table = BlockTable()
    fleet = run.fleet
    prefills = [
        VirtualPrefill(f"p{number}", fleet.prefill_blocks, table, fleet.hardware)
        for number in range(fleet.num_prefill)
    ]
    decodes = [
        VirtualDecode(f"d{number}", fleet.decode_blocks, fleet.hardware)
        for number in range(fleet.num_decode)
    ]
    cluster = Cluster(
        VirtualRegistry([*prefills, *decodes]),
        interval_s=1.0,
        clock=asyncio.get_running_loop().time,
    )
    await cluster.refresh()
    policy: Policy = (
        RoundRobin(fleet) if run.is_round_robin else _real_scheduler(run, cluster, table)
    )
    mesh = _Mesh(
        policy,
        {one.record.worker_id: one for one in prefills},
        {one.record.worker_id: one for one in decodes},
        fleet.hardware,
    )
    refreshing = asyncio.create_task(cluster.run())
    clients = [asyncio.create_task(mesh.serve(request)) for request in run.trace]
    outcomes = await asyncio.gather(*clients)
    refreshing.cancel()
    return outcomes


def _real_scheduler(run: Run, cluster: Cluster, table: BlockTable) -> RealScheduler:
    clock = asyncio.get_running_loop().time
    replicas: dict[str, Replica] = {MODEL: TableReplica(table if run.has_index else BlockTable())}
    predicted = PredictedBlocks(ttl_s=5.0 if run.has_index else 0.0, clock=clock)
    scheduler = Scheduler(
        cluster,
        LocalLookup(replicas, IndexLookup(NoIndex()), predicted),
        PlacementSettings(mode=ModePolicy.DISAGGREGATED, max_num_seqs=run.max_num_seqs),
        QueueSettings(max_num_waiting=run.max_num_waiting),
        run.objectives,
        random_source=random.Random(run.seed),
        clock=clock,
    )
    return RealScheduler(scheduler, run.patience_s)


class _Mesh:
    """What the gateway and the workers do with a request."""

    def __init__(
        self,
        policy: Policy,
        prefills: dict[str, VirtualPrefill],
        decodes: dict[str, VirtualDecode],
        hardware: Hardware,
    ) -> None:
        self._policy = policy
        self._prefills = prefills
        self._decodes = decodes
        self._hardware = hardware
        self._keys = BlockKeys("virtual")

    async def serve(self, line: TraceRequest) -> Outcome:
        await asyncio.sleep(line.timestamp / 1000)
        arrived_at = asyncio.get_running_loop().time()
        token_ids = _token_ids(line)
        facts = RequestFacts(MODEL, line.input_length, line.output_length)
        try:
            async with self._policy.hold(AdmitRequest(facts, token_ids)) as place:
                return await self._run(line, token_ids, place, arrived_at)
        except (QueueFull, DeadlineExceeded):
            return Outcome(arrived_at, None, None, line.input_length, 0)

    async def _run(
        self, line: TraceRequest, token_ids: list[int], place: Place, arrived_at: float
    ) -> Outcome:
        loop = asyncio.get_running_loop()
        keys = self._keys.chain(token_ids[:-1], BLOCK_TOKENS)
        prefill = self._prefills[place.prefill_id]
        num_cached, compute_s = await prefill.run(keys, line.input_length)
        first_token_at = loop.time()
        self._policy.prefill_done(
            place, StageTimes(prefill_compute_s=compute_s, num_cached_tokens=num_cached)
        )
        transfer_s = line.input_length * self._hardware.transfer_s_per_token
        await asyncio.sleep(transfer_s)
        decoding_at = loop.time()
        await self._decodes[place.decode_id].run(line.output_length - 1)
        decode_s = loop.time() - decoding_at
        self._policy.finished(
            place,
            StageTimes(
                kv_transfer_s=transfer_s,
                decode_steps_s=decode_s,
                num_output_tokens=line.output_length,
            ),
        )
        return Outcome(
            arrived_at,
            first_token_at - arrived_at,
            decode_s / max(1, line.output_length - 1),
            line.input_length,
            num_cached,
        )


def _token_ids(line: TraceRequest) -> list[int]:
    """Tokens that are equal exactly where the hash ids are."""
    token_ids: list[int] = []
    for hash_id in line.hash_ids:
        token_ids += [hash_id] * BLOCK_TOKENS
    return token_ids[: line.input_length]
