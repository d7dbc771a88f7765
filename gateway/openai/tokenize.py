"""/tokenize and /detokenize, in vLLM's shapes."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from gateway.generation import ChatPrompt, TextPrompt
from gateway.openai.fields import TokenId, validate
from gateway.openai.messages import ChatFields
from gateway.openai.responses import Tokenized
from gateway.openai.unsupported import TOKENIZE_CHAT, refuse_unsupported
from mesh.v1 import tokenizer_pb2

ModelName = Annotated[str, Field(min_length=1)]


def _to_bool(value: object) -> object:
    """1 == True in Python, and so for a literal."""
    if value is not None and not isinstance(value, bool):
        raise ValueError("should be a boolean")
    return value


class TokenizeTextRequest(BaseModel):
    """Text to encode; without a model, for the first one that is served."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: ModelName | None = None
    prompt: str
    # A tokenizer adds what its own configuration says.
    add_special_tokens: Annotated[Literal[True] | None, BeforeValidator(_to_bool)] = None
    return_token_strs: bool | None = None

    def to_prompt(self) -> TextPrompt:
        return TextPrompt(self.prompt)


class TokenizeChatRequest(ChatFields):
    """Messages to render and encode."""

    model: ModelName | None = None
    # Templates write them themselves.
    add_special_tokens: Annotated[Literal[False] | None, BeforeValidator(_to_bool)] = None
    return_token_strs: bool | None = None

    def to_prompt(self) -> ChatPrompt:
        return self.chat_prompt()


class DetokenizeRequest(BaseModel):
    """Ids to decode."""

    model_config = ConfigDict(strict=True, extra="ignore")

    model: ModelName | None = None
    tokens: list[TokenId]


def parse_tokenize(payload: Mapping[str, Any]) -> TokenizeTextRequest | TokenizeChatRequest:
    if "messages" in payload:
        refuse_unsupported(payload, TOKENIZE_CHAT)
        return validate(TokenizeChatRequest, payload)
    return validate(TokenizeTextRequest, payload)


def parse_detokenize(payload: Mapping[str, Any]) -> DetokenizeRequest:
    return validate(DetokenizeRequest, payload)


def tokenize_answer(
    token_ids: Sequence[int], model: tokenizer_pb2.ModelInfo, token_bytes: Sequence[bytes] | None
) -> Tokenized:
    return {
        "count": len(token_ids),
        "max_model_len": model.max_model_len,
        "tokens": list(token_ids),
        "token_strs": (
            None if token_bytes is None else [one.decode("utf-8", "replace") for one in token_bytes]
        ),
    }
