"""What the HTTP route needs from an endpoint's request and answer."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gateway.generation import Delta, GenerationRequest, Job
from gateway.openai.responses import FinishReason, PromptTokensDetails, ServiceTier, Usage
from mesh.v1 import tokenizer_pb2, types_pb2

FINISH_REASONS: "dict[types_pb2.FinishReason.ValueType, FinishReason]" = {
    types_pb2.FINISH_REASON_STOP: "stop",
    types_pb2.FINISH_REASON_LENGTH: "length",
}


class Choice(Protocol):
    """One choice of the answer, as it grows."""

    def chunks(self, delta: Delta) -> Sequence[Mapping[str, object]]:
        """What a stream says about `delta`; nothing where there is nothing to say."""
        ...

    def add(self, delta: Delta) -> None:
        """Take `delta` into the whole answer."""
        ...

    def answer(self) -> Mapping[str, object]:
        """The whole choice, once it is finished."""
        ...


class ApiRequest(Protocol):
    """A validated request of one endpoint."""

    @property
    def model(self) -> str: ...

    def is_stream(self) -> bool: ...

    def includes_usage(self) -> bool:
        """A chunk with the usage before the end of the stream."""
        ...

    def has_continuous_usage(self) -> bool:
        """The usage so far in every chunk."""
        ...

    def served_tier(self) -> ServiceTier | None:
        """Which tier serves the client, if it has named one."""
        ...

    def generation(self, model: tokenizer_pb2.ModelInfo) -> GenerationRequest: ...

    def choice(self, index: int, job: Job) -> Choice: ...


@dataclass(frozen=True)
class Api:
    """One endpoint: its names and how its bodies are read."""

    # OpenTelemetry's gen_ai.operation.name.
    operation: str
    id_prefix: str
    answer_object: str
    chunk_object: str
    parse: "Parse"


class Parse(Protocol):
    def __call__(self, payload: Mapping[str, Any]) -> ApiRequest: ...


def usage_object(prompt_tokens: int, completion_tokens: int, cached_tokens: int | None) -> Usage:
    """OpenAI's usage; without details where nobody knows what was cached."""
    usage = Usage(
        prompt_tokens=prompt_tokens,
        completion_tokens=completion_tokens,
        total_tokens=prompt_tokens + completion_tokens,
    )
    if cached_tokens is not None:
        usage["prompt_tokens_details"] = PromptTokensDetails(cached_tokens=cached_tokens)
    return usage
