"""/v1/chat/completions: its request and its answer."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Self

from pydantic import Field

from gateway.generation import Delta, GenerationRequest, Job
from gateway.openai import responses
from gateway.openai.api import FINISH_REASONS, Api
from gateway.openai.fields import GenerationFields
from gateway.openai.logprobs import chat_logprobs
from gateway.openai.messages import ChatFields
from gateway.openai.responses import (
    AnswerMessage,
    ChatChunkChoice,
    ChatLogprobs,
    FinishReason,
    MessageDelta,
    TokenLogprob,
)
from gateway.openai.unsupported import CHAT, refuse_unsupported
from gateway.sampling import MAX_LOGPROBS
from mesh.errors import InvalidRequest
from mesh.v1 import tokenizer_pb2


class ChatRequest(GenerationFields, ChatFields):
    """The body of a chat completion."""

    tool_choice: str | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @classmethod
    def parse(cls, payload: Mapping[str, Any]) -> Self:
        refuse_unsupported(payload, CHAT)
        return super().parse(payload)

    def generation(self, model: tokenizer_pb2.ModelInfo) -> GenerationRequest:
        sampling_params = self.sampling_params(model.default_sampling_params)
        if self.logprobs:
            sampling_params.num_logprobs = self.top_logprobs or 0
        return self.request(
            # "none" forbids the model to use tools: it does not get to see them.
            prompts=(self.chat_prompt(with_tools=self.tool_choice != "none"),),
            prompt_param="messages",
            sampling_params=sampling_params,
        )

    def choice(self, index: int, job: Job) -> "ChatChoice":
        return ChatChoice(index, self.top_logprobs or 0 if self.logprobs else None)

    def _check_together(self) -> None:
        super()._check_together()
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs to be true", param="top_logprobs")


class ChatChoice:
    """One choice of a chat completion."""

    def __init__(self, index: int, num_top: int | None) -> None:
        self._index = index
        # None: no log-probabilities.
        self._num_top = num_top
        self._has_begun = False
        self._text: list[str] = []
        self._logprobs: list[TokenLogprob] = []
        self._finish_reason: FinishReason | None = None

    def chunks(self, delta: Delta) -> Sequence[ChatChunkChoice]:
        chunks = []
        if not self._has_begun:
            self._has_begun = True
            chunks.append(self._chunk({"role": "assistant", "content": ""}))
        logprobs = self._entries(delta)
        if delta.text or logprobs:
            chunks.append(self._chunk({"content": delta.text}, logprobs))
        if delta.finish is not None:
            chunks.append(self._chunk({}, finish_reason=FINISH_REASONS[delta.finish.reason]))
        return chunks

    def add(self, delta: Delta) -> None:
        self._text.append(delta.text)
        self._logprobs += self._entries(delta)
        if delta.finish is not None:
            self._finish_reason = FINISH_REASONS[delta.finish.reason]

    def answer(self) -> responses.ChatChoice:
        assert self._finish_reason is not None, "the choice is finished"
        message: AnswerMessage = {
            "role": "assistant",
            "content": "".join(self._text),
            "refusal": None,
        }
        return {
            "index": self._index,
            "message": message,
            "logprobs": self._logprobs_object(self._logprobs),
            "finish_reason": self._finish_reason,
        }

    def _entries(self, delta: Delta) -> list[TokenLogprob]:
        return [] if self._num_top is None else chat_logprobs(delta, self._num_top)

    def _chunk(
        self,
        delta: MessageDelta,
        logprobs: list[TokenLogprob] | None = None,
        finish_reason: FinishReason | None = None,
    ) -> ChatChunkChoice:
        return {
            "index": self._index,
            "delta": delta,
            "logprobs": self._logprobs_object(logprobs) if logprobs else None,
            "finish_reason": finish_reason,
        }

    def _logprobs_object(self, entries: list[TokenLogprob]) -> ChatLogprobs | None:
        return None if self._num_top is None else {"content": entries, "refusal": None}


CHAT_API = Api(
    operation="chat",
    id_prefix="chatcmpl-",
    answer_object="chat.completion",
    chunk_object="chat.completion.chunk",
    parse=ChatRequest.parse,
)
