"""The shapes of all answers: what the code that builds them is checked against, and what
`/openapi.json` says of them.
"""

# pydantic reads these, which typing.TypedDict does not allow before Python 3.12.
from typing import Literal, NotRequired

from typing_extensions import TypedDict

FinishReason = Literal["stop", "length"]
ServiceTier = Literal["default", "flex"]


class PromptTokensDetails(TypedDict):
    """What of the prompt did not have to be computed."""

    cached_tokens: int


class Usage(TypedDict):
    """Tokens of a request, over all its choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    # Absent while nobody knows.
    prompt_tokens_details: NotRequired[PromptTokensDetails]


class TopLogprob(TypedDict):
    """A token that could have been chosen."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """A token of the answer."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(TypedDict):
    """Of each token of a chat's answer."""

    content: list[TokenLogprob]
    refusal: None


class AnswerMessage(TypedDict):
    """What the assistant said."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(TypedDict):
    """One choice of a chat completion."""

    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason


class MessageDelta(TypedDict, total=False):
    """What a chunk adds to the message."""

    role: Literal["assistant"]
    content: str


class ChatChunkChoice(TypedDict):
    """One choice in a chunk."""

    index: int
    delta: MessageDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None


class ChatCompletion(TypedDict):
    """The answer of a chat."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    service_tier: NotRequired[ServiceTier]


class ChatCompletionChunk(TypedDict):
    """An event of a streamed chat; the one with the usage has no choices."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]
    service_tier: NotRequired[ServiceTier]


class CompletionLogprobs(TypedDict):
    """Parallel lists, one entry a token; null where nothing came before a token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(TypedDict):
    """One choice of a completion."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason


class CompletionChunkChoice(TypedDict):
    """One choice in a chunk."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None


class Completion(TypedDict):
    """The answer of a completion."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage
    service_tier: NotRequired[ServiceTier]


class CompletionChunk(TypedDict):
    """An event of a streamed completion; the one with the usage has no choices."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChunkChoice]
    usage: NotRequired[Usage | None]
    service_tier: NotRequired[ServiceTier]


class Model(TypedDict):
    """A model that is served."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    # Tokens of prompt and answer together.
    max_model_len: int


class ModelList(TypedDict):
    """All of them."""

    object: Literal["list"]
    data: list[Model]


class Tokenized(TypedDict):
    """Ids of a prompt."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(TypedDict):
    """The text of ids."""

    prompt: str


class Live(TypedDict):
    """The process answers."""

    status: Literal["ok"]


class Health(TypedDict):
    """Whether requests can be served, and why not."""

    status: Literal["ok", "unavailable"]
    problems: list[str]
    # By role.
    workers: dict[str, int]


class Unhealthy(Health):
    """The same as an error."""

    error: "ErrorDetails"


class ErrorDetails(TypedDict):
    """What went wrong."""

    message: str
    type: str
    # The parameter that is to blame.
    param: str | None
    code: str | None


class Error(TypedDict):
    """Every failure, on every path, and the last event but one of a stream that failed."""

    error: ErrorDetails
