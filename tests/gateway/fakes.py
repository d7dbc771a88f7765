"""A mesh of scripted services on real sockets, one byte a token."""

import asyncio
import codecs
import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Self

import grpc

from mesh.errors import InvalidRequest, MeshError, ModelNotFound, QueueFull, WorkerUnavailable
from mesh.server import MeshServer
from mesh.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    scheduler_pb2,
    scheduler_pb2_grpc,
    tokenizer_pb2,
    tokenizer_pb2_grpc,
    types_pb2,
)

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
    # Set to hold ListModels back, as a frozen process does.
    list_gate: asyncio.Event | None = None
    # Break the Detokenize call, once, after so many answers of it.
    break_after: int | None = None
    # Answers every append from this one on with an error.
    error_from: int | None = None
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
            name=MODEL,
            max_model_len=WINDOW,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=[EOS],
            has_chat_template=True,
            default_sampling_params=self.default_sampling_params,
            created_at_s=1,
        )
        return tokenizer_pb2.ListModelsResponse(models=[model])

    async def Encode(
        self, request: tokenizer_pb2.EncodeRequest, context: Context
    ) -> tokenizer_pb2.EncodeResponse:
        self.num_encodes += 1
        if self.encode_gate is not None:
            await self.encode_gate.wait()
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
        return tokenizer_pb2.TokenizerServiceDecodeResponse(
            text=b"".join(map(token_bytes, request.token_ids)).decode("utf-8", "replace"),
            token_bytes=map(token_bytes, request.token_ids) if request.return_token_bytes else (),
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

    def reset(self) -> None:
        super().reset()
        self.requests: list[decode_pb2.DecodeRequest] = []

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

    async def _decode(
        self, request: decode_pb2.DecodeRequest, context: Context
    ) -> AsyncGenerator[decode_pb2.DecodeResponse, None]:
        if self.start_gate is not None:
            await self.start_gate.wait()
        fault = self.take_fault()
        params, outputs = request.sampling_params, list(request.output_token_ids)
        num_produced = 0
        ended = None
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
            yield decode_pb2.DecodeResponse(
                tokens=chunk(outputs[-1], params, request.prompt_token_ids if is_first else ()),
                num_cached_tokens=self.num_cached_tokens if num_produced == 0 else None,
            )
            num_produced += 1
            ended = ending(params, outputs)
        if fault is not None and num_produced == fault.after:
            await act_out(fault, context)
            return
        yield decode_pb2.DecodeResponse(finished=self._finish(ended))

    def _finish(
        self, ended: tuple["types_pb2.FinishReason.ValueType", int | None]
    ) -> decode_pb2.DecodeFinished:
        finished = decode_pb2.DecodeFinished(
            finish_reason=ended[0],
            num_cached_tokens=self.num_cached_tokens,
            timings=[
                types_pb2.StageTiming(stage=types_pb2.STAGE_KV_TRANSFER, duration_ms=0.0625),
                types_pb2.StageTiming(stage=types_pb2.STAGE_DECODE_STEPS, duration_ms=0.25),
            ],
        )
        if ended[1] is not None:
            finished.matched_stop_token_id = ended[1]
        return finished


@dataclass
class FakeScheduler(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Places on the first workers that are not excluded."""

    prefills: list[FakePrefill] = field(default_factory=list)
    decodes: list[FakeDecode] = field(default_factory=list)
    local: bool = False
    # Raised instead of placing.
    error: MeshError | None = None
    # By the prompt's text: how many times the mesh is full for it.
    full: dict[bytes, int] = field(default_factory=dict)
    gate: asyncio.Event | None = None
    # Set to hold GetState back, as a frozen process does.
    state_gate: asyncio.Event | None = None
    num_open: int = 0
    lease_ms: int = 15_000
    admits: list[scheduler_pb2.PlaceRequest.Admit] = field(default_factory=list)
    num_prefill_done: int = 0
    # What callers said after `admit`.
    told: list[scheduler_pb2.PlaceRequest] = field(default_factory=list)
    was_asked: asyncio.Event = field(default_factory=asyncio.Event)
    was_renewed: asyncio.Event = field(default_factory=asyncio.Event)
    is_idle: asyncio.Event = field(default_factory=asyncio.Event)
    loads: dict[str, types_pb2.EngineLoad] = field(default_factory=dict)
    metadata: list[dict[str, str]] = field(default_factory=list)

    async def Place(
        self, request_iterator: AsyncIterator[scheduler_pb2.PlaceRequest], context: Context
    ) -> AsyncGenerator[scheduler_pb2.PlaceResponse, None]:
        self.num_open += 1
        self.is_idle.clear()
        self.metadata.append({k: str(v) for k, v in context.invocation_metadata() or ()})
        try:
            admit = (await anext(request_iterator)).admit
            self.admits.append(admit)
            self.was_asked.set()
            if self.gate is not None:
                await self.gate.wait()
            if self.error is not None:
                raise self.error
            self._refuse_if_full(bytes(one for one in admit.prompt_token_ids if one < EOS))
            yield scheduler_pb2.PlaceResponse(placement=self._place(admit))
            async for message in request_iterator:
                self.num_prefill_done += message.HasField("prefill_done")
                self.told.append(message)
                if message.HasField("renew"):
                    self.was_renewed.set()
        finally:
            self.num_open -= 1
            if self.num_open == 0:
                self.is_idle.set()

    async def GetState(
        self, request: scheduler_pb2.GetStateRequest, context: Context
    ) -> scheduler_pb2.GetStateResponse:
        if self.state_gate is not None:
            await self.state_gate.wait()
        return scheduler_pb2.GetStateResponse(
            workers=[
                scheduler_pb2.WorkerState(
                    worker_id=worker.worker_id,
                    role=role,
                    incarnation="1",
                    load=self.loads.get(worker.worker_id),
                )
                for role, workers in (("prefill", self.prefills), ("decode", self.decodes))
                for worker in workers
            ]
        )

    def _refuse_if_full(self, prompt: bytes) -> None:
        if self.full.get(prompt, 0) > 0:
            self.full[prompt] -= 1
            raise QueueFull("full", retry_after_s=1)

    def _place(self, admit: scheduler_pb2.PlaceRequest.Admit) -> scheduler_pb2.Placement:
        excluded = set(admit.excluded_worker_ids)
        decode = next((one for one in self.decodes if one.worker_id not in excluded), None)
        prefill = next((one for one in self.prefills if one.worker_id not in excluded), None)
        if decode is None:
            raise WorkerUnavailable("no decode worker is alive")
        placement = scheduler_pb2.Placement(
            placement_id=f"p{len(self.admits)}",
            lease_ms=self.lease_ms,
            mode=scheduler_pb2.PLACEMENT_MODE_LOCAL,
            decode=scheduler_pb2.WorkerRef(worker_id=decode.worker_id, address=decode.address),
        )
        if prefill is not None and not self.local:
            placement.mode = scheduler_pb2.PLACEMENT_MODE_DISAGGREGATED
            placement.prefill.worker_id = prefill.worker_id
            placement.prefill.address = prefill.address
        return placement


class FakeMesh:
    """All services of a mesh, each behind its own server."""

    def __init__(self, num_prefill: int = 1, num_decode: int = 2) -> None:
        self.model = FakeModel()
        self.tokenizer = FakeTokenizer()
        self.prefills = [FakePrefill(self.model, f"prefill-{i}") for i in range(num_prefill)]
        self.decodes = [
            FakeDecode(self.model, self.prefills[0], f"decode-{i}") for i in range(num_decode)
        ]
        self.scheduler = FakeScheduler([*self.prefills], [*self.decodes])
        self.tokenizer_address = ""
        self.scheduler_address = ""
        self._servers: dict[str, MeshServer] = {}
        self._stack = AsyncExitStack()

    @property
    def prefill(self) -> FakePrefill:
        return self.prefills[0]

    @property
    def decode(self) -> FakeDecode:
        return self.decodes[0]

    async def __aenter__(self) -> Self:
        self.tokenizer_address = await self.start_tokenizer()
        self.scheduler_address = await self._start(
            "scheduler", scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server, self.scheduler
        )
        for prefill in self.prefills:
            prefill.address = await self._start(
                prefill.worker_id, prefill_pb2_grpc.add_PrefillServiceServicer_to_server, prefill
            )
        for decode in self.decodes:
            decode.address = await self._start(
                decode.worker_id, decode_pb2_grpc.add_DecodeServiceServicer_to_server, decode
            )
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        for name in list(self._servers):
            await self.kill(name)

    async def start_tokenizer(self, address: str = "127.0.0.1:0") -> str:
        return await self._start(
            "tokenizer",
            tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server,
            self.tokenizer,
            address,
        )

    def reset(self) -> None:
        """Forget scripts and recordings; what is counted as held stays."""
        tokenizer, scheduler = self.tokenizer, self.scheduler
        tokenizer.encode_gate = tokenizer.break_after = tokenizer.error_from = None
        tokenizer.num_encodes = 0
        tokenizer.chats.clear()
        tokenizer.traceparents.clear()
        scheduler.error = scheduler.gate = None
        scheduler.lease_ms = 15_000
        scheduler.was_renewed.clear()
        scheduler.full.clear()
        self.model.failing.clear()
        scheduler.local = False
        scheduler.num_prefill_done = 0
        scheduler.told.clear()
        scheduler.was_asked.clear()
        scheduler.admits.clear()
        scheduler.loads.clear()
        scheduler.metadata.clear()
        self.model.answers.clear()
        self.model.default = FakeModel.default
        for worker in (*self.prefills, *self.decodes):
            worker.reset()

    async def kill(self, name: str) -> None:
        """Stop a server at once, cutting its calls."""
        await self._servers.pop(name).stop(0)

    async def quiet(self) -> None:
        """Return when nothing runs and nothing is held; the tests' time limit is the bound."""
        for worker in (*self.prefills, *self.decodes):
            if worker.num_active:
                await worker.is_idle.wait()
        if self.scheduler.num_open:
            await self.scheduler.is_idle.wait()

    async def _start(self, name: str, add: Any, servicer: Any, address: str = "127.0.0.1:0") -> str:
        server = MeshServer(address)
        server.add(add, servicer, f"mesh.v1.{name}")
        self._servers[name] = server
        return await server.start()
