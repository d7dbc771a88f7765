"""DecodeService: prompts, or prompts already computed elsewhere, in; tokens out."""

import asyncio
import itertools
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc

from decode_svc.config import DecodeConfig
from decode_svc.generation import Generator, Transfer
from decode_svc.kv_holder import RemoteKv
from decode_svc.kv_import import KvImporter, KvImportLimits
from engine.request import Request, TokenOutput
from mesh import metrics
from mesh.client import remaining_s
from mesh.v1 import decode_pb2, decode_pb2_grpc, types_pb2
from worker import translate
from worker.engine_port import EnginePort
from worker.host import Quiescence, Service, Worker
from worker.spans import run_span

Context = grpc.aio.ServicerContext[Any, Any]


class DecodeServicer(decode_pb2_grpc.DecodeServiceServicer):
    """Nothing of a request outlives its call but a transfer in flight, which ends by itself."""

    def __init__(self, model: str, engine: EnginePort, generator: Generator) -> None:
        self._model = model
        self._engine = engine
        self._generator = generator
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
        last: TokenOutput | None = None
        try:
            with run_span("decode.run", {"pdmesh.request_id": request.request_id}) as span:
                outputs = self._generator.generate(decoding, remote, transfer, span)
                async with aclosing(outputs):
                    async for tokens in outputs:
                        last = tokens[-1]
                        yield decode_pb2.DecodeResponse(tokens=translate.to_token_chunk(tokens))
                assert last is not None, "a request ends with a token or an error"
                span.set_attributes(_attributes(decoding, last, transfer))
        except (asyncio.CancelledError, GeneratorExit):
            state = "transfer" if transfer.is_running else "decode"
            metrics.ABORTED.add(1, {"state": state})
            raise
        yield decode_pb2.DecodeResponse(finished=_finished(last, transfer))

    async def GetLoad(
        self, request: decode_pb2.DecodeServiceGetLoadRequest, context: Context
    ) -> decode_pb2.DecodeServiceGetLoadResponse:
        return decode_pb2.DecodeServiceGetLoadResponse(
            load=translate.to_engine_load(self._engine.load())
        )

    def _to_engine_request(self, request: decode_pb2.DecodeRequest) -> Request:
        return Request(
            # A resumed request may come back here before its first call is quite over.
            request_id=f"{request.request_id}/{next(self._num_requests)}",
            prompt_token_ids=list(request.prompt_token_ids),
            output_token_ids=list(request.output_token_ids),
            sampling_params=translate.to_sampling_params(request.sampling_params),
            cache_salt=request.cache_salt,
        )


def _finished(last: TokenOutput, transfer: Transfer) -> decode_pb2.DecodeFinished:
    assert last.finish_reason is not None, "a decode ends for a reason"
    assert last.timings is not None, "the last token carries the timings"
    timings = last.timings
    # What went by before the first token belongs to the prefill that ran meanwhile.
    wait_overlap_s = min(transfer.overlap_s, timings.decode_wait_s)
    kv_overlap_s = min(transfer.overlap_s - wait_overlap_s, timings.remote_kv_s)
    return decode_pb2.DecodeFinished(
        finish_reason=translate.to_finish_reason(last.finish_reason),
        matched_stop_token_id=last.matched_stop_token_id,
        num_cached_tokens=last.num_cached_tokens,
        timings=translate.to_timings(
            (types_pb2.STAGE_PREFILL_WAIT, timings.wait_s),
            (types_pb2.STAGE_PREFILL_COMPUTE, timings.prefill_s),
            (types_pb2.STAGE_KV_TRANSFER, timings.remote_kv_s - kv_overlap_s + transfer.lost_s),
            (types_pb2.STAGE_DECODE_WAIT, timings.decode_wait_s - wait_overlap_s),
            (types_pb2.STAGE_DECODE_STEPS, timings.decode_s),
        ),
        kv_transfer_bytes=transfer.payload_bytes,
    )


def _attributes(request: Request, last: TokenOutput, transfer: Transfer) -> dict[str, int]:
    return {
        "pdmesh.prompt_tokens": len(request.prompt_token_ids),
        "pdmesh.cached_tokens": last.num_cached_tokens,
        "pdmesh.kv_transfer.bytes": transfer.payload_bytes,
    }


def decode_service(config: DecodeConfig) -> Service:
    """Decode on a worker; it is quiescent when nothing may write to its blocks any more."""

    @asynccontextmanager
    async def serving(worker: Worker) -> AsyncIterator[Quiescence]:
        importer = KvImporter(
            worker.engine,
            worker.channels,
            engine_id=worker.loaded.engine_id,
            transfer_address=config.kv_transfer_address,
            layout_fingerprint=worker.loaded.layout_fingerprint,
            block_size=config.block_size,
            limits=KvImportLimits(config.kv_pull_timeout_s, config.kv_release_timeout_s),
        )
        generator = Generator(worker.engine, worker.streams, importer)
        worker.server.add(
            decode_pb2_grpc.add_DecodeServiceServicer_to_server,
            DecodeServicer(config.model, worker.engine, generator),
            "mesh.v1.DecodeService",
        )
        async with importer:
            yield importer.wait_until_idle

    return serving
