"""Every metric of the mesh, declared once, and their text form for /metrics."""

from collections.abc import Callable

from prometheus_client import start_http_server
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from mesh import errors
from mesh.instruments import (
    DESCRIPTIONS,
    REGISTRY,
    Counter,
    Description,
    Gauge,
    Histogram,
    Values,
    WatchedCounter,
)
from mesh.vllm_names import VllmNames


def describe() -> list[Description]:
    """Every instrument, in the order of declaration."""
    return list(DESCRIPTIONS)


def render() -> tuple[bytes, str]:
    """The body and the content type of /metrics."""
    return generate_latest(REGISTRY), CONTENT_TYPE_LATEST


def listen(address: str | None, *, vllm_names: bool = False) -> Callable[[], None]:
    """Answer GET /metrics at "host:port" from a thread of its own; call the result to stop.

    The thread answers although the event loop is stuck, which is when somebody asks.
    Without an address nothing listens; with `vllm_names`, /metrics has vLLM's names too.
    """
    if vllm_names:
        _names.register(REGISTRY)
    if address is None:
        return lambda: None
    host, _, port = address.rpartition(":")
    server, thread = start_http_server(int(port), host.strip("[]"), registry=REGISTRY)

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop


def forget_vllm_names() -> None:
    """Undo `vllm_names`."""
    _names.unregister()


# Served models; the gateway and the workers allow theirs at start.
MODELS = Values()
OPERATIONS = Values("chat", "text_completion")
OUTCOMES = Values("ok", "error", "rejected", "aborted")
STAGES = Values(
    "network",
    "rules",
    "tokenize",
    "queue",
    "prefill_wait",
    "prefill_compute",
    "kv_transfer",
    "decode_wait",
    "decode_steps",
    "detokenize",
    "write",
)
REASONS = Values(*errors.REASONS)

_MODEL = {"gen_ai.request.model": MODELS}
_MODEL_LABELS = {
    **_MODEL,
    "gen_ai.operation.name": OPERATIONS,
    "gen_ai.provider.name": Values("pdmesh"),
}
_SECONDS = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60]
_PER_TOKEN = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5]
_POWERS_OF_TWO = [2**n for n in range(18)]

