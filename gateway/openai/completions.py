"""/v1/completions: its request and its answer."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, WithJsonSchema

from gateway.generation import Delta, GenerationRequest, Job, Prompt, TextPrompt, TokenPrompt
from gateway.openai import responses
from gateway.openai.api import FINISH_REASONS, Api
from gateway.openai.fields import MAX_TOKENS, GenerationFields
from gateway.openai.logprobs import LogprobLists, extend, no_logprobs
from gateway.openai.responses import CompletionChunkChoice, CompletionLogprobs, FinishReason
from gateway.openai.unsupported import COMPLETIONS, refuse_unsupported
from gateway.sampling import MAX_LOGPROBS
from mesh.errors import InvalidRequest
from mesh.v1 import tokenizer_pb2

# What OpenAI and vLLM produce when a completion does not say how much it wants.
_DEFAULT_MAX_TOKENS = 16
_MAX_TOKEN_ID = 2**32 - 1
# Far more than a request may have choices for; each costs before those are counted.
_MAX_PROMPTS = 4096


def _to_prompts(value: object) -> tuple[Prompt, ...]:
    """Text, several texts, token ids, or several lists of token ids."""
    if isinstance(value, str):
        return (_text_prompt(value),)
    if isinstance(value, list) and value:
        kinds = set(map(type, value))
        if kinds == {int}:
            return (_token_prompt(value),)
        if len(value) > _MAX_PROMPTS:
            raise InvalidRequest(f"at most {_MAX_PROMPTS} prompts a request", param="prompt")
        if kinds == {str}:
            return tuple(_text_prompt(text) for text in value)
        if kinds == {list}:
            return tuple(_token_prompt(ids) for ids in value)
        raise _bad_prompt()
    if value == []:
        raise InvalidRequest("prompt should not be empty", param="prompt")
    raise _bad_prompt()


def _text_prompt(text: str) -> TextPrompt:
    if not text:
        raise InvalidRequest("prompt should not be empty", param="prompt")
    return TextPrompt(text)


def _token_prompt(token_ids: list[Any]) -> TokenPrompt:
    if not token_ids:
        raise InvalidRequest("prompt should not be empty", param="prompt")
    if set(map(type, token_ids)) != {int}:
        raise _bad_prompt()
    if min(token_ids) < 0 or max(token_ids) > _MAX_TOKEN_ID:
        raise InvalidRequest("prompt holds a number that is no token id", param="prompt")
    return TokenPrompt(tuple(token_ids))


def _bad_prompt() -> InvalidRequest:
    return InvalidRequest(
        "prompt should be a string, a list of strings, a list of token ids or a list of such lists",
        param="prompt",
    )


_TEXT_SCHEMA = {"type": "string", "minLength": 1}
_IDS_SCHEMA = {
    "type": "array",
    "items": {"type": "integer", "minimum": 0, "maximum": _MAX_TOKEN_ID},
    "minItems": 1,
}
Prompts = Annotated[
    Any,
    BeforeValidator(_to_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                _TEXT_SCHEMA,
                {
                    "type": "array",
                    "items": _TEXT_SCHEMA,
                    "minItems": 1,
                    "maxItems": _MAX_PROMPTS,
                },
                _IDS_SCHEMA,
                {"type": "array", "items": _IDS_SCHEMA, "minItems": 1, "maxItems": _MAX_PROMPTS},
            ]
        }
    ),
]


class CompletionRequest(GenerationFields):
    """The body of a completion."""

    prompt: Prompts
    # 0 asks for what `echo` says about the prompt, and nothing after it.
    max_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @classmethod
    def parse(cls, payload: Mapping[str, Any]) -> Self:
        refuse_unsupported(payload, COMPLETIONS)
        return super().parse(payload)

    def generation(self, model: tokenizer_pb2.ModelInfo) -> GenerationRequest:
        sampling_params = self.sampling_params(model.default_sampling_params)
        if self.logprobs is not None:
            sampling_params.num_logprobs = self.logprobs
            if self.echo:
                sampling_params.num_prompt_logprobs = self.logprobs
        request = self.request(
            prompts=self.prompt,
            prompt_param="prompt",
            sampling_params=sampling_params,
            default_max_tokens=_DEFAULT_MAX_TOKENS,
            echo=bool(self.echo),
        )
        if self.max_tokens == 0:
            return replace(request, max_tokens=1, is_prompt_only=True)
        return request

    def _check_together(self) -> None:
        super()._check_together()
        if self.max_tokens == 0 and not self.echo:
            raise InvalidRequest(
                "max_tokens should be at least 1, or 0 with echo", param="max_tokens"
            )

    def choice(self, index: int, job: Job) -> "CompletionChoice":
        return CompletionChoice(index, self.logprobs, job if self.echo else None)


class CompletionChoice:
    """One choice of a completion."""

    def __init__(self, index: int, num_top: int | None, echoed: Job | None = None) -> None:
        """`echoed`: whose prompt the text begins with."""
        self._index = index
        # Until it has been said.
        self._echoed = echoed
        self._logprobs = None if num_top is None else LogprobLists(num_top)
        self._text: list[str] = []
        self._lists = no_logprobs()
        self._finish_reason: FinishReason | None = None

    def chunks(self, delta: Delta) -> Sequence[CompletionChunkChoice]:
        chunks = []
        if (job := self._take_echoed()) is not None:
            chunks.append(self._chunk(job.prompt_text, self._prompt_logprobs(job, delta), None))
        lists = self._take_logprobs(delta)
        finish_reason = _finish_reason(delta)
        if delta.text or lists is not None or finish_reason is not None:
            chunks.append(self._chunk(delta.text, lists, finish_reason))
        return chunks

    def add(self, delta: Delta) -> None:
        if (job := self._take_echoed()) is not None:
            self._text.append(job.prompt_text)
            self._keep(self._prompt_logprobs(job, delta))
        self._text.append(delta.text)
        self._keep(self._take_logprobs(delta))
        self._finish_reason = _finish_reason(delta)

    def answer(self) -> responses.CompletionChoice:
        assert self._finish_reason is not None, "the choice is finished"
        return {
            "index": self._index,
            "text": "".join(self._text),
            "logprobs": None if self._logprobs is None else self._lists,
            "finish_reason": self._finish_reason,
        }

    def _take_echoed(self) -> Job | None:
        echoed, self._echoed = self._echoed, None
        return echoed

    def _prompt_logprobs(self, job: Job, delta: Delta) -> CompletionLogprobs | None:
        if self._logprobs is None:
            return None
        return self._logprobs.prompt_lists(job.prompt_token_ids, delta)

    def _keep(self, lists: CompletionLogprobs | None) -> None:
        if lists is not None:
            extend(self._lists, lists)

    def _take_logprobs(self, delta: Delta) -> CompletionLogprobs | None:
        if self._logprobs is None or not delta.logprobs:
            return None
        return self._logprobs.lists(delta)

    def _chunk(
        self,
        text: str,
        logprobs: CompletionLogprobs | None,
        finish_reason: FinishReason | None,
    ) -> CompletionChunkChoice:
        return {
            "index": self._index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }


def _finish_reason(delta: Delta) -> FinishReason | None:
    return None if delta.finish is None else FINISH_REASONS[delta.finish.reason]


COMPLETIONS_API = Api(
    operation="text_completion",
    id_prefix="cmpl-",
    answer_object="text_completion",
    chunk_object="text_completion",
    parse=CompletionRequest.parse,
)
