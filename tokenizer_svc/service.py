"""TokenizerService over gRPC: translate, delegate, translate back."""

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import grpc

from mesh import metrics
from mesh.errors import InvalidRequest, MeshError, MessageTooLarge, ModelNotFound
from mesh.server import MeshServer
from mesh.telemetry import Stopwatch, span
from mesh.text.token_bytes import UnknownToken
from mesh.v1 import tokenizer_pb2, tokenizer_pb2_grpc, types_pb2
from tokenizer_svc.chat_template import ChatPrompt
from tokenizer_svc.encoder import Encoder, TextPrompt
from tokenizer_svc.models import TokenizerModel
from tokenizer_svc.quiescence import Quiescence
from tokenizer_svc.sequence_table import (
    Appended,
    SequenceLimits,
    SequenceOptions,
    SequenceTable,
    Tokens,
)
from tokenizer_svc.vocabulary import Vocabulary

logger = logging.getLogger(__name__)

_SERVICE_NAME = tokenizer_pb2.DESCRIPTOR.services_by_name["TokenizerService"].full_name
_Context = grpc.aio.ServicerContext[Any, Any]


class TokenizerServicer(tokenizer_pb2_grpc.TokenizerServiceServicer):
    """Serves the tokenizers of some models; holds no state outside its calls."""

    def __init__(
        self,
        models: Sequence[TokenizerModel],
        encoder: Encoder,
        *,
        sequence_limits: SequenceLimits,
        max_bad_words: int,
        max_message_bytes: int,
    ) -> None:
        self._models: Mapping[str, TokenizerModel] = {model.name: model for model in models}
        self._encoder = encoder
        self._sequence_limits = sequence_limits
        self._max_bad_words = max_bad_words
        self._max_message_bytes = max_message_bytes
        self._quiescence = Quiescence()
        # One for each open Detokenize call.
        self._tables: set[SequenceTable] = set()

    def add_to(self, server: MeshServer) -> None:
        """Register with a server."""
        server.add(tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server, self, _SERVICE_NAME)

    @property
    def num_sequences(self) -> int:
        """Sequences that are open, over all calls."""
        return sum(map(len, self._tables))

    async def drain(self) -> None:
        """Return once no prompt is being encoded and no sequence is open."""
        await self._quiescence.wait()

    async def ListModels(
        self, request: tokenizer_pb2.ListModelsRequest, context: _Context
    ) -> tokenizer_pb2.ListModelsResponse:
        return tokenizer_pb2.ListModelsResponse(models=map(_model_info, self._models.values()))

    async def Encode(
        self, request: tokenizer_pb2.EncodeRequest, context: _Context
    ) -> tokenizer_pb2.EncodeResponse:
        stopwatch = Stopwatch()
        with span("tokenizer.encode", {"pdmesh.model": request.model}) as encode_span:
            model = self._model(request.model)
            if len(request.bad_words) > self._max_bad_words:
                raise InvalidRequest(
                    f"at most {self._max_bad_words} bad words are allowed", param="bad_words"
                )
            with self._quiescence.busy():
                encoded = await self._encoder.encode(
                    model,
                    _to_prompt(request),
                    request.bad_words,
                    request.max_prompt_tokens or model.max_model_len,
                )
            encode_span.set_attribute("pdmesh.num_prompt_tokens", len(encoded.token_ids))
        metrics.ENCODE_DURATION.record(stopwatch.elapsed_s)
        response = tokenizer_pb2.EncodeResponse(
            token_ids=encoded.token_ids,
            bad_words=[types_pb2.TokenSequence(token_ids=ids) for ids in encoded.bad_words],
            timings=[
                types_pb2.StageTiming(
                    stage=types_pb2.STAGE_TOKENIZE, duration_ms=stopwatch.elapsed_ms
                )
            ],
        )
        self._check_size(response)
        return response

    async def Decode(
        self, request: tokenizer_pb2.TokenizerServiceDecodeRequest, context: _Context
    ) -> tokenizer_pb2.TokenizerServiceDecodeResponse:
        vocabulary = self._model(request.model).vocabulary
        try:
            with self._quiescence.busy():
                response = await self._encoder.run(lambda: _decode(vocabulary, request))
        except UnknownToken as error:
            raise InvalidRequest(str(error), param="token_ids") from error
        self._check_size(response)
        return response

    async def GetTokenBytes(
        self, request: tokenizer_pb2.GetTokenBytesRequest, context: _Context
    ) -> tokenizer_pb2.GetTokenBytesResponse:
        model = self._model(request.model)
        if not model.vocabulary.is_byte_level:
            raise InvalidRequest("the text of a token depends on its neighbours", param="model")
        response = tokenizer_pb2.GetTokenBytesResponse(
            token_bytes=model.vocabulary.token_bytes,
            special_token_ids=sorted(model.vocabulary.special_ids),
            tokenizer_sha256=model.tokenizer_sha256,
        )
        self._check_size(response)
        return response

    async def Detokenize(
        self,
        request_iterator: AsyncIterator[tokenizer_pb2.DetokenizeRequest],
        context: _Context,
    ) -> AsyncGenerator[tokenizer_pb2.DetokenizeResponse, None]:
        table = SequenceTable(self._models, self._sequence_limits, self._quiescence)
        self._tables.add(table)
        try:
            # The next request is read once the answer is written: a caller that does
            # not read is not read from, and nothing piles up here.
            async for request in request_iterator:
                answers = [_answer(table, event) for event in (request, *request.more)]
                if responses := [answer for answer in answers if answer is not None]:
                    responses[0].more.extend(responses[1:])
                    yield responses[0]
        finally:
            self._tables.discard(table)
            table.close()

    def _model(self, name: str) -> TokenizerModel:
        model = self._models.get(name)
        if model is None:
            raise ModelNotFound(f"the model {name!r} does not exist", param="model")
        return model

    def _check_size(
        self,
        response: (
            tokenizer_pb2.EncodeResponse
            | tokenizer_pb2.TokenizerServiceDecodeResponse
            | tokenizer_pb2.GetTokenBytesResponse
        ),
    ) -> None:
        size = response.ByteSize()
        if size > self._max_message_bytes:
            raise MessageTooLarge(
                f"the answer has {size} bytes, more than the {self._max_message_bytes} of a"
                " message: ask for less at once"
            )


