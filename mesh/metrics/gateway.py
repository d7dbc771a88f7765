"""What the edge measures: requests as their callers see them."""

from mesh.instruments import Counter, Gauge, Histogram, Values
from mesh.metrics.labels import (
    MODEL,
    MODEL_AND_OPERATION,
    OUTCOMES,
    PER_TOKEN_SECONDS,
    POWERS_OF_TWO,
    REASONS,
    SECONDS,
    STAGES,
)

REQUEST_DURATION = Histogram(
    "gen_ai.server.request.duration",
    "s",
    "From the first byte of the request to the last of the answer",
    [0.01 * 2**n for n in range(14)],
    {**MODEL_AND_OPERATION, "error.type": REASONS},
    service="gateway",
)
TIME_TO_FIRST_TOKEN = Histogram(
    "gen_ai.server.time_to_first_token",
    "s",
    "From the first byte of the request to the first token",
    [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10],
    MODEL_AND_OPERATION,
    service="gateway",
)
TIME_PER_OUTPUT_TOKEN = Histogram(
    "gen_ai.server.time_per_output_token",
    "s",
    "Mean time between tokens after the first, per request",
    PER_TOKEN_SECONDS,
    MODEL_AND_OPERATION,
    service="gateway",
)
INTER_TOKEN_LATENCY = Histogram(
    "pdmesh.inter_token_latency",
    "s",
    "Time between two events that bring a choice's tokens",
    [0.001, 0.0025, 0.005, *PER_TOKEN_SECONDS],
    MODEL,
    service="gateway",
)
STAGE_DURATION = Histogram(
    "pdmesh.stage.duration",
    "s",
    "Time that a request spent in one stage, on its critical path",
    SECONDS,
    {"stage": STAGES},
    service="gateway",
)
REQUESTS = Counter(
    "pdmesh.requests",
    "{request}",
    "Finished requests by outcome",
    {"outcome": OUTCOMES, "error.type": REASONS, **MODEL},
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
            "expired_key",
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
    {"reason": Values("stop", "length"), **MODEL},
    service="gateway",
)
TOKENS = Counter(
    "pdmesh.tokens",
    "{token}",
    "Tokens of requests that were answered, in whole or in part",
    {"type": Values("prompt", "completion", "cached"), **MODEL},
    service="gateway",
)
PROMPT_LENGTH = Histogram(
    "pdmesh.request.prompt_tokens",
    "{token}",
    "Prompt tokens of a request",
    POWERS_OF_TWO,
    MODEL,
    service="gateway",
)
COMPLETION_LENGTH = Histogram(
    "pdmesh.request.completion_tokens",
    "{token}",
    "Completion tokens of a request",
    POWERS_OF_TWO,
    MODEL,
    service="gateway",
)
COMPUTED_PROMPT_LENGTH = Histogram(
    "pdmesh.request.computed_prompt_tokens",
    "{token}",
    "Prompt tokens of a request that no prefix cache had",
    POWERS_OF_TWO,
    MODEL,
    service="gateway",
)
LONGEST_COMPLETION = Histogram(
    "pdmesh.request.longest_completion_tokens",
    "{token}",
    "Completion tokens of a request's longest choice",
    POWERS_OF_TWO,
    MODEL,
    service="gateway",
)
MAX_TOKENS = Histogram(
    "pdmesh.request.max_tokens",
    "{token}",
    "Completion tokens that a choice may have",
    POWERS_OF_TWO,
    MODEL,
    service="gateway",
)
NUM_CHOICES = Histogram(
    "pdmesh.request.choices",
    "{choice}",
    "Choices of a request",
    [1, 2, 4, 8, 16, 32, 64, 128],
    MODEL,
    service="gateway",
)
INFERENCE_DURATION = Histogram(
    "pdmesh.request.inference.duration",
    "s",
    "From the first step of the prompt to the last token",
    SECONDS,
    MODEL,
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
