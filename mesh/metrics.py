"""Every metric of the mesh, declared once, and their text form for /metrics."""

from collections.abc import Callable, Iterable, Iterator, Mapping

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.resources import Resource
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from mesh import errors

OTHER = "other"

# Own registry and provider: nothing else in the process can add to or break /metrics.
_registry = CollectorRegistry()
_provider = MeterProvider(
    metric_readers=[
        PrometheusMetricReader(
            disable_target_info=True, scope_info_enabled=False, registry=_registry
        )
    ],
    resource=Resource.get_empty(),
    shutdown_on_exit=False,
)
_meter = _provider.get_meter("pdmesh")


def render() -> tuple[bytes, str]:
    """The body and the content type of /metrics."""
    return generate_latest(_registry), CONTENT_TYPE_LATEST


class Values:
    """The values that a label may take; every other one becomes "other".

    What a client sends can therefore never add a series.
    """

    def __init__(self, *names: str, max_values: int = 64) -> None:
        self._names = set(names)
        self._max_values = max_values

    def allow(self, *names: str) -> None:
        """Add values that the operator chose, such as the names of served models."""
        for name in names:
            if len(self._names) < self._max_values:
                self._names.add(name)

    def pick(self, value: str) -> str:
        return value if value in self._names else OTHER


Labels = Mapping[str, Values]
NO_LABELS: Labels = {}


class Counter:
    """Only goes up."""

    def __init__(self, name: str, unit: str, description: str, labels: Labels = NO_LABELS) -> None:
        self._labels = labels
        self._counter = _meter.create_counter(name, unit, description)

    def add(self, amount: float, values: Mapping[str, str] | None = None) -> None:
        self._counter.add(amount, _bounded(self._labels, values))


class Histogram:
    """Distribution of a measurement over fixed buckets."""

    def __init__(
        self,
        name: str,
        unit: str,
        description: str,
        buckets: Iterable[float],
        labels: Labels = NO_LABELS,
    ) -> None:
        self._labels = labels
        self._histogram = _meter.create_histogram(
            name, unit, description, explicit_bucket_boundaries_advisory=list(buckets)
        )

    def record(self, amount: float, values: Mapping[str, str] | None = None) -> None:
        self._histogram.record(amount, _bounded(self._labels, values))


class Gauge:
    """Read when /metrics is, from whoever watches it."""

    def __init__(self, name: str, unit: str, description: str, labels: Labels = NO_LABELS) -> None:
        self._labels = labels
        self._readers: dict[object, tuple[Callable[[], float], Mapping[str, str]]] = {}
        _meter.create_observable_gauge(name, [self._observe], unit, description)

    def watch(
        self, read: Callable[[], float], values: Mapping[str, str] | None = None
    ) -> Callable[[], None]:
        """Report what `read` returns from now on; call the result to stop."""
        key = object()
        self._readers[key] = (read, _bounded(self._labels, values))
        return lambda: self._readers.pop(key, None) and None

    def _observe(self, options: CallbackOptions) -> Iterator[Observation]:
        for read, values in list(self._readers.values()):
            yield Observation(read(), values)


def _bounded(labels: Labels, values: Mapping[str, str] | None) -> dict[str, str]:
    """Labels not given are left out; one that was not declared is a bug."""
    if not values:
        return {}
    return {name: labels[name].pick(value) for name, value in values.items()}


# Served models; the gateway and the workers allow theirs at start.
MODELS = Values()
OPERATIONS = Values("chat", "text_completion")
OUTCOMES = Values("ok", "error", "rejected", "aborted")
STAGES = Values(
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

_MODEL_LABELS = {"gen_ai.request.model": MODELS, "gen_ai.operation.name": OPERATIONS}
_SECONDS = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60]

