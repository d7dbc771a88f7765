"""Settings of the scheduler."""

from typing import ClassVar

from pydantic import Field

from mesh.config import ServiceConfig
from scheduler_svc.admission import QueueSettings
from scheduler_svc.breakers import BreakerSettings
from scheduler_svc.cost import CostWeights
from scheduler_svc.objectives import Objectives
from scheduler_svc.placement import ModePolicy, PlacementSettings


class SchedulerConfig(ServiceConfig):
    """What a scheduler can be told."""

    service: ClassVar[str] = "scheduler"

    mode: ModePolicy = Field(
        ModePolicy.AUTO,
        description="auto decides for each request; disaggregated and local force one mode",
    )
    local_prefill_max_tokens: int = Field(
        32,
        ge=0,
        description="fewer uncached prompt tokens than this are computed by the decode worker",
    )
    local_prefill_max_ratio: float = Field(
        1.0, ge=0, le=1, description="... if they are at most this share of the prompt"
    )
    max_num_seqs: int = Field(32, ge=1, description="requests placed on one worker at a time")
    reserved_output_tokens: int = Field(
        128, ge=0, description="output tokens for which a placement sets blocks aside"
    )
    credit_decay: float = Field(
        0.5,
        ge=0,
        description="how fast a cached prefix loses its pull as its worker falls behind",
    )
    kvcache_balancing_threshold: float = Field(
        4.0,
        ge=0,
        description="a cached prefix has no pull on workers that are this many prompts behind",
    )
    predicted_ttl_s: float = Field(
        5.0, ge=0, description="how long a placed prompt counts as cached before an event tells"
    )
    interference: float = Field(
        0.1, ge=0, description="weight of the decodes that a local prefill holds up"
    )
    explore_ratio: float = Field(
        0.02, ge=0, le=1, description="share of placements in the mode that looks worse"
    )
    local_margin: float = Field(
        0.5, ge=0, lt=1, description="by this share local mode must be cheaper to be chosen"
    )
    ttft_objective_ms: float = Field(
        0, ge=0, description="refuse online requests whose first token would be later; 0: never"
    )
    offline_ttft_objective_ms: float = Field(0, ge=0, description="the same for offline requests")
    tbt_objective_ms: float = Field(
        0, ge=0, description="refuse requests by whose time tokens would be slower; 0: never"
    )
    long_prompt_tokens: int = Field(
        32_768, ge=1, description="prompts from this length on have a quota"
    )
    long_prompt_share: float = Field(
        0.5, gt=0, le=1, description="share of the prefill workers that long prompts may have"
    )
    fair_share_tokens: int = Field(
        2048, ge=1, description="tokens that a tenant may be served before the next one's turn"
    )
    max_num_waiting: int = Field(256, ge=0, description="requests that may wait for a place")
    max_overtaken_s: float = Field(
        30.0, ge=0, description="after this wait a request goes before all younger ones"
    )
    max_queue_wait_s: float = Field(
        120.0, gt=0, description="the longest wait for a place, whatever the caller's deadline"
    )
    placement_lease_s: float = Field(
        15.0,
        ge=1,
        description="how long a placement is kept for a gateway that says nothing of it",
    )
    breaker_max_failures: int = Field(
        3,
        ge=1,
        description="consecutive faults that make a worker get no placements for a while",
    )
    breaker_first_open_s: float = Field(
        1.0, gt=0, description="how long, the first time; twice as long each time after"
    )
    breaker_max_open_s: float = Field(30.0, gt=0, description="... but no longer than this")
    refresh_interval_s: float = Field(
        0.25, gt=0, description="how often workers are read from Redis while any has requests"
    )
    max_outage_s: float = Field(
        86_400.0, ge=0, description="how long workers count as alive while Redis does not answer"
    )
    lookup_timeout_s: float = Field(
        0.05, gt=0, description="how long a placement waits for the prefix lookup"
    )

    @property
    def placement(self) -> PlacementSettings:
        return PlacementSettings(
            mode=self.mode,
            local_prefill_max_tokens=self.local_prefill_max_tokens,
            local_prefill_max_ratio=self.local_prefill_max_ratio,
            max_num_seqs=self.max_num_seqs,
            reserved_output_tokens=self.reserved_output_tokens,
            interference=self.interference,
            explore_ratio=self.explore_ratio,
            local_margin=self.local_margin,
            weights=CostWeights(
                credit_decay=self.credit_decay,
                kvcache_balancing_threshold=self.kvcache_balancing_threshold,
            ),
        )

    @property
    def queue(self) -> QueueSettings:
        return QueueSettings(self.max_num_waiting, self.max_overtaken_s, self.fair_share_tokens)

    @property
    def breakers(self) -> BreakerSettings:
        return BreakerSettings(
            self.breaker_max_failures, self.breaker_first_open_s, self.breaker_max_open_s
        )

    @property
    def objectives(self) -> Objectives:
        return Objectives(
            online_ttft_s=_seconds(self.ttft_objective_ms),
            offline_ttft_s=_seconds(self.offline_ttft_objective_ms),
            tbt_s=_seconds(self.tbt_objective_ms),
            long_prompt_tokens=self.long_prompt_tokens,
            long_prompt_share=self.long_prompt_share,
        )


def _seconds(milliseconds: float) -> float | None:
    return milliseconds / 1000 if milliseconds else None
