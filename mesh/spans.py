"""Every span of the mesh, for the documentation and the tests that hold it to this list."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SpanDescription:
    """One kind of span."""

    name: str
    service: str
    # The names that its parent may have; None begins a trace, or continues the client's.
    parent: str | None
    text: str
    attributes: tuple[str, ...] = ()
    events: tuple[str, ...] = ()


_RUN = (
    "pdmesh.request_id",
    "pdmesh.num_prompt_tokens",
    "pdmesh.num_cached_tokens",
    "pdmesh.num_preemptions",
    "pdmesh.cancelled",
    "gen_ai.latency.time_in_queue",
    "gen_ai.latency.time_in_model_prefill",
    "gen_ai.latency.time_in_model_decode",
    "gen_ai.latency.time_in_model_inference",
    "gen_ai.latency.e2e",
    "pdmesh.latency.time_in_kv_transfer",
)

SPANS = (
    SpanDescription(
        "gateway.request",
        "gateway",
        None,
        "One request from its first byte to its last; the only span with token usage.",
        (
            "gen_ai.operation.name",
            "gen_ai.provider.name",
            "gen_ai.request.model",
            "gen_ai.request.stream",
            "gen_ai.request.max_tokens",
            "gen_ai.request.temperature",
            "gen_ai.request.top_p",
            "gen_ai.request.top_k",
            "gen_ai.request.frequency_penalty",
            "gen_ai.request.presence_penalty",
            "gen_ai.request.seed",
            "gen_ai.request.choice.count",
            "gen_ai.request.stop_sequences",
            "gen_ai.input.messages",
            "gen_ai.output.messages",
            "gen_ai.response.model",
            "gen_ai.response.id",
            "gen_ai.response.finish_reasons",
            "gen_ai.usage.input_tokens",
            "gen_ai.usage.output_tokens",
            "gen_ai.usage.cache_read.input_tokens",
            "gen_ai.latency.e2e",
            "gen_ai.latency.time_to_first_token",
            "http.response.status_code",
            "error.type",
            "pdmesh.request_id",
            "pdmesh.num_attempts",
            "pdmesh.key",
            "pdmesh.key_group",
            "pdmesh.param_actions",
            "pdmesh.stage.<stage>_ms",
        ),
        ("first_token",),
    ),
    SpanDescription(
        "gateway.rules", "gateway", "gateway.request", "Parameter rules and validation."
    ),
    SpanDescription(
        "gateway.attempt",
        "gateway",
        "gateway.request",
        "One placement and what ran on it; a failover shows as two.",
        (
            "pdmesh.attempt",
            "pdmesh.prefill_worker_id",
            "pdmesh.decode_worker_id",
            "pdmesh.num_output_tokens",
            "error.type",
        ),
    ),
    SpanDescription(
        "tokenizer.encode",
        "tokenizer",
        "gateway.request",
        "Chat template and encoding.",
        ("pdmesh.model", "pdmesh.num_prompt_tokens"),
    ),
    SpanDescription(
        "tokenizer.detokenize",
        "gateway or tokenizer",
        "gateway.request",
        "One sequence's text, from its first token to its last.",
        ("pdmesh.matched_stop", "pdmesh.num_tokens", "pdmesh.busy_ms"),
    ),
    SpanDescription(
        "scheduler.place",
        "scheduler",
        "gateway.attempt",
        "Waiting for a placement and choosing it.",
        ("pdmesh.num_prompt_tokens", "pdmesh.num_excluded_workers", "pdmesh.placement.<fact>"),
    ),
    SpanDescription(
        "prefill.run",
        "prefill",
        "gateway.attempt",
        "A prompt on a prefill worker, from arrival to first token.",
        _RUN,
        ("chunk", "first_token", "preempted"),
    ),
    SpanDescription(
        "decode.run",
        "decode",
        "gateway.attempt",
        "A sequence on a decode worker, from arrival to last token.",
        (
            *_RUN,
            "pdmesh.kv_transfer.bytes",
            "pdmesh.mean_batch_size",
            "pdmesh.max_kv_cache_usage",
        ),
        ("chunk", "first_token", "preempted"),
    ),
    SpanDescription(
        "kv.pull",
        "kv_transfer",
        "decode.run",
        "One copy of blocks between engines.",
        (
            "pdmesh.kv.num_blocks",
            "pdmesh.kv.bytes",
            "pdmesh.kv.num_runs",
            "pdmesh.kv.gb_per_s",
            "pdmesh.kv.transport",
        ),
    ),
    SpanDescription(
        "kv.send",
        "kv_transfer",
        "kv.pull",
        "One stream of a copy to another machine, where it is sent.",
        ("pdmesh.kv.num_blocks", "pdmesh.kv.bytes"),
    ),
    SpanDescription(
        "kv.load",
        "kv_transfer",
        "prefill.run, decode.run",
        "Blocks that come back from a colder tier.",
        ("pdmesh.kv.num_blocks", "pdmesh.kv.num_loaded_blocks", "pdmesh.kv.num_disk_blocks"),
    ),
    SpanDescription(
        "engine.step",
        "prefill, decode",
        None,
        "One step, at most one a second, linked to the runs of the requests in its batch.",
        ("pdmesh.num_requests", "pdmesh.num_tokens", "pdmesh.num_preempted"),
    ),
)
