"""What the engine is asked, what it answers, and a request's state in between."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.sampling import SamplingParams, TokenLogprobs


class EngineError(Exception):
    """Why the engine refused or gave up a request."""


class InvalidParameter(EngineError):
    """A value is out of range; `param` names it as the caller spells it."""

    def __init__(self, param: str, message: str) -> None:
        super().__init__(message)
        self.param = param


class RequestTooLarge(EngineError):
    """The prompt leaves no room for a token in the context window or in the cache."""


class DuplicateRequest(EngineError):
    """The id belongs to a request that is running or still owns blocks."""


class TooManyWaiting(EngineError):
    """The waiting queue is full."""


class InvalidLogits(EngineError):
    """The model produced no usable distribution for this request."""


class EngineStopped(EngineError):
    """The engine does not run any more, because it was stopped or because it crashed."""


class FinishReason(StrEnum):
    """Why a sequence ended normally."""

    STOP = "stop"
    LENGTH = "length"


class RequestStatus(Enum):
    """Where a request is in the engine."""

    WAITING = "waiting"
    WAITING_FOR_REMOTE_KVS = "waiting_for_remote_kvs"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


@dataclass(frozen=True)
class RequestTimings:
    """Seconds per stage, from arrival to the last token; together they are all of it."""

    wait_s: float = 0.0
    prefill_s: float = 0.0
    remote_kv_s: float = 0.0
    decode_wait_s: float = 0.0
    decode_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.wait_s + self.prefill_s + self.remote_kv_s + self.decode_wait_s + self.decode_s


@dataclass(frozen=True)
class PrefillProgress:
    """A chunk of the prompt was computed; the count goes back after a preemption."""

    request_id: str
    num_computed_tokens: int
    # With `hold_blocks`: where the whole sequence's KV comes to lie, so that others may
    # begin to read what is computed.
    block_ids: tuple[int, ...] = ()
    block_generations: tuple[int, ...] = ()


@dataclass(frozen=True)
class RemoteKvWanted:
    """The request's KV may now be written to `block_ids`, the sequence's blocks from
    `first_block_index` on; they may be none.

    Comes once for each `remote_kv` request, and for a `tiered_kv` request that the prefix cache
    does not serve. The blocks stay reserved, even if the request is aborted, until
    `remote_kv_done` or `remote_kv_failed` answers.
    """

    request_id: str
    first_block_index: int
    block_ids: tuple[int, ...]
    # With `tiered_kv`: the content keys of these blocks, which are full ones.
    keys: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class TokenOutput:
    """One produced token; the request's last one carries `timings`, its first `timings_so_far`.

    Both carry `num_cached_tokens`.
    """

    request_id: str
    token_id: int
    logprobs: TokenLogprobs | None = None
    finish_reason: FinishReason | None = None
    matched_stop_token_id: int | None = None
    timings: RequestTimings | None = None
    timings_so_far: RequestTimings | None = None
    # With the first token, where they were asked for: of each prompt token from the second on.
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    # With `hold_blocks`, unless the sequence is over: what `release_hold` gives back.
    held_block_ids: tuple[int, ...] = ()
    held_block_generations: tuple[int, ...] = ()
    num_held_tokens: int = 0
    # Also with `hold_blocks`: when the token was sampled, by the engine's clock.
    sampled_at: float = 0.0

    @property
    def is_last(self) -> bool:
        return self.timings is not None


@dataclass(frozen=True)
class RequestFailed:
    """The request is over without an end; everything it held is released."""

    request_id: str
    error: EngineError


EngineEvent = PrefillProgress | RemoteKvWanted | TokenOutput | RequestFailed


@dataclass(eq=False)
class Request:
    """A sequence to continue.

    `output_token_ids` may arrive filled: tokens that another worker produced. They count as
    output in every respect, so the request goes on as if it had never moved.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    output_token_ids: list[int] = field(default_factory=list)
    # Blocks are shared only between requests with the same salt.
    cache_salt: str = ""
    # End after one token and keep the blocks for another worker until `release_hold`.
    hold_blocks: bool = False
    # Another worker computes all tokens but the last; ask for their KV.
    remote_kv: bool = False
    # It computes all that are known, and the next one comes with `remote_kv_done`.
    remote_token: bool = False
    # Colder tiers may have KV of the prompt; ask before computing it.
    tiered_kv: bool = False
    # Leading tokens that they have, if that is known: no reason to ask if the cache has as many.
    num_tiered_tokens: int | None = None

    # The engine's own bookkeeping.
    arrival: int = field(default=0, init=False)
    status: RequestStatus = field(default=RequestStatus.WAITING, init=False)
    block_ids: list[int] = field(default_factory=list, init=False)
    block_keys: list[bytes] = field(default_factory=list, init=False)
    # Leading tokens whose keys and values are in `block_ids`.
    num_computed_tokens: int = field(default=0, init=False)
    # Prompt tokens that the prefix cache had when the request was first scheduled.
    num_cached_tokens: int | None = field(default=None, init=False)
    # Of its tokens, those whose KV came from other workers or colder tiers.
    num_external_tokens: int = field(default=0, init=False)
    # Tokens whose KV a preemption threw away, until they are computed again.
    num_lost_tokens: int = field(default=0, init=False)
    num_sampled_tokens: int = field(default=0, init=False)
    # Of the prompt tokens that follow a computed one.
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list, init=False)
    num_preemptions: int = field(default=0, init=False)
    # When somebody began to wait for it; by default when the engine gets it.
    submitted_at: float | None = field(default=None, init=False)
    awaits_remote_kv: bool = field(default=False, init=False)
    has_remote_kv: bool = field(default=False, init=False)
    _stage_s: dict[str, float] = field(default_factory=lambda: defaultdict(float), init=False)
    _entered_at: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        tiered = self.tiered_kv and not self.scores_prompt
        self.awaits_remote_kv = self.remote_kv or tiered

    @property
    def scores_prompt(self) -> bool:
        """The prompt's log-probabilities are due with the first token, so that every one of its
        tokens has to be computed here. Whoever produced tokens before has reported them.
        """
        return (
            self.sampling_params.num_prompt_logprobs is not None
            and not self.output_token_ids
            and not self.remote_kv
        )

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_remote_tokens(self) -> int:
        """Tokens whose KV another worker has or will have."""
        return self.num_tokens if self.remote_token else self.num_tokens - 1

    @property
    def token_ids(self) -> list[int]:
        return self.prompt_token_ids + self.output_token_ids

    @property
    def num_uncomputed_tokens(self) -> int:
        return self.num_tokens - self.num_computed_tokens

    def slice_token_ids(self, start: int, end: int) -> list[int]:
        """Token ids of positions `start` to `end`, without copying the rest."""
        first_output = self.num_prompt_tokens
        return (
            self.prompt_token_ids[start:end]
            + self.output_token_ids[max(0, start - first_output) : max(0, end - first_output)]
        )

    def append(self, token_id: int, now: float) -> None:
        """Record a token that was sampled here."""
        self._charge(now)
        self.output_token_ids.append(token_id)
        self.num_sampled_tokens += 1

    def finish_reason(
        self, eos_token_ids: frozenset[int], max_model_len: int
    ) -> FinishReason | None:
        """Whether the last token ends the sequence; a stop token at the cap is a stop."""
        params = self.sampling_params
        last = self.output_token_ids[-1]
        if last in params.stop_token_ids or (last in eos_token_ids and not params.ignore_eos):
            return FinishReason.STOP
        if len(self.output_token_ids) >= params.max_tokens or self.num_tokens >= max_model_len:
            return FinishReason.LENGTH
        return None

    def arrive(self, arrival: int, now: float) -> None:
        """Take a place in the order of arrival, and start the clock."""
        self.arrival = arrival
        self._entered_at = now if self.submitted_at is None else self.submitted_at

    def enter(self, status: RequestStatus, now: float) -> None:
        """Change the status; the time since the last change belongs to the stage left."""
        self._charge(now)
        self.status = status

    def timings(self, now: float) -> RequestTimings:
        """How long each stage took, up to `now`."""
        self._charge(now)
        return RequestTimings(**self._stage_s)

    def _charge(self, now: float) -> None:
        self._stage_s[self._stage()] += now - self._entered_at
        self._entered_at = now

    def _stage(self) -> str:
        """The field of RequestTimings to which the time that passes now belongs."""
        decodes = self.num_sampled_tokens > 0 or self.has_remote_kv
        match self.status:
            case RequestStatus.WAITING_FOR_REMOTE_KVS:
                return "remote_kv_s"
            case RequestStatus.RUNNING:
                return "decode_s" if decodes else "prefill_s"
            case _:
                return "decode_wait_s" if decodes or self.remote_kv else "wait_s"
