"""Admission, lookup, placement and charges, put together: the scheduler without its wire."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

from mesh.errors import Draining, MeshError, ModelNotFound
from mesh.registry import RegisteredWorker
from scheduler_svc.admission import AdmissionQueue, Claim, PriorityClass, QueueSettings
from scheduler_svc.breakers import Breakers, BreakerSettings, Failure
from scheduler_svc.cluster import Cluster
from scheduler_svc.estimates import Estimates
from scheduler_svc.forecast import Ahead, Forecast, forecast
from scheduler_svc.loads import HeldPlacement, LoadLedger
from scheduler_svc.mode import Comparisons, PlacementMode
from scheduler_svc.objectives import Objectives
from scheduler_svc.placement import Decision, PlacementSettings, check_fits, place
from scheduler_svc.prefix_lookup import PrefixLookup, PrefixQuery
from scheduler_svc.workers import ActiveLoad, Hits, RequestFacts, Role, WorkerView


@dataclass(frozen=True, slots=True)
class AdmitRequest:
    """A request that wants a place."""

    facts: RequestFacts
    prompt_token_ids: list[int]
    cache_salt: str = ""
    priority: int = 0
    tenant: str = ""
    priority_class: PriorityClass = PriorityClass.ONLINE
    # None: that of its class.
    ttft_objective_s: float | None = None


@dataclass(frozen=True, slots=True)
class StageTimes:
    """What a caller knows of a request's stages, in seconds; None is not known."""

    prefill_compute_s: float | None = None
    kv_transfer_s: float | None = None
    decode_steps_s: float | None = None
    num_cached_tokens: int | None = None
    num_output_tokens: int = 0


@dataclass(slots=True)
class _Waiting:
    facts: RequestFacts
    query: PrefixQuery
    hits: Hits
    entered_at: float
    ttft_objective_s: float | None

    @property
    def num_cached_tokens(self) -> int:
        """As many as the best worker has."""
        block_size = max((layout.block_size for layout in self.query.layouts), default=0)
        most = max((hit.num_blocks for hit in self.hits.values()), default=0)
        return min(most * block_size, self.facts.num_prompt_tokens - 1)


@dataclass
class ModelCosts:
    """What was learnt of one model."""

    estimates: Estimates = field(default_factory=Estimates)
    comparisons: Comparisons = field(default_factory=Comparisons)


