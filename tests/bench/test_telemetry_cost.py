"""What being watched costs: the receiver that measures nothing of its own, and the turns."""

import asyncio

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from benchmarks.pairs import Sample
from benchmarks.spans import Sink, no_span_ns
from benchmarks.telemetry import Shift, Turn
from mesh import telemetry
from mesh.bench.client import Recording


async def test_the_sink_takes_what_a_real_exporter_sends_and_counts_it_later() -> None:
    sink = Sink()
    async with sink.listening() as endpoint:
        exporter = OTLPSpanExporter(endpoint=endpoint, insecure=True)
        telemetry.start_tracing("test", SimpleSpanProcessor(exporter))
        try:

            def work() -> None:
                for _ in range(3):
                    with telemetry.span("one"), telemetry.span("two"):
                        pass

            await asyncio.to_thread(work)
        finally:
            await asyncio.to_thread(telemetry.shutdown)

    assert sink.num_spans() == 6


async def test_a_turn_waits_until_the_requests_of_the_turn_before_are_over() -> None:
    shift = Shift()
    is_over = asyncio.Event()
    seen: list[str] = []

    async def ask() -> None:
        async with shift.request() as variant:
            seen.append(variant)
            await is_over.wait()

    old = asyncio.create_task(ask())
    await asyncio.sleep(0)
    changing = asyncio.create_task(shift.change("traced"))
    await asyncio.sleep(0)
    new = asyncio.create_task(ask())
    await asyncio.sleep(0)
    assert not changing.done()

    is_over.set()
    await asyncio.wait_for(changing, 20)
    await asyncio.gather(old, new)
    assert seen == ["plain", "traced"]


def test_a_turn_counts_the_tokens_that_came_in_it() -> None:
    answer = Recording("r", 0.0, token_times=[9.0, 11.0, 13.0, 15.0, 31.0], ended_at=31.0)
    # Two tokens an event.
    answer.num_completion_tokens = 10
    used = {"decode_svc": 0.4, "gateway": 0.2}
    turn = Turn("b", "traced", begun_at=10.0, ended_at=20.0, cpu_s=used)

    assert turn.sample([answer]) == Sample("b", "traced", 0.6, 100.0, 33.33333)


def test_a_span_costs_next_to_nothing_where_nobody_traces() -> None:
    assert not telemetry.is_tracing()
    # Some ten of them a request; a loaded machine may take ten times as long as a calm one.
    assert no_span_ns() < 50_000
