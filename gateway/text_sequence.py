"""The text of one job as its tokens come, wherever they are turned into it."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from gateway.generation import Chunk, Delta, Finish, Job
from mesh.v1 import types_pb2

# Enough to tell whether the first delta continues a word.
_NUM_CONTEXT_TOKENS = 16


@dataclass(frozen=True)
class NewText:
    """What some tokens made final."""

    text: str
    matched_stop: str | None
    # With a match: how many of all tokens belong to the text.
    num_tokens: int
    # Of the tokens that were to be described.
    token_bytes: Sequence[bytes]


class TextSequence(ABC):
    """Text deltas of one job, each answered in turn. An async context manager."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.is_over = False
        self._num_tokens = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    async def append(self, chunk: Chunk) -> Delta:
        """The text that `chunk` makes final; the delta finishes when a stop string matched."""
        timeline = self.job.trace.timeline
        timeline.enter(types_pb2.STAGE_DETOKENIZE)
        described = self._described_ids(chunk)
        new = await self.to_text(chunk, described)
        delta = self._to_delta(chunk, new, described)
        timeline.enter(types_pb2.STAGE_NETWORK)
        return delta

    @abstractmethod
    async def to_text(self, chunk: Chunk, described_ids: Sequence[int]) -> NewText:
        """Turn the next tokens into text; raises InternalError where that fails."""

    @abstractmethod
    def close(self) -> None:
        """Forget the sequence, which may be over."""

    @property
    def context(self) -> Sequence[int]:
        """The end of the prompt: what the first delta may continue."""
        return self.job.prompt_token_ids[-_NUM_CONTEXT_TOKENS:]

    def _described_ids(self, chunk: Chunk) -> list[int]:
        """The tokens that log-probabilities mention, each once, in order."""
        ids: dict[int, None] = {}
        if not self._num_tokens and self.job.sampling_params.HasField("num_prompt_logprobs"):
            ids.update(dict.fromkeys(self.job.prompt_token_ids))
        for token in (*chunk.prompt_logprobs, *chunk.logprobs):
            ids[token.token_id] = None
            ids.update((candidate.token_id, None) for candidate in token.top)
        return list(ids)

    def _to_delta(self, chunk: Chunk, new: NewText, described: Sequence[int]) -> Delta:
        self._num_tokens += len(chunk.token_ids)
        num_new, text, finish = len(chunk.token_ids), new.text, chunk.finish
        if self.job.request.is_prompt_only:
            num_new, text = 0, ""
            finish = finish and Finish(types_pb2.FINISH_REASON_LENGTH)
        elif new.matched_stop is not None:
            # Tokens behind the match never existed for the client.
            num_new -= max(0, self._num_tokens - new.num_tokens)
            finish = Finish(types_pb2.FINISH_REASON_STOP, stop_string=new.matched_stop)
        self.is_over = finish is not None
        self.job.num_completion_tokens += num_new
        return Delta(
            text=text,
            token_ids=chunk.token_ids[:num_new],
            logprobs=chunk.logprobs[:num_new],
            prompt_logprobs=chunk.prompt_logprobs,
            token_bytes=dict(zip(described, new.token_bytes, strict=False)),
            finish=finish,
        )
