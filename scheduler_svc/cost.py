"""What it would cost to give a worker a request. The unit is a block; the lowest cost wins."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from random import Random

from scheduler_svc.workers import Candidate, RequestFacts


@dataclass(frozen=True, slots=True)
class CostWeights:
    """What counts how much."""

    device_credit: float = 1.0
    host_credit: float = 0.75
    disk_credit: float = 0.25
    # How fast a cached prefix loses its pull as its worker falls behind the least loaded one.
    # Without it a hot prefix pins its requests to one worker while others idle.
    credit_decay: float = 0.5
    # Beyond this many times the request's own length the prefix is worth a second copy: the
    # request goes by load alone, and leaves its blocks where it goes.
    kvcache_balancing_threshold: float = 4.0
    prefill_load: float = 1.0
    decode_request: float = 1.0


def prefill_cost(
    candidate: Candidate, facts: RequestFacts, least_prefill_tokens: int, weights: CostWeights
) -> float:
    """Blocks to compute before the first token, with credit for those in the cache.

    `least_prefill_tokens` is the load of the least loaded worker that competes.
    """
    worker = candidate.worker
    num_request_blocks = max(1.0, facts.num_prompt_tokens / worker.block_size)
    excess_blocks = (worker.prefill_tokens - least_prefill_tokens) / worker.block_size
    excess = excess_blocks / num_request_blocks
    decay = 1.0 / (1.0 + weights.credit_decay * excess)
    if excess > weights.kvcache_balancing_threshold:
        decay = 0.0
    to_compute = worker.prefill_tokens / worker.block_size + num_request_blocks
    return weights.prefill_load * max(0.0, to_compute - _credit(candidate, decay, weights))


def decode_cost(candidate: Candidate, facts: RequestFacts, weights: CostWeights) -> float:
    """Blocks that every decode step will read, and the work that slows the steps down.

    Cached blocks are credit: they need neither computing nor pulling.
    """
    worker = candidate.worker
    num_blocks = worker.active_blocks + facts.num_prompt_tokens / worker.block_size
    return (
        max(0.0, num_blocks - _credit(candidate, 1.0, weights))
        + weights.prefill_load * worker.prefill_tokens / worker.block_size
        + weights.decode_request * worker.num_requests
    )


def cheapest_first(
    candidates: Iterable[Candidate], cost: Callable[[Candidate], float], random: Random
) -> list[Candidate]:
    """By cost; ties in random order, so that schedulers with one view do not act as a herd."""
    ranked = [(cost(candidate), random.random(), candidate) for candidate in candidates]
    ranked.sort(key=lambda entry: entry[:2])
    return [candidate for _, _, candidate in ranked]


def _credit(candidate: Candidate, decay: float, weights: CostWeights) -> float:
    hit = candidate.hit
    return (
        weights.device_credit * decay * hit.device_blocks
        + weights.host_credit * hit.host_blocks
        + weights.disk_credit * hit.disk_blocks
    )
