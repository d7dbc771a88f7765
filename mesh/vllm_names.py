"""Metrics under vLLM's names, for dashboards and autoscalers that already read those."""

import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

_MODEL_LABEL = "gen_ai_request_model"


@dataclass(frozen=True)
class Renamed:
    """One of our families, or some of its series, under another name."""

    ours: str
    theirs: str
    # Only series with these labels.
    where: Mapping[str, str] = field(default_factory=dict)
    # Labels to keep, by their name there.
    labels: Mapping[str, str] = field(default_factory=dict)


RENAMED = (
    Renamed("pdmesh_engine_running", "vllm:num_requests_running"),
    Renamed("pdmesh_engine_waiting", "vllm:num_requests_waiting"),
    Renamed(
        "pdmesh_engine_waiting",
        "vllm:num_requests_waiting_by_reason",
        labels={"reason": "reason"},
    ),
    Renamed("pdmesh_kv_cache_usage", "vllm:kv_cache_usage_perc"),
    Renamed("pdmesh_prefix_cache_queries", "vllm:prefix_cache_queries"),
    # Ours include what colder tiers had, which there is an external cache.
    Renamed("pdmesh_engine_prompt_tokens", "vllm:prefix_cache_hits", {"source": "local_cache_hit"}),
    Renamed("pdmesh_external_cache_queries", "vllm:external_prefix_cache_queries"),
    Renamed("pdmesh_external_cache_hits", "vllm:external_prefix_cache_hits"),
    Renamed("pdmesh_preemptions", "vllm:num_preemptions"),
    Renamed("pdmesh_speculation_drafts", "vllm:spec_decode_num_drafts"),
    Renamed("pdmesh_speculation_draft_tokens", "vllm:spec_decode_num_draft_tokens"),
    Renamed("pdmesh_speculation_accepted_tokens", "vllm:spec_decode_num_accepted_tokens"),
    Renamed(
        "pdmesh_speculation_accepted_tokens_per_position",
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        labels={"position": "position"},
    ),
    Renamed("pdmesh_engine_invalid_logits", "vllm:corrupted_requests"),
    Renamed("pdmesh_engine_step_tokens", "vllm:iteration_tokens_total"),
    Renamed("pdmesh_tokens", "vllm:prompt_tokens", {"type": "prompt"}),
    Renamed(
        "pdmesh_engine_prompt_tokens",
        "vllm:prompt_tokens_by_source",
        labels={"source": "source"},
    ),
    Renamed("pdmesh_tokens", "vllm:prompt_tokens_cached", {"type": "cached"}),
    Renamed("pdmesh_tokens", "vllm:generation_tokens", {"type": "completion"}),
    Renamed(
        "pdmesh_finished_choices", "vllm:request_success", labels={"reason": "finished_reason"}
    ),
    Renamed("gen_ai_server_time_to_first_token_seconds", "vllm:time_to_first_token_seconds"),
    Renamed(
        "gen_ai_server_time_per_output_token_seconds",
        "vllm:request_time_per_output_token_seconds",
    ),
    Renamed("gen_ai_server_request_duration_seconds", "vllm:e2e_request_latency_seconds"),
    Renamed("pdmesh_stage_duration_seconds", "vllm:request_queue_time_seconds", {"stage": "queue"}),
    Renamed(
        "pdmesh_stage_duration_seconds",
        "vllm:request_prefill_time_seconds",
        {"stage": "prefill_compute"},
    ),
    Renamed(
        "pdmesh_stage_duration_seconds",
        "vllm:request_decode_time_seconds",
        {"stage": "decode_steps"},
    ),
    Renamed("pdmesh_inter_token_latency_seconds", "vllm:inter_token_latency_seconds"),
    Renamed("pdmesh_request_inference_duration_seconds", "vllm:request_inference_time_seconds"),
    Renamed("pdmesh_request_prompt_tokens", "vllm:request_prompt_tokens"),
    Renamed("pdmesh_request_completion_tokens", "vllm:request_generation_tokens"),
    Renamed("pdmesh_request_longest_completion_tokens", "vllm:request_max_num_generation_tokens"),
    Renamed("pdmesh_request_computed_prompt_tokens", "vllm:request_prefill_kv_computed_tokens"),
    Renamed("pdmesh_request_choices", "vllm:request_params_n"),
    Renamed("pdmesh_request_max_tokens", "vllm:request_params_max_tokens"),
    Renamed(
        "pdmesh_kv_cache_config",
        "vllm:cache_config_info",
        labels={"block_size": "block_size", "num_blocks": "num_gpu_blocks"},
    ),
    Renamed("pdmesh_kv_cache_block_lifetime_seconds", "vllm:kv_block_lifetime_seconds"),
    Renamed(
        "pdmesh_kv_cache_block_idle_before_evict_seconds",
        "vllm:kv_block_idle_before_evict_seconds",
    ),
    Renamed("pdmesh_kv_cache_block_reuse_gap_seconds", "vllm:kv_block_reuse_gap_seconds"),
    Renamed("pdmesh_kv_transfer_duration_seconds", "vllm:nixl_xfer_time_seconds"),
    Renamed("pdmesh_kv_transfer_size_bytes", "vllm:nixl_bytes_transferred"),
    Renamed("pdmesh_kv_transfer_runs", "vllm:nixl_num_descriptors"),
    Renamed("pdmesh_kv_transfer_failures", "vllm:nixl_num_failed_transfers"),
    Renamed("pdmesh_kv_cache_unreleased_handles", "vllm:nixl_num_failed_notifications"),
    Renamed("pdmesh_kv_cache_lease_expiries", "vllm:nixl_num_kv_expired_reqs"),
)

