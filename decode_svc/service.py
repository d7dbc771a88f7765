"""DecodeService: prompts, or prompts already computed elsewhere, in; tokens out."""

import asyncio
import itertools
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager, nullcontext
from typing import Any

import grpc

from decode_svc.config import DecodeConfig
from decode_svc.feeds import Feeds, OpenFeed
from decode_svc.generation import Generator, Transfer
from decode_svc.kv_holder import RemoteKv
from decode_svc.kv_import import KvImporter, KvImportLimits
from engine.request import Request, RequestTimings, TokenOutput
from mesh import metrics
from mesh.client import remaining_s
from mesh.v1 import decode_pb2, decode_pb2_grpc, types_pb2
from worker import translate
from worker.arrivals import Arrivals
from worker.engine_port import EnginePort
from worker.host import Quiescence, Service, Worker
from worker.load_samples import LoadSamples
from worker.spans import end_attributes, run_span

Context = grpc.aio.ServicerContext[Any, Any]


class DecodeServicer(decode_pb2_grpc.DecodeServiceServicer):
    """Nothing of a request outlives its call but a transfer in flight, which ends by itself."""

    def __init__(self, model: str, engine: EnginePort, generator: Generator, feeds: Feeds) -> None:
        self._model = model
        self._engine = engine
        self._generator = generator
        self._feeds = feeds
        self._num_requests = itertools.count(1)

    async def Decode(
        self, request: decode_pb2.DecodeRequest, context: Context
    ) -> AsyncGenerator[decode_pb2.DecodeResponse, None]:
        translate.check_model(request.model, self._model)
        decoding = self._to_engine_request(request)
        remote: RemoteKv | None = None
        if request.HasField("kv_handle"):
            deadline = time.monotonic() + remaining_s(context, math.inf)
            remote = RemoteKv(request.kv_handle, deadline, request.awaits_first_token)
        transfer = Transfer()
        load = LoadSamples(self._engine)
        feed = self._feed_of(request)
        last: TokenOutput | None = None
        num_tokens = num_fed_tokens = 0
        try:
            with run_span("decode.run", decoding) as span:
                outputs = self._generator.generate(decoding, remote, transfer, span)
                async with aclosing(outputs):
                    async for tokens in outputs:
                        load.take()
                        num_tokens += len(tokens)
                        if last is None:
                            span.add_event("first_token")
                            yield _first_response(tokens, transfer, is_fed=feed is not None)
                        elif feed is not None:
                            feed.put(request.feed_sequence_id, [token.token_id for token in tokens])
                            num_fed_tokens += len(tokens)
                        else:
                            chunk = translate.to_token_chunk(tokens)
                            yield decode_pb2.DecodeResponse(tokens=chunk)
                        last = tokens[-1]
                assert last is not None, "a request ends with a token or an error"
                assert last.timings is not None, "the last token carries the timings"
                _measure(num_tokens, last.timings, self._model)
                span.set_attributes(end_attributes(last) | load.attributes())
                span.set_attribute("pdmesh.kv_transfer.bytes", transfer.payload_bytes)
        except (asyncio.CancelledError, GeneratorExit):
            state = "transfer" if transfer.is_running else "decode"
            metrics.ABORTED.add(1, {"state": state})
            raise
        finished = _finished(last, transfer, load)
        finished.num_fed_tokens = num_fed_tokens
        yield decode_pb2.DecodeResponse(finished=finished)

    async def Feed(
        self, request: decode_pb2.FeedRequest, context: Context
    ) -> AsyncGenerator[decode_pb2.FeedResponse, None]:
        async with aclosing(self._feeds.serve(request.feed_id)) as messages:
            async for message in messages:
                yield message

    async def GetLoad(
        self, request: decode_pb2.DecodeServiceGetLoadRequest, context: Context
    ) -> decode_pb2.DecodeServiceGetLoadResponse:
        return decode_pb2.DecodeServiceGetLoadResponse(
            load=translate.to_engine_load(self._engine.load())
        )

    def _feed_of(self, request: decode_pb2.DecodeRequest) -> OpenFeed | None:
        if request.sampling_params.HasField("num_logprobs"):
            return None
        return self._feeds.get(request.feed_id)

    def _to_engine_request(self, request: decode_pb2.DecodeRequest) -> Request:
        return Request(
            # A resumed request may come back here before its first call is quite over.
            request_id=f"{request.request_id}/{next(self._num_requests)}",
            prompt_token_ids=list(request.prompt_token_ids),
            output_token_ids=list(request.output_token_ids),
            sampling_params=translate.to_sampling_params(request.sampling_params),
            cache_salt=request.cache_salt,
            num_tiered_tokens=translate.to_num_tiered_tokens(request),
        )


