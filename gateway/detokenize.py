"""Token ids to text: here where tokens are bytes, else by the multiplexed Detokenize call."""

import asyncio
import itertools
import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any, Self

import grpc

from gateway.generation import Chunk, Job
from gateway.local_text import LocalText
from gateway.patience import Patience
from gateway.text_sequence import NewText, TextSequence
from mesh.client import settled
from mesh.errors import DeadlineExceeded, InternalError
from mesh.telemetry import current_traceparent
from mesh.text.token_bytes import TokenBytes
from mesh.v1 import tokenizer_pb2, tokenizer_pb2_grpc

logger = logging.getLogger(__name__)

_APPEND_TIMEOUT_S = 10.0
_FIRST_BACKOFF_S = 0.05
_MAX_BACKOFF_S = 1.0
# Of events in one message; their answers are at most some times as long.
_MAX_BATCH_BYTES = 1 << 18


class Detokenizer:
    """Owns the one call that serves all sequences, and makes it again when it breaks.

    A sequence survives that: it is opened again and its tokens are sent once more. Those of
    models whose tokens are bytes need no call.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        token_bytes: Mapping[str, TokenBytes] = MappingProxyType({}),
        *,
        append_timeout_s: float = _APPEND_TIMEOUT_S,
    ) -> None:
        """`token_bytes` has those models, by name; it may change."""
        self._token_bytes = token_bytes
        self._channel = channel
        self._stub = tokenizer_pb2_grpc.TokenizerServiceStub(channel)
        self._append_timeout_s = append_timeout_s
        self._sequence_ids = itertools.count(1)
        self._connection: _Connection | None = None
        self._is_connected = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._stay_connected(), name="detokenizer")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    def open(self, job: Job) -> TextSequence:
        """The text of one job, an async context manager."""
        if (tokens := self._token_bytes.get(job.model)) is not None:
            return LocalText(job, tokens)
        return RemoteText(self, next(self._sequence_ids), job, self._append_timeout_s)

    async def connection(self) -> "_Connection":
        """The current connection; waits while there is none."""
        while self._connection is None:
            await self._is_connected.wait()
        return self._connection

    async def _stay_connected(self) -> None:
        backoff_s = _FIRST_BACKOFF_S
        while True:
            await settled(self._channel)
            # The one call without a deadline: it lives as long as the gateway.
            connection = _Connection(self._stub.Detokenize(wait_for_ready=True))
            self._connection = connection
            self._is_connected.set()
            try:
                await connection.run()
            except grpc.aio.AioRpcError as error:
                logger.warning(
                    "detokenizer connection lost",
                    extra={"code": error.code().name, "details": error.details()},
                )
            finally:
                self._connection = None
                self._is_connected.clear()
                connection.close()
            if connection.was_useful:
                backoff_s = _FIRST_BACKOFF_S
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, _MAX_BACKOFF_S)


class RemoteText(TextSequence):
    """Asks the tokenizer, and survives it: a new one is told everything again."""

    def __init__(
        self, detokenizer: Detokenizer, sequence_id: int, job: Job, append_timeout_s: float
    ) -> None:
        super().__init__(job)
        self._detokenizer = detokenizer
        self._id = sequence_id
        self._append_timeout_s = append_timeout_s
        self._patience = Patience()
        self._connection: _Connection | None = None
        # What a tokenizer that knows nothing of the sequence must be told.
        self._token_ids: list[int] = []
        self._num_chars = 0

    def close(self) -> None:
        self._patience.close()
        if self._connection is not None and not self.is_over:
            self._connection.send(
                tokenizer_pb2.DetokenizeRequest(
                    sequence_id=self._id, close=tokenizer_pb2.DetokenizeRequest.Close()
                )
            )

    async def to_text(self, chunk: Chunk, described_ids: Sequence[int]) -> NewText:
        response = await self._exchange(chunk, described_ids)
        if response.error:
            raise InternalError(f"detokenization failed: {response.error}")
        matched_stop = response.matched_stop if response.HasField("matched_stop") else None
        return NewText(response.text, matched_stop, response.num_tokens, response.token_bytes)

    async def _exchange(
        self, chunk: Chunk, described: Sequence[int]
    ) -> tokenizer_pb2.DetokenizeResponse:
        num_known = len(self._token_ids)
        self._token_ids += chunk.token_ids
        append = tokenizer_pb2.DetokenizeRequest.Append(
            is_last=chunk.finish is not None,
            ends_with_stop_token=(
                chunk.finish is not None and chunk.finish.stop_token_id is not None
            ),
            describe_token_ids=described,
        )
        try:
            with self._patience.for_(self._append_timeout_s):
                while True:
                    try:
                        return await self._send(append, num_known)
                    except _ConnectionLost:
                        continue
        except TimeoutError:
            raise DeadlineExceeded(
                f"the tokenizer did not answer within {self._append_timeout_s:g} s"
            ) from None

    async def _send(
        self, append: tokenizer_pb2.DetokenizeRequest.Append, num_known: int
    ) -> tokenizer_pb2.DetokenizeResponse:
        connection = await self._detokenizer.connection()
        is_new = connection is not self._connection
        del append.token_ids[:]
        append.token_ids.extend(self._token_ids if is_new else self._token_ids[num_known:])
        messages = [tokenizer_pb2.DetokenizeRequest(sequence_id=self._id, append=append)]
        if is_new:
            messages.insert(0, self._open_message())
        self._connection = connection
        try:
            response = await connection.exchange(self._id, messages)
        except _ConnectionLost:
            self._connection = None
            raise
        if is_new:
            # The client has the beginning of the text already.
            response.text = response.text[self._num_chars :]
        self._num_chars += len(response.text)
        return response

    def _open_message(self) -> tokenizer_pb2.DetokenizeRequest:
        request = self.job.request
        return tokenizer_pb2.DetokenizeRequest(
            sequence_id=self._id,
            open=tokenizer_pb2.DetokenizeRequest.Open(
                model=self.job.model,
                prompt_token_ids=self.context,
                skip_special_tokens=request.skip_special_tokens,
                stop=request.stop,
                include_stop_str_in_output=request.include_stop_str_in_output,
                min_tokens=self.job.sampling_params.min_tokens,
                return_token_bytes=self.job.sampling_params.HasField("num_logprobs"),
                traceparent=current_traceparent() or "",
            ),
        )


class _ConnectionLost(Exception):
    """The call broke before it answered."""


class _Connection:
    """One Detokenize call and who waits for its answers.

    A cancelled `read` or `write` cancels the whole call, so both are left to the
    connection's own tasks and never awaited by a request.
    """

    def __init__(
        self,
        call: "grpc.aio.StreamStreamCall[Any, tokenizer_pb2.DetokenizeResponse]",
    ) -> None:
        self._call = call
        self._outbox: asyncio.Queue[tokenizer_pb2.DetokenizeRequest] = asyncio.Queue()
        self._waiting: dict[int, asyncio.Future[tokenizer_pb2.DetokenizeResponse]] = {}
        self._is_closed = False
        self.was_useful = False

    async def run(self) -> None:
        """Serve until the call ends; raises AioRpcError when it broke."""
        writing = asyncio.create_task(self._write())
        try:
            while True:
                response = await self._call.read()
                if not isinstance(response, tokenizer_pb2.DetokenizeResponse):
                    return
                self.was_useful = True
                for answer in (response, *response.more):
                    waiting = self._waiting.pop(answer.sequence_id, None)
                    if waiting is not None and not waiting.done():
                        waiting.set_result(answer)
        finally:
            writing.cancel()
            await asyncio.gather(writing, return_exceptions=True)

    def close(self) -> None:
        """End the call; whoever waits learns that the connection is lost."""
        self._is_closed = True
        self._call.cancel()
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(_ConnectionLost)
        self._waiting.clear()

    def send(self, message: tokenizer_pb2.DetokenizeRequest) -> None:
        """Say something that is not answered."""
        if not self._is_closed:
            # Every sequence has one unanswered message at most: the queue is bounded.
            self._outbox.put_nowait(message)

    async def exchange(
        self, sequence_id: int, messages: Sequence[tokenizer_pb2.DetokenizeRequest]
    ) -> tokenizer_pb2.DetokenizeResponse:
        """Send messages of which the last is answered."""
        if self._is_closed:
            raise _ConnectionLost
        answer: asyncio.Future[tokenizer_pb2.DetokenizeResponse] = (
            asyncio.get_running_loop().create_future()
        )
        self._waiting[sequence_id] = answer
        for message in messages:
            self._outbox.put_nowait(message)
        try:
            return await answer
        finally:
            self._waiting.pop(sequence_id, None)

    async def _write(self) -> None:
        while True:
            message = await self._outbox.get()
            # A decode step brings tokens of all its sequences at once, and a message
            # costs far more than what is in it.
            num_bytes = message.ByteSize()
            while num_bytes < _MAX_BATCH_BYTES and not self._outbox.empty():
                event = self._outbox.get_nowait()
                num_bytes += event.ByteSize()
                message.more.append(event)
            await self._call.write(message)
