"""What placing requests measures."""

from mesh.instruments import Counter, Gauge, Values

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
            "shared_cores",
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
