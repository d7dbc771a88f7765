"""What labels may be, and the buckets that several histograms share."""

from mesh import errors
from mesh.instruments import Values

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

MODEL = {"gen_ai.request.model": MODELS}
MODEL_AND_OPERATION = {
    **MODEL,
    "gen_ai.operation.name": OPERATIONS,
    "gen_ai.provider.name": Values("pdmesh"),
}
SECONDS = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60]
PER_TOKEN_SECONDS = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5]
POWERS_OF_TWO = [2**n for n in range(18)]
