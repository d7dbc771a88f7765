"""Parameters that chat completions and completions share."""

import logging
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
)

from gateway.generation import GenerationRequest, PriorityClass, Prompt
from gateway.openai.responses import ServiceTier
from gateway.sampling import (
    MAX_SEED,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MIN_SEED,
    RANGES,
    check_stop,
)
from mesh.errors import InvalidRequest, UnsupportedParameter
from mesh.v1 import types_pb2

logger = logging.getLogger(__name__)

_MAX_UINT32 = 2**32 - 1
MAX_TOKENS = _MAX_UINT32
_MAX_INT32 = 2**31 - 1
_TOKEN_ID = re.compile(r"[0-9]{1,10}")
_MAX_BIASES = 1024

Model = TypeVar("Model", bound=BaseModel)


def _to_stop(value: object) -> object:
    """One string or several; validators raise InvalidRequest, which names the parameter."""
    stop = [value] if isinstance(value, str) else value
    if stop is None:
        return ()
    if not isinstance(stop, list) or not all(isinstance(one, str) for one in stop):
        raise InvalidRequest("stop should be a string or a list of strings", param="stop")
    return tuple(stop)


def _to_logit_bias(value: object) -> object:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidRequest("logit_bias should be an object", param="logit_bias")
    if len(value) > _MAX_BIASES:
        raise InvalidRequest(f"at most {_MAX_BIASES} entries in logit_bias", param="logit_bias")
    biases: dict[int, float] = {}
    for key, bias in value.items():
        if not _TOKEN_ID.fullmatch(key) or int(key) > _MAX_UINT32:
            raise InvalidRequest(
                f"logit_bias keys should be token ids, not {key[:40]!r}", param="logit_bias"
            )
        if isinstance(bias, bool) or not isinstance(bias, int | float) or abs(bias) > 100:
            raise InvalidRequest(
                "logit_bias values should be numbers between -100 and 100", param="logit_bias"
            )
        biases[int(key)] = float(bias)
    return biases


_STOP_STRING = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
Stop = Annotated[
    tuple[str, ...],
    BeforeValidator(_to_stop),
    WithJsonSchema(
        {
            "anyOf": [
                _STOP_STRING,
                {"type": "array", "items": _STOP_STRING, "maxItems": MAX_STOP_STRINGS},
                {"type": "null"},
            ]
        }
    ),
]
LogitBias = Annotated[
    dict[int, float],
    BeforeValidator(_to_logit_bias),
    WithJsonSchema(
        {
            "anyOf": [
                {
                    "type": "object",
                    "propertyNames": {"pattern": "^[0-9]{1,10}$"},
                    "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
                    "maxProperties": _MAX_BIASES,
                },
                {"type": "null"},
            ]
        }
    ),
]
TokenId = Annotated[int, Field(ge=0, le=_MAX_UINT32)]


# OpenAI's flex processing is cheaper and may wait: what pdmesh calls offline.
_TIERS = {
    "auto": PriorityClass.ONLINE,
    "default": PriorityClass.ONLINE,
    "flex": PriorityClass.OFFLINE,
}


def _within(name: str) -> WithJsonSchema:
    """The range that `gateway.sampling` checks."""
    low, high = RANGES[name]
    return WithJsonSchema({"type": "number", "minimum": low, "maximum": high})


