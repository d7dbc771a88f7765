"""What placement knows of a request, of the workers, and of the work that they have."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from mesh.block_index import PrefixHit

__all__ = [
    "IDLE",
    "NO_HIT",
    "ActiveLoad",
    "Candidate",
    "Hits",
    "PrefixHit",
    "RequestFacts",
    "Role",
    "WorkerView",
    "candidate",
]


class Role(StrEnum):
    """What a worker does for others. A decode worker can compute prompts too."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """All that placement knows of a request. Its tokens' values are not needed."""

    model: str
    num_prompt_tokens: int
    max_tokens: int
    excluded_worker_ids: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class ActiveLoad:
    """Work that a worker has not finished."""

    num_requests: int = 0
    # Prompt tokens that are not computed yet.
    prefill_tokens: int = 0
    # KV blocks in use or promised.
    blocks: int = 0

    def __add__(self, other: "ActiveLoad") -> "ActiveLoad":
        return ActiveLoad(
            self.num_requests + other.num_requests,
            self.prefill_tokens + other.prefill_tokens,
            self.blocks + other.blocks,
        )


IDLE = ActiveLoad()
NO_HIT = PrefixHit()

# By the holder id of a worker, or by the transfer address of a machine.
Hits = Mapping[str, PrefixHit]


@dataclass(frozen=True, slots=True)
class WorkerView:
    """One live worker: what it is, what it reports, and what schedulers have charged to it."""

    worker_id: str
    # A new process is a new incarnation, and so a new holder of blocks and charges.
    incarnation: str
    holder_id: str
    role: Role
    address: str
    model: str
    layout_fingerprint: str
    block_size: int
    num_blocks: int
    max_model_len: int
    # The agent of its machine, whose colder tiers it can reach.
    transfer_address: str = ""
    # Cores of its machine that it may compute on, and on how many at a time.
    cpus: frozenset[int] = frozenset()
    num_threads: int = 0
    reported: ActiveLoad = IDLE
    charged: ActiveLoad = IDLE

    # A heartbeat lags behind the charges, and the charges miss what a scheduler that has died
    # placed: the larger of the two is nearer to the truth than either.
    @property
    def prefill_tokens(self) -> int:
        return max(self.reported.prefill_tokens, self.charged.prefill_tokens)

    @property
    def active_blocks(self) -> int:
        return max(self.reported.blocks, self.charged.blocks)

    @property
    def num_requests(self) -> int:
        return max(self.reported.num_requests, self.charged.num_requests)

    def shares_cores(self, other: "WorkerView") -> bool:
        """Whether each waits for the other's threads when both compute."""
        return (
            self.transfer_address == other.transfer_address
            and not self.cpus.isdisjoint(other.cpus)
            and self.num_threads + other.num_threads > len(self.cpus | other.cpus)
        )

    def num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker and what it already has of the request's prompt."""

    worker: WorkerView
    hit: PrefixHit
    # What the tiers of its machine have.
    num_tiered_tokens: int = 0

    @property
    def num_cached_tokens(self) -> int:
        return self.hit.num_blocks * self.worker.block_size


def candidate(worker: WorkerView, facts: RequestFacts, hits: Hits) -> Candidate:
    """The last prompt token is always computed, so a hit never covers the whole prompt."""
    hit = hits.get(worker.holder_id, NO_HIT)
    colder = hits.get(worker.transfer_address)
    if colder is None and hit is NO_HIT:
        return Candidate(worker, hit)
    num_tiered_blocks = 0
    if colder is not None:
        hit = hit.extended(colder)
        num_tiered_blocks = colder.num_blocks
    bounded = hit.bounded((facts.num_prompt_tokens - 1) // worker.block_size)
    return Candidate(worker, bounded, num_tiered_blocks * worker.block_size)
