"""What is known of a request once it is over: as data, as log fields, as span attributes."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gateway.errors import CLIENT_CLOSED_REQUEST
from gateway.timeline import Segment, Stage
from mesh.v1 import types_pb2


@dataclass(frozen=True)
class FinishedRequest:
    """Numbers and names only: nothing of what was asked or answered."""

    request_id: str
    client_request_id: str
    trace_id: str
    operation: str
    # Empty unless it is one of ours.
    model: str
    # The caller's API key by its name, and its group; empty without keys.
    key: str
    key_group: str
    # What parameter rules did: kinds and paths, no values.
    param_actions: str
    is_stream: bool
    # Seconds since the epoch.
    started_at: float
    status: int
    # Why it failed, in the words of the taxonomy.
    error: str | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None
    ttft_ms: float | None
    tpot_ms: float | None
    total_ms: float
    # Of the choice that took longest; disjoint, and together all of the time.
    stages_ms: Mapping[Stage, float]
    segments: tuple[Segment, ...]
    overlap_ms: float
    num_choices: int
    longest_completion_tokens: int
    # What each choice might have had.
    max_tokens: int
    mode: str | None
    prefill_worker_id: str
    decode_worker_id: str
    num_attempts: int
    finish_reasons: tuple[str, ...]
    mean_batch_size: float
    max_kv_cache_usage: float
    num_preemptions: int
    kv_transfer_bytes: int

    @property
    def has_failed(self) -> bool:
        """Whether it ended otherwise than the client wanted; one that left wanted that."""
        return self.error is not None and self.status != CLIENT_CLOSED_REQUEST

    # Asked again with every look at the dashboard.
    @cached_property
    def named_stages_ms(self) -> dict[str, float]:
        """Milliseconds by the stage's name."""
        return {stage_name(stage): round(ms, 3) for stage, ms in self.stages_ms.items()}

    def log_fields(self) -> dict[str, object]:
        """The fields of the request's one log line; the trace id is added to every line."""
        line: dict[str, object] = {
            "request_id": self.request_id,
            "client_request_id": self.client_request_id,
            "operation": self.operation,
            "model": self.model,
            "stream": self.is_stream,
            "status": self.status,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "cached_tokens": self.cached_tokens,
            "ttft_ms": rounded(self.ttft_ms),
            "tpot_ms": rounded(self.tpot_ms),
            "total_ms": rounded(self.total_ms),
            "stages_ms": self.named_stages_ms,
            "overlap_ms": rounded(self.overlap_ms),
            "choices": self.num_choices,
        }
        if self.num_choices:
            line |= {
                "mode": self.mode,
                "prefill_worker_id": self.prefill_worker_id,
                "decode_worker_id": self.decode_worker_id,
                "attempts": self.num_attempts,
                "finish_reason": self.finish_reasons[0] if self.finish_reasons else None,
                "batch_size": round(self.mean_batch_size, 2),
                "kv_cache_usage": round(self.max_kv_cache_usage, 4),
                "kv_transfer_bytes": self.kv_transfer_bytes,
                "preemptions": self.num_preemptions,
            }
        if self.key:
            line |= {"key": self.key, "key_group": self.key_group}
        if self.param_actions:
            line["param_actions"] = self.param_actions
        if self.error is not None:
            line["error"] = self.error
        return line

    def span_attributes(self) -> dict[str, str | int | float | bool | list[str]]:
        """Of the root span: the only one that has token usage, so that nobody adds it up twice."""
        attributes: dict[str, str | int | float | bool | list[str]] = {
            "gen_ai.operation.name": self.operation,
            "gen_ai.provider.name": "pdmesh",
            "gen_ai.request.model": self.model,
            "gen_ai.request.stream": self.is_stream,
            "gen_ai.response.model": self.model,
            "gen_ai.response.id": self.request_id,
            "gen_ai.usage.input_tokens": self.prompt_tokens,
            "gen_ai.usage.output_tokens": self.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": self.cached_tokens or 0,
            "gen_ai.response.finish_reasons": list(self.finish_reasons),
            "gen_ai.latency.e2e": self.total_ms / 1000,
            "http.response.status_code": self.status,
            "pdmesh.request_id": self.request_id,
            "pdmesh.num_attempts": self.num_attempts,
        }
        for name, duration_ms in self.named_stages_ms.items():
            attributes[f"pdmesh.stage.{name}_ms"] = duration_ms
        if self.ttft_ms is not None:
            attributes["gen_ai.latency.time_to_first_token"] = self.ttft_ms / 1000
        if self.key:
            attributes["pdmesh.key"] = self.key
            attributes["pdmesh.key_group"] = self.key_group
        if self.param_actions:
            attributes["pdmesh.param_actions"] = self.param_actions
        if self.error is not None:
            attributes["error.type"] = self.error
        return attributes

    def summary(self) -> dict[str, Any]:
        """As JSON, for the page and the commands that show requests."""
        started_at = round(self.started_at, 3)
        return {"started_at": started_at, "trace_id": self.trace_id, **self.log_fields()}

    def details(self) -> dict[str, Any]:
        """The summary, and the stages in the order in which the request went through them."""
        segments = [
            {
                "name": stage_name(one.stage),
                "start_ms": rounded(one.start_ms),
                "ms": rounded(one.duration_ms),
            }
            for one in self.segments
        ]
        stages = [{"name": name, "ms": ms} for name, ms in self.named_stages_ms.items()]
        return {**self.summary(), "stages": stages, "segments": segments}


def stage_name(stage: Stage) -> str:
    """ "queue" for STAGE_QUEUE."""
    return types_pb2.Stage.Name(stage).removeprefix("STAGE_").lower()


def rounded(duration_ms: float | None) -> float | None:
    return None if duration_ms is None else round(duration_ms, 3)
