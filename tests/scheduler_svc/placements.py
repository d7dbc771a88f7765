"""Workers and requests on paper, and where a request is placed among them."""

from dataclasses import replace
from random import Random

from scheduler_svc.placement import Decision, PlacementSettings, place
from scheduler_svc.workers import PrefixHit, RequestFacts, Role, WorkerView

SETTINGS = PlacementSettings()


def make_worker(worker_id: str, role: Role = Role.DECODE, **changes: object) -> WorkerView:
    worker = WorkerView(
        worker_id=worker_id,
        incarnation="1",
        holder_id=f"{worker_id}@1",
        role=role,
        address=f"{worker_id}:1",
        model="smol",
        layout_fingerprint="f1",
        block_size=16,
        num_blocks=100,
        max_model_len=1024,
    )
    return replace(worker, **changes)  # type: ignore[arg-type]


def make_facts(
    num_prompt_tokens: int = 160, max_tokens: int = 16, **changes: object
) -> RequestFacts:
    return replace(
        RequestFacts("smol", num_prompt_tokens, max_tokens),
        **changes,  # type: ignore[arg-type]
    )


def decide(
    workers: list[WorkerView],
    facts: RequestFacts | None = None,
    hits: dict[str, PrefixHit] | None = None,
    settings: PlacementSettings = SETTINGS,
    seed: int = 0,
) -> Decision | None:
    return place(facts or make_facts(), workers, hits or {}, settings, Random(seed))


def must_decide(
    workers: list[WorkerView],
    facts: RequestFacts | None = None,
    hits: dict[str, PrefixHit] | None = None,
    settings: PlacementSettings = SETTINGS,
    seed: int = 0,
) -> Decision:
    decision = decide(workers, facts, hits, settings, seed)
    assert decision is not None
    return decision


PREFILL = make_worker("p0", Role.PREFILL)
DECODE = make_worker("d0")