# The gateway.
REQUEST_DURATION = Histogram(
    "gen_ai.server.request.duration",
    "s",
    "From the first byte of the request to the last of the answer",
    [0.01 * 2**n for n in range(14)],
    {**_MODEL_LABELS, "error.type": REASONS},
    service="gateway",
)
TIME_TO_FIRST_TOKEN = Histogram(
    "gen_ai.server.time_to_first_token",
    "s",
    "From the first byte of the request to the first token",
    [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10],
    _MODEL_LABELS,
    service="gateway",
)
TIME_PER_OUTPUT_TOKEN = Histogram(
    "gen_ai.server.time_per_output_token",
    "s",
    "Mean time between tokens after the first, per request",
    _PER_TOKEN,
    _MODEL_LABELS,
    service="gateway",
)
INTER_TOKEN_LATENCY = Histogram(
    "pdmesh.inter_token_latency",
    "s",
    "Time between two events that bring a choice's tokens",
    [0.001, 0.0025, 0.005, *_PER_TOKEN],
    _MODEL,
    service="gateway",
)
STAGE_DURATION = Histogram(
    "pdmesh.stage.duration",
    "s",
    "Time that a request spent in one stage, on its critical path",
    _SECONDS,
    {"stage": STAGES},
    service="gateway",
)
REQUESTS = Counter(
    "pdmesh.requests",
    "{request}",
    "Finished requests by outcome",
    {"outcome": OUTCOMES, "error.type": REASONS, **_MODEL},
    service="gateway",
)
REFUSALS = Counter(
    "pdmesh.gateway.refusals",
    "{request}",
    "Requests refused at the edge: by key, by limit, because too many are running, or for being "
    "too slow",
    {
        "reason": Values(
            "no_key",
            "wrong_key",
            "not_admin",
            "requests",
            "tokens",
            "concurrency",
            "too_many_requests",
            "too_many_connections",
            "slow_head",
            "slow_body",
        )
    },
    service="gateway",
)
FINISHED_CHOICES = Counter(
    "pdmesh.finished_choices",
    "{choice}",
    "Choices that ended normally, by finish reason",
    {"reason": Values("stop", "length"), **_MODEL},
    service="gateway",
)
TOKENS = Counter(
    "pdmesh.tokens",
    "{token}",
    "Tokens of finished requests",
    {"type": Values("prompt", "completion", "cached"), **_MODEL},
    service="gateway",
)
PROMPT_LENGTH = Histogram(
    "pdmesh.request.prompt_tokens",
    "{token}",
    "Prompt tokens of a request",
    _POWERS_OF_TWO,
    _MODEL,
    service="gateway",
)
COMPLETION_LENGTH = Histogram(
    "pdmesh.request.completion_tokens",
    "{token}",
    "Completion tokens of a request",
    _POWERS_OF_TWO,
    _MODEL,
    service="gateway",
)
COMPUTED_PROMPT_LENGTH = Histogram(
    "pdmesh.request.computed_prompt_tokens",
    "{token}",
    "Prompt tokens of a request that no prefix cache had",
    _POWERS_OF_TWO,
    _MODEL,
    service="gateway",
)
LONGEST_COMPLETION = Histogram(
    "pdmesh.request.longest_completion_tokens",
    "{token}",
    "Completion tokens of a request's longest choice",
    _POWERS_OF_TWO,
    _MODEL,
    service="gateway",
)
MAX_TOKENS = Histogram(
    "pdmesh.request.max_tokens",
    "{token}",
    "Completion tokens that a choice may have",
    _POWERS_OF_TWO,
    _MODEL,
    service="gateway",
)
NUM_CHOICES = Histogram(
    "pdmesh.request.choices",
    "{choice}",
    "Choices of a request",
    [1, 2, 4, 8, 16, 32, 64, 128],
    _MODEL,
    service="gateway",
)
INFERENCE_DURATION = Histogram(
    "pdmesh.request.inference.duration",
    "s",
    "From the first step of the prompt to the last token",
    _SECONDS,
    _MODEL,
    service="gateway",
)
RESUMPTIONS = Counter(
    "pdmesh.resumptions",
    "{request}",
    "Streams that went on elsewhere after a failure",
    {"error.type": REASONS},
    service="gateway",
)
NUM_STREAMS = Gauge(
    "pdmesh.gateway.streams", "{request}", "Requests being answered", service="gateway"
)

# The scheduler.
DISAGG_DECISIONS = Counter(
    "pdmesh.disagg.decision",
    "{request}",
    "Placements by mode and reason",
    {
        "decision": Values("disaggregated", "local"),
        "reason": Values(
            "isl_bounding",
            "prefill_remote",
            "no_prefill_worker",
            "forced",
            "local_cheaper",
            "remote_cheaper",
            "explore",
        ),
    },
    service="scheduler",
)
REJECTIONS = Counter(
    "pdmesh.scheduler.rejections",
    "{request}",
    "Requests refused by admission",
    {"reason": Values("queue_full", "ttft_objective", "tbt_objective")},
    service="scheduler",
)
NUM_INDEXED_BLOCKS = Gauge(
    "pdmesh.scheduler.indexed_blocks",
    "{block}",
    "Blocks in the local copy of the block index",
    service="scheduler",
)
NUM_QUEUED = Gauge(
    "pdmesh.scheduler.queued",
    "{request}",
    "Requests waiting for a placement",
    service="scheduler",
)
NUM_PLACEMENTS = Gauge(
    "pdmesh.scheduler.placements", "{placement}", "Placements held", service="scheduler"
)
PLACEMENT_LEASE_EXPIRIES = Counter(
    "pdmesh.scheduler.placement_lease_expiries",
    "{placement}",
    "Placements taken back from a gateway that said nothing more of them",
    service="scheduler",
)
NUM_WORKERS = Gauge(
    "pdmesh.scheduler.workers",
    "{worker}",
    "Workers known to be alive",
    {"role": Values("prefill", "decode")},
    service="scheduler",
)
BREAKERS = Gauge(
    "pdmesh.scheduler.breakers",
    "{worker}",
    "Workers that get no placements after failures, or one to find out",
    {"state": Values("open", "half_open")},
    service="scheduler",
)
BREAKER_OPENINGS = Counter(
    "pdmesh.scheduler.breaker_openings",
    "{opening}",
    "Times that a worker was given no more placements for a while",
    {"failure": Values("lost", "faulty")},
    service="scheduler",
)

