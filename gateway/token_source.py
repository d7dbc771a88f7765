"""Tokens from workers: prefill and decode."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import grpc

from gateway.attempts import worker_losses
from gateway.generation import Chunk, Finish, Job
from gateway.kv_release import KvReleases
from gateway.token_feeds import DecodeStream, TokenFeeds
from mesh.client import Channels, mesh_errors
from mesh.errors import MeshError, WorkerUnavailable
from mesh.telemetry import use_span
from mesh.v1 import (
    decode_pb2,
    prefill_pb2,
    prefill_pb2_grpc,
    scheduler_pb2,
    types_pb2,
)

Response = TypeVar("Response")
PrefillCall = grpc.aio.UnaryStreamCall[prefill_pb2.PrefillRequest, prefill_pb2.PrefillResponse]


@dataclass
class FirstToken:
    """What prefill leaves behind."""

    chunk: Chunk
    # None: the sequence is over.
    kv_handle: types_pb2.KvHandle | None
    # A decode worker has pulled the blocks and given them back.
    is_taken: bool = False
    # It has been doing so since the prompt's first chunk was computed.
    decode_stream: DecodeStream | None = None


class Workers:
    """Calls to prefill and decode workers, wherever they are."""

    def __init__(
        self, channels: Channels, *, start_timeout_s: float, stall_timeout_s: float
    ) -> None:
        self._channels = channels
        self._start_timeout_s = start_timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._releases = KvReleases(channels)
        self._feeds = TokenFeeds(channels)

    @asynccontextmanager
    async def prefill(
        self,
        job: Job,
        worker: scheduler_pb2.WorkerRef,
        successor: scheduler_pb2.WorkerRef,
    ) -> AsyncIterator[FirstToken]:
        """Compute the prompt; its KV is held until `successor` has taken it over.

        A long prompt's KV is taken over while it is computed. Should that fail, `decode` says
        so: the first token does not depend on it. Leaving, by an exception or by closing, ends
        both calls and gives the KV back.
        """
        decode_stream: DecodeStream | None = None

        def decode_ahead(handle: types_pb2.KvHandle) -> None:
            nonlocal decode_stream
            if job.num_tokens_left > 1:
                decode_stream = self._begin_decode(job, successor, handle, awaits_first_token=True)

        first: FirstToken | None = None
        try:
            first = _first_token(await self._run_prefill(job, worker, decode_ahead))
            first.decode_stream = decode_stream
            yield first
        finally:
            if decode_stream is not None:
                decode_stream.close()
            if first is not None and first.kv_handle is not None and not first.is_taken:
                self._releases.release(worker.address, first.kv_handle.handle_id)

    async def decode(
        self,
        job: Job,
        worker: scheduler_pb2.WorkerRef,
        first: FirstToken | None = None,
    ) -> AsyncGenerator[Chunk, None]:
        """Tokens until the sequence ends; the last chunk says why. Closing it aborts."""
        stream = None if first is None else first.decode_stream
        if stream is None:
            stream = self._begin_decode(job, worker, None if first is None else first.kv_handle)
        job.trace.timeline.begin_stream()
        try:
            async with aclosing(self._chunks(stream, job, worker)) as chunks:
                async for chunk in chunks:
                    if first is not None:
                        first.is_taken = True
                    yield chunk
        except MeshError:
            # Whether it gave them back before it failed is its secret.
            if first is not None:
                first.is_taken = False
            raise
        finally:
            job.trace.timeline.end_stream()
            stream.close()

    async def close(self) -> None:
        """Wait for KV that is being given back."""
        await self._feeds.close()
        await self._releases.close()

    def _begin_decode(
        self,
        job: Job,
        worker: scheduler_pb2.WorkerRef,
        kv_handle: types_pb2.KvHandle | None,
        *,
        awaits_first_token: bool = False,
    ) -> DecodeStream:
        request = decode_pb2.DecodeRequest(
            request_id=job.request_id,
            model=job.model,
            prompt_token_ids=job.prompt_token_ids,
            output_token_ids=job.output_token_ids,
            sampling_params=job.sampling_params,
            kv_handle=kv_handle,
            cache_salt=job.request.cache_salt,
            awaits_first_token=awaits_first_token,
            num_tiered_tokens=_num_tiered_tokens(worker),
        )
        with use_span(job.trace.attempt_span):
            return self._feeds.decode(worker, request, job.deadline.remaining_s())

    async def _run_prefill(
        self,
        job: Job,
        worker: scheduler_pb2.WorkerRef,
        on_handle: Callable[[types_pb2.KvHandle], None],
    ) -> prefill_pb2.PrefillFinished:
        """The prompt's first token; `on_handle` is called if its KV can be read before that."""
        job.trace.timeline.enter(types_pb2.STAGE_PREFILL_WAIT)
        call = self._call_prefill(job, worker)
        finished: prefill_pb2.PrefillFinished | None = None
        timeout_s = self._start_timeout_s
        try:
            # To the end of the call: cancelled before it, the worker would keep nothing.
            while (response := await _read(call, timeout_s, worker)) is not None:
                timeout_s = self._stall_timeout_s
                if response.HasField("finished"):
                    finished = response.finished
                elif response.progress.HasField("kv_handle"):
                    on_handle(response.progress.kv_handle)
        except BaseException as error:
            call.cancel()
            # A call that the worker itself ended holds nothing.
            if not isinstance(error.__cause__, grpc.aio.AioRpcError):
                self._releases.release_all(worker.address, job.request_id)
            raise
        if finished is None or len(finished.first_token.token_ids) != 1:
            raise WorkerUnavailable(f"{worker.worker_id} ended the prefill without a token")
        job.trace.timeline.reported(finished.timings)
        _note_cached(job, finished.num_cached_tokens)
        return finished

    def _call_prefill(self, job: Job, worker: scheduler_pb2.WorkerRef) -> PrefillCall:
        channel = self._channels.get(worker.address, worker.incarnation)
        stub = prefill_pb2_grpc.PrefillServiceStub(channel)
        with use_span(job.trace.attempt_span):
            return stub.Prefill(
                prefill_pb2.PrefillRequest(
                    request_id=job.request_id,
                    model=job.model,
                    prompt_token_ids=job.prompt_token_ids,
                    output_token_ids=job.output_token_ids,
                    sampling_params=job.sampling_params,
                    cache_salt=job.request.cache_salt,
                    num_tiered_tokens=_num_tiered_tokens(worker),
                ),
                timeout=job.deadline.remaining_s(),
            )

    async def _chunks(
        self,
        stream: DecodeStream,
        job: Job,
        worker: scheduler_pb2.WorkerRef,
    ) -> AsyncGenerator[Chunk, None]:
        """Hold back a token that may be the last one until it is known whether it is.

        Its text depends on that. The worker's last word adds only numbers: if it
        gets lost, the sequence is as complete as it would be with it.
        """
        timeout_s = self._start_timeout_s
        held: Chunk | None = None
        try:
            while (message := await stream.read(timeout_s, worker.worker_id)) is not None:
                timeout_s = self._stall_timeout_s
                if isinstance(message, decode_pb2.DecodeResponse):
                    job.trace.timeline.received(message.timings)
                    if message.HasField("num_cached_tokens"):
                        _note_cached(job, message.num_cached_tokens)
                    if message.HasField("finished"):
                        _note(job, message.finished)
                        yield _last_chunk(held, message.finished)
                        return
                    if not message.HasField("tokens"):
                        continue
                    chunk = _to_chunk(message.tokens)
                else:
                    job.trace.timeline.received()
                    chunk = Chunk(message)
                if held is not None:
                    yield held
                    held = None
                if job.ending(chunk.token_ids) is None:
                    yield chunk
                else:
                    held = chunk
        except MeshError:
            if held is None:
                raise
        if held is None:
            raise WorkerUnavailable(f"{worker.worker_id} ended the stream before the sequence")
        yield replace(held, finish=job.ending(held.token_ids))


