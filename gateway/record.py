"""What is remembered of a request while it runs, and told once it is over."""

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

from opentelemetry import trace
from opentelemetry.trace import StatusCode
from starlette.requests import ClientDisconnect

from gateway.dashboard.recent import RecentRequests
from gateway.errors import CLIENT_CLOSED_REQUEST, OK, to_answer
from gateway.finished import FinishedRequest, stage_name
from gateway.genai import Content, request_attributes
from gateway.generation import Delta, Job, JobTrace
from gateway.keys.model import ANYONE
from gateway.openai.api import FINISH_REASONS
from gateway.request_metrics import measure
from gateway.timeline import Stage, Timeline
from mesh import metrics
from mesh.errors import MeshError
from mesh.telemetry import Span, is_tracing
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

    def __init__(
        self,
        request_id: str,
        operation: str,
        *,
        client_request_id: str = "",
        recent: RecentRequests,
        keeps_content: bool = False,
    ) -> None:
        self.timeline = Timeline()
        self.request_id = request_id
        self._client_request_id = client_request_id
        self.operation = operation
        # The name a client sent may be anything: it is noted once it is one of ours.
        self.model = ""
        self.is_stream = False
        # What parameter rules did, as the response header says it.
        self.param_actions = ""
        self.caller = ANYONE
        self._recent = recent
        self._started_at = time.time()
        self._jobs: Sequence[Job] = ()
        # One of each prompt's choices.
        self._prompts: Sequence[Job] = ()
        self._finish_reasons: dict[int, str] = {}
        # By choice.
        self._first_token_ms: dict[int, float] = {}
        self._last_token_ms: dict[int, float] = {}
        # Nobody but a trace may keep what was said.
        self._content = Content() if keeps_content and is_tracing() else None
        self._is_finished = False

    def serve(self, groups: Sequence[Sequence[Job]]) -> None:
        """The jobs that answer the request; their time begins."""
        self._jobs = [job for group in groups for job in group]
        self._prompts = [group[0] for group in groups]
        for job in self._prompts:
            self._recent.prefixes.add(self.caller.key, job.model, job.prompt_token_ids)
        self.timeline.enter(types_pb2.STAGE_QUEUE)
        for job in self._jobs:
            job.trace.timeline = self.timeline.fork(types_pb2.STAGE_QUEUE)

    def begin_error(self) -> None:
        """An error is about to be written."""
        if not self._jobs:
            self.timeline.enter(types_pb2.STAGE_WRITE)

    def note(self, index: int, delta: Delta) -> None:
        """A delta has reached the gateway."""
        if delta.token_ids:
            self._recent.add_tokens(len(delta.token_ids))
            self._note_time(index)
        if self._content is not None:
            self._content.add(index, delta.text)
        if delta.finish is not None:
            self._finish_reasons[index] = FINISH_REASONS[delta.finish.reason]

    def _note_time(self, index: int) -> None:
        now_ms = self.timeline.elapsed_ms
        self._first_token_ms.setdefault(index, now_ms)
        if (last_ms := self._last_token_ms.get(index)) is not None:
            model = {"gen_ai.request.model": self.model}
            metrics.INTER_TOKEN_LATENCY.record((now_ms - last_ms) / 1000, model)
        self._last_token_ms[index] = now_ms

    def counts(self) -> TokenCounts:
        """Usage so far: each prompt counts once, each choice for itself."""
        cached = [
            # A resumption looks up its own output too.
            min(job.trace.num_cached_tokens, len(job.prompt_token_ids))
            for job in self._prompts
            if job.trace.num_cached_tokens is not None
        ]
        return TokenCounts(
            prompt_tokens=sum(len(job.prompt_token_ids) for job in self._prompts),
            completion_tokens=sum(job.num_completion_tokens for job in self._jobs),
            cached_tokens=sum(cached) if cached else None,
        )

    def stages(self) -> dict[Stage, float]:
        """Milliseconds by stage, so far or in all; of the choice that takes longest."""
        stages = self.timeline.so_far()
        if not self._is_finished and (job := self._latest()) is not None:
            for stage, duration_ms in job.trace.timeline.so_far().items():
                stages[stage] = stages.get(stage, 0.0) + duration_ms
        return stages

    def server_timing(self) -> str:
        """The stages so far as a Server-Timing header."""
        return ", ".join(
            f"{stage_name(stage)};dur={duration_ms:.3f}"
            for stage, duration_ms in self.stages().items()
        )

    def finish(self, error: BaseException | None, span: Span) -> None:
        """Log, count and trace the outcome; the first call counts."""
        if self._is_finished:
            return
        if (job := self._latest()) is not None:
            self.timeline.join(job.trace.timeline)
        self.timeline.enter(types_pb2.STAGE_WRITE)
        self._is_finished = True
        finished = self._finished(error, span)
        extra = finished.log_fields()
        # Only failures of ours are explained: a client's mistake may quote its text.
        if finished.status >= _REJECTED_BELOW:
            extra["detail"] = str(error)
        logger.info("request finished", extra=extra)
        measure(finished)
        self._describe(span, finished)
        self._recent.add(finished)

    def _latest(self) -> Job | None:
        """The choice that came furthest in time: the one that the request waits for."""
        return max(self._jobs, key=lambda job: job.trace.timeline.mark_ms, default=None)

    def _finished(self, error: BaseException | None, span: Span) -> FinishedRequest:
        status, reason = _outcome(error)
        counts, context = self.counts(), span.get_span_context()
        served = self._jobs[0].trace if self._jobs else JobTrace()
        return FinishedRequest(
            request_id=self.request_id,
            client_request_id=self._client_request_id,
            trace_id=trace.format_trace_id(context.trace_id) if context.is_valid else "",
            operation=self.operation,
            model=self.model,
            key=self.caller.key,
            key_group=self.caller.group,
            param_actions=self.param_actions,
            is_stream=self.is_stream,
            started_at=self._started_at,
            status=status,
            error=reason,
            prompt_tokens=counts.prompt_tokens,
            completion_tokens=counts.completion_tokens,
            cached_tokens=counts.cached_tokens,
            ttft_ms=self._ttft_ms(),
            tpot_ms=self._tpot_ms(),
            total_ms=self.timeline.mark_ms,
            stages_ms=self.timeline.stages_ms,
            segments=tuple(self.timeline.segments),
            overlap_ms=self.timeline.overlap_ms,
            num_choices=len(self._jobs),
            longest_completion_tokens=self._longest(),
            max_tokens=self._jobs[0].sampling_params.max_tokens if self._jobs else 0,
            mode=served.mode,
            prefill_worker_id=served.prefill_worker_id,
            decode_worker_id=served.decode_worker_id,
            num_attempts=max((job.trace.num_attempts for job in self._jobs), default=0),
            finish_reasons=tuple(self._finish_reasons[one] for one in sorted(self._finish_reasons)),
            mean_batch_size=served.mean_batch_size,
            max_kv_cache_usage=served.max_kv_cache_usage,
            num_preemptions=sum(job.trace.num_preemptions for job in self._jobs),
            kv_transfer_bytes=sum(job.trace.kv_transfer_bytes for job in self._jobs),
        )

    def _ttft_ms(self) -> float | None:
        """Until the first token of any choice."""
        return min(self._first_token_ms.values(), default=None)

    def _tpot_ms(self) -> float | None:
        """Mean time between the tokens of the longest choice, after its first.

        Choices may follow each other: from one's first token to another's last is no gap.
        """
        if not self._first_token_ms:
            return None
        index = max(self._first_token_ms, key=lambda one: self._jobs[one].num_completion_tokens)
        num_gaps = self._jobs[index].num_completion_tokens - 1
        if num_gaps < 1:
            return None
        return (self._last_token_ms[index] - self._first_token_ms[index]) / num_gaps

    def _longest(self) -> int:
        """Tokens of the longest choice."""
        return max((job.num_completion_tokens for job in self._jobs), default=0)

    def _describe(self, span: Span, finished: FinishedRequest) -> None:
        if not span.is_recording():
            return
        span.set_attributes(finished.span_attributes())
        if self._jobs:
            span.set_attributes(request_attributes(self._jobs))
            if self._content is not None:
                span.set_attributes(self._content.attributes(self._jobs, self._finish_reasons))
        if finished.ttft_ms is not None:
            ago_ms = finished.total_ms - finished.ttft_ms
            span.add_event("first_token", timestamp=time.time_ns() - int(ago_ms * 1e6))
        if finished.status >= _REJECTED_BELOW:
            span.set_status(StatusCode.ERROR)


def _outcome(error: BaseException | None) -> tuple[int, str | None]:
    """The status that the log shows, and the reason of a failure."""
    if error is None:
        return OK, None
    if isinstance(error, ClientDisconnect) or not isinstance(error, Exception):
        return CLIENT_CLOSED_REQUEST, "CANCELLED"
    reason = error.reason if isinstance(error, MeshError) else "INTERNAL"
    return to_answer(error).status, reason
