"""What an engine runs: the model's shape from its config.json, and the engine's own limits."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from engine.quantization_config import (
    CheckpointQuantization,
    UnsupportedQuantization,
    parse_quantization,
)

MIB = 1024 * 1024


class ModelError(Exception):
    """A model that the engine cannot run; the message says what and where."""


class ModelConfigError(ModelError):
    """config.json asks for something that the engine does not have."""


@dataclass(frozen=True)
class Llama3RopeScaling:
    """Llama 3.1's stretching of low rotary frequencies to longer contexts."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True)
class LinearRopeScaling:
    """Positions divided by a factor."""

    factor: float


RopeScaling = Llama3RopeScaling | LinearRopeScaling | None


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a Llama-family model."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    # Longest sequence that the model was made for.
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling
    attention_bias: bool
    mlp_bias: bool
    tie_word_embeddings: bool
    # A token sees this many last tokens, itself included; None: all.
    sliding_window: int | None
    bos_token_id: int | None
    # Any of these ends a sequence.
    eos_token_ids: frozenset[int]
    # None: the checkpoint has plain floats.
    quantization: CheckpointQuantization | None = None

    @classmethod
    def from_folder(cls, folder: Path) -> "ModelConfig":
        """Read config.json (and the eos ids of generation_config.json)."""
        path = folder / "config.json"
        values = _read_object(path)
        generation = folder / "generation_config.json"
        generation_values = _read_object(generation) if generation.exists() else {}
        try:
            return _parse(values, generation_values)
        except ModelConfigError as error:
            raise ModelConfigError(f"{path}: {error}") from None

    @property
    def num_kv_groups(self) -> int:
        """Query heads that share one key/value head."""
        return self.num_heads // self.num_kv_heads


# What computes: the compiled kernels (CPU) or torch.
BackendName = Literal["native", "torch"]
# Instructions that the kernels use, most first; all give the same bits.
KernelLevel = Literal["amx", "avx512", "avx2", "portable"]
DtypeName = Literal["float32", "bfloat16"]
# How weights are stored; "none" is the dtype.
QuantizationName = Literal["none", "int8", "int4", "int4_channel"]
# Of these, what stores weights as whole numbers.
INTEGER_WEIGHTS = frozenset(get_args(QuantizationName)) - {"none"}
KvDtypeName = Literal["float32", "bfloat16", "int8", "fp8"]

SpeculativeMethod = Literal["ngram", "none"]


@dataclass(frozen=True)
class SpeculationLimits:
    """How tokens are guessed; names and meaning are those of vLLM's `ngram` method."""

    # Tokens in a draft, at most.
    num_speculative_tokens: int = 7
    # Lengths of the sequence's end that is looked for in the sequence, in tokens.
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4

    def __post_init__(self) -> None:
        if self.num_speculative_tokens < 1:
            raise ValueError(f"num_speculative_tokens is {self.num_speculative_tokens}, below 1")
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max:
            raise ValueError(
                f"prompt_lookup_min is {self.prompt_lookup_min}, expected a number from 1 to "
                f"prompt_lookup_max, {self.prompt_lookup_max}"
            )


@dataclass(frozen=True)
class EngineConfig:
    """One engine: its model and its limits."""

    # Folder with config.json, safetensors and tokenizer.json.
    model_path: Path
    device: str = "cpu"
    # "auto" is native where the kernels are and can run the model.
    backend: BackendName | Literal["auto"] = "auto"
    # "auto" is the best that the CPU has.
    kernel_level: KernelLevel | Literal["auto"] = "auto"
    # "auto" keeps what the checkpoint stores (float16 becomes float32 on a CPU).
    dtype: DtypeName | Literal["auto"] = "auto"
    # "auto" is what the checkpoint is quantized to, or was made from, where the kernels can run it.
    quantization: QuantizationName | Literal["auto"] = "auto"
    # "auto" is the dtype, or bfloat16 with quantized weights.
    kv_cache_dtype: KvDtypeName | Literal["auto"] = "auto"
    # Folder for weights as the kernels read them, made once; None: in the model's folder.
    packed_weights_dir: Path | None = None
    # Tokens in a KV block.
    block_size: int = 16
    # KV blocks; None: as many as kv_cache_memory_bytes holds.
    num_blocks: int | None = None
    kv_cache_memory_bytes: int = 288 * MIB
    # Requests that run at the same time.
    max_num_seqs: int = 32
    # Tokens in one step, over all requests.
    max_num_batched_tokens: int = 256
    # Longest chunk of one prompt in a step while others run; 0: no limit but the step's.
    long_prefill_token_threshold: int = 0
    # How long a step with decodes should take at most, if need be with some layers of the prompts
    # beside them only; 0: no limit.
    step_objective_ms: float = 25
    # Longest sequence; None: what the model was made for.
    max_model_len: int | None = None
    # Guess tokens ahead; "auto" is ngram where a row's result does not depend on its neighbours.
    speculative_method: SpeculativeMethod | Literal["auto"] = "auto"
    speculation: SpeculationLimits = SpeculationLimits()
    enable_prefix_caching: bool = True
    # Requests that may wait; more are refused.
    max_num_waiting: int = 256
    # CPU threads of a forward pass; None: one per core.
    num_threads: int | None = None
    # File of the shared-memory segment behind the KV cache; None: private memory.
    segment_path: str | None = None


_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")
_MAX_SIZE = 1 << 24


