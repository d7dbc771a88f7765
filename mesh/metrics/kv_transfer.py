"""What the transfer agent measures: copies, and the colder tiers."""

from mesh.instruments import Counter, Gauge, Histogram, Values
from mesh.metrics.labels import SECONDS

_TRANSPORT = {"transport": Values("shared_memory", "tcp", "mooncake")}
KV_TRANSFER_BYTES = Histogram(
    "pdmesh.kv_transfer.size",
    "By",
    "KV bytes that one copy moved between engines",
    [2**n for n in range(11, 35, 2)],
    _TRANSPORT,
    service="kv_transfer",
)
KV_TRANSFER_DURATION = Histogram(
    "pdmesh.kv_transfer.duration",
    "s",
    "Time of one copy of blocks",
    SECONDS,
    _TRANSPORT,
    service="kv_transfer",
)
KV_TRANSFER_RUNS = Histogram(
    "pdmesh.kv_transfer.runs",
    "{run}",
    "Contiguous pieces of memory that one copy of blocks was made of",
    [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000],
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
