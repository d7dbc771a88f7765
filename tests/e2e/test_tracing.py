"""One request, one trace: from the gateway's root span to the copy of the KV."""

import json
import time
from pathlib import Path
from typing import Any

import openai
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from mesh.spans import SPANS as DESCRIBED
from tests.e2e.harness import MODEL, Collector, RunningMesh

SPANS = {
    ("gateway", "gateway.request"),
    ("gateway", "gateway.rules"),
    ("tokenizer", "tokenizer.encode"),
    ("scheduler", "scheduler.place"),
    ("prefill", "prefill.run"),
    ("kv_transfer", "kv.pull"),
    ("decode", "decode.run"),
    ("gateway", "tokenizer.detokenize"),
}
PARENTS = {span.name: (span.parent or "").split(", ") for span in DESCRIBED}
TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
PROMPT = "Every stage of a request has a name and a duration. " * 8


def collect_trace(collector: Collector, trace_id: str) -> list[Span]:
    """The spans of one trace, once every service has sent its own."""
    spans: list[Span] = []
    missing = set(SPANS)
    while missing:
        service, span = collector.spans.get(timeout=20)
        if span.trace_id.hex() == trace_id:
            spans.append(span)
            missing.discard((service, span.name))
    return spans


def test_one_request_leaves_one_trace_over_all_services_each_child_inside_its_parent(
    client: openai.OpenAI, collector: tuple[Collector, str]
) -> None:
    client.completions.create(
        model=MODEL,
        prompt=PROMPT,
        max_tokens=8,
        extra_headers={"traceparent": f"00-{TRACE_ID}-b7ad6b7169203331-01"},
    )

    spans = collect_trace(collector[0], TRACE_ID)

    by_id = {span.span_id: span for span in spans}
    roots = [span for span in spans if span.parent_span_id not in by_id]
    assert [root.name for root in roots] == ["gateway.request"]
    for span in spans:
        parent = by_id.get(span.parent_span_id)
        if parent is not None:
            assert parent.start_time_unix_nano <= span.start_time_unix_nano, span.name
            assert span.end_time_unix_nano <= parent.end_time_unix_nano, span.name
            assert parent.name in PARENTS[span.name]


def test_the_log_line_of_a_request_names_every_stage(
    mesh: RunningMesh, client: openai.OpenAI
) -> None:
    answer = client.completions.with_raw_response.create(
        model=MODEL, prompt="Another one. " + PROMPT, max_tokens=8
    )

    request_id = answer.headers["x-request-id"]
    line = find_log_line(mesh.home / "logs" / "gateway-0.log", request_id)
    assert {"queue", "tokenize", "prefill_compute", "kv_transfer", "decode_steps"} <= set(
        line["stages_ms"]
    )
    assert line["completion_tokens"] == 8
    assert line["trace_id"]
    assert PROMPT[:20] not in json.dumps(line)


def find_log_line(path: Path, request_id: str) -> dict[str, Any]:
    """The line of a finished request, which is written behind its answer."""
    give_up_at = time.monotonic() + 10
    while time.monotonic() < give_up_at:
        lines = [json.loads(line) for line in path.read_text().splitlines() if request_id in line]
        if finished := [line for line in lines if "stages_ms" in line]:
            assert len(finished) == 1
            return dict(finished[0])
        time.sleep(0.02)
    raise AssertionError("the request is in no log line")
