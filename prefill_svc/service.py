"""PrefillService: prompts in; progress, the first token and leased KV out."""

import asyncio
import itertools
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.timestamp_pb2 import Timestamp

from engine.request import PrefillProgress, Request, TokenOutput
from mesh import metrics
from mesh.v1 import prefill_pb2, prefill_pb2_grpc, types_pb2
from prefill_svc.config import PrefillConfig
from prefill_svc.handovers import Handovers, SampledToken
from prefill_svc.leases import LeaseTable
from worker import translate
from worker.engine_port import EnginePort, run_request
from worker.host import Quiescence, Service, Worker
from worker.spans import add_chunk_event, end_attributes, run_span
from worker.streams import ActiveStreams

# The token goes with the blocks to who pulls them. What says when it was sampled must not take the
# cores from them, or from the message that takes the token to the client.
_COURTESY_S = 0.005

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True)
class Holder:
    """What this worker's handles say about it."""

    engine_id: str
    # Known once the server listens.
    address: Callable[[], str]
    transfer_address: str
    layout_fingerprint: str


class PrefillServicer(prefill_pb2_grpc.PrefillServiceServicer):
    """What a request holds in the engine is freed unless its handle reached the caller."""

    def __init__(
        self,
        model: str,
        engine: EnginePort,
        streams: ActiveStreams,
        leases: LeaseTable,
        handovers: Handovers,
        holder: Holder,
    ) -> None:
        self._model = model
        self._engine = engine
        self._streams = streams
        self._leases = leases
        self._handovers = handovers
        self._holder = holder
        # Handles of a former process at this address are none of ours, though it may have had the
        # same requests: their readers may still be giving them back.
        self._num_requests = itertools.count(secrets.randbits(48))

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: Context
    ) -> AsyncGenerator[prefill_pb2.PrefillResponse, None]:
        translate.check_model(request.model, self._model)
        prompt = self._to_engine_request(request)
        first: TokenOutput | None = None
        early: types_pb2.KvHandle | None = None
        is_delivered = False
        try:
            with run_span("prefill.run", prompt) as span:
                async with self._streams.open(run_request(self._engine, prompt)) as batches:
                    async for batch in batches:
                        match batch[-1]:
                            case TokenOutput() as first:
                                # Before all else: whoever follows the handle waits for it.
                                finished = self._finish(prompt, first, early)
                                span.add_event("first_token")
                                span.set_attributes(end_attributes(first))
                            case PrefillProgress() as progress if early is None:
                                add_chunk_event(span, progress)
                                early = self._begin_handover(prompt, progress)
                                yield _progress(progress, early)
                            case PrefillProgress() as progress:
                                assert early is not None
                                add_chunk_event(span, progress)
                                self._check_unmoved(early, progress)
                                yield _progress(progress)
            assert first is not None, "run_request ends with a token or an error"
            yield prefill_pb2.PrefillResponse(finished=finished)
            # Only a caller that has taken the stream to its end gets us here.
            is_delivered = True
        except (asyncio.CancelledError, GeneratorExit):
            metrics.ABORTED.add(1, {"state": "prefill"})
            raise
        finally:
            if not is_delivered:
                self._take_back(prompt.request_id)

    async def WatchKv(
        self, request: prefill_pb2.WatchKvRequest, context: Context
    ) -> AsyncGenerator[prefill_pb2.WatchKvResponse, None]:
        yield prefill_pb2.WatchKvResponse()
        token = await self._handovers.first_token(request.handle_id)
        sampled_at = _after(token.sampled_at - time.perf_counter())
        await asyncio.sleep(_COURTESY_S)
        yield prefill_pb2.WatchKvResponse(first_token_id=token.token_id, sampled_at=sampled_at)

    async def RenewKv(
        self, request: prefill_pb2.RenewKvRequest, context: Context
    ) -> prefill_pb2.RenewKvResponse:
        lease_s = self._leases.renew(request.handle_id)
        return prefill_pb2.RenewKvResponse(lease_expires_at=_after(lease_s))

    async def ReleaseKv(
        self, request: prefill_pb2.ReleaseKvRequest, context: Context
    ) -> prefill_pb2.ReleaseKvResponse:
        if request.request_id:
            was_live = self._leases.release_all(f"{request.request_id}/")
        else:
            was_live = self._leases.release(request.handle_id)
        return prefill_pb2.ReleaseKvResponse(was_live=was_live)

    async def GetLoad(
        self, request: prefill_pb2.PrefillServiceGetLoadRequest, context: Context
    ) -> prefill_pb2.PrefillServiceGetLoadResponse:
        return prefill_pb2.PrefillServiceGetLoadResponse(
            load=translate.to_engine_load(self._engine.load())
        )

    def _to_engine_request(self, request: prefill_pb2.PrefillRequest) -> Request:
        return Request(
            # A gateway may try again here while the lease of its first try still lasts.
            request_id=f"{request.request_id}/{next(self._num_requests)}",
            prompt_token_ids=list(request.prompt_token_ids),
            output_token_ids=list(request.output_token_ids),
            sampling_params=translate.to_sampling_params(request.sampling_params),
            cache_salt=request.cache_salt,
            num_tiered_tokens=translate.to_num_tiered_tokens(request),
            hold_blocks=True,
        )

    def _begin_handover(self, prompt: Request, progress: PrefillProgress) -> types_pb2.KvHandle:
        """Let the decode worker take over blocks while the others are computed."""
        lease_s = self._leases.open(prompt.request_id)
        self._handovers.begin(prompt.request_id)
        return self._handle(
            prompt, lease_s, progress.block_ids, progress.block_generations, prompt.num_tokens
        )

    def _check_unmoved(self, handle: types_pb2.KvHandle, progress: PrefillProgress) -> None:
        if tuple(handle.block_generations) != progress.block_generations:
            # Preempted: the blocks that others know are not its own any more.
            self._leases.release(handle.handle_id)

    def _finish(
        self, prompt: Request, first: TokenOutput, early: types_pb2.KvHandle | None
    ) -> prefill_pb2.PrefillFinished:
        """The last message; from here on a lease guards what the engine holds."""
        assert first.timings is not None, "the first token is the last one here"
        finished = prefill_pb2.PrefillFinished(
            first_token=translate.to_token_chunk([first]),
            num_cached_tokens=first.num_cached_tokens,
            matched_stop_token_id=first.matched_stop_token_id,
            timings=translate.to_timings(
                (types_pb2.STAGE_PREFILL_WAIT, first.timings.wait_s),
                (types_pb2.STAGE_PREFILL_COMPUTE, first.timings.prefill_s),
            ),
        )
        if first.finish_reason is not None:
            finished.finish_reason = translate.to_finish_reason(first.finish_reason)
            self._leases.release(prompt.request_id)
        elif early is None or self._leases.is_live(early.handle_id):
            finished.kv_handle.CopyFrom(self._lease(prompt, first))
        else:
            # Given back before it was whole.
            self._engine.release_hold(prompt.request_id)
        return finished

    def _lease(self, prompt: Request, first: TokenOutput) -> types_pb2.KvHandle:
        lease_s = self._leases.grant(prompt.request_id)
        self._handovers.finish(prompt.request_id, SampledToken(first.token_id, first.sampled_at))
        return self._handle(
            prompt,
            lease_s,
            first.held_block_ids,
            first.held_block_generations,
            first.num_held_tokens,
        )

    def _handle(
        self,
        prompt: Request,
        lease_s: float,
        block_ids: tuple[int, ...],
        generations: tuple[int, ...],
        num_tokens: int,
    ) -> types_pb2.KvHandle:
        return types_pb2.KvHandle(
            handle_id=prompt.request_id,
            engine_id=self._holder.engine_id,
            block_ids=block_ids,
            block_generations=generations,
            num_tokens=num_tokens,
            lease_expires_at=_after(lease_s),
            holder_address=self._holder.address(),
            transfer_address=self._holder.transfer_address,
            layout_fingerprint=self._holder.layout_fingerprint,
        )

    def _take_back(self, handle_id: str) -> None:
        """Free what a finished request holds, whether or not its lease has begun."""
        if not self._leases.release(handle_id):
            self._engine.release_hold(handle_id)


