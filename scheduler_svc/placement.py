"""Which workers serve a request, and in which mode: pure functions over facts and worker views."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random

from mesh.errors import ContextLengthExceeded, InvalidRequest, WorkerUnavailable
from scheduler_svc.cost import CostWeights, cheapest_first, decode_cost, prefill_cost
from scheduler_svc.estimates import Estimates
from scheduler_svc.mode import Comparison, PlacementMode, Reason, compare
from scheduler_svc.workers import (
    ActiveLoad,
    Candidate,
    Hits,
    RequestFacts,
    Role,
    WorkerView,
    candidate,
)


class ModePolicy(StrEnum):
    """`AUTO` decides for each request; the others force one mode on all."""

    AUTO = "auto"
    DISAGGREGATED = "disaggregated"
    LOCAL = "local"


@dataclass(frozen=True, slots=True)
class PlacementSettings:
    """Limits and preferences."""

    mode: ModePolicy = ModePolicy.AUTO
    # A prompt is computed by the decode worker itself when fewer tokens than this are missing
    # in its cache (the field's `eff_isl_threshold`) ...
    local_prefill_max_tokens: int = 32
    # ... and they are at most this share of the prompt (`eff_isl_ratio_threshold`).
    local_prefill_max_ratio: float = 1.0
    # Requests that one worker is charged with at a time.
    max_num_seqs: int = 32
    # Output tokens for which blocks are set aside; beyond them the engine preempts.
    reserved_output_tokens: int = 128
    # What a second counts by which a local prefill holds up one request that decodes there.
    interference: float = 0.1
    # Share of the placements that take the mode that looks worse, so that it is measured too.
    explore_ratio: float = 0.02
    # By this share local mode must be cheaper to be chosen: what it saves is measured, what
    # its prefill costs the decodes beside it only in part.
    local_margin: float = 0.5
    weights: CostWeights = field(default_factory=CostWeights)


@dataclass(frozen=True, slots=True)
class Assignment:
    """A worker's part in a placement and what it is charged for it."""

    worker: WorkerView
    num_cached_tokens: int
    charge: ActiveLoad
    num_tiered_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Decision:
    """Where a request runs. `prefill` is None in local mode."""

    mode: PlacementMode
    reason: Reason
    decode: Assignment
    prefill: Assignment | None = None
    # None where there was nothing to choose, or too little was measured.
    comparison: Comparison | None = None

    @property
    def parts(self) -> tuple[Assignment, ...]:
        """Of each worker that takes part."""
        return (self.decode,) if self.prefill is None else (self.prefill, self.decode)


def place(
    facts: RequestFacts,
    workers: Sequence[WorkerView],
    hits: Hits,
    settings: PlacementSettings,
    random: Random,
    estimates: Estimates | None = None,
) -> Decision | None:
    """Choose workers, or return None when those that could serve have no room now.

    The decode worker comes first, since how much of the prompt it holds decides whether a
    prefill worker is wanted: by what each way would take, as far as `estimates` can tell, and
    by the length of what is missing until then. Raises when waiting cannot help: nobody is
    alive, or nobody could ever hold the request.
    """
    serving = [worker for worker in workers if worker.model == facts.model]
    decoders = [candidate(worker, facts, hits) for worker in _decoders(serving, facts)]
    prefillers = [candidate(worker, facts, hits) for worker in _prefillers(serving, facts)]
    if settings.mode is ModePolicy.DISAGGREGATED:
        decoders = [decoder for decoder in decoders if _paired(decoder, prefillers)]
        if not decoders:
            raise no_worker(Role.PREFILL, facts.model)

    def cost(decoder: Candidate) -> float:
        return decode_cost(decoder, facts, settings.weights)

    pools = _PrefillPools(prefillers, facts, settings, random)
    for decoder in cheapest_first(decoders, cost, random):
        ranked = pools.ranked(decoder)
        comparison = None
        if estimates is not None and ranked and settings.mode is ModePolicy.AUTO:
            comparison = compare(facts, decoder, ranked[0], estimates, settings.interference)
        mode, reason = _choose_mode(decoder, facts, bool(ranked), comparison, settings, random)
        decode = _assign_decode(decoder, facts, mode, settings)
        if not _has_room(decode, settings):
            continue
        if mode is PlacementMode.LOCAL:
            return Decision(mode, reason, decode, comparison=comparison)
        prefill = pools.first_with_room(decoder)
        if prefill is not None:
            return Decision(mode, reason, decode, prefill, comparison)
    return None


