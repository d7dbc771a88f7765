"""Spans of requests on a worker: one for each run, and the engine's steps linked to them."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from opentelemetry.trace import Status, StatusCode

from engine.reports import StepReport
from engine.request import PrefillProgress, Request, TokenOutput
from mesh import metrics
from mesh.telemetry import INVALID_SPAN, Span, is_tracing, start_span

# A step lasts milliseconds: a span for each would be most of a trace store's content.
STEP_SPAN_INTERVAL_S = 1.0

# Of the requests that this process's engine has, by the engine's own ids.
_running: dict[str, Span] = {}


@contextmanager
def run_span(name: str, request: Request) -> Iterator[Span]:
    """A span that ends with the block and that nothing inside sees as the current one.

    A handler yields inside it, and whatever is current across a `yield` leaks.
    """
    span = start_span(name)
    if span.is_recording():
        # The engine's id is the gateway's and a number of ours.
        span.set_attribute("pdmesh.request_id", request.request_id.partition("/")[0])
        span.set_attribute("pdmesh.num_prompt_tokens", request.num_prompt_tokens)
        _running[request.request_id] = span
    try:
        yield span
    except Exception as error:
        span.record_exception(error)
        span.set_status(Status(StatusCode.ERROR, type(error).__name__))
        raise
    except BaseException:
        span.set_attribute("pdmesh.cancelled", True)
        raise
    finally:
        _running.pop(request.request_id, None)
        span.end()


def run_of(request_id: str) -> Span:
    """The run of an engine's request; one that had to start again has an id longer by that."""
    return _running.get("/".join(request_id.split("/", 2)[:2]), INVALID_SPAN)


def add_chunk_event(span: Span, progress: PrefillProgress) -> None:
    """A chunk of the prompt is computed."""
    if span.is_recording():
        span.add_event("chunk", {"pdmesh.num_computed_tokens": progress.num_computed_tokens})


def end_attributes(last: TokenOutput) -> dict[str, float]:
    """What an engine measured, durations in seconds under the names that engines share."""
    timings = last.timings
    assert timings is not None, "the last token carries the timings"
    return {
        "pdmesh.num_cached_tokens": last.num_cached_tokens,
        "pdmesh.num_preemptions": last.num_preemptions,
        "gen_ai.latency.time_in_queue": timings.wait_s + timings.decode_wait_s,
        "gen_ai.latency.time_in_model_prefill": timings.prefill_s,
        "gen_ai.latency.time_in_model_decode": timings.decode_s,
        "gen_ai.latency.time_in_model_inference": timings.prefill_s + timings.decode_s,
        "gen_ai.latency.e2e": timings.total_s,
        "pdmesh.latency.time_in_kv_transfer": timings.remote_kv_s,
    }


class StepObserver:
    """Measures an engine's steps; called on the engine's thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last_span_at = float("-inf")

    def __call__(self, report: StepReport) -> None:
        if report.request_ids:
            metrics.STEP_DURATION.record(report.duration_s)
            metrics.BATCH_SIZE.record(len(report.request_ids))
            metrics.STEP_TOKENS.record(report.num_tokens)
        for lasted_s in report.residency.lifetimes_s:
            metrics.BLOCK_LIFETIME.record(lasted_s)
        for idle_s in report.residency.idle_s:
            metrics.BLOCK_IDLE.record(idle_s)
        for gap_s in report.residency.reuse_gaps_s:
            metrics.BLOCK_REUSE_GAP.record(gap_s)
        if is_tracing():
            self._trace(report)

    def _trace(self, report: StepReport) -> None:
        for request_id in report.preempted_request_ids:
            run_of(request_id).add_event("preempted")
        if self._clock() - self._last_span_at >= STEP_SPAN_INTERVAL_S:
            runs = map(run_of, report.request_ids)
            linked = [run for run in runs if run is not INVALID_SPAN]
            if linked:
                self._last_span_at = self._clock()
                _emit_step(report, linked)


def _emit_step(report: StepReport, linked: list[Span]) -> None:
    ended_at = time.time_ns()
    span = start_span(
        "engine.step",
        {
            "pdmesh.num_requests": len(report.request_ids),
            "pdmesh.num_tokens": report.num_tokens,
            "pdmesh.num_preempted": len(report.preempted_request_ids),
        },
        links=linked,
        start_time_ns=ended_at - int(report.duration_s * 1e9),
    )
    span.end(ended_at)