def _progress(
    progress: PrefillProgress, handle: types_pb2.KvHandle | None = None
) -> prefill_pb2.PrefillResponse:
    return prefill_pb2.PrefillResponse(
        progress=prefill_pb2.PrefillProgress(
            num_computed_tokens=progress.num_computed_tokens, kv_handle=handle
        )
    )


def _after(delay_s: float) -> Timestamp:
    timestamp = Timestamp()
    timestamp.FromNanoseconds(time.time_ns() + int(delay_s * 1e9))
    return timestamp


def lease_end(engine: EnginePort, handovers: Handovers) -> Callable[[str], None]:
    """What happens when a lease is over: nobody may read any more, and the blocks are free."""

    def end(handle_id: str) -> None:
        handovers.end(handle_id)
        engine.release_hold(handle_id)

    return end


def prefill_service(config: PrefillConfig) -> Service:
    """Prefill on a worker; it is quiescent when nobody may read its blocks any more."""

    @asynccontextmanager
    async def serving(worker: Worker) -> AsyncIterator[Quiescence]:
        holder = Holder(
            engine_id=worker.loaded.engine_id,
            address=lambda: worker.address,
            transfer_address=config.kv_transfer_address,
            layout_fingerprint=worker.loaded.layout_fingerprint,
        )
        handovers = Handovers()
        on_end = lease_end(worker.requests, handovers)
        async with LeaseTable(on_end, lease_s=config.lease_s) as leases:
            servicer = PrefillServicer(
                config.model, worker.requests, worker.streams, leases, handovers, holder
            )
            worker.server.add(
                prefill_pb2_grpc.add_PrefillServiceServicer_to_server,
                servicer,
                "mesh.v1.PrefillService",
            )
            yield leases.wait_until_empty

    return serving