def _num_tiered_tokens(worker: scheduler_pb2.WorkerRef) -> int | None:
    return worker.num_tiered_tokens if worker.HasField("num_tiered_tokens") else None


async def _read(
    call: "grpc.aio.UnaryStreamCall[Any, Response]",
    timeout_s: float,
    worker: scheduler_pb2.WorkerRef,
) -> Response | None:
    """The next message, None at the end; a silent worker counts as lost."""
    with worker_losses(worker.worker_id, timeout_s):
        async with asyncio.timeout(timeout_s):
            with mesh_errors():
                response = await call.read()
    return None if response is grpc.aio.EOF else response  # type: ignore[return-value]


def _first_token(finished: prefill_pb2.PrefillFinished) -> FirstToken:
    chunk = _to_chunk(finished.first_token)
    if finished.HasField("finish_reason"):
        return FirstToken(replace(chunk, finish=_finish(finished)), None)
    return FirstToken(chunk, finished.kv_handle)


def _to_chunk(tokens: types_pb2.TokenChunk) -> Chunk:
    return Chunk(tokens.token_ids, tokens.logprobs, tokens.prompt_logprobs)


def _last_chunk(held: Chunk | None, finished: decode_pb2.DecodeFinished) -> Chunk:
    return replace(held or Chunk(()), finish=_finish(finished))


def _finish(finished: prefill_pb2.PrefillFinished | decode_pb2.DecodeFinished) -> Finish:
    if finished.finish_reason == types_pb2.FINISH_REASON_UNSPECIFIED:
        raise WorkerUnavailable("a worker ended a sequence without saying why")
    return Finish(
        finished.finish_reason,
        stop_token_id=(
            finished.matched_stop_token_id if finished.HasField("matched_stop_token_id") else None
        ),
    )


def _note(job: Job, finished: decode_pb2.DecodeFinished) -> None:
    trace = job.trace
    trace.timeline.end_stream(finished.timings)
    trace.mean_batch_size = finished.mean_batch_size
    trace.max_kv_cache_usage = finished.max_kv_cache_usage
    trace.num_preemptions += finished.num_preemptions
    trace.kv_transfer_bytes += finished.kv_transfer_bytes
    _note_cached(job, finished.num_cached_tokens)


def _note_cached(job: Job, num_tokens: int) -> None:
    """The first worker's word counts: a resumption finds what came before it."""
    if job.trace.num_cached_tokens is None:
        job.trace.num_cached_tokens = num_tokens
