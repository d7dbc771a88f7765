"""Which code runs which model, chosen once when the engine starts."""

import os
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from engine.config import (
    INTEGER_WEIGHTS,
    BackendName,
    DtypeName,
    EngineConfig,
    KvDtypeName,
    ModelConfig,
    ModelError,
)
from engine.forward_batch import ForwardBatch, ForwardPass
from engine.kernels.library import load_library
from engine.kv_cache import KvCache, KvCacheLayout
from engine.loader import load_weights, stored_dtype
from engine.models.native import NativeModel
from engine.models.native_weights import WeightsName, has_quantized_source, load_packed
from engine.sampling import Draw, draw_tokens
from engine.speculation import COSTS_BY_ROWS, COSTS_BY_TILES, StepCosts


class BackendError(ModelError):
    """The settings ask for something that cannot be run here."""


class Model(Protocol):
    """Anything that turns tokens into logits over a paged KV cache."""

    @property
    def vocab_size(self) -> int: ...

    def forward(self, batch: ForwardBatch, kv_cache: KvCache) -> npt.NDArray[np.float32]:
        """Write the batch's keys and values, and return float32 logits `[L, vocab_size]`.

        They are the caller's to change, until the next call.
        """
        ...

    def begin(self, batch: ForwardBatch, kv_cache: KvCache) -> ForwardPass:
        """Compute the same in parts, between which other batches may be computed."""
        ...

    def close(self) -> None:
        """End its threads."""
        ...


@dataclass(frozen=True)
class LoadedModel:
    """A model, the layout of its cache, and what draws tokens from its logits."""

    model: Model
    layout: KvCacheLayout
    draw: Draw
    # Where a row's logits are the same, to the bit, whatever is computed beside it: the costs of
    # computing more rows in a step.
    costs: StepCosts | None = None


@dataclass(frozen=True)
class Choice:
    """What `EngineConfig` comes to for one model on this machine."""

    backend: BackendName
    weights: WeightsName
    kv_dtype: KvDtypeName


def load_model(config: EngineConfig, model_config: ModelConfig, max_model_len: int) -> LoadedModel:
    """Load a model for sequences of up to `max_model_len` tokens."""
    choice = choose(config, model_config, max_model_len)
    layout = KvCacheLayout(
        num_layers=model_config.num_layers,
        num_kv_heads=model_config.num_kv_heads,
        head_dim=model_config.head_dim,
        block_size=config.block_size,
        dtype=choice.kv_dtype,
        weights=choice.weights,
    )
    if choice.backend == "torch":
        return LoadedModel(_load_torch(config, model_config), layout, draw_tokens)
    library = load_library()
    assert library is not None, "choose() has found it"
    native = NativeModel(
        library,
        model_config,
        load_packed(config.model_path, model_config, choice.weights, config.packed_weights_dir),
        layout,
        num_positions=max_model_len,
        num_threads=config.num_threads or len(os.sched_getaffinity(0)),
        level=_level_name(config),
    )
    by_tiles = has_tiles(config) and choice.weights in ("int8", "int4_channel")
    costs = COSTS_BY_TILES if by_tiles else COSTS_BY_ROWS
    return LoadedModel(native, layout, native.draw, costs)


def choose(config: EngineConfig, model_config: ModelConfig, max_model_len: int) -> Choice:
    """Settle what the settings leave open; raises BackendError where they cannot be met."""
    obstacle = None
    if config.backend != "torch":
        obstacle = _obstacle_to_native(config, model_config, max_model_len)
    if config.backend == "native" and obstacle is not None:
        raise BackendError(f"the native backend cannot run this: {obstacle}")
    is_native = config.backend != "torch" and obstacle is None
    if not is_native:
        for name, value in (
            ("quantization", config.quantization),
            ("kv_cache_dtype", config.kv_cache_dtype),
        ):
            if value in INTEGER_WEIGHTS or value in ("int8", "fp8"):
                raise _needs_native(name, value, obstacle)
        if config.kernel_level != "auto":
            raise _needs_native("kernel_level", config.kernel_level, obstacle)
    weights = _choose_weights(config, model_config, is_native)
    kv_dtype = config.kv_cache_dtype
    if kv_dtype == "auto":
        kv_dtype = "float32" if weights == "float32" else "bfloat16"
    elif not is_native and kv_dtype != weights:
        raise BackendError(f"kv_cache_dtype {kv_dtype} with {weights} needs the native backend")
    return Choice("native" if is_native else "torch", weights, kv_dtype)


def _needs_native(name: str, value: str, obstacle: str | None) -> BackendError:
    why = obstacle or "backend is torch"
    return BackendError(f"{name} {value} needs the native backend: {why}")


def has_tiles(config: EngineConfig) -> bool:
    """Whether the kernels multiply int8 matrices in AMX tiles here."""
    library = load_library()
    return library is not None and library.level(_level_name(config)) == "amx"


def _level_name(config: EngineConfig) -> str | None:
    return None if config.kernel_level == "auto" else config.kernel_level


def _obstacle_to_native(
    config: EngineConfig, model_config: ModelConfig, max_model_len: int
) -> str | None:
    """Say why the kernels cannot run this; None: they can."""
    if config.device != "cpu":
        return f"device is {config.device}"
    if model_config.attention_bias or model_config.mlp_bias:
        return "the model's matrices have biases"
    if model_config.sliding_window is not None and model_config.sliding_window < max_model_len:
        return "the model's attention has a sliding window"
    if model_config.head_dim % 4:
        return f"head_dim {model_config.head_dim} is no multiple of 4"
    library = load_library()
    if library is None:
        return "the kernel library could not be built"
    if library.level(_level_name(config)) is None:
        return f"this CPU has {', '.join(library.levels())}"
    return None


def _choose_weights(
    config: EngineConfig, model_config: ModelConfig, is_native: bool
) -> WeightsName:
    stored = model_config.quantization
    match config.quantization:
        case ("int4" | "int4_channel") as name if stored is not None and stored.weights == "int8":
            raise BackendError(
                f"quantization {name} would round the checkpoint's int8 weights again"
            )
        case "int8" | "int4" | "int4_channel":
            return config.quantization
        case "auto" if is_native and config.dtype == "auto":
            if stored is not None:
                return stored.weights
            if has_quantized_source(config.model_path):
                # What is fastest of that which passes the gate: tiles multiply whole rows of
                # int8, and vector units sums that become floats after each group.
                return "int4_channel" if has_tiles(config) else "int4"
    return _dtype(config)


def _dtype(config: EngineConfig) -> DtypeName:
    if config.dtype != "auto":
        return config.dtype
    # float16 is for GPUs; float32 holds all of its values.
    return "bfloat16" if stored_dtype(config.model_path) == "bfloat16" else "float32"


def _load_torch(config: EngineConfig, model_config: ModelConfig) -> Model:
    # Imported here, because torch costs a worker 200 MB and seconds, and mostly is not needed.
    import torch

    from engine.models.llama import LlamaModel
    from engine.models.torch_weights import to_tensors

    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    weights = load_weights(config.model_path, model_config)
    # ModelConfig has refused all other architectures: Mistral differs from Llama by its window.
    return LlamaModel(model_config, to_tensors(weights, config.device, _dtype(config)))
