"""Admission, lookup, placement and charges, put together: the scheduler without its wire."""

import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from mesh.errors import ModelNotFound, WorkerUnavailable
from mesh.registry import RegisteredWorker
from scheduler_svc.admission import AdmissionQueue, QueueSettings
from scheduler_svc.cluster import Cluster
from scheduler_svc.loads import HeldPlacement, LoadLedger
from scheduler_svc.placement import PlacementSettings, place
from scheduler_svc.prefix_lookup import BlockLayout, PrefixLookup, PrefixQuery
from scheduler_svc.workers import ActiveLoad, Hits, RequestFacts, Role, WorkerView


@dataclass(frozen=True, slots=True)
class AdmitRequest:
    """A request that wants a place."""

    facts: RequestFacts
    prompt_token_ids: list[int]
    cache_salt: str = ""
    priority: int = 0


@dataclass(frozen=True, slots=True)
class _Waiting:
    facts: RequestFacts
    hits: Hits


class Scheduler:
    """Owns the queue and the charges of every placement that is held."""

    def __init__(
        self,
        cluster: Cluster,
        lookup: PrefixLookup,
        placement: PlacementSettings,
        queue: QueueSettings,
        *,
        random_source: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster = cluster
        self._lookup = lookup
        self._settings = placement
        self._random = random_source or random.Random()
        self._ledger = LoadLedger()
        self._queue: AdmissionQueue[_Waiting, HeldPlacement] = AdmissionQueue(
            self._place, HeldPlacement.release, queue, clock
        )
        cluster.on_refresh(self._queue.wake)

    @property
    def num_waiting(self) -> int:
        return self._queue.num_waiting

    @property
    def num_placements(self) -> int:
        return self._queue.num_admitted

    @property
    def workers(self) -> list[RegisteredWorker]:
        return self._cluster.workers

    def num_workers(self, role: Role) -> int:
        return sum(view.role is role for view in self._cluster.views)

    def charged(self, worker: RegisteredWorker) -> ActiveLoad:
        """What the placements that are held now owe to a worker."""
        return self._ledger.charged(worker.record.holder)

    @asynccontextmanager
    async def hold(self, request: AdmitRequest, timeout_s: float) -> AsyncIterator[HeldPlacement]:
        """Wait for a place and keep it for the block."""
        facts = request.facts
        hits = await self._lookup.hits(self._query(request))
        async with self._queue.admitted(
            _Waiting(facts, hits),
            # Requests that avoid different workers do not compete for the same room.
            lane=(facts.model, facts.excluded_worker_ids),
            priority=request.priority,
            timeout_s=timeout_s,
        ) as held:
            yield held

    def prefill_done(self, held: HeldPlacement) -> None:
        """Move the charge from the prefill to the decode worker."""
        held.prefill_done()
        self._queue.wake()

    async def drain(self) -> None:
        """Refuse newcomers and those who wait; return when the last placement has ended."""
        self._queue.close(WorkerUnavailable("the scheduler is draining", retry_after_s=1.0))
        await self._queue.wait_idle()

    def _query(self, request: AdmitRequest) -> PrefixQuery:
        model = request.facts.model
        views = self._cluster.views
        layouts = frozenset(
            BlockLayout(view.layout_fingerprint, view.block_size)
            for view in views
            if view.model == model
        )
        # A model that was served before has lost its workers, which may come back.
        if not layouts and views and not self._cluster.has_served(model):
            raise ModelNotFound(f"no worker serves the model {model!r}", param="model")
        return PrefixQuery(model, request.prompt_token_ids, request.cache_salt, layouts)

    def _place(self, waiting: _Waiting) -> HeldPlacement | None:
        views = [self._with_charges(view) for view in self._cluster.views]
        decision = place(waiting.facts, views, waiting.hits, self._settings, self._random)
        return None if decision is None else HeldPlacement(decision, self._ledger)

    def _with_charges(self, view: WorkerView) -> WorkerView:
        charged = self._ledger.charged(view.holder_id)
        return view if charged == view.charged else replace(view, charged=charged)
