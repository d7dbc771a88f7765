"""What a client asked for and what it gets back, whichever API it speaks."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from gateway.timeline import Timeline
from mesh.errors import DeadlineExceeded
from mesh.telemetry import INVALID_SPAN, Span
from mesh.v1 import tokenizer_pb2, types_pb2


@dataclass(frozen=True)
class TextPrompt:
    """Text to continue."""

    text: str


@dataclass(frozen=True)
class ChatPrompt:
    """Messages for the model's chat template."""

    chat: tokenizer_pb2.Chat


@dataclass(frozen=True)
class TokenPrompt:
    """A prompt that the client encoded itself."""

    token_ids: tuple[int, ...]


Prompt = TextPrompt | ChatPrompt | TokenPrompt


class PriorityClass(StrEnum):
    """Whether somebody waits for the answer: offline requests give way to online ones."""

    ONLINE = "online"
    OFFLINE = "offline"


@dataclass(frozen=True)
class GenerationRequest:
    """One request: `n` choices for each of its prompts."""

    prompts: tuple[Prompt, ...]
    # As the client said it: `max_tokens` is filled in once the prompt's length is known.
    sampling_params: types_pb2.SamplingParams
    max_tokens: int | None = None
    # For a client that left `max_tokens` out; None means as many as fit.
    default_max_tokens: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    bad_words: tuple[str, ...] = ()
    # Begin the answer with the prompt.
    echo: bool = False
    # End it there: the token that a worker makes in any case is nobody's.
    is_prompt_only: bool = False
    cache_salt: str = ""
    priority: int = 0
    priority_class: PriorityClass = PriorityClass.ONLINE
    # Refused at once when its first token could not come within this; 0: the scheduler's own.
    ttft_objective_ms: int = 0
    # Whose turn it is in the scheduler's queue: the group of the caller's key.
    tenant: str = ""
    # The parameter that holds the prompt, for error messages.
    prompt_param: str | None = None


class Deadline:
    """When a request must be over, by the monotonic clock."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._ends_at = time.monotonic() + timeout_s

    def remaining_s(self, at_most: float | None = None) -> float:
        """The timeout for the next call; raises when nothing is left."""
        left = self._ends_at - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded(f"the request took longer than {self._timeout_s:g} s")
        return left if at_most is None else min(left, at_most)


@dataclass(frozen=True)
class Finish:
    """Why a choice ended normally."""

    reason: "types_pb2.FinishReason.ValueType"
    stop_token_id: int | None = None
    stop_string: str | None = None


@dataclass(frozen=True)
class Chunk:
    """Tokens from a worker."""

    token_ids: Sequence[int]
    logprobs: Sequence[types_pb2.TokenLogprobs] = ()
    # With a sequence's first token: of the prompt's tokens from the second on.
    prompt_logprobs: Sequence[types_pb2.TokenLogprobs] = ()
    finish: Finish | None = None


@dataclass(frozen=True)
class Delta:
    """Text and the tokens that led to it; text may lag behind its tokens."""

    text: str
    token_ids: Sequence[int]
    logprobs: Sequence[types_pb2.TokenLogprobs] = ()
    prompt_logprobs: Sequence[types_pb2.TokenLogprobs] = ()
    # Of every token that is described, and of the prompt's if these are.
    token_bytes: Mapping[int, bytes] = field(default_factory=dict)
    finish: Finish | None = None


@dataclass
class JobTrace:
    """What is known about how one choice was served."""

    # Replaced when the choice begins.
    timeline: Timeline = field(default_factory=Timeline)
    # Of the attempt under way.
    attempt_span: Span = INVALID_SPAN
    # Prompt tokens found in a prefix cache by the worker that computed the prompt first.
    num_cached_tokens: int | None = None
    mode: str | None = None
    prefill_worker_id: str = ""
    decode_worker_id: str = ""
    num_attempts: int = 0
    # As the decode worker saw them while it served the choice.
    mean_batch_size: float = 0.0
    max_kv_cache_usage: float = 0.0
    num_preemptions: int = 0
    kv_transfer_bytes: int = 0


@dataclass
class Job:
    """One choice on its way: what is to be done and what exists so far."""

    # Unique in the mesh, whatever id the client uses.
    request_id: str
    model: str
    prompt_token_ids: Sequence[int]
    sampling_params: types_pb2.SamplingParams
    # Tokens that end the sequence wherever they are produced.
    end_token_ids: frozenset[int]
    request: GenerationRequest
    deadline: Deadline
    # Where the answer begins with it.
    prompt_text: str = ""
    # Tokens that the workers produced: what a resumption starts from.
    output_token_ids: list[int] = field(default_factory=list)
    # Tokens that count: without those behind a stop string.
    num_completion_tokens: int = 0
    trace: JobTrace = field(default_factory=JobTrace)

    @property
    def num_tokens_left(self) -> int:
        """How many may still be produced."""
        return self.sampling_params.max_tokens - len(self.output_token_ids)

    def record(self, chunk: Chunk) -> None:
        """Take tokens over from a worker, before anyone else sees them."""
        self.output_token_ids += chunk.token_ids

    def ending(self, token_ids: Sequence[int]) -> Finish | None:
        """How the sequence ends with `token_ids`, as far as ids and counts tell."""
        if token_ids and token_ids[-1] in self.end_token_ids:
            return Finish(types_pb2.FINISH_REASON_STOP, stop_token_id=token_ids[-1])
        if len(self.output_token_ids) + len(token_ids) >= self.sampling_params.max_tokens:
            return Finish(types_pb2.FINISH_REASON_LENGTH)
        return None