def _parse(values: Mapping[str, Any], generation: Mapping[str, Any]) -> ModelConfig:
    architecture = _architecture(values)
    if "auto_map" in values:
        raise ModelConfigError("auto_map asks for the model's own code, which is never run")
    if (activation := values.get("hidden_act", "silu")) != "silu":
        raise ModelConfigError(f"hidden_act is {activation!r}, only 'silu' is supported")
    hidden_size = _size(values, "hidden_size")
    num_heads = _size(values, "num_attention_heads")
    is_mistral = architecture == "MistralForCausalLM"
    num_kv_heads = _size(values, "num_key_value_heads", default=None if is_mistral else num_heads)
    if num_heads % num_kv_heads:
        raise ModelConfigError(
            f"num_attention_heads {num_heads} is no multiple of num_key_value_heads {num_kv_heads}"
        )
    head_dim = _size(values, "head_dim", default=hidden_size // num_heads)
    if head_dim % 2:
        raise ModelConfigError(f"head_dim {head_dim} is odd")
    vocab_size = _size(values, "vocab_size")
    rope_theta, rope_scaling = _rope(values)
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=_size(values, "intermediate_size"),
        num_layers=_size(values, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=_size(values, "max_position_embeddings"),
        rms_norm_eps=_positive(values, "rms_norm_eps", default=1e-6),
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        attention_bias=_flag(values, "attention_bias"),
        mlp_bias=_flag(values, "mlp_bias"),
        tie_word_embeddings=_flag(values, "tie_word_embeddings"),
        sliding_window=_sliding_window(values) if is_mistral else None,
        bos_token_id=_bos(values, vocab_size),
        eos_token_ids=_eos(values, generation, vocab_size),
        quantization=_quantization(values),
    )


def _architecture(values: Mapping[str, Any]) -> str:
    architectures = values.get("architectures") or []
    for architecture in architectures:
        if architecture in _ARCHITECTURES:
            return str(architecture)
    raise ModelConfigError(
        f"architecture {architectures} is not supported; supported: {', '.join(_ARCHITECTURES)}"
    )


def _quantization(values: Mapping[str, Any]) -> CheckpointQuantization | None:
    stored = values.get("quantization_config")
    if stored is None:
        return None
    if not isinstance(stored, dict):
        raise ModelConfigError("quantization_config is not an object")
    try:
        return parse_quantization(stored)
    except UnsupportedQuantization as error:
        raise ModelConfigError(f"quantization_config: {error}") from None


def _rope(values: Mapping[str, Any]) -> tuple[float, RopeScaling]:
    """Read both spellings: rope_theta + rope_scaling, and transformers 5's rope_parameters."""
    parameters = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(parameters, dict):
        raise ModelConfigError("rope_scaling is not an object")
    if parameters.get("partial_rotary_factor", values.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelConfigError("partial_rotary_factor other than 1 is not supported")
    theta_source = parameters if "rope_theta" in parameters else values
    theta = _positive(theta_source, "rope_theta", default=10000.0)
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, LinearRopeScaling(_positive(parameters, "factor"))
    if kind == "llama3":
        scaling = Llama3RopeScaling(
            factor=_positive(parameters, "factor"),
            low_freq_factor=_positive(parameters, "low_freq_factor"),
            high_freq_factor=_positive(parameters, "high_freq_factor"),
            original_max_position_embeddings=_size(parameters, "original_max_position_embeddings"),
        )
        if scaling.high_freq_factor <= scaling.low_freq_factor:
            raise ModelConfigError("rope_scaling: high_freq_factor must exceed low_freq_factor")
        return theta, scaling
    raise ModelConfigError(f"rope_scaling type {kind!r} is not supported")


def _sliding_window(values: Mapping[str, Any]) -> int | None:
    # Absent means transformers' default for Mistral; null means no window.
    if "sliding_window" in values and values["sliding_window"] is None:
        return None
    return _size(values, "sliding_window", default=4096)


def _bos(values: Mapping[str, Any], vocab_size: int) -> int | None:
    bos = values.get("bos_token_id")
    return None if bos is None else _token_id("bos_token_id", bos, vocab_size)


def _eos(
    values: Mapping[str, Any], generation: Mapping[str, Any], vocab_size: int
) -> frozenset[int]:
    """Generation's word is final where it has one: chat models end turns with other ids."""
    eos = generation.get("eos_token_id")
    if eos is None:
        eos = values.get("eos_token_id")
    if eos is None:
        return frozenset()
    ids = eos if isinstance(eos, list) else [eos]
    return frozenset(_token_id("eos_token_id", token_id, vocab_size) for token_id in ids)


def _token_id(key: str, value: object, vocab_size: int) -> int:
    if type(value) is not int or not 0 <= value < vocab_size:
        raise ModelConfigError(f"{key} {value!r} is outside the vocabulary of {vocab_size}")
    return value


def _size(values: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = values.get(key)
    if value is None:
        value = default
    if value is None:
        raise ModelConfigError(f"{key} is missing")
    if type(value) is not int or not 0 < value <= _MAX_SIZE:
        raise ModelConfigError(f"{key} is {value!r}, expected an integer from 1 to {_MAX_SIZE}")
    return value


def _positive(values: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = values.get(key, default)
    if type(value) not in (int, float) or not 0 < value < float("inf"):
        raise ModelConfigError(f"{key} is {value!r}, expected a positive number")
    return float(value)


def _flag(values: Mapping[str, Any], key: str) -> bool:
    value = values.get(key, False)
    if not isinstance(value, bool):
        raise ModelConfigError(f"{key} is {value!r}, expected true or false")
    return value


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelConfigError(f"{path}: not readable as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelConfigError(f"{path}: expected a JSON object")
    return value