# Prefill and decode workers.
NUM_RUNNING = Gauge(
    "pdmesh.engine.running", "{request}", "Requests in the running batch", service="worker"
)
NUM_WAITING = Gauge(
    "pdmesh.engine.waiting",
    "{request}",
    "Requests waiting for room or remote KV",
    service="worker",
)
NUM_WAITING_TOKENS = Gauge(
    "pdmesh.engine.waiting_tokens",
    "{token}",
    "Prompt tokens not computed yet",
    service="worker",
)
STEP_AGE = Gauge(
    "pdmesh.engine.step_age",
    "s",
    "How long the running step has lasted; 0 without work",
    service="worker",
)
STEPS = WatchedCounter(
    "pdmesh.engine.steps", "{step}", "Steps run: forward progress", service="worker"
)
STEP_DURATION = Histogram(
    "pdmesh.engine.step.duration",
    "s",
    "Time of one step, forward pass and sampling",
    _SECONDS,
    service="worker",
)
BATCH_SIZE = Histogram(
    "pdmesh.engine.step.requests",
    "{request}",
    "Requests in one step",
    _POWERS_OF_TWO[:11],
    service="worker",
)
STEP_TOKENS = Histogram(
    "pdmesh.engine.step.tokens",
    "{token}",
    "Tokens computed in one step",
    _POWERS_OF_TWO,
    service="worker",
)
ENGINE_TIME_PER_OUTPUT_TOKEN = Histogram(
    "pdmesh.engine.time_per_output_token",
    "s",
    "Mean time between tokens where they are made: a client that gets them faster than this "
    "gets them from a buffer",
    _PER_TOKEN,
    _MODEL,
    service="worker",
)
INVALID_LOGITS = WatchedCounter(
    "pdmesh.engine.invalid_logits",
    "{request}",
    "Requests that failed because the model gave no usable distribution",
    service="worker",
)
PREEMPTIONS = WatchedCounter(
    "pdmesh.preemptions", "{request}", "Requests that gave their blocks away", service="worker"
)
RECOMPUTED_TOKENS = WatchedCounter(
    "pdmesh.recomputed_tokens",
    "{token}",
    "Tokens computed again after a preemption",
    service="worker",
)
PREFIX_CACHE_QUERIES = WatchedCounter(
    "pdmesh.prefix_cache.queries",
    "{token}",
    "Prompt tokens looked up in the prefix cache",
    service="worker",
)
PREFIX_CACHE_HITS = WatchedCounter(
    "pdmesh.prefix_cache.hits",
    "{token}",
    "Prompt tokens found in the prefix cache",
    service="worker",
)
NUM_BLOCKS = Gauge("pdmesh.kv_cache.blocks", "{block}", "Blocks in the KV cache", service="worker")
CACHE_BLOCK_SIZES, CACHE_SIZES = Values(), Values()
KV_CACHE_CONFIG = Gauge(
    "pdmesh.kv_cache.config",
    "1",
    "Always 1; the labels say how the KV cache is laid out",
    {"block_size": CACHE_BLOCK_SIZES, "num_blocks": CACHE_SIZES},
    service="worker",
)
NUM_FREE_BLOCKS = Gauge(
    "pdmesh.kv_cache.free_blocks",
    "{block}",
    "Blocks that could be handed out, cached ones included",
    service="worker",
)
KV_CACHE_USAGE = Gauge(
    "pdmesh.kv_cache.usage",
    "1",
    "Share of the blocks that requests and leases hold",
    service="worker",
)
NUM_LEASES = Gauge(
    "pdmesh.kv_cache.leases", "{lease}", "Handles held for another worker", service="worker"
)
LEASE_EXPIRIES = Counter(
    "pdmesh.kv_cache.lease_expiries",
    "{lease}",
    "Leases that ended before anybody took the blocks",
    service="worker",
)
ABORTED = Counter(
    "pdmesh.aborted",
    "{request}",
    "Requests whose caller went away, by what they were doing",
    {"state": Values("queued", "prefill", "transfer", "decode", "waiting", "running")},
    service="worker",
)
KV_TRANSFER_FAILURES = Counter(
    "pdmesh.kv_transfer.failures",
    "{transfer}",
    "Transfers after which the prompt was recomputed",
    {
        "reason": Values(
            "holder_unreachable",
            "incomplete",
            "layout_mismatch",
            "lease_expired",
            "pull_failed",
        )
    },
    service="worker",
)