class _PrefillPools:
    """The prefill workers for each decode worker, ranked once for all with one layout."""

    def __init__(
        self,
        prefillers: Sequence[Candidate],
        facts: RequestFacts,
        settings: PlacementSettings,
        random: Random,
    ) -> None:
        self._prefillers = prefillers
        self._facts = facts
        self._settings = settings
        self._random = random
        self._ranked: dict[str, list[Candidate]] = {}
        self._with_room: dict[str, Assignment | None] = {}

    def ranked(self, decoder: Candidate) -> list[Candidate]:
        """Those whose blocks the decode worker can import, cheapest first."""
        layout = decoder.worker.layout_fingerprint
        if layout not in self._ranked:
            paired = _paired(decoder, self._prefillers)
            self._ranked[layout] = _by_prefill_cost(
                paired, self._facts, self._settings, self._random
            )
        return self._ranked[layout]

    def first_with_room(self, decoder: Candidate) -> Assignment | None:
        layout = decoder.worker.layout_fingerprint
        if layout not in self._with_room:
            ranked = self.ranked(decoder)
            self._with_room[layout] = _first_with_room(ranked, self._facts, self._settings)
        return self._with_room[layout]


def _decoders(serving: Sequence[WorkerView], facts: RequestFacts) -> list[WorkerView]:
    """Those that hold prompt and output; if there are none, those where the output ends early,
    as the engine ends it when the whole cache is one sequence."""
    # Before exclusions: whether a request fits does not depend on who failed it.
    check_fits(serving, facts)
    allowed = [
        worker
        for worker in serving
        if worker.role is Role.DECODE and worker.worker_id not in facts.excluded_worker_ids
    ]
    whole = [w for w in allowed if _fits(w, facts.num_prompt_tokens + facts.max_tokens)]
    able = whole or [w for w in allowed if _fits(w, facts.num_prompt_tokens + 1)]
    if not able:
        raise no_worker(Role.DECODE, facts.model)
    return able


def _prefillers(serving: Sequence[WorkerView], facts: RequestFacts) -> list[WorkerView]:
    return [
        worker
        for worker in serving
        if worker.role is Role.PREFILL
        and worker.worker_id not in facts.excluded_worker_ids
        and _fits(worker, facts.num_prompt_tokens + 1)
    ]


def _fits(worker: WorkerView, num_tokens: int) -> bool:
    return (
        num_tokens <= worker.max_model_len
        and worker.num_blocks_for(num_tokens) <= worker.num_blocks
    )


def check_fits(workers: Sequence[WorkerView], facts: RequestFacts) -> None:
    """Raise if no worker could hold the request even when it is idle."""
    decoders = [one for one in workers if one.role is Role.DECODE and one.model == facts.model]
    if not decoders:
        return
    prompt, num_tokens = facts.num_prompt_tokens, facts.num_prompt_tokens + facts.max_tokens
    window = max(worker.max_model_len for worker in decoders)
    if num_tokens > window:
        raise ContextLengthExceeded(
            f"{prompt} prompt tokens and {facts.max_tokens} new ones exceed the window of "
            f"{window} tokens"
        )
    if not any(_fits(worker, prompt + 1) for worker in decoders):
        room = max(min(w.num_blocks * w.block_size, w.max_model_len) for w in decoders)
        raise InvalidRequest(
            f"{prompt} prompt tokens and room for a new one exceed the largest KV cache, which "
            f"holds {room} tokens"
        )


def no_worker(role: Role, model: str) -> WorkerUnavailable:
    """Nobody of a needed role is alive."""
    return WorkerUnavailable(
        f"no {role} worker for model {model!r} is available", retry_after_s=1.0
    )


def _paired(decoder: Candidate, prefillers: Sequence[Candidate]) -> list[Candidate]:
    """The prefill workers whose blocks the decode worker can import."""
    fingerprint = decoder.worker.layout_fingerprint
    return [p for p in prefillers if p.worker.layout_fingerprint == fingerprint]


