"""Protobuf to engine and back, for both kinds of worker."""

from collections.abc import Mapping, Sequence
from typing import Any

from engine.reports import EngineStats
from engine.request import (
    DuplicateRequest,
    EngineError,
    EngineStopped,
    FinishReason,
    InvalidLogits,
    InvalidParameter,
    RequestTooLarge,
    TokenOutput,
    TooManyWaiting,
)
from engine.sampling import SamplingParams, TokenLogprobs
from mesh.errors import (
    ContextLengthExceeded,
    InternalError,
    InvalidRequest,
    MeshError,
    ModelNotFound,
    QueueFull,
    WorkerUnavailable,
)
from mesh.v1 import decode_pb2, prefill_pb2, types_pb2

# A full waiting queue drains in steps, so the caller may come back soon.
_RETRY_AFTER_S = 1.0

_MESH_ERRORS: Mapping[type[EngineError], type[MeshError]] = {
    InvalidParameter: InvalidRequest,
    RequestTooLarge: ContextLengthExceeded,
    DuplicateRequest: InvalidRequest,
    TooManyWaiting: QueueFull,
    InvalidLogits: InternalError,
}

_FINISH_REASONS = {
    FinishReason.STOP: types_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: types_pb2.FINISH_REASON_LENGTH,
}

# Sent as they are, where they are sent at all.
_OPTIONAL_FIELDS = {
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "num_logprobs",
    "num_prompt_logprobs",
}


def check_model(requested: str, served: str) -> None:
    if requested != served:
        raise ModelNotFound(f"this worker serves {served!r}, not {requested!r}")


def to_mesh_error(error: EngineError) -> MeshError:
    """What an engine's refusal means to the mesh."""
    if isinstance(error, EngineStopped):
        # Its text may hold internals of a crash; the log has them.
        return WorkerUnavailable("the worker's engine has stopped")
    return _MESH_ERRORS.get(type(error), InternalError)(
        str(error),
        param=error.param if isinstance(error, InvalidParameter) else None,
        retry_after_s=_RETRY_AFTER_S if isinstance(error, TooManyWaiting) else None,
    )


def to_sampling_params(message: types_pb2.SamplingParams) -> SamplingParams:
    """Absent fields take the engine's defaults; the engine checks the ranges."""
    given: dict[str, Any] = {
        field.name: value for field, value in message.ListFields() if field.name in _OPTIONAL_FIELDS
    }
    return SamplingParams(
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        ignore_eos=message.ignore_eos,
        stop_token_ids=frozenset(message.stop_token_ids),
        logit_bias=dict(message.logit_bias),
        bad_words=tuple(tuple(word.token_ids) for word in message.bad_words),
        **given,
    )


def to_num_tiered_tokens(
    request: decode_pb2.DecodeRequest | prefill_pb2.PrefillRequest,
) -> int | None:
    """How much of a prompt colder tiers are known to have; None: nobody knows."""
    return request.num_tiered_tokens if request.HasField("num_tiered_tokens") else None


def to_token_chunk(outputs: Sequence[TokenOutput]) -> types_pb2.TokenChunk:
    return types_pb2.TokenChunk(
        token_ids=[output.token_id for output in outputs],
        logprobs=[_to_logprobs(output.logprobs) for output in outputs if output.logprobs],
        prompt_logprobs=[_to_logprobs(one) for output in outputs for one in output.prompt_logprobs],
    )


def to_finish_reason(reason: FinishReason) -> "types_pb2.FinishReason.ValueType":
    return _FINISH_REASONS[reason]


def to_timings(
    *stages: "tuple[types_pb2.Stage.ValueType, float]",
) -> list[types_pb2.StageTiming]:
    """From (stage, seconds); stages that took no time are left out."""
    return [
        types_pb2.StageTiming(stage=stage, duration_ms=duration_s * 1000)
        for stage, duration_s in stages
        if duration_s > 0
    ]


def to_engine_load(stats: EngineStats) -> types_pb2.EngineLoad:
    return types_pb2.EngineLoad(
        **{field: getattr(stats, field) for field in types_pb2.EngineLoad.DESCRIPTOR.fields_by_name}
    )


def _to_logprobs(logprobs: TokenLogprobs) -> types_pb2.TokenLogprobs:
    return types_pb2.TokenLogprobs(
        token_id=logprobs.token_id,
        logprob=logprobs.logprob,
        top=[
            types_pb2.TokenLogprobs.Candidate(token_id=one.token_id, logprob=one.logprob)
            for one in logprobs.top
        ],
    )
