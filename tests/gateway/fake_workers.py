"""Scripted workers: what every prompt is continued with, and what goes wrong."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import grpc

from decode_svc.feeds import Feeds
from mesh.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, types_pb2
from tests.gateway.fake_tokenizer import EOS, Context


@dataclass
class Fault:
    """What goes wrong in the next calls of a worker."""

    # Tokens that still come out of the call.
    after: int = 0
    error: Exception | None = None
    # A status without details, as gRPC makes it when a stream breaks.
    status: grpc.StatusCode | None = None
    # Say nothing more, until cancelled.
    hangs: bool = False
    # End the stream without a finish; with neither, too.
    num_calls: int = 1


@dataclass
class FakeModel:
    """What every worker computes: the continuation of a prompt, the same everywhere."""

    # By the prompt's text; a default for all others.
    answers: dict[bytes, Sequence[int]] = field(default_factory=dict)
    default: Sequence[int] = (*b"Hello, world!", EOS)
    # Prompts whose third token does not come.
    failing: set[bytes] = field(default_factory=set)

    def next_token(self, prompt: Sequence[int], outputs: Sequence[int]) -> int:
        text = bytes(token for token in prompt if token < EOS)
        if text in self.failing and len(outputs) == 2:
            raise RuntimeError("scripted")
        answer = self.answers.get(text, self.default)
        return answer[len(outputs)] if len(outputs) < len(answer) else ord(".")


class _Worker:
    """What prefill and decode workers have in common."""

    def __init__(self, model: FakeModel, worker_id: str) -> None:
        self.model = model
        self.worker_id = worker_id
        self.address = ""
        self.num_active = 0
        self.num_handles = 0
        self.is_idle = asyncio.Event()
        self.reset()

    def reset(self) -> None:
        self.faults: list[Fault] = []
        # Released to let one token through; None lets all.
        self.steps: asyncio.Semaphore | None = None
        self.start_gate: asyncio.Event | None = None
        self.num_cached_tokens = 0
        self.num_calls = 0
        self.num_steps = 0
        self.was_active = asyncio.Event()
        self.deadlines_s: list[float | None] = []
        self.metadata: list[dict[str, str]] = []

    def enter(self, context: Context) -> None:
        self.num_calls += 1
        self.num_active += 1
        self.was_active.set()
        self.is_idle.clear()
        self.deadlines_s.append(context.time_remaining())
        self.metadata.append({k: str(v) for k, v in context.invocation_metadata() or ()})

    def leave(self) -> None:
        self.num_active -= 1
        if self.num_active == 0:
            self.is_idle.set()

    async def step(self) -> None:
        if self.steps is not None:
            await self.steps.acquire()
        self.num_steps += 1

    def take_fault(self) -> Fault | None:
        if not self.faults:
            return None
        fault = self.faults[0]
        fault.num_calls -= 1
        if fault.num_calls == 0:
            self.faults.pop(0)
        return fault


async def act_out(fault: Fault, context: Context) -> None:
    """Raise, hang, or return to end the stream early."""
    if fault.status is not None:
        await context.abort(fault.status, "stream broke")
    if fault.hangs:
        await asyncio.Event().wait()
    if fault.error is not None:
        raise fault.error


def ending(
    params: types_pb2.SamplingParams, outputs: Sequence[int]
) -> tuple["types_pb2.FinishReason.ValueType", int | None] | None:
    last = outputs[-1]
    if last in params.stop_token_ids or (last == EOS and not params.ignore_eos):
        return types_pb2.FINISH_REASON_STOP, last
    if len(outputs) >= params.max_tokens:
        return types_pb2.FINISH_REASON_LENGTH, None
    return None


def chunk(
    token_id: int, params: types_pb2.SamplingParams, prompt: Sequence[int] = ()
) -> types_pb2.TokenChunk:
    """One token; the alternatives are its neighbours in the vocabulary.

    `prompt`: of a sequence's first token, which describes it.
    """
    made = types_pb2.TokenChunk(token_ids=[token_id])
    if params.HasField("num_logprobs"):
        made.logprobs.append(token_logprobs(token_id, params.num_logprobs))
    if params.HasField("num_prompt_logprobs"):
        made.prompt_logprobs.extend(
            token_logprobs(one, params.num_prompt_logprobs) for one in prompt[1:]
        )
    return made


def token_logprobs(token_id: int, num_top: int) -> types_pb2.TokenLogprobs:
    top = [
        types_pb2.TokenLogprobs.Candidate(token_id=(token_id + i) % EOS, logprob=-0.5 - i)
        for i in range(num_top)
    ]
    return types_pb2.TokenLogprobs(token_id=token_id, logprob=-0.5, top=top)


class FakePrefill(_Worker, prefill_pb2_grpc.PrefillServiceServicer):
    """Computes at once; remembers which handles are held."""

    def __init__(self, model: FakeModel, worker_id: str = "prefill-0") -> None:
        super().__init__(model, worker_id)
        self.held: set[str] = set()

    def reset(self) -> None:
        super().reset()
        self.requests: list[prefill_pb2.PrefillRequest] = []
        # Hand out a handle before the prompt is computed, and go on when the gate is open.
        self.is_chunked = False
        self.finish_gate = asyncio.Event()
        self.finish_gate.set()

    async def WatchKv(
        self, request: prefill_pb2.WatchKvRequest, context: Context
    ) -> AsyncGenerator[prefill_pb2.WatchKvResponse, None]:
        await self.finish_gate.wait()
        yield prefill_pb2.WatchKvResponse()

    async def Prefill(
        self, request: prefill_pb2.PrefillRequest, context: Context
    ) -> AsyncGenerator[prefill_pb2.PrefillResponse, None]:
        self.enter(context)
        self.requests.append(request)
        try:
            if self.start_gate is not None:
                await self.start_gate.wait()
            progress = prefill_pb2.PrefillProgress(
                num_computed_tokens=len(request.prompt_token_ids)
            )
            if self.is_chunked:
                progress.kv_handle.CopyFrom(self._hold(request))
            yield prefill_pb2.PrefillResponse(progress=progress)
            try:
                await self.finish_gate.wait()
            except BaseException:
                self.held.discard(progress.kv_handle.handle_id)
                raise
            if (fault := self.take_fault()) is not None:
                self.held.discard(progress.kv_handle.handle_id)
                await act_out(fault, context)
                return
            await self.step()
            finished = self._finish(request, progress)
            try:
                yield prefill_pb2.PrefillResponse(finished=finished)
            except BaseException:
                # The caller never got it.
                self.held.discard(finished.kv_handle.handle_id)
                raise
        finally:
            self.leave()

    async def ReleaseKv(
        self, request: prefill_pb2.ReleaseKvRequest, context: Context
    ) -> prefill_pb2.ReleaseKvResponse:
        held = {
            handle_id
            for handle_id in self.held
            if handle_id == request.handle_id or handle_id.startswith(f"{request.request_id}/")
        }
        self.held -= held
        return prefill_pb2.ReleaseKvResponse(was_live=bool(held))

    async def RenewKv(
        self, request: prefill_pb2.RenewKvRequest, context: Context
    ) -> prefill_pb2.RenewKvResponse:
        return prefill_pb2.RenewKvResponse()

    async def GetLoad(
        self, request: prefill_pb2.PrefillServiceGetLoadRequest, context: Context
    ) -> prefill_pb2.PrefillServiceGetLoadResponse:
        return prefill_pb2.PrefillServiceGetLoadResponse()

    def _hold(self, request: prefill_pb2.PrefillRequest) -> types_pb2.KvHandle:
        self.num_handles += 1
        handle_id = f"{request.request_id}/{self.num_handles}"
        self.held.add(handle_id)
        return types_pb2.KvHandle(handle_id=handle_id, holder_address=self.address)

    def _finish(
        self, request: prefill_pb2.PrefillRequest, progress: prefill_pb2.PrefillProgress
    ) -> prefill_pb2.PrefillFinished:
        params, outputs = request.sampling_params, list(request.output_token_ids)
        outputs.append(self.model.next_token(request.prompt_token_ids, outputs))
        finished = prefill_pb2.PrefillFinished(
            first_token=chunk(
                outputs[-1], params, request.prompt_token_ids if len(outputs) == 1 else ()
            ),
            num_cached_tokens=self.num_cached_tokens,
            timings=[
                types_pb2.StageTiming(stage=types_pb2.STAGE_PREFILL_WAIT, duration_ms=0.03125),
                types_pb2.StageTiming(stage=types_pb2.STAGE_PREFILL_COMPUTE, duration_ms=0.125),
            ],
        )
        ended = ending(params, outputs)
        if ended is not None:
            self.held.discard(progress.kv_handle.handle_id)
            finished.finish_reason = ended[0]
            if ended[1] is not None:
                finished.matched_stop_token_id = ended[1]
            return finished
        is_known = progress.HasField("kv_handle")
        finished.kv_handle.CopyFrom(progress.kv_handle if is_known else self._hold(request))
        return finished


class FakeDecode(_Worker, decode_pb2_grpc.DecodeServiceServicer):
    """Continues a prompt token by token; pulls nothing but releases what it was given."""

    def __init__(self, model: FakeModel, prefill: FakePrefill, worker_id: str = "decode-0") -> None:
        super().__init__(model, worker_id)
        self._prefill = prefill
        self._feeds = Feeds()

    def reset(self) -> None:
        super().reset()
        self.requests: list[decode_pb2.DecodeRequest] = []
        # Tokens that nobody waits for come together through a feed: one by one without.
        self.has_feeds = False

    async def Decode(
        self, request: decode_pb2.DecodeRequest, context: Context
    ) -> AsyncGenerator[decode_pb2.DecodeResponse, None]:
        self.enter(context)
        self.requests.append(request)
        try:
            async for response in self._decode(request, context):
                yield response
        finally:
            self.leave()

    async def GetLoad(
        self, request: decode_pb2.DecodeServiceGetLoadRequest, context: Context
    ) -> decode_pb2.DecodeServiceGetLoadResponse:
        return decode_pb2.DecodeServiceGetLoadResponse()

    @property
    def num_feeds(self) -> int:
        return len(self._feeds)

    def break_feeds(self) -> None:
        """End the calls; what is being decoded for them goes nowhere."""
        self._feeds.close()

    async def Feed(
        self, request: decode_pb2.FeedRequest, context: Context
    ) -> AsyncGenerator[decode_pb2.FeedResponse, None]:
        async with aclosing(self._feeds.serve(request.feed_id)) as messages:
            async for message in messages:
                yield message

    async def _decode(
        self, request: decode_pb2.DecodeRequest, context: Context
    ) -> AsyncGenerator[decode_pb2.DecodeResponse, None]:
        if self.start_gate is not None:
            await self.start_gate.wait()
        fault = self.take_fault()
        params, outputs = request.sampling_params, list(request.output_token_ids)
        num_produced = num_fed = 0
        ended = None
        is_feedable = self.has_feeds and not params.HasField("num_logprobs")
        feed = self._feeds.get(request.feed_id) if is_feedable else None
        if request.awaits_first_token:
            await self._prefill.finish_gate.wait()
            outputs.append(self.model.next_token(request.prompt_token_ids, outputs))
        while ended is None:
            if fault is not None and num_produced == fault.after:
                await act_out(fault, context)
                return
            if num_produced == 0 and request.HasField("kv_handle"):
                self._prefill.held.discard(request.kv_handle.handle_id)
            await self.step()
            outputs.append(self.model.next_token(request.prompt_token_ids, outputs))
            is_first = len(outputs) == 1
            if feed is not None and num_produced:
                feed.put(request.feed_sequence_id, outputs[-1:])
                num_fed += 1
            else:
                prompt = request.prompt_token_ids if is_first else ()
                yield decode_pb2.DecodeResponse(
                    tokens=chunk(outputs[-1], params, prompt),
                    num_cached_tokens=self.num_cached_tokens if num_produced == 0 else None,
                    is_fed=feed is not None,
                )
            num_produced += 1
            ended = ending(params, outputs)
        if fault is not None and num_produced == fault.after:
            await act_out(fault, context)
            return
        yield decode_pb2.DecodeResponse(finished=self._finish(ended, num_fed))

    def _finish(
        self, ended: tuple["types_pb2.FinishReason.ValueType", int | None], num_fed: int
    ) -> decode_pb2.DecodeFinished:
        finished = decode_pb2.DecodeFinished(
            finish_reason=ended[0],
            num_fed_tokens=num_fed,
            num_cached_tokens=self.num_cached_tokens,
            timings=[
                types_pb2.StageTiming(stage=types_pb2.STAGE_KV_TRANSFER, duration_ms=0.0625),
                types_pb2.StageTiming(stage=types_pb2.STAGE_DECODE_STEPS, duration_ms=0.25),
            ],
        )
        if ended[1] is not None:
            finished.matched_stop_token_id = ended[1]
        return finished