def _choose_mode(
    decoder: Candidate,
    facts: RequestFacts,
    has_prefill: bool,
    comparison: Comparison | None,
    settings: PlacementSettings,
    random: Random,
) -> tuple[PlacementMode, Reason]:
    if settings.mode is ModePolicy.LOCAL:
        return PlacementMode.LOCAL, Reason.FORCED
    if settings.mode is ModePolicy.DISAGGREGATED:
        return PlacementMode.DISAGGREGATED, Reason.FORCED
    if not has_prefill:
        return PlacementMode.LOCAL, Reason.NO_PREFILL_WORKER
    if comparison is not None:
        return _better_mode(comparison, settings, random)
    num_missing_tokens = facts.num_prompt_tokens - decoder.num_cached_tokens
    if (
        num_missing_tokens < settings.local_prefill_max_tokens
        and num_missing_tokens <= settings.local_prefill_max_ratio * facts.num_prompt_tokens
    ):
        return PlacementMode.LOCAL, Reason.ISL_BOUNDING
    return PlacementMode.DISAGGREGATED, Reason.PREFILL_REMOTE


def _better_mode(
    comparison: Comparison, settings: PlacementSettings, random: Random
) -> tuple[PlacementMode, Reason]:
    """A prefill worker on the decode worker's own cores spares its decodes nothing: their
    threads then wait for the prefill's at every step, in place of sharing a pass with it."""
    is_local_cheaper = comparison.local_s <= (1 - settings.local_margin) * comparison.remote_s
    if comparison.shares_cores:
        # Nothing to explore: no measurement could change it.
        reason = Reason.LOCAL_CHEAPER if is_local_cheaper else Reason.SHARED_CORES
        return PlacementMode.LOCAL, reason
    if random.random() < settings.explore_ratio:
        other = PlacementMode.DISAGGREGATED if is_local_cheaper else PlacementMode.LOCAL
        return other, Reason.EXPLORE
    if is_local_cheaper:
        return PlacementMode.LOCAL, Reason.LOCAL_CHEAPER
    return PlacementMode.DISAGGREGATED, Reason.REMOTE_CHEAPER


def _assign_decode(
    decoder: Candidate, facts: RequestFacts, mode: PlacementMode, settings: PlacementSettings
) -> Assignment:
    """Its blocks are charged from the start: a prompt computed for a decode worker that has no
    room would strand its blocks on the prefill worker."""
    is_local = mode is PlacementMode.LOCAL
    num_reserved_tokens = min(facts.max_tokens, settings.reserved_output_tokens)
    charge = _charge(decoder, facts, num_reserved_tokens, computes_prompt=is_local)
    return _assignment(decoder, charge)


def _by_prefill_cost(
    candidates: Sequence[Candidate],
    facts: RequestFacts,
    settings: PlacementSettings,
    random: Random,
) -> list[Candidate]:
    least_tokens = min((one.worker.prefill_tokens for one in candidates), default=0)

    def cost(candidate: Candidate) -> float:
        return prefill_cost(candidate, facts, least_tokens, settings.weights)

    return cheapest_first(candidates, cost, random)


def _first_with_room(
    candidates: Sequence[Candidate], facts: RequestFacts, settings: PlacementSettings
) -> Assignment | None:
    for chosen in candidates:
        charge = _charge(chosen, facts, num_reserved_tokens=0, computes_prompt=True)
        assignment = _assignment(chosen, charge)
        if _has_room(assignment, settings):
            return assignment
    return None


def _assignment(chosen: Candidate, charge: ActiveLoad) -> Assignment:
    return Assignment(chosen.worker, chosen.num_cached_tokens, charge, chosen.num_tiered_tokens)


def _charge(
    candidate: Candidate, facts: RequestFacts, num_reserved_tokens: int, *, computes_prompt: bool
) -> ActiveLoad:
    num_missing_tokens = facts.num_prompt_tokens - candidate.num_cached_tokens
    num_blocks = candidate.worker.num_blocks_for(facts.num_prompt_tokens + num_reserved_tokens)
    return ActiveLoad(
        num_requests=1,
        prefill_tokens=num_missing_tokens if computes_prompt else 0,
        # Blocks in the worker's cache are shared, not taken.
        blocks=num_blocks - candidate.hit.device_blocks,
    )


def _has_room(assignment: Assignment, settings: PlacementSettings) -> bool:
    """By charges alone: reports are up to a second old, so a client's next request would wait
    for a heartbeat that says that its last one has ended."""
    worker, charge = assignment.worker, assignment.charge
    if worker.charged.num_requests == 0:
        return True
    return (
        worker.charged.num_requests < settings.max_num_seqs
        and worker.charged.blocks + charge.blocks <= worker.num_blocks
    )