# The transfer agent.
_TRANSPORT = {"transport": Values("shared_memory", "tcp", "mooncake")}
KV_TRANSFER_BYTES = Counter(
    "pdmesh.kv_transfer.size",
    "By",
    "KV bytes moved between engines",
    _TRANSPORT,
    service="kv_transfer",
)
KV_TRANSFER_DURATION = Histogram(
    "pdmesh.kv_transfer.duration",
    "s",
    "Time of one copy of blocks",
    _SECONDS,
    _TRANSPORT,
    service="kv_transfer",
)
_TIERS = {"tier": Values("host", "disk")}
KV_TIER_BLOCKS = Gauge(
    "pdmesh.kv_tier.blocks", "{block}", "Blocks in a colder tier", _TIERS, service="kv_transfer"
)
KV_TIER_STORED = Counter(
    "pdmesh.kv_tier.stored",
    "{block}",
    "Blocks copied into a colder tier",
    _TIERS,
    service="kv_transfer",
)
KV_TIER_HITS = Counter(
    "pdmesh.kv_tier.hits",
    "{block}",
    "Blocks that came back from a colder tier",
    _TIERS,
    service="kv_transfer",
)
KV_TIER_SKIPPED = Counter(
    "pdmesh.kv_tier.skipped",
    "{block}",
    "Blocks that a colder tier could not take",
    _TIERS,
    service="kv_transfer",
)
KV_TIER_DAMAGED = Counter(
    "pdmesh.kv_tier.damaged",
    "{file}",
    "Files of the disk tier that were found damaged, and deleted",
    service="kv_transfer",
)
NUM_SEGMENTS = Gauge(
    "pdmesh.kv_transfer.segments",
    "{segment}",
    "Engines attached to this agent",
    service="kv_transfer",
)
NUM_ACTIVE_PULLS = Gauge(
    "pdmesh.kv_transfer.active_pulls", "{transfer}", "Copies under way", service="kv_transfer"
)

# The tokenizer.
ENCODE_DURATION = Histogram(
    "pdmesh.tokenizer.encode.duration",
    "s",
    "Time to render and encode a prompt",
    _SECONDS,
    service="tokenizer",
)
NUM_SEQUENCES = Gauge(
    "pdmesh.tokenizer.sequences",
    "{sequence}",
    "Sequences being turned into text",
    service="tokenizer",
)

# Everyone who uses Redis.
REDIS_ERRORS = Counter(
    "pdmesh.redis.errors",
    "{command}",
    "Redis commands that failed; the mesh went on without them",
    {
        "kind": Values(
            "circuit_open",
            "connection",
            "loading",
            "moved",
            "noauth",
            "out_of_memory",
            "readonly",
            "timeout",
        )
    },
    service="scheduler, worker",
)

_names = VllmNames(MODELS)
