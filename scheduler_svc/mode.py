"""One worker or two: what a request would take with each, and what follows from it."""

from collections import deque
from dataclasses import dataclass
from enum import StrEnum

from scheduler_svc.estimates import Estimates
from scheduler_svc.workers import Candidate, RequestFacts, Role


class PlacementMode(StrEnum):
    """Whether prompt and output are computed by one worker or by two."""

    DISAGGREGATED = "disaggregated"
    LOCAL = "local"


class Reason(StrEnum):
    """Why a placement has its mode."""

    ISL_BOUNDING = "isl_bounding"
    PREFILL_REMOTE = "prefill_remote"
    NO_PREFILL_WORKER = "no_prefill_worker"
    # The prefill worker would compute on the decode worker's own cores.
    SHARED_CORES = "shared_cores"
    FORCED = "forced"
    LOCAL_CHEAPER = "local_cheaper"
    REMOTE_CHEAPER = "remote_cheaper"
    # Against the numbers, once in a while: a way that is never taken is never measured again.
    EXPLORE = "explore"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Seconds until a request can decode, with each mode."""

    local_s: float
    remote_s: float
    # Both workers compute on the same cores.
    shares_cores: bool = False


def compare(
    facts: RequestFacts,
    decoder: Candidate,
    prefiller: Candidate,
    estimates: Estimates,
    interference: float,
) -> Comparison | None:
    """None while something is not measured.

    A prompt that a decode worker computes holds up those who decode there; `interference` is
    what a second of each of them counts.
    """
    at_home, away = estimates.prefill_time(Role.DECODE), estimates.prefill_time(Role.PREFILL)
    missing = facts.num_prompt_tokens - decoder.num_cached_tokens
    transfer_s = estimates.transfer_s(missing)
    if at_home is None or away is None or transfer_s is None:
        return None
    compute_s = at_home.predict(missing, decoder.num_cached_tokens)
    held_up = interference * decoder.worker.num_requests
    return Comparison(
        local_s=at_home.backlog(decoder.worker.prefill_tokens) + compute_s * (1 + held_up),
        remote_s=away.backlog(prefiller.worker.prefill_tokens)
        + away.predict(
            facts.num_prompt_tokens - prefiller.num_cached_tokens, prefiller.num_cached_tokens
        )
        + transfer_s,
        shares_cores=decoder.worker.shares_cores(prefiller.worker),
    )


class Advice(StrEnum):
    """Whether separate prefill workers pay."""

    UNKNOWN = "unknown"
    DISAGGREGATE = "disaggregate"
    LOCAL = "local"
    # They do not: both kinds of worker compute on the same cores.
    SHARED_CORES = "shared_cores"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the placements of late would have taken on average with each mode."""

    advice: Advice
    num_placements: int
    local_s: float
    remote_s: float


class Comparisons:
    """The comparisons of late, of requests for which either mode was possible."""

    def __init__(self, *, max_kept: int = 512, min_needed: int = 32, margin: float = 0.1) -> None:
        self._kept: deque[Comparison] = deque(maxlen=max_kept)
        self._min_needed = min_needed
        self._margin = margin

    def add(self, comparison: Comparison) -> None:
        self._kept.append(comparison)

    def verdict(self) -> Verdict:
        """Against disaggregation only by a margin: it also evens out the time between tokens."""
        num_placements = len(self._kept)
        if num_placements < self._min_needed:
            return Verdict(Advice.UNKNOWN, num_placements, 0.0, 0.0)
        local_s = sum(one.local_s for one in self._kept) / num_placements
        remote_s = sum(one.remote_s for one in self._kept) / num_placements
        advice = Advice.DISAGGREGATE
        if local_s < (1 - self._margin) * remote_s:
            advice = Advice.LOCAL
        elif all(one.shares_cores for one in self._kept):
            advice = Advice.SHARED_CORES
        return Verdict(advice, num_placements, local_s, remote_s)