class Scheduler:
    """Owns the queue, the charges of every placement that is held, and what was measured."""

    def __init__(
        self,
        cluster: Cluster,
        lookup: PrefixLookup,
        placement: PlacementSettings,
        queue: QueueSettings,
        objectives: Objectives | None = None,
        *,
        breakers: BreakerSettings | None = None,
        random_source: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster = cluster
        self._lookup = lookup
        self._settings = placement
        self._objectives = objectives or Objectives()
        self._random = random_source or random.Random()
        self._clock = clock
        self._ledger = LoadLedger()
        self._breakers = Breakers(breakers or BreakerSettings(), clock)
        self._probe_timer: asyncio.TimerHandle | None = None
        self._held: set[HeldPlacement] = set()
        self._costs: dict[str, ModelCosts] = {}
        self._queue: AdmissionQueue[_Waiting, HeldPlacement] = AdmissionQueue(
            self._place, self._release, queue, clock, self._may_start
        )
        cluster.on_refresh(self._refreshed)

    @property
    def num_waiting(self) -> int:
        return self._queue.num_waiting

    @property
    def num_placements(self) -> int:
        return self._queue.num_admitted

    @property
    def workers(self) -> list[RegisteredWorker]:
        return self._cluster.workers

    @property
    def costs(self) -> Mapping[str, ModelCosts]:
        """What was learnt, by model."""
        return self._costs

    @property
    def charges(self) -> Mapping[str, ActiveLoad]:
        """What the placements that are held now owe, by the holder id of a worker."""
        return self._ledger.all

    @property
    def breakers(self) -> Breakers:
        """Which workers get no placements for what callers said of them."""
        return self._breakers

    def num_workers(self, role: Role) -> int:
        return sum(view.role is role for view in self._cluster.views)

    def charged(self, worker: RegisteredWorker) -> ActiveLoad:
        """What the placements that are held now owe to a worker."""
        return self._ledger.charged(worker.record.holder)

    @asynccontextmanager
    async def hold(self, request: AdmitRequest, timeout_s: float) -> AsyncIterator[HeldPlacement]:
        """Wait for a place and keep it for the block."""
        facts = request.facts
        self._cluster.hurry()
        query = self._query(request)
        # Not when its turn comes: it would wait for nothing, and take a place in the queue.
        check_fits(self._cluster.views, facts)
        waiting = _Waiting(
            facts=facts,
            query=query,
            hits=await self._lookup.hits(query),
            entered_at=self._clock(),
            ttft_objective_s=self._ttft_objective_s(request),
        )
        claim = Claim(
            # Requests that avoid different workers do not compete for the same room.
            lane=(facts.model, facts.excluded_worker_ids),
            tenant=request.tenant,
            priority_class=request.priority_class,
            priority=request.priority,
            num_tokens=facts.num_prompt_tokens + facts.max_tokens,
        )
        self._check_objectives(waiting, claim)
        async with self._queue.admitted(waiting, claim, timeout_s) as held:
            yield held

    def prefill_done(self, held: HeldPlacement, times: StageTimes | None = None) -> None:
        """Move the charge from the prefill to the decode worker."""
        held.prefill_done(self._clock())
        first = held.decision.prefill or held.decision.decode
        self._breakers.succeeded(first.worker.holder_id, held)
        if times is not None:
            self._learn_prefill(held, times)
        self._queue.wake()

    def finished(self, held: HeldPlacement, times: StageTimes) -> None:
        """Learn from a request that has ended well."""
        self._breakers.succeeded(held.decision.decode.worker.holder_id, held)
        estimates = self._costs_of(held.facts.model).estimates
        if held.decision.mode is PlacementMode.LOCAL:
            self._learn_prefill(held, times)
        elif times.kv_transfer_s:
            num_pulled = held.facts.num_prompt_tokens - held.decision.decode.num_cached_tokens
            estimates.observe_transfer(num_pulled, times.kv_transfer_s)
        if times.decode_steps_s:
            beside = self._ledger.charged(held.decision.decode.worker.holder_id).num_requests
            estimates.observe_decode(times.num_output_tokens - 1, beside, times.decode_steps_s)

    def failed(self, held: HeldPlacement, worker_id: str, failure: Failure) -> None:
        """A worker failed the request: there may be a pause before it gets another one."""
        for part in held.decision.parts:
            if part.worker.worker_id == worker_id:
                self._breakers.failed(part.worker.holder_id, held, failure)

    async def drain(self) -> None:
        """Refuse newcomers and those who wait; return when the last placement has ended."""
        self._queue.close(Draining("the scheduler is draining", retry_after_s=1.0))
        await self._queue.wait_idle()

    def _ttft_objective_s(self, request: AdmitRequest) -> float | None:
        """None for a request that goes on elsewhere: its client has had its first token."""
        if request.facts.excluded_worker_ids:
            return None
        return request.ttft_objective_s or self._objectives.ttft_s(request.priority_class)

    def _query(self, request: AdmitRequest) -> PrefixQuery:
        model = request.facts.model
        layouts = self._cluster.layouts(model)
        # A model that was served before has lost its workers, which may come back.
        if not layouts and self._cluster.views and not self._cluster.has_served(model):
            raise ModelNotFound(f"no worker serves the model {model!r}", param="model")
        return PrefixQuery(model, request.prompt_token_ids, request.cache_salt, layouts)

    def _place(self, waiting: _Waiting) -> HeldPlacement | None:
        waiting.hits = self._lookup.latest(waiting.query, waiting.hits)
        self._objectives.check_waited(waiting.ttft_objective_s, self._clock() - waiting.entered_at)
        costs = self._costs_of(waiting.facts.model)
        decision = self._decide(waiting, costs.estimates)
        if decision is None:
            return None
        if decision.comparison is not None:
            costs.comparisons.add(decision.comparison)
        self._lookup.placed(waiting.query, [part.worker.holder_id for part in decision.parts])
        held = HeldPlacement(
            decision,
            waiting.facts,
            self._ledger,
            is_long=self._is_long(waiting.facts),
            knows_tiers=self._lookup.is_complete(waiting.facts.model),
        )
        self._held.add(held)
        for part in decision.parts:
            self._breakers.placed(part.worker.holder_id, held)
        return held

    def _decide(self, waiting: _Waiting, estimates: Estimates) -> Decision | None:
        """Among those whose breakers are closed. Whoever can be served by the others alone waits
        for them, for as long as its caller does: their breakers are open for a short time."""

        def among(views: list[WorkerView]) -> Decision | None:
            charged = [self._with_charges(view) for view in views]
            return place(
                waiting.facts, charged, waiting.hits, self._settings, self._random, estimates
            )

        views = self._cluster.views
        admitted = [view for view in views if self._breakers.admits(view.holder_id)]
        if len(admitted) == len(views):
            return among(views)
        try:
            return among(admitted)
        except MeshError:
            among(views)  # raises where waiting is in vain
            self._wake_for_a_probe()
            return None

    def _wake_for_a_probe(self) -> None:
        """Nothing else happens when a breaker's time is over."""
        delay_s = self._breakers.next_probe_in_s()
        if delay_s is not None:
            if self._probe_timer is not None:
                self._probe_timer.cancel()
            self._probe_timer = asyncio.get_running_loop().call_later(delay_s, self._queue.wake)

    def _refreshed(self) -> None:
        self._breakers.registered({view.holder_id for view in self._cluster.views})
        self._queue.wake()

    def _release(self, held: HeldPlacement) -> None:
        self._held.discard(held)
        for part in held.decision.parts:
            self._breakers.left(part.worker.holder_id, held)
        held.release()

    def _is_long(self, facts: RequestFacts) -> bool:
        return facts.num_prompt_tokens >= self._objectives.long_prompt_tokens

    def _may_start(self, waiting: _Waiting) -> bool:
        """Very long prompts may not have all workers, however many of them wait."""
        if not self._is_long(waiting.facts):
            return True
        num_long = sum(held.is_long and held.decoding_since is None for held in self._held)
        num_workers = self.num_workers(Role.PREFILL) or self.num_workers(Role.DECODE)
        return num_long < max(1, int(self._objectives.long_prompt_share * num_workers))

    def _check_objectives(self, waiting: _Waiting, claim: Claim) -> None:
        has_objective = waiting.ttft_objective_s is not None or self._objectives.tbt_s is not None
        if not has_objective or waiting.facts.excluded_worker_ids:
            return
        expected = self._forecast(waiting, self._ahead(claim))
        if expected is not None:
            self._objectives.check_forecast(expected, waiting.ttft_objective_s)

    def _forecast(self, waiting: _Waiting, ahead: Ahead) -> Forecast | None:
        return forecast(
            waiting.facts,
            waiting.num_cached_tokens,
            [self._with_charges(view) for view in self._cluster.views],
            ahead,
            [held.decoding_since for held in self._held if held.facts.model == waiting.facts.model],
            self._costs_of(waiting.facts.model).estimates,
            max_num_seqs=self._settings.max_num_seqs,
            now=self._clock(),
        )

    def _ahead(self, claim: Claim) -> Ahead:
        """Those who wait and are served before, as far as the order of classes tells."""
        before = [
            waiting
            for other, waiting in self._queue.waiting()
            if other.priority_class is claim.priority_class
            or other.priority_class is PriorityClass.ONLINE
        ]
        return Ahead(
            len(before),
            sum(one.facts.num_prompt_tokens - one.num_cached_tokens for one in before),
        )

    def _learn_prefill(self, held: HeldPlacement, times: StageTimes) -> None:
        if not times.prefill_compute_s or times.num_cached_tokens is None:
            return
        role = Role.DECODE if held.decision.prefill is None else Role.PREFILL
        self._costs_of(held.facts.model).estimates.prefill[role].observe(
            held.facts.num_prompt_tokens - times.num_cached_tokens,
            times.num_cached_tokens,
            times.prefill_compute_s,
        )

    def _costs_of(self, model: str) -> ModelCosts:
        return self._costs.setdefault(model, ModelCosts())

    def _with_charges(self, view: WorkerView) -> WorkerView:
        charged = self._ledger.charged(view.holder_id)
        others = self._cluster.charged_by_others(view.holder_id)
        if charged is view.charged and others is view.charged:
            # Idle, like most of a large mesh: this runs for every worker at every placement.
            return view
        return replace(view, charged=charged + others)
