"""What a request can expect that comes now: when its first token, and how crowded it will be."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scheduler_svc.estimates import Estimates
from scheduler_svc.workers import RequestFacts, Role, WorkerView


@dataclass(frozen=True, slots=True)
class Ahead:
    """Work that will be served before a request that comes now."""

    num_requests: int = 0
    prefill_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Forecast:
    """Predicted for one request."""

    ttft_s: float
    # Requests on each decode worker when this one's prefill ends.
    num_decoding: float
    # Time between tokens with so many; None is not measured.
    step_s: float | None


def forecast(
    facts: RequestFacts,
    num_cached_tokens: int,
    workers: Sequence[WorkerView],
    ahead: Ahead,
    decoding_since: Iterable[float | None],
    estimates: Estimates,
    *,
    max_num_seqs: int,
    now: float,
) -> Forecast | None:
    """None while prefill times are not measured.

    `decoding_since` has an element for each placement that is held: when its first token was
    there, None before that.
    """
    serving = [worker for worker in workers if worker.model == facts.model]
    decoders = [worker for worker in serving if worker.role is Role.DECODE]
    pool = [worker for worker in serving if worker.role is Role.PREFILL]
    prefillers = pool or decoders
    # Prompts may be computed there as well, on the same cores.
    beside = [one for one in decoders if any(map(one.shares_cores, pool))]
    prefill_time = estimates.prefill_time(Role.PREFILL)
    if prefill_time is None or not decoders:
        return None
    computing = (*prefillers, *beside)
    backlog_tokens = ahead.prefill_tokens + sum(worker.prefill_tokens for worker in computing)
    backlog_s = prefill_time.backlog(backlog_tokens // len(prefillers))
    num_missing_tokens = facts.num_prompt_tokens - num_cached_tokens
    compute_s = prefill_time.predict(num_missing_tokens, num_cached_tokens)
    at_home = estimates.prefill_time(Role.DECODE)
    if beside and at_home is not None:
        compute_s = max(compute_s, at_home.predict(num_missing_tokens, num_cached_tokens))
    room_s = _wait_for_room(decoders, ahead, estimates, max_num_seqs)
    ttft_s = max(backlog_s, room_s) + compute_s
    num_decoding = _decoding_at(ttft_s, decoding_since, ahead, estimates, now) / len(decoders)
    num_decoding = min(num_decoding, max_num_seqs)
    return Forecast(ttft_s, num_decoding, estimates.step_s(num_decoding))


def _wait_for_room(
    decoders: Sequence[WorkerView], ahead: Ahead, estimates: Estimates, max_num_seqs: int
) -> float:
    """Places become free at the pace at which requests end."""
    active = sum(worker.charged.num_requests for worker in decoders)
    blocks = sum(worker.charged.blocks for worker in decoders)
    capacity = float(max_num_seqs * len(decoders))
    if active and blocks:
        # Where blocks run out before places do.
        capacity = min(capacity, sum(w.num_blocks for w in decoders) / (blocks / active))
    num_waiting_for_room = active + ahead.num_requests + 1 - capacity
    if num_waiting_for_room <= 0 or estimates.decode_s is None:
        return 0.0
    return num_waiting_for_room * estimates.decode_s / max(capacity, 1.0)


def _decoding_at(
    after_s: float,
    decoding_since: Iterable[float | None],
    ahead: Ahead,
    estimates: Estimates,
    now: float,
) -> float:
    """Everyone decodes for the mean time: those that began longer ago than that will be gone,
    and those before us in line will have come (Mooncake's prediction)."""
    decode_s = estimates.decode_s or 0.0
    staying = sum(since is None or now + after_s - since < decode_s for since in decoding_since)
    return staying + ahead.num_requests + 1