def _first_response(
    tokens: Sequence[TokenOutput], transfer: Transfer, *, is_fed: bool
) -> decode_pb2.DecodeResponse:
    response = decode_pb2.DecodeResponse(tokens=translate.to_token_chunk(tokens), is_fed=is_fed)
    if (so_far := tokens[0].timings_so_far) is not None:
        response.timings.extend(_stages(so_far, transfer))
        response.num_cached_tokens = tokens[0].num_cached_tokens
    return response


def _finished(
    last: TokenOutput, transfer: Transfer, load: LoadSamples
) -> decode_pb2.DecodeFinished:
    assert last.finish_reason is not None, "a decode ends for a reason"
    assert last.timings is not None, "the last token carries the timings"
    return decode_pb2.DecodeFinished(
        finish_reason=translate.to_finish_reason(last.finish_reason),
        matched_stop_token_id=last.matched_stop_token_id,
        num_cached_tokens=last.num_cached_tokens,
        timings=_stages(last.timings, transfer),
        kv_transfer_bytes=transfer.payload_bytes,
        mean_batch_size=load.mean_batch_size,
        max_kv_cache_usage=load.max_kv_cache_usage,
        num_preemptions=last.num_preemptions,
    )


def _stages(timings: RequestTimings, transfer: Transfer) -> list[types_pb2.StageTiming]:
    """In the order in which a request goes through them."""
    # What went by before the first token belongs to the prefill that ran meanwhile.
    wait_overlap_s = min(transfer.overlap_s, timings.decode_wait_s)
    kv_overlap_s = min(transfer.overlap_s - wait_overlap_s, timings.remote_kv_s)
    return translate.to_timings(
        (types_pb2.STAGE_PREFILL_WAIT, timings.wait_s),
        (types_pb2.STAGE_PREFILL_COMPUTE, timings.prefill_s),
        (types_pb2.STAGE_KV_TRANSFER, timings.remote_kv_s - kv_overlap_s + transfer.lost_s),
        (types_pb2.STAGE_DECODE_WAIT, timings.decode_wait_s - wait_overlap_s),
        (types_pb2.STAGE_DECODE_STEPS, timings.decode_s),
    )


def _measure(num_tokens: int, timings: RequestTimings, model: str) -> None:
    """Record how fast tokens were made, for comparison with how fast clients get them."""
    # A token that ended a prefill here took no decode step.
    num_steps = num_tokens - 1 if timings.prefill_s else num_tokens
    if num_steps > 0:
        metrics.ENGINE_TIME_PER_OUTPUT_TOKEN.record(
            timings.decode_s / num_steps, {"gen_ai.request.model": model}
        )


def decode_service(config: DecodeConfig) -> Service:
    """Decode on a worker; it is quiescent when nothing may write to its blocks any more."""

    @asynccontextmanager
    async def serving(worker: Worker) -> AsyncIterator[Quiescence]:
        marks = worker.loaded.engine.block_marks
        arrivals = Arrivals(marks) if marks is not None else None
        importer = KvImporter(
            worker.requests,
            worker.channels,
            engine_id=worker.loaded.engine_id,
            transfer_address=config.kv_transfer_address,
            layout_fingerprint=worker.loaded.layout_fingerprint,
            block_size=config.block_size,
            limits=KvImportLimits(config.kv_pull_timeout_s, config.kv_release_timeout_s),
            arrivals=arrivals,
            block_bytes=worker.loaded.engine.block_bytes,
        )
        generator = Generator(worker.requests, worker.streams, importer)
        feeds = Feeds()
        worker.server.add(
            decode_pb2_grpc.add_DecodeServiceServicer_to_server,
            DecodeServicer(config.model, worker.requests, generator, feeds),
            "mesh.v1.DecodeService",
        )

        async def quiescence() -> None:
            # No decode runs any more: nothing will come through them.
            feeds.close()
            await importer.wait_until_idle()

        with arrivals or nullcontext():
            async with importer:
                yield quiescence

    return serving