class StreamOptions(BaseModel):
    """What a stream carries besides text."""

    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool | None = None
    # Padding against whoever measures the lengths of encrypted events.
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationFields(BaseModel):
    """Validates types; ranges are checked in `gateway.sampling`, for gRPC callers too.

    A null is the client's decision for the engine's own default, an absent key
    leaves the choice to the model's defaults.
    """

    model_config = ConfigDict(strict=True, extra="ignore")

    model: Annotated[str, Field(min_length=1)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    n: Annotated[int, Field(ge=1, le=_MAX_INT32)] | None = None

    temperature: Annotated[float, _within("temperature")] | None = None
    top_p: Annotated[float, _within("top_p")] | None = None
    top_k: Annotated[int, Field(ge=-1, le=_MAX_INT32)] | None = None
    min_p: Annotated[float, _within("min_p")] | None = None
    presence_penalty: Annotated[float, _within("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, _within("frequency_penalty")] | None = None
    repetition_penalty: (
        Annotated[float, WithJsonSchema({"type": "number", "exclusiveMinimum": 0, "maximum": 2})]
        | None
    ) = None
    seed: Annotated[int, Field(ge=MIN_SEED, le=MAX_SEED)] | None = None
    logit_bias: LogitBias = {}

    stop: Stop = ()
    include_stop_str_in_output: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    min_tokens: Annotated[int, Field(ge=0, le=_MAX_UINT32)] | None = None
    ignore_eos: bool | None = None
    bad_words: list[Annotated[str, Field(min_length=1)]] | None = None
    skip_special_tokens: bool | None = None

    # Labels: they change nothing about the answer.
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    metadata: dict[str, str] | None = None
    cache_salt: Annotated[str, Field(min_length=1)] | None = None
    priority: Annotated[int, Field(ge=-_MAX_INT32, le=_MAX_INT32)] | None = None
    service_tier: Annotated[str, WithJsonSchema({"enum": list(_TIERS)})] | None = None

    # Taken as they are by `SamplingParams`.
    _SAMPLING: ClassVar[tuple[str, ...]] = (
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "seed",
    )

    @classmethod
    def parse(cls, payload: Mapping[str, Any]) -> Self:
        """Validate a body; the error names the first parameter that is wrong."""
        log_unknown(payload, cls)
        parsed = validate(cls, payload)
        parsed._check_together()
        return parsed

    def is_stream(self) -> bool:
        return bool(self.stream)

    def includes_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def has_continuous_usage(self) -> bool:
        options = self.stream_options
        return options is not None and bool(options.continuous_usage_stats)

    def served_tier(self) -> ServiceTier | None:
        if self.service_tier is None:
            return None
        return "flex" if _TIERS[self.service_tier] is PriorityClass.OFFLINE else "default"

    def sampling_params(self, defaults: types_pb2.SamplingParams) -> types_pb2.SamplingParams:
        """What the client said, and for keys that it left out what the model suggests."""
        params = types_pb2.SamplingParams(
            min_tokens=self.min_tokens or 0,
            ignore_eos=bool(self.ignore_eos),
            stop_token_ids=self.stop_token_ids or (),
            logit_bias=self.logit_bias,
        )
        for name in self._SAMPLING:
            if name not in self.model_fields_set and defaults.HasField(name):  # type: ignore[arg-type]
                setattr(params, name, getattr(defaults, name))
            elif (value := getattr(self, name)) is not None:
                setattr(params, name, value)
        return params

    def request(
        self,
        *,
        prompts: tuple[Prompt, ...],
        prompt_param: str,
        sampling_params: types_pb2.SamplingParams,
        default_max_tokens: int | None = None,
        echo: bool = False,
    ) -> GenerationRequest:
        """The request in the gateway's own terms."""
        return GenerationRequest(
            prompts=prompts,
            prompt_param=prompt_param,
            sampling_params=sampling_params,
            # One slot behind two names.
            max_tokens=self.max_completion_tokens if self.max_tokens is None else self.max_tokens,
            default_max_tokens=default_max_tokens,
            n=self.n or 1,
            stop=self.stop,
            include_stop_str_in_output=bool(self.include_stop_str_in_output),
            skip_special_tokens=self.skip_special_tokens is not False,
            bad_words=tuple(self.bad_words or ()),
            echo=echo,
            cache_salt=self.cache_salt or "",
            priority=self.priority or 0,
            priority_class=_TIERS[self.service_tier or "auto"],
        )

    def _check_together(self) -> None:
        if self.service_tier is not None and self.service_tier not in _TIERS:
            raise UnsupportedParameter(
                f"service_tier {self.service_tier!r} is not supported: use one of "
                f"{', '.join(_TIERS)}",
                param="service_tier",
            )
        first, second = self.max_tokens, self.max_completion_tokens
        if first is not None and second is not None and first != second:
            raise InvalidRequest(
                f"max_tokens ({first}) and max_completion_tokens ({second}) are two names of one "
                "parameter and should not differ",
                param="max_completion_tokens",
            )
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest(
                "stream_options is only allowed when stream is true", param="stream_options"
            )
        if self.stream_options is not None and self.stream_options.include_obfuscation:
            raise UnsupportedParameter(
                "stream_options.include_obfuscation is not supported by this server",
                param="stream_options.include_obfuscation",
            )
        check_stop(self.stop)


def validate(kind: type[Model], payload: Mapping[str, Any]) -> Model:
    """A pydantic model from a body; raises InvalidRequest with `param`."""
    try:
        return kind.model_validate(payload)
    except ValidationError as error:
        details = error.errors(include_url=False, include_input=False)[0]
        param = _path(details["loc"])
        raise InvalidRequest(f"{param}: {details['msg']}", param=param) from None


def log_unknown(payload: Mapping[str, Any], kind: type[BaseModel]) -> None:
    """One debug line with the keys that nobody reads. Their values may be private."""
    if logger.isEnabledFor(logging.DEBUG):
        unknown = sorted(set(payload) - set(kind.model_fields))
        if unknown:
            logger.debug("ignored unknown parameters", extra={"parameters": unknown[:20]})


def _path(location: tuple[int | str, ...]) -> str:
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path
