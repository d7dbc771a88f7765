"""A scripted tokenizer: one byte a token."""

import asyncio
import codecs
import json
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc

from mesh.errors import InvalidRequest, MeshError, ModelNotFound, WorkerUnavailable
from mesh.v1 import tokenizer_pb2, tokenizer_pb2_grpc, types_pb2

MODEL = "byte-model"
EOS = 256
VOCAB_SIZE = 257
WINDOW = 1000
Context = grpc.aio.ServicerContext[Any, Any]


@dataclass
class FakeTokenizer(tokenizer_pb2_grpc.TokenizerServiceServicer):
    """UTF-8 bytes as tokens; chat messages become `role: content` lines."""

    # Set to hold Encode back.
    encode_gate: asyncio.Event | None = None
    # Set to hold Decode back.
    decode_gate: asyncio.Event | None = None
    # Set to hold ListModels back, as a frozen process does.
    list_gate: asyncio.Event | None = None
    # Break the Detokenize call, once, after so many answers of it.
    break_after: int | None = None
    # Answers every append from this one on with an error.
    error_from: int | None = None
    # The one that ListModels tells.
    model: str = MODEL
    # Gateways may turn tokens into text themselves.
    has_byte_tokens: bool = False
    # Changes with the tokens.
    tokenizer_sha256: str = "1"
    # Raised by Encode.
    encode_error: BaseException | None = None
    # Raised by GetTokenBytes.
    token_bytes_error: MeshError | None = None
    num_encodes: int = 0
    num_calls: int = 0
    # Of the latest Detokenize call.
    num_messages: int = 0
    num_answers: int = 0
    num_open: int = 0
    default_sampling_params: types_pb2.SamplingParams = field(
        default_factory=types_pb2.SamplingParams
    )
    chats: list[tokenizer_pb2.Chat] = field(default_factory=list)
    traceparents: list[str] = field(default_factory=list)

    async def ListModels(
        self, request: tokenizer_pb2.ListModelsRequest, context: Context
    ) -> tokenizer_pb2.ListModelsResponse:
        if self.list_gate is not None:
            await self.list_gate.wait()
        model = tokenizer_pb2.ModelInfo(
            name=self.model,
            max_model_len=WINDOW,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=[EOS],
            has_chat_template=True,
            default_sampling_params=self.default_sampling_params,
            created_at_s=1,
            tokenizer_sha256=self.tokenizer_sha256,
            has_byte_tokens=self.has_byte_tokens,
        )
        return tokenizer_pb2.ListModelsResponse(models=[model])

    async def Encode(
        self, request: tokenizer_pb2.EncodeRequest, context: Context
    ) -> tokenizer_pb2.EncodeResponse:
        self.num_encodes += 1
        if self.encode_gate is not None:
            await self.encode_gate.wait()
        if self.encode_error is not None:
            raise self.encode_error
        if request.model != MODEL:
            raise ModelNotFound("unknown")
        text = request.text if request.WhichOneof("input") == "text" else self._render(request.chat)
        if not text:
            raise InvalidRequest("no tokens")
        return tokenizer_pb2.EncodeResponse(
            token_ids=text.encode(),
            bad_words=[types_pb2.TokenSequence(token_ids=w.encode()) for w in request.bad_words],
        )

    async def Decode(
        self, request: tokenizer_pb2.TokenizerServiceDecodeRequest, context: Context
    ) -> tokenizer_pb2.TokenizerServiceDecodeResponse:
        if self.decode_gate is not None:
            await self.decode_gate.wait()
        return tokenizer_pb2.TokenizerServiceDecodeResponse(
            text=b"".join(map(token_bytes, request.token_ids)).decode("utf-8", "replace"),
            token_bytes=map(token_bytes, request.token_ids) if request.return_token_bytes else (),
        )

    async def GetTokenBytes(
        self, request: tokenizer_pb2.GetTokenBytesRequest, context: Context
    ) -> tokenizer_pb2.GetTokenBytesResponse:
        if self.token_bytes_error is not None:
            raise self.token_bytes_error
        return tokenizer_pb2.GetTokenBytesResponse(
            token_bytes=map(token_bytes, range(VOCAB_SIZE)),
            special_token_ids=[EOS],
            tokenizer_sha256=self.tokenizer_sha256,
        )

    async def Detokenize(
        self, request_iterator: AsyncIterator[tokenizer_pb2.DetokenizeRequest], context: Context
    ) -> AsyncGenerator[tokenizer_pb2.DetokenizeResponse, None]:
        self.num_calls += 1
        sequences: dict[int, _Text] = {}
        self.num_answers = self.num_messages = 0
        try:
            async for request in request_iterator:
                self.num_messages += 1
                answers = [self._answer(sequences, event) for event in (request, *request.more)]
                if responses := [answer for answer in answers if answer is not None]:
                    responses[0].more.extend(responses[1:])
                    yield responses[0]
        finally:
            self.num_open -= len(sequences)

    def _answer(
        self, sequences: dict[int, "_Text"], request: tokenizer_pb2.DetokenizeRequest
    ) -> tokenizer_pb2.DetokenizeResponse | None:
        match request.WhichOneof("event"):
            case "open":
                sequences[request.sequence_id] = _Text(request.open)
                self.traceparents.append(request.open.traceparent)
                self.num_open += 1
            case "close":
                if sequences.pop(request.sequence_id, None) is not None:
                    self.num_open -= 1
            case "append":
                self.num_answers += 1
                if self.break_after is not None and self.num_answers > self.break_after:
                    self.break_after = None
                    raise WorkerUnavailable("tokenizer restarts")
                response = self._append(sequences, request)
                if self.error_from is not None and self.num_answers >= self.error_from:
                    response.error = "scripted"
                return response
        return None

    def _append(
        self, sequences: dict[int, "_Text"], request: tokenizer_pb2.DetokenizeRequest
    ) -> tokenizer_pb2.DetokenizeResponse:
        response = sequences[request.sequence_id].append(request.append)
        response.sequence_id = request.sequence_id
        if request.append.is_last or response.HasField("matched_stop"):
            del sequences[request.sequence_id]
            self.num_open -= 1
        return response

    def _render(self, chat: tokenizer_pb2.Chat) -> str:
        self.chats.append(chat)
        messages = json.loads(chat.messages_json)
        return "".join(f"{one['role']}: {one.get('content') or ''}\n" for one in messages)


