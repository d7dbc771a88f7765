"""What being watched costs: the receiver that measures nothing of its own, and the table."""

import asyncio

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from benchmarks.telemetry import PLAIN, Sample, Sink, markdown, no_span_ns
from mesh import telemetry


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


def test_a_variant_is_compared_with_the_plain_round_beside_it() -> None:
    samples = [
        Sample(PLAIN, 100.0, 2.0),
        Sample("traced", 99.0, 2.02),
        Sample("traced", 194.0, 4.0),
        Sample(PLAIN, 200.0, 4.0),
    ]

    table = markdown(samples, num_spans=7)

    assert "| plain | 150.0 (100.0 to 200.0) | 3.000 (2.000 to 4.000) |  |  |" in table
    assert "| 0.980 (0.970 to 0.990) | 1.005 (1.000 to 1.010) |" in table
    assert "7 spans" in table


def test_a_span_costs_next_to_nothing_where_nobody_traces() -> None:
    assert not telemetry.is_tracing()
    # Some ten of them a request; a loaded machine may take ten times as long as a calm one.
    assert no_span_ns() < 50_000
