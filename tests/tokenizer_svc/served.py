"""A tokenizer service behind a real port, and sequences like the gateway's."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import grpc
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor

from mesh.client import DEFAULT_MAX_MESSAGE_BYTES, Channels
from mesh.server import MeshServer
from mesh.v1 import tokenizer_pb2, tokenizer_pb2_grpc
from tests.tokenizer_svc.synthetic import bytes_tokenizer, encode
from tokenizer_svc.encoder import Encoder
from tokenizer_svc.guarded_tokenizer import load_tokenizer
from tokenizer_svc.models import TokenizerModel
from tokenizer_svc.sequence_table import SequenceLimits
from tokenizer_svc.service import TokenizerServicer

Stub: TypeAlias = "tokenizer_pb2_grpc.TokenizerServiceAsyncStub"
Request = tokenizer_pb2.DetokenizeRequest
Response = tokenizer_pb2.DetokenizeResponse
BYTES = load_tokenizer(bytes_tokenizer())


@asynccontextmanager
async def serving(
    models: Sequence[TokenizerModel],
    *,
    max_open_sequences: int = 100,
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
) -> AsyncIterator[tuple[Stub, TokenizerServicer]]:
    encoder = Encoder(num_threads=2, max_waiting=100)
    servicer = TokenizerServicer(
        models,
        encoder,
        sequence_limits=SequenceLimits(max_open_sequences=max_open_sequences),
        max_bad_words=256,
        max_message_bytes=max_message_bytes,
    )
    server = MeshServer(max_message_bytes=max_message_bytes)
    servicer.add_to(server)
    async with Channels() as channels:
        channel = channels.get(await server.start())
        yield tokenizer_pb2_grpc.TokenizerServiceStub(channel), servicer
    await server.stop(0)
    encoder.close()


class EndedSpans(SpanProcessor):
    """Spans in the order in which they ended."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[ReadableSpan] = asyncio.Queue()

    def on_end(self, span: ReadableSpan) -> None:
        self.queue.put_nowait(span)


class Sequences:
    """One Detokenize call: what to send, and the answers as they come."""

    def __init__(self, stub: Stub) -> None:
        self._call = stub.Detokenize()

    async def open(self, sequence_id: int, model: str = "bytes", **options: Any) -> None:
        event = Request.Open(model=model, **options)
        await self._call.write(Request(sequence_id=sequence_id, open=event))

    async def send(self, sequence_id: int, token_ids: list[int], **options: Any) -> None:
        event = Request.Append(token_ids=token_ids, **options)
        await self._call.write(Request(sequence_id=sequence_id, append=event))

    async def close(self, sequence_id: int) -> None:
        await self._call.write(Request(sequence_id=sequence_id, close=Request.Close()))

    async def answer(self) -> Response:
        response = await self._call.read()
        assert isinstance(response, Response)
        return response

    async def append(self, sequence_id: int, token_ids: list[int], **options: Any) -> Response:
        await self.send(sequence_id, token_ids, **options)
        response = await self.answer()
        assert response.sequence_id == sequence_id
        return response

    async def finish(self) -> None:
        await self._call.done_writing()
        assert await self._call.read() is grpc.aio.EOF

    def cancel(self) -> None:
        self._call.cancel()


def ids(text: str) -> list[int]:
    """One token per byte, as in the model "bytes"."""
    return encode(BYTES, text)
