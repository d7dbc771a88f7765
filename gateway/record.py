"""What is remembered of a request: one log line, its metrics, its usage."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from opentelemetry.trace import StatusCode
from starlette.requests import ClientDisconnect

from gateway.errors import CLIENT_CLOSED_REQUEST, OK, to_answer
from gateway.generation import Delta, Job
from gateway.openai.api import FINISH_REASONS
from mesh import metrics
from mesh.errors import MeshError
from mesh.telemetry import Span
from mesh.v1 import types_pb2

logger = logging.getLogger(__name__)

_REJECTED_BELOW = 500


@dataclass(frozen=True)
class TokenCounts:
    """Tokens of a request, over all its choices."""

    prompt_tokens: int
    completion_tokens: int
    # None while nobody knows.
    cached_tokens: int | None


class RequestRecord:
    """One request from its first byte to its last; finished exactly once."""

    def __init__(self, request_id: str, operation: str, *, client_request_id: str = "") -> None:
        self.request_id = request_id
        self._client_request_id = client_request_id
        self.operation = operation
        # The name a client sent may be anything: it is noted once it is one of ours.
        self.model = ""
        self.is_stream = False
        self._groups: Sequence[Sequence[Job]] = ()
        self._stages_ms: dict[types_pb2.Stage.ValueType, float] = {}
        self._finish_reasons: dict[int, str] = {}
        self._started_at = time.perf_counter()
        self._first_token_at: float | None = None
        self._last_token_at: float | None = None
        self._is_finished = False

    def serve(self, groups: Sequence[Sequence[Job]]) -> None:
        """The jobs that answer the request."""
        self._groups = groups

    def add(self, stage: "types_pb2.Stage.ValueType", duration_ms: float) -> None:
        self._stages_ms[stage] = self._stages_ms.get(stage, 0.0) + duration_ms

    def note(self, index: int, delta: Delta) -> None:
        """A delta has reached the gateway."""
        if delta.token_ids:
            self._last_token_at = time.perf_counter()
            if self._first_token_at is None:
                self._first_token_at = self._last_token_at
        if delta.finish is not None:
            self._finish_reasons[index] = FINISH_REASONS[delta.finish.reason]

    def counts(self) -> TokenCounts:
        """Usage so far: each prompt counts once, each choice for itself."""
        cached = [
            # A resumption looks up its own output too.
            min(group[0].trace.num_cached_tokens, len(group[0].prompt_token_ids))
            for group in self._groups
            if group[0].trace.num_cached_tokens is not None
        ]
        return TokenCounts(
            prompt_tokens=sum(len(group[0].prompt_token_ids) for group in self._groups),
            completion_tokens=sum(job.num_completion_tokens for job in self._jobs()),
            cached_tokens=sum(cached) if cached else None,
        )

    def stages(self) -> "dict[types_pb2.Stage.ValueType, float]":
        """Milliseconds by stage; of the first choice, where there are several."""
        stages = dict(self._stages_ms)
        for job in self._jobs()[:1]:
            for stage, duration_ms in job.trace.stages_ms.items():
                stages[stage] = stages.get(stage, 0.0) + duration_ms
        return stages

    def finish(self, error: BaseException | None, span: Span) -> None:
        """Log, count and trace the outcome; the first call counts."""
        if self._is_finished:
            return
        self._is_finished = True
        total_s = time.perf_counter() - self._started_at
        status, reason = _outcome(error)
        self._log(total_s, status, reason, error)
        self._measure(total_s, status, reason)
        self._describe(span, status, reason)

    def _jobs(self) -> list[Job]:
        return [job for group in self._groups for job in group]

    def _log(
        self, total_s: float, status: int, reason: str | None, error: BaseException | None
    ) -> None:
        counts, jobs = self.counts(), self._jobs()
        line: dict[str, object] = {
            "request_id": self.request_id,
            "client_request_id": self._client_request_id,
            "operation": self.operation,
            "model": self.model,
            "stream": self.is_stream,
            "status": status,
            "prompt_tokens": counts.prompt_tokens,
            "completion_tokens": counts.completion_tokens,
            "cached_tokens": counts.cached_tokens,
            "ttft_ms": _ms(self._ttft_s()),
            "tpot_ms": _ms(self._tpot_s()),
            "total_ms": _ms(total_s),
            "stages_ms": {
                _stage_name(stage): round(duration_ms, 3)
                for stage, duration_ms in self.stages().items()
            },
            "choices": len(jobs),
        }
        if jobs:
            trace = jobs[0].trace
            line |= {
                "mode": trace.mode,
                "prefill_worker_id": trace.prefill_worker_id,
                "decode_worker_id": trace.decode_worker_id,
                "attempts": max(job.trace.num_attempts for job in jobs),
                "finish_reason": self._finish_reasons.get(0),
            }
        if reason is not None:
            line["error"] = reason
        # Only failures of ours are explained: a client's mistake may quote its text.
        if status >= _REJECTED_BELOW:
            line["detail"] = str(error)
        logger.info("request finished", extra=line)

    def _measure(self, total_s: float, status: int, reason: str | None) -> None:
        labels = {"gen_ai.request.model": self.model, "gen_ai.operation.name": self.operation}
        error_label = {"error.type": reason} if reason is not None else {}
        metrics.REQUEST_DURATION.record(total_s, labels | error_label)
        metrics.REQUESTS.add(
            1,
            {"outcome": _outcome_label(status), "gen_ai.request.model": self.model} | error_label,
        )
        for stage, duration_ms in self.stages().items():
            metrics.STAGE_DURATION.record(duration_ms / 1000, {"stage": _stage_name(stage)})
        if (ttft_s := self._ttft_s()) is not None:
            metrics.TIME_TO_FIRST_TOKEN.record(ttft_s, labels)
        if (tpot_s := self._tpot_s()) is not None:
            metrics.TIME_PER_OUTPUT_TOKEN.record(tpot_s, labels)
        counts = self.counts()
        for kind, amount in (
            ("prompt", counts.prompt_tokens),
            ("completion", counts.completion_tokens),
            ("cached", counts.cached_tokens or 0),
        ):
            metrics.TOKENS.add(amount, {"type": kind, "gen_ai.request.model": self.model})

    def _describe(self, span: Span, status: int, reason: str | None) -> None:
        if not span.is_recording():
            return
        counts = self.counts()
        span.set_attributes(
            {
                "gen_ai.operation.name": self.operation,
                "gen_ai.request.model": self.model,
                "gen_ai.request.stream": self.is_stream,
                "gen_ai.usage.input_tokens": counts.prompt_tokens,
                "gen_ai.usage.output_tokens": counts.completion_tokens,
                "gen_ai.usage.cache_read.input_tokens": counts.cached_tokens or 0,
                "gen_ai.response.finish_reasons": list(self._finish_reasons.values()),
                "http.response.status_code": status,
                "pdmesh.request_id": self.request_id,
            }
        )
        if (ttft_s := self._ttft_s()) is not None:
            span.set_attribute("gen_ai.latency.time_to_first_token", ttft_s)
        if reason is not None:
            span.set_attribute("error.type", reason)
        if status >= _REJECTED_BELOW:
            span.set_status(StatusCode.ERROR)

    def _ttft_s(self) -> float | None:
        return None if self._first_token_at is None else self._first_token_at - self._started_at

    def _tpot_s(self) -> float | None:
        """Mean time between the tokens of one choice, after its first."""
        num_gaps = max((job.num_completion_tokens for job in self._jobs()), default=0) - 1
        if self._first_token_at is None or self._last_token_at is None or num_gaps < 1:
            return None
        return (self._last_token_at - self._first_token_at) / num_gaps


def _outcome(error: BaseException | None) -> tuple[int, str | None]:
    """The status that the log shows, and the reason of a failure."""
    if error is None:
        return OK, None
    if isinstance(error, ClientDisconnect) or not isinstance(error, Exception):
        return CLIENT_CLOSED_REQUEST, "CANCELLED"
    reason = error.reason if isinstance(error, MeshError) else "INTERNAL"
    return to_answer(error).status, reason


def _outcome_label(status: int) -> str:
    if status == OK:
        return "ok"
    if status == CLIENT_CLOSED_REQUEST:
        return "aborted"
    return "rejected" if status < _REJECTED_BELOW else "error"


def _stage_name(stage: "types_pb2.Stage.ValueType") -> str:
    return types_pb2.Stage.Name(stage).removeprefix("STAGE_").lower()


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