# Names that stay away, and why: a series that is always 0 would be a lie about a measurement.
WITHOUT_COUNTERPART = {
    "vllm:lora_requests_info": "there are no adapters",
    "vllm:engine_sleep_state": "engines do not sleep",
    "vllm:mm_cache_queries": "models read text only",
    "vllm:mm_cache_hits": "models read text only",
    "vllm:nixl_post_time_seconds": "a copy is begun and ended by one call, "
    "whose time is `vllm:nixl_xfer_time_seconds`",
}

# Of a label that vLLM does not have, only the sum over its values is of use there.
_KEPT = {"le", _MODEL_LABEL}


class ModelNames(Protocol):
    """Knows the served models."""

    def only(self) -> str | None:
        """The model, where there is one."""
        ...


class VllmNames(Collector):
    """Adds the renamed families to whatever its registry collects."""

    def __init__(self, models: ModelNames) -> None:
        self._models = models
        self._registry: CollectorRegistry | None = None
        # Collecting the registry collects this too; each scrape has a thread of its own.
        self._scrape = threading.local()

    def register(self, registry: CollectorRegistry) -> None:
        """Do so from now on; once more is no mistake."""
        if self._registry is None:
            self._registry = registry
            registry.register(self)

    def unregister(self) -> None:
        if self._registry is not None:
            self._registry.unregister(self)
            self._registry = None

    def describe(self) -> Iterable[Metric]:
        # Without this, registering would collect everything once.
        return ()

    def collect(self) -> Iterator[Metric]:
        if self._registry is None or getattr(self._scrape, "is_inside", False):
            return
        self._scrape.is_inside = True
        try:
            families = {family.name: family for family in self._registry.collect()}
        finally:
            self._scrape.is_inside = False
        for renamed in RENAMED:
            family = families.get(renamed.ours)
            if family is not None:
                yield self._rename(family, renamed)

    def _rename(self, family: Metric, renamed: Renamed) -> Metric:
        copy = Metric(renamed.theirs, family.documentation, family.type)
        sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        for sample in family.samples:
            if any(sample.labels.get(name) != value for name, value in renamed.where.items()):
                continue
            labels = {
                renamed.labels.get(name, name): value
                for name, value in sample.labels.items()
                if name in _KEPT or name in renamed.labels
            }
            model = labels.pop(_MODEL_LABEL, None) or self._models.only() or ""
            labels |= {"model_name": model, "engine": "0"}
            name = sample.name.replace(renamed.ours, renamed.theirs, 1)
            key = (name, tuple(labels.items()))
            sums[key] = sums.get(key, 0.0) + sample.value
        copy.samples = [Sample(name, dict(labels), value) for (name, labels), value in sums.items()]
        return copy