def _model_info(model: TokenizerModel) -> tokenizer_pb2.ModelInfo:
    return tokenizer_pb2.ModelInfo(
        name=model.name,
        max_model_len=model.max_model_len,
        vocab_size=model.vocabulary.size,
        eos_token_ids=model.eos_token_ids,
        tokenizer_sha256=model.tokenizer_sha256,
        has_chat_template=model.renderer is not None,
        default_sampling_params=types_pb2.SamplingParams(**asdict(model.sampling_defaults)),
        created_at_s=model.created_at_s,
        has_byte_tokens=model.vocabulary.is_byte_level,
    )


def _to_prompt(request: tokenizer_pb2.EncodeRequest) -> TextPrompt | ChatPrompt:
    match request.WhichOneof("input"):
        case "text":
            return TextPrompt(request.text, request.allow_special_tokens)
        case "chat":
            chat = request.chat
            has_choice = chat.HasField("add_generation_prompt")
            return ChatPrompt(
                chat.messages_json,
                chat.tools_json,
                chat.template_kwargs_json,
                chat.add_generation_prompt if has_choice else None,
                chat.continue_final_message,
            )
        case _:
            raise InvalidRequest("neither text nor chat is set")


def _answer(
    table: SequenceTable, request: tokenizer_pb2.DetokenizeRequest
) -> tokenizer_pb2.DetokenizeResponse | None:
    """Answer one event, if it is to be; what goes wrong ends its sequence only."""
    sequence_id = request.sequence_id
    try:
        match request.WhichOneof("event"):
            case "open":
                table.open(sequence_id, _to_options(request.open))
                return None
            case "append":
                return _to_response(sequence_id, table.append(sequence_id, _to_tokens(request)))
            case "close":
                table.end(sequence_id)
                return None
            case _:
                raise InvalidRequest("no event is set")
    except (MeshError, UnknownToken) as error:
        message = str(error)
    except Exception:
        logger.exception("detokenization failed")
        message = "internal error"
    table.end(sequence_id)
    return tokenizer_pb2.DetokenizeResponse(sequence_id=sequence_id, error=message)


def _to_options(event: tokenizer_pb2.DetokenizeRequest.Open) -> SequenceOptions:
    return SequenceOptions(
        model=event.model,
        prompt_token_ids=event.prompt_token_ids,
        skip_special_tokens=event.skip_special_tokens,
        stop=tuple(event.stop),
        include_stop_str_in_output=event.include_stop_str_in_output,
        min_tokens=event.min_tokens,
        return_token_bytes=event.return_token_bytes,
        traceparent=event.traceparent,
    )


def _to_tokens(request: tokenizer_pb2.DetokenizeRequest) -> Tokens:
    event = request.append
    return Tokens(
        token_ids=event.token_ids,
        is_last=event.is_last,
        ends_with_stop_token=event.ends_with_stop_token,
        describe_token_ids=event.describe_token_ids,
    )


def _to_response(sequence_id: int, appended: Appended) -> tokenizer_pb2.DetokenizeResponse:
    delta = appended.delta
    return tokenizer_pb2.DetokenizeResponse(
        sequence_id=sequence_id,
        text=delta.text,
        matched_stop=delta.matched_stop,
        num_tokens=delta.num_tokens if delta.matched_stop is not None else 0,
        token_bytes=appended.token_bytes,
        duration_ms=appended.duration_ms,
    )


def _decode(
    vocabulary: Vocabulary, request: tokenizer_pb2.TokenizerServiceDecodeRequest
) -> tokenizer_pb2.TokenizerServiceDecodeResponse:
    token_ids = list(request.token_ids)
    vocabulary.check(token_ids)
    wanted = token_ids if request.return_token_bytes else []
    return tokenizer_pb2.TokenizerServiceDecodeResponse(
        text=vocabulary.decode(token_ids, skip_special_tokens=request.skip_special_tokens),
        token_bytes=[vocabulary.token_bytes[token_id] for token_id in wanted],
    )
