"""Spans of the workers: one trace, children inside their parents, ended before the last message."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from mesh import telemetry
from mesh.v1 import decode_pb2_grpc, prefill_pb2_grpc
from tests.tiny_llama import make_tiny_model
from tests.worker_mesh import WorkerMesh, worker_mesh
from tests.worker_wire import decode_request, prefill_request, sampling, wait_until

PARAMS = sampling(60, temperature=0.0, ignore_eos=True)
PROMPT = list(range(3, 15))


@pytest.fixture
def exporter() -> Iterator[InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    telemetry.start_tracing("test", SimpleSpanProcessor(exporter))
    yield exporter
    telemetry.shutdown()


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny_model(folder)
    return folder


@pytest.fixture
async def mesh(
    exporter: InMemorySpanExporter, tiny_folder: Path, tmp_path: Path
) -> AsyncIterator[WorkerMesh]:
    async with worker_mesh(tiny_folder, tmp_path) as mesh:
        yield mesh


def named(exporter: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [span for span in exporter.get_finished_spans() if span.name == name]


def interval(span: ReadableSpan) -> tuple[int, int]:
    assert span.start_time is not None
    assert span.end_time is not None
    return span.start_time, span.end_time


async def test_one_request_is_one_trace_with_the_transfer_inside_the_decode(
    mesh: WorkerMesh, exporter: InMemorySpanExporter
) -> None:
    producer, consumer = await mesh.start_prefill(), await mesh.start_decode()
    prefills = prefill_pb2_grpc.PrefillServiceStub(producer.channel)
    decodes = decode_pb2_grpc.DecodeServiceStub(consumer.channel)
    with telemetry.span("gateway.request") as root:
        async for event in prefills.Prefill(prefill_request("r", PROMPT, params=PARAMS)):
            if event.HasField("finished"):
                first = event.finished
                # Ended before the last message left.
                assert len(named(exporter, "prefill.run")) == 1
        request = decode_request("r", PROMPT, [first.first_token.token_ids[0]], PARAMS)
        request.kv_handle.CopyFrom(first.kv_handle)
        async for answer in decodes.Decode(request):
            if answer.HasField("finished"):
                assert len(named(exporter, "decode.run")) == 1

    (prefill_run,) = named(exporter, "prefill.run")
    (decode_run,) = named(exporter, "decode.run")
    (pull,) = named(exporter, "kv.pull")
    root_context = root.get_span_context()
    for span in (prefill_run, decode_run):
        assert span.parent is not None
        assert span.parent.span_id == root_context.span_id
    assert pull.parent is not None
    assert decode_run.context is not None
    assert pull.parent.span_id == decode_run.context.span_id
    for span in (prefill_run, decode_run, pull):
        assert span.context is not None
        assert span.context.trace_id == root_context.trace_id
    (begin, end), (pull_begin, pull_end) = interval(decode_run), interval(pull)
    assert begin <= pull_begin < pull_end <= end
    assert dict(decode_run.attributes or {})["pdmesh.kv_transfer.bytes"] == 3 * consumer.block_bytes


async def test_chunk_ends_and_the_first_token_are_events_of_whichever_run_computes_the_prompt(
    mesh: WorkerMesh, exporter: InMemorySpanExporter
) -> None:
    prompt = [3 + number % 60 for number in range(50)]
    producer, consumer = await mesh.start_prefill(), await mesh.start_decode()
    prefills = prefill_pb2_grpc.PrefillServiceStub(producer.channel)
    decodes = decode_pb2_grpc.DecodeServiceStub(consumer.channel)
    async for _ in prefills.Prefill(prefill_request("r", prompt, params=PARAMS)):
        pass
    async for _ in decodes.Decode(decode_request("s", prompt, params=PARAMS)):
        pass

    for name in ("prefill.run", "decode.run"):
        (run,) = named(exporter, name)
        *chunks, last = run.events
        assert last.name == "first_token"
        assert {event.name for event in chunks} == {"chunk"}
        attributes = [dict(event.attributes or {}) for event in chunks]
        computed = [int(str(one["pdmesh.num_computed_tokens"])) for one in attributes]
        assert computed == sorted(computed)
        assert computed[-1] < len(prompt)


async def test_callers_that_leave_end_their_span_once_and_detach_nothing(
    mesh: WorkerMesh, exporter: InMemorySpanExporter, caplog: pytest.LogCaptureFixture
) -> None:
    # OB-01
    consumer = await mesh.start_decode()
    stub = decode_pb2_grpc.DecodeServiceStub(consumer.channel)
    for number in range(30):
        call: Any = stub.Decode(decode_request(f"r{number}", PROMPT, params=PARAMS))
        if number % 3 == 0:
            await call.read()
            call.cancel()
        elif number % 3 == 1:
            await asyncio.sleep(0)
            call.cancel()
        else:
            assert [event async for event in call][-1].HasField("finished")
    await wait_until(lambda: not consumer.worker.streams)

    assert not trace.get_current_span().get_span_context().is_valid
    assert "detach" not in caplog.text
    assert "ended span" not in caplog.text
    ids = [span.context.span_id for span in named(exporter, "decode.run") if span.context]
    assert len(ids) == len(set(ids)) >= 20