REQUEST_DURATION = Histogram(
    "gen_ai.server.request.duration",
    "s",
    "From the first byte of the request to the last of the answer",
    [0.01 * 2**n for n in range(14)],
    {**_MODEL_LABELS, "error.type": REASONS},
)
TIME_TO_FIRST_TOKEN = Histogram(
    "gen_ai.server.time_to_first_token",
    "s",
    "From the first byte of the request to the first token",
    [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10],
    _MODEL_LABELS,
)
TIME_PER_OUTPUT_TOKEN = Histogram(
    "gen_ai.server.time_per_output_token",
    "s",
    "Mean time between tokens after the first, per request",
    [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5],
    _MODEL_LABELS,
)
STAGE_DURATION = Histogram(
    "pdmesh.stage.duration",
    "s",
    "Time that a request spent in one stage",
    _SECONDS,
    {"stage": STAGES},
)
REQUESTS = Counter(
    "pdmesh.requests",
    "{request}",
    "Finished requests by outcome",
    {"outcome": OUTCOMES, "error.type": REASONS, "gen_ai.request.model": MODELS},
)
TOKENS = Counter(
    "pdmesh.tokens",
    "{token}",
    "Tokens of finished requests",
    {"type": Values("prompt", "completion", "cached"), "gen_ai.request.model": MODELS},
)
RESUMPTIONS = Counter(
    "pdmesh.resumptions",
    "{request}",
    "Streams that went on elsewhere after a failure",
    {"error.type": REASONS},
)
ABORTED = Counter(
    "pdmesh.aborted",
    "{request}",
    "Requests whose caller went away, by what they were doing",
    {"state": Values("queued", "prefill", "transfer", "decode", "waiting", "running")},
)
PREFIX_CACHE_QUERIES = Counter(
    "pdmesh.prefix_cache.queries", "{token}", "Prompt tokens looked up in the prefix cache"
)
PREFIX_CACHE_HITS = Counter(
    "pdmesh.prefix_cache.hits", "{token}", "Prompt tokens found in the prefix cache"
)
PREEMPTIONS = Counter("pdmesh.preemptions", "{request}", "Requests that gave their blocks away")
RECOMPUTED_TOKENS = Counter(
    "pdmesh.recomputed_tokens", "{token}", "Tokens computed again after a preemption"
)
DISAGG_DECISIONS = Counter(
    "pdmesh.disagg.decisions",
    "{request}",
    "Placements by mode and reason",
    {
        "decision": Values("disaggregated", "local"),
        "reason": Values("isl_bounding", "prefill_remote", "no_prefill_worker", "forced"),
    },
)
_TRANSPORT = {"transport": Values("shared_memory", "tcp")}
KV_TRANSFER_BYTES = Counter(
    "pdmesh.kv_transfer.size", "By", "KV bytes moved between engines", _TRANSPORT
)
KV_TRANSFER_DURATION = Histogram(
    "pdmesh.kv_transfer.duration", "s", "Time of one copy of blocks", _SECONDS, _TRANSPORT
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
)
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
)

NUM_BLOCKS = Gauge("pdmesh.kv_cache.blocks", "{block}", "Blocks in the KV cache")
NUM_FREE_BLOCKS = Gauge(
    "pdmesh.kv_cache.free_blocks",
    "{block}",
    "Blocks that could be handed out, cached ones included",
)
NUM_LEASES = Gauge("pdmesh.kv_cache.leases", "{lease}", "Handles held for another worker")
NUM_RUNNING = Gauge("pdmesh.engine.running", "{request}", "Requests in the running batch")
NUM_WAITING = Gauge("pdmesh.engine.waiting", "{request}", "Requests waiting for room or remote KV")
NUM_QUEUED = Gauge("pdmesh.scheduler.queued", "{request}", "Requests waiting for a placement")
NUM_PLACEMENTS = Gauge("pdmesh.scheduler.placements", "{placement}", "Placements held")
NUM_WORKERS = Gauge(
    "pdmesh.scheduler.workers",
    "{worker}",
    "Workers known to be alive",
    {"role": Values("prefill", "decode")},
)
NUM_SEGMENTS = Gauge("pdmesh.kv_transfer.segments", "{segment}", "Engines attached to this agent")
NUM_STREAMS = Gauge("pdmesh.gateway.streams", "{request}", "Requests being answered")
