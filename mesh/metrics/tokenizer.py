"""What the tokenizer measures."""

from mesh.instruments import Gauge, Histogram
from mesh.metrics.labels import SECONDS

ENCODE_DURATION = Histogram(
    "pdmesh.tokenizer.encode.duration",
    "s",
    "Time to render and encode a prompt",
    SECONDS,
    service="tokenizer",
)
NUM_SEQUENCES = Gauge(
    "pdmesh.tokenizer.sequences",
    "{sequence}",
    "Sequences being turned into text",
    service="tokenizer",
)
