"""Settings of the scheduler."""

from typing import ClassVar

from pydantic import Field

from mesh.config import ServiceConfig
from scheduler_svc.admission import QueueSettings
from scheduler_svc.cost import CostWeights
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
    max_num_waiting: int = Field(256, ge=0, description="requests that may wait for a place")
    max_overtaken_s: float = Field(
        30.0, ge=0, description="after this wait a request goes before all younger ones"
    )
    max_queue_wait_s: float = Field(
        120.0, gt=0, description="the longest wait for a place, whatever the caller's deadline"
    )
    refresh_interval_s: float = Field(
        0.25, gt=0, description="how often the workers are read from Redis"
    )
    max_outage_s: float = Field(
        60.0, ge=0, description="how long workers count as alive while Redis does not answer"
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
            weights=CostWeights(credit_decay=self.credit_decay),
        )

    @property
    def queue(self) -> QueueSettings:
        return QueueSettings(self.max_num_waiting, self.max_overtaken_s)
