"""The mesh now, as JSON: what the page and `pdmesh top` draw."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from gateway.core import Core
from gateway.dashboard.recent import WINDOW_S, mean_stages_ms, summarize
from gateway.finished import FinishedRequest
from mesh.v1 import scheduler_pb2


def live(core: Core) -> dict[str, Any]:
    """Everything that changes by the second."""
    requests = core.recent.window()
    summary = summarize(requests)
    state = core.health.state
    health = core.health.report()
    return {
        "time": round(time.time(), 3),
        "window_s": WINDOW_S,
        "status": health["status"],
        "problems": health["problems"],
        "streams": core.in_flight.num_requests,
        "queued": state.num_waiting,
        "placements": state.num_placements,
        **summary,
        "mean_stages_ms": mean_stages_ms(requests),
        "series": core.recent.series(),
        "workers": [_worker(worker, requests, summary) for worker in state.workers],
    }


def _worker(
    worker: scheduler_pb2.WorkerState,
    requests: Sequence[FinishedRequest],
    summary: Mapping[str, Any],
) -> dict[str, Any]:
    """`summary` is that of all requests."""
    load = worker.load
    queries = load.num_prefix_cache_queries
    served = [
        one for one in requests if worker.worker_id in (one.decode_worker_id, one.prefill_worker_id)
    ]
    # A page asks every second: where one worker has served them all, they are gone through once.
    summary = summary if len(served) == len(requests) else summarize(served)
    is_decode = worker.role == "decode"
    return {
        "worker_id": worker.worker_id,
        "role": worker.role,
        "address": worker.address,
        "placements": worker.num_placements,
        "running": load.num_running,
        "waiting": load.num_waiting,
        "waiting_tokens": load.num_waiting_tokens,
        "leases": load.num_leases,
        "kv_cache_usage": 1 - load.num_free_blocks / load.num_blocks if load.num_blocks else 0.0,
        "blocks": load.num_blocks,
        "free_blocks": load.num_free_blocks,
        "prefix_cache_hit_rate": load.num_prefix_cache_hits / queries if queries else None,
        "preemptions": load.num_preemptions,
        "steps": load.num_steps,
        "num_requests": summary["num_requests"],
        "ttft_ms": summary["ttft_ms"],
        "tpot_ms": summary["tpot_ms"] if is_decode else None,
        "batch_size": summary["batch_size"] if is_decode else None,
        "kv_transfer_gb_per_s": summary["kv_transfer_gb_per_s"] if is_decode else None,
        "tokens_per_s": (
            sum(one.completion_tokens for one in served) / WINDOW_S if is_decode else None
        ),
    }
