"""What an engine tells about itself."""

from dataclasses import dataclass

from engine.block_residency import NOTHING_MOVED, Residency
from engine.speculation import NO_DRAFTS, DraftCounts


@dataclass(frozen=True)
class EngineStats:
    """What the engine is doing; the fields are those of the proto's EngineLoad, and more."""

    num_blocks: int
    num_free_blocks: int
    num_leases: int
    num_running: int
    num_waiting: int
    num_waiting_tokens: int
    num_prefix_cache_queries: int
    num_prefix_cache_hits: int
    num_preemptions: int
    num_recomputed_tokens: int
    num_steps: int
    num_invalid_logits: int
    # Of those that wait: for KV from elsewhere; the others wait for room.
    num_waiting_for_kv: int = 0
    # Tokens whose KV was asked for elsewhere, other workers and colder tiers, and that came.
    num_external_queries: int = 0
    num_external_hits: int = 0
    # Where the prompt tokens of requests that have begun to answer were from.
    num_computed_prompt_tokens: int = 0
    num_cached_prompt_tokens: int = 0
    num_external_prompt_tokens: int = 0
    drafts: DraftCounts = NO_DRAFTS

    @property
    def num_waiting_for_room(self) -> int:
        return self.num_waiting - self.num_waiting_for_kv


@dataclass(frozen=True)
class StepReport:
    """What one step was, for whoever measures."""

    duration_s: float
    num_tokens: int
    request_ids: tuple[str, ...]
    preempted_request_ids: tuple[str, ...]
    residency: Residency = NOTHING_MOVED
