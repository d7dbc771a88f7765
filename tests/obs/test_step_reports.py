"""What an engine says of its steps, and what becomes of it: metrics, span events, links."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from engine.block_residency import Residency
from engine.reports import StepReport
from engine.request import Request, RequestTimings, TokenOutput
from engine.sampling import SamplingParams
from mesh import metrics, telemetry
from worker.spans import STEP_SPAN_INTERVAL_S, StepObserver, end_attributes, run_span


@pytest.fixture
def exporter() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    telemetry.start_tracing("test", SimpleSpanProcessor(exporter))
    yield exporter
    telemetry.shutdown()


def request(request_id: str) -> Request:
    return Request(request_id, [1, 2, 3], SamplingParams(max_tokens=4))


def report(*request_ids: str, preempted: tuple[str, ...] = ()) -> StepReport:
    return StepReport(0.25, 7, request_ids, preempted)


def test_a_step_is_linked_to_the_requests_in_its_batch_and_not_one_of_many(
    exporter: InMemorySpanExporter,
) -> None:
    now = 100.0
    observe = StepObserver(clock=lambda: now)
    with (
        run_span("decode.run", request("a-0/1")) as first,
        run_span("decode.run", request("b-0/2")) as second,
    ):
        for _ in range(50):
            observe(report("a-0/1", "b-0/2"))
        now += STEP_SPAN_INTERVAL_S
        observe(report("a-0/1", "b-0/2"))

    steps = [span for span in exporter.get_finished_spans() if span.name == "engine.step"]
    assert len(steps) == 2
    linked = {link.context.span_id for link in steps[0].links}
    assert linked == {one.get_span_context().span_id for one in (first, second)}
    assert steps[0].start_time is not None
    assert steps[0].end_time is not None
    assert steps[0].end_time - steps[0].start_time == pytest.approx(0.25e9, rel=0.01)
    assert dict(steps[0].attributes or {})["pdmesh.num_tokens"] == 7


def test_a_preemption_is_an_event_of_the_request_that_lost_its_blocks(
    exporter: InMemorySpanExporter,
) -> None:
    observe = StepObserver()
    with run_span("decode.run", request("a-0/1")), run_span("decode.run", request("b-0/2")):
        observe(report("a-0/1", preempted=("b-0/2",)))

    events = {
        str((span.attributes or {})["pdmesh.request_id"]): [event.name for event in span.events]
        for span in exporter.get_finished_spans()
        if span.name == "decode.run"
    }
    assert events == {"a-0": [], "b-0": ["preempted"]}


def test_a_request_that_had_to_start_again_keeps_its_run(exporter: InMemorySpanExporter) -> None:
    with run_span("decode.run", request("a-0/1")) as run:
        StepObserver()(report("a-0/1/again", preempted=("a-0/1/again",)))

    step, decode_run = exporter.get_finished_spans()
    assert [link.context.span_id for link in step.links] == [run.get_span_context().span_id]
    assert [event.name for event in decode_run.events] == ["preempted"]


def test_without_tracing_steps_are_measured_and_leave_no_span() -> None:
    def count() -> float:
        lines = metrics.render()[0].decode().splitlines()
        name = "pdmesh_engine_step_duration_seconds_count "
        return sum(float(line.split()[1]) for line in lines if line.startswith(name))

    before = count()
    with run_span("decode.run", request("a-0/1")) as span:
        StepObserver()(report("a-0/1"))

    assert not span.is_recording()
    assert count() == before + 1


def test_engine_spans_say_how_long_what_took_under_the_shared_names() -> None:
    last = TokenOutput("r", 5, timings=RequestTimings(1.0, 2.0, 0.5, 0.25, 4.0), num_preemptions=2)

    attributes = end_attributes(last)

    assert attributes["gen_ai.latency.time_in_queue"] == 1.25
    assert attributes["gen_ai.latency.time_in_model_inference"] == 6.0
    assert attributes["gen_ai.latency.e2e"] == 7.75
    assert attributes["pdmesh.num_preemptions"] == 2
    assert not any(name.startswith("gen_ai.usage") for name in attributes)


def test_what_became_of_cached_blocks_is_measured() -> None:
    def sums() -> list[float]:
        names = [
            f"pdmesh_kv_cache_block_{kind}_seconds_sum "
            for kind in ("lifetime", "idle_before_evict", "reuse_gap")
        ]
        lines = metrics.render()[0].decode().splitlines()
        return [
            sum(float(line.split()[1]) for line in lines if line.startswith(name)) for name in names
        ]

    before = sums()
    StepObserver()(replace(report("a-0/1"), residency=Residency((8.0,), (2.0, 1.0), (0.5,))))

    gained = [after - earlier for after, earlier in zip(sums(), before, strict=True)]
    assert gained == pytest.approx([8.0, 3.0, 0.5])