class _Text:
    """Incremental text of one sequence, by the contract of the proto."""

    def __init__(self, opened: tokenizer_pb2.DetokenizeRequest.Open) -> None:
        self._options = opened
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._num_tokens = 0

    def append(
        self, append: tokenizer_pb2.DetokenizeRequest.Append
    ) -> tokenizer_pb2.DetokenizeResponse:
        response = tokenizer_pb2.DetokenizeResponse(
            token_bytes=map(token_bytes, append.describe_token_ids)
        )
        silent = len(append.token_ids) - 1 if append.ends_with_stop_token else None
        for index, token_id in enumerate(append.token_ids):
            self._num_tokens += 1
            if index == silent or (token_id == EOS and self._options.skip_special_tokens):
                continue
            self._held += self._decoder.decode(token_bytes(token_id))
            if self._match(response):
                return response
        if append.is_last:
            response.text += self._held + self._decoder.decode(b"", final=True)
            return response
        keep = self._num_ambiguous()
        ready = len(self._held) - keep
        response.text += self._held[:ready]
        self._held = self._held[ready:]
        return response

    def _match(self, response: tokenizer_pb2.DetokenizeResponse) -> bool:
        for stop in self._options.stop:
            at = self._held.find(stop)
            if at >= 0 and self._num_tokens > self._options.min_tokens:
                end = at + len(stop) if self._options.include_stop_str_in_output else at
                response.text += self._held[:end]
                response.matched_stop = stop
                response.num_tokens = self._num_tokens
                return True
        return False

    def _num_ambiguous(self) -> int:
        """Characters at the end that could still become a stop string."""
        return max(
            (
                size
                for stop in self._options.stop
                for size in range(1, len(stop))
                if self._held.endswith(stop[:size])
            ),
            default=0,
        )


def token_bytes(token_id: int) -> bytes:
    return bytes([token_id]) if token_id < EOS else b"<eos>"
