"""InferenceService: the pipeline for internal callers."""

import uuid
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from typing import Any

import grpc

from gateway.choices import Choices
from gateway.core import Core
from gateway.generation import (
    ChatPrompt,
    Deadline,
    Delta,
    Finish,
    GenerationRequest,
    Job,
    Prompt,
    TextPrompt,
    TokenPrompt,
)
from gateway.inference_rules import apply_rules, read_payload
from gateway.record import RequestRecord
from gateway.rules.engine import ACTIONS_HEADER
from gateway.service_class import priority_class
from mesh.client import remaining_s
from mesh.errors import InvalidRequest
from mesh.telemetry import SpanKind, request_id_var, span, start_span, use_span
from mesh.v1 import inference_pb2, inference_pb2_grpc, tokenizer_pb2, types_pb2

_MAX_ID_CHARS = 128

Context = grpc.aio.ServicerContext[Any, Any]


class InferenceServicer(inference_pb2_grpc.InferenceServiceServicer):
    """One choice a call: validated, placed and resumed like a request over HTTP."""

    def __init__(self, core: Core) -> None:
        self._core = core

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Context
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        # The caller's id appears in the log; the mesh needs ids that nobody else uses.
        request_id_var.set(uuid.uuid4().hex)
        record = RequestRecord(
            request_id_var.get(),
            _operation(request),
            client_request_id=request.request_id[:_MAX_ID_CHARS],
            recent=self._core.recent,
            keeps_content=self._core.config.trace_content,
        )
        record.is_stream = True
        root = start_span("gateway.request", kind=SpanKind.SERVER)
        outcome: BaseException | None = None
        finish: Finish | None = None
        try:
            with self._core.in_flight.request():
                with use_span(root):
                    model, generation = await self._validate(request, record, context)
                async with self._core.admitted(record.caller, generation, record) as headers:
                    with use_span(root):
                        context.set_trailing_metadata(_trailing(record, headers))
                        job = await self._prepare(model, generation, record, context)
                        choices = Choices(self._core.pipeline, [[job]]).start()
                    async with choices:
                        with self._core.in_flight.running(choices):
                            while (item := await choices.next()) is not None:
                                record.note(item.index, item.delta)
                                finish = item.delta.finish
                                if item.delta.text or item.delta.token_ids:
                                    yield _to_response(item.delta)
        except BaseException as error:
            outcome = error
            raise
        finally:
            record.finish(outcome, root)
            root.end()
        assert finish is not None, "choices end with a finish or raise"
        yield _finished(finish, job, record)

    async def _validate(
        self, request: inference_pb2.GenerateRequest, record: RequestRecord, context: Context
    ) -> tuple[tokenizer_pb2.ModelInfo, GenerationRequest]:
        """Who asks, and for what after rules: the same as over HTTP."""
        core = self._core
        core.in_flight.check_room()
        record.timeline.enter(types_pb2.STAGE_RULES)
        metadata = [
            (name, value)
            for name, value in context.invocation_metadata() or ()
            if isinstance(value, str)
        ]
        caller = record.caller = core.keys.authenticate(
            [value for name, value in metadata if name == "authorization"]
        )
        with span("gateway.rules"):
            ruled = apply_rules(core.rules.current(), request, metadata, record)
        catalog = core.catalog
        model = await (catalog.get(ruled.model, caller) if ruled.model else catalog.default(caller))
        record.model = model.name
        generation = (
            _to_generation(request)
            if ruled.payload is None
            else read_payload(ruled.payload, request, model.name)
        )
        return model, replace(
            generation, ttft_objective_ms=request.ttft_objective_ms, tenant=caller.group
        )

    async def _prepare(
        self,
        model: tokenizer_pb2.ModelInfo,
        generation: GenerationRequest,
        record: RequestRecord,
        context: Context,
    ) -> Job:
        deadline = Deadline(remaining_s(context, self._core.config.request_timeout_s))
        groups = await self._core.pipeline.prepare(
            record.request_id, generation, model, deadline, record.timeline
        )
        record.serve(groups)
        return groups[0][0]


def _trailing(record: RequestRecord, headers: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """What the headers of an HTTP answer say."""
    actions = {ACTIONS_HEADER: record.param_actions} if record.param_actions else {}
    return tuple({**actions, **headers}.items())


def _to_generation(request: inference_pb2.GenerateRequest) -> GenerationRequest:
    # The pipeline fills in `max_tokens` once it knows what fits.
    params = types_pb2.SamplingParams()
    params.CopyFrom(request.sampling_params)
    params.ClearField("max_tokens")
    return GenerationRequest(
        prompts=(_to_prompt(request),),
        prompt_param=request.WhichOneof("input"),
        sampling_params=params,
        max_tokens=request.sampling_params.max_tokens or None,
        stop=tuple(request.stop),
        include_stop_str_in_output=request.include_stop_str_in_output,
        skip_special_tokens=not request.keep_special_tokens,
        cache_salt=request.cache_salt,
        priority=request.priority,
        priority_class=priority_class(request.priority_class),
    )


def _to_prompt(request: inference_pb2.GenerateRequest) -> Prompt:
    match request.WhichOneof("input"):
        case "text" if request.text:
            return TextPrompt(request.text)
        case "chat":
            return ChatPrompt(request.chat)
        case "prompt_token_ids" if request.prompt_token_ids.token_ids:
            return TokenPrompt(tuple(request.prompt_token_ids.token_ids))
        case _:
            raise InvalidRequest("the input is empty", param="input")


def _operation(request: inference_pb2.GenerateRequest) -> str:
    return "chat" if request.HasField("chat") else "text_completion"


def _to_response(delta: Delta) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(
        delta=inference_pb2.GenerateDelta(
            text=delta.text,
            tokens=types_pb2.TokenChunk(
                token_ids=delta.token_ids,
                logprobs=delta.logprobs,
                prompt_logprobs=delta.prompt_logprobs,
            ),
        )
    )


def _finished(finish: Finish, job: Job, record: RequestRecord) -> inference_pb2.GenerateResponse:
    counts = record.counts()
    finished = inference_pb2.GenerateFinished(
        finish_reason=finish.reason,
        usage=types_pb2.Usage(
            prompt_tokens=counts.prompt_tokens,
            completion_tokens=counts.completion_tokens,
            cached_tokens=counts.cached_tokens or 0,
        ),
        timings=[
            types_pb2.StageTiming(stage=stage, duration_ms=duration_ms)
            for stage, duration_ms in record.stages().items()
        ],
        prefill_worker_id=job.trace.prefill_worker_id,
        decode_worker_id=job.trace.decode_worker_id,
    )
    if finish.stop_string is not None:
        finished.stop_string = finish.stop_string
    elif finish.stop_token_id is not None:
        finished.stop_token_id = finish.stop_token_id
    return inference_pb2.GenerateResponse(finished=finished)
