"""What prefill and decode workers measure: their engine, its cache, their leases."""

from mesh.instruments import Counter, Gauge, Histogram, Values, WatchedCounter
from mesh.metrics.labels import MODEL, PER_TOKEN_SECONDS, POWERS_OF_TWO, SECONDS

# From reuse within a burst to content that stays for half an hour.
_RESIDENCY_SECONDS = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5]
_RESIDENCY_SECONDS += [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800]

NUM_RUNNING = Gauge(
    "pdmesh.engine.running", "{request}", "Requests in the running batch", service="worker"
)
NUM_WAITING = Gauge(
    "pdmesh.engine.waiting",
    "{request}",
    "Requests waiting, for room (capacity) or for KV from elsewhere (deferred)",
    {"reason": Values("capacity", "deferred")},
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
    SECONDS,
    service="worker",
)
BATCH_SIZE = Histogram(
    "pdmesh.engine.step.requests",
    "{request}",
    "Requests in one step",
    POWERS_OF_TWO[:11],
    service="worker",
)
STEP_TOKENS = Histogram(
    "pdmesh.engine.step.tokens",
    "{token}",
    "Tokens computed in one step",
    POWERS_OF_TWO,
    service="worker",
)
ENGINE_TIME_PER_OUTPUT_TOKEN = Histogram(
    "pdmesh.engine.time_per_output_token",
    "s",
    "Mean time between tokens where they are made: a client that gets them faster than this "
    "gets them from a buffer",
    PER_TOKEN_SECONDS,
    MODEL,
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
MAX_SPECULATIVE_TOKENS = 32
SPECULATION_DRAFTS = WatchedCounter(
    "pdmesh.speculation.drafts",
    "{draft}",
    "Times that the tokens after the next one were guessed",
    service="worker",
)
SPECULATION_DRAFT_TOKENS = WatchedCounter(
    "pdmesh.speculation.draft_tokens", "{token}", "Tokens guessed", service="worker"
)
SPECULATION_ACCEPTED_TOKENS = WatchedCounter(
    "pdmesh.speculation.accepted_tokens",
    "{token}",
    "Guessed tokens that were what the model chose; the mean number of tokens in a step that "
    "has a draft is one more than these by draft",
    service="worker",
)
SPECULATION_ACCEPTED_TOKENS_PER_POSITION = WatchedCounter(
    "pdmesh.speculation.accepted_tokens_per_position",
    "{token}",
    "The same, by place in the draft from 0 on",
    {"position": Values(*map(str, range(MAX_SPECULATIVE_TOKENS)))},
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
EXTERNAL_CACHE_QUERIES = WatchedCounter(
    "pdmesh.external_cache.queries",
    "{token}",
    "Tokens whose KV was asked for from other workers or colder tiers",
    service="worker",
)
EXTERNAL_CACHE_HITS = WatchedCounter(
    "pdmesh.external_cache.hits",
    "{token}",
    "Tokens whose KV came from other workers or colder tiers",
    service="worker",
)
PROMPT_TOKENS = WatchedCounter(
    "pdmesh.engine.prompt_tokens",
    "{token}",
    "Prompt tokens of requests that got a token here, by where their KV was from",
    {"source": Values("local_compute", "local_cache_hit", "external_kv_transfer")},
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
BLOCK_LIFETIME = Histogram(
    "pdmesh.kv_cache.block.lifetime",
    "s",
    "From being handed out to eviction, of cached blocks that made room",
    _RESIDENCY_SECONDS,
    service="worker",
)
BLOCK_IDLE = Histogram(
    "pdmesh.kv_cache.block.idle_before_evict",
    "s",
    "From being wanted last to eviction, of cached blocks that made room",
    _RESIDENCY_SECONDS,
    service="worker",
)
BLOCK_REUSE_GAP = Histogram(
    "pdmesh.kv_cache.block.reuse_gap",
    "s",
    "From being wanted to being found in the cache by the next request",
    _RESIDENCY_SECONDS,
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
UNRELEASED_HANDLES = Counter(
    "pdmesh.kv_cache.unreleased_handles",
    "{handle}",
    "Handles of others that could not be given back before their lease ended",
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
