"""Tensors of quantized checkpoints as matrices of the engine's own formats, not rounded again.

| layout             | tensors of one matrix of n outputs and k inputs                          |
|--------------------|--------------------------------------------------------------------------|
| pdmesh             | weight_packed I32[n, k/8], weight_scale and weight_minimum F16[n, k/32], |
|                    | weight_shape I64[2]; or weight I8[n, k], weight_scale F16[n, k/32]       |
| compressed-tensors | weight I8[n, k], weight_scale[n, 1]                                      |
| gptq               | qweight I32[k/8, n], scales[groups, n], qzeros I32[groups, n/8], g_idx   |
| awq                | qweight I32[k, n/8], scales[groups, n], qzeros I32[groups, n/8]          |

An I32 holds eight codes, the first in its lowest bits; AWQ's have an order of their own. What
has none of these tensors is not quantized.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.kernels.formats import GROUP_SIZE, WeightFormat
from engine.kernels.quantize import MatrixWeights
from engine.quantization_config import CheckpointQuantization
from engine.safetensors_file import FLOAT_DTYPES, StoredTensor

Array = npt.NDArray[Any]

# Where output channel i of eight is in an I32.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
_CODES_PER_WORD = 8


class LayoutError(Exception):
    """Tensors that do not make up a matrix; the message names it."""


@dataclass(frozen=True, eq=False)
class ScatteredGroups:
    """4-bit codes whose inputs share scales in another order than they come in (act-order)."""

    codes: Array
    scales: Array
    zeros: Array
    # For each input, its group.
    g_idx: Array

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    def dequantize(self) -> Array:
        """float32[n, k]"""
        scales = self.scales.astype(np.float32)[:, self.g_idx]
        return np.asarray(scales * (self.codes.astype(np.float32) - self.zeros[:, self.g_idx]))


QuantizedWeight = MatrixWeights | ScatteredGroups
Weight = StoredTensor | QuantizedWeight


def read_weights(
    stored: Mapping[str, StoredTensor], quantization: CheckpointQuantization | None
) -> dict[str, Weight]:
    """Join the tensors of each quantized matrix under the name `….weight`; pass on the others."""
    weights: dict[str, Weight] = {}
    rest = dict(stored)
    if quantization is not None:
        read = _READERS[quantization.layout]
        for module in _modules(stored):
            try:
                weights[f"{module}.weight"] = read(_Parts(rest, module), quantization)
            except ValueError as error:
                raise LayoutError(f"{module}: {error}") from None
        if not weights:
            raise LayoutError(f"quantization_config is {quantization.layout}, but no tensor is")
    for name, tensor in rest.items():
        if tensor.dtype not in FLOAT_DTYPES:
            raise LayoutError(f"{name}: dtype {tensor.dtype} is not supported for weights")
        # Some of GPTQ's writers gave every matrix a bias.
        if not (name.endswith(".bias") and name[:-4] + "weight" in weights and _is_zero(tensor)):
            weights[name] = tensor
    return weights


def as_float32(weight: Weight) -> Array:
    """The same values in float32."""
    return weight.to_float32() if isinstance(weight, StoredTensor) else weight.dequantize()


def as_stored(weight: Weight) -> StoredTensor:
    """The tensor itself, or a quantized matrix in float32."""
    if isinstance(weight, StoredTensor):
        return weight
    return StoredTensor("float32", weight.dequantize())


def pack_words(codes: Array) -> Array:
    """Rows of 4-bit codes as int32, eight in each; the last is filled up with zeros."""
    n, k = codes.shape
    padded = np.zeros((n, -(-k // _CODES_PER_WORD) * _CODES_PER_WORD), dtype=np.uint8)
    padded[:, :k] = codes
    return np.asarray((padded[:, ::2] | padded[:, 1::2] << 4).view("<i4"))


def unpack_words(words: Array) -> Array:
    """The codes of each row, in their order."""
    data = np.ascontiguousarray(words).view(np.uint8)
    return np.stack((data & 15, data >> 4), axis=-1).reshape(len(words), -1)


class _Parts:
    """Takes the tensors of one matrix out of all."""

    def __init__(self, tensors: dict[str, StoredTensor], module: str) -> None:
        self._tensors = tensors
        self._module = module

    def has(self, name: str) -> bool:
        return f"{self._module}.{name}" in self._tensors

    def take(self, name: str, dtype: str | None = None) -> StoredTensor:
        tensor = self._tensors.pop(f"{self._module}.{name}", None)
        if tensor is None:
            raise ValueError(f"{name} is missing")
        if dtype is not None and tensor.dtype != dtype:
            raise ValueError(f"{name} is {tensor.dtype}, expected {dtype}")
        return tensor

    def take_words(self, name: str) -> Array:
        """A matrix of int32."""
        words = self.take(name, "int32").array
        if words.ndim != 2:
            raise ValueError(f"{name} has shape {list(words.shape)}, expected two dimensions")
        return words

    def take_half(self, name: str, shape: tuple[int, ...]) -> Array:
        """Numbers that float16 holds, as float16: the kernels have no wider scales of groups."""
        tensor = self.take(name)
        if tensor.dtype not in FLOAT_DTYPES:
            raise ValueError(f"{name} is {tensor.dtype}, expected floats")
        _check_shape(name, tensor.array, shape)
        values = tensor.to_float32()
        with np.errstate(over="ignore"):
            half = values.astype(np.float16)
        if not np.array_equal(half.astype(np.float32), values):
            raise ValueError(f"{name} has values that float16 cannot hold exactly")
        return half


def _modules(stored: Mapping[str, StoredTensor]) -> list[str]:
    """Names of the quantized matrices, by the tensor that only these have."""
    marks = (".qweight", ".weight_packed", ".weight_scale")
    return list(dict.fromkeys(n.rpartition(".")[0] for n in stored if n.endswith(marks)))


def _pdmesh(parts: _Parts, quantization: CheckpointQuantization) -> QuantizedWeight:
    if parts.has("weight"):
        codes = parts.take("weight", "int8").array
        n, k = codes.shape
        scales = parts.take_half("weight_scale", (n, -(-k // GROUP_SIZE)))
        return MatrixWeights(WeightFormat.INT8_GROUPED, codes, scales)
    n, k = (int(size) for size in parts.take("weight_shape", "int64").array)
    words = parts.take_words("weight_packed")
    _check_shape("weight_packed", words, (n, -(-k // _CODES_PER_WORD)))
    groups = (n, -(-k // GROUP_SIZE))
    return MatrixWeights(
        WeightFormat.INT4,
        np.ascontiguousarray(unpack_words(words)[:, :k]),
        parts.take_half("weight_scale", groups),
        parts.take_half("weight_minimum", groups),
    )


def _compressed_tensors(parts: _Parts, quantization: CheckpointQuantization) -> QuantizedWeight:
    codes = parts.take("weight", "int8").array
    scale = parts.take("weight_scale")
    _check_shape("weight_scale", scale.array, (codes.shape[0], 1))
    return MatrixWeights(WeightFormat.INT8, codes, scale.to_float32().reshape(-1))


def _gptq(parts: _Parts, quantization: CheckpointQuantization) -> QuantizedWeight:
    codes = unpack_words(parts.take_words("qweight").T)
    words = parts.take_words("qzeros")
    if quantization.zeros_less_one:
        # Over the whole word, as its writers subtract: a zero point of 0 borrows from the next.
        words = (np.ascontiguousarray(words).view(np.uint32) + np.uint32(0x11111111)).view("<i4")
    zeros = unpack_words(words).T
    k = codes.shape[1]
    g_idx = _default_groups(k, quantization)
    if parts.has("g_idx"):
        g_idx = parts.take("g_idx", "int32").array
        _check_shape("g_idx", g_idx, (k,))
    return _grouped(parts, codes, zeros, g_idx)


def _awq(parts: _Parts, quantization: CheckpointQuantization) -> QuantizedWeight:
    codes = _in_awq_order(parts.take_words("qweight")).T
    zeros = _in_awq_order(parts.take_words("qzeros")).T
    return _grouped(parts, codes, zeros, _default_groups(codes.shape[1], quantization))


_READERS = {
    "pdmesh": _pdmesh,
    "compressed-tensors": _compressed_tensors,
    "gptq": _gptq,
    "awq": _awq,
}


def _grouped(parts: _Parts, codes: Array, zeros: Array, g_idx: Array) -> QuantizedWeight:
    """From scale · (code - zero), in groups of any inputs, to groups of 32 neighbours."""
    (n, k), num_groups = codes.shape, zeros.shape[1]
    _check_shape("qzeros", zeros, (n, num_groups))
    scales = parts.take_half("scales", (num_groups, n)).T
    if k % GROUP_SIZE:
        raise ValueError(f"{k} inputs are no multiple of {GROUP_SIZE}")
    if len(g_idx) and not 0 <= g_idx.min() <= g_idx.max() < num_groups:
        raise ValueError(f"g_idx names groups beyond the {num_groups} that scales has")
    runs = g_idx.reshape(-1, GROUP_SIZE)
    if not (runs == runs[:, :1]).all():
        return ScatteredGroups(codes, scales, zeros, g_idx)
    scales, zeros = scales[:, runs[:, 0]], zeros[:, runs[:, 0]]
    # Exact for symmetric weights (a zero point of 8); else half a unit in float16's last place,
    # at most a hundredth of a step between two codes.
    minimums = -(scales.astype(np.float32) * zeros)
    return MatrixWeights(
        WeightFormat.INT4,
        np.ascontiguousarray(codes),
        np.ascontiguousarray(scales),
        minimums.astype(np.float16),
    )


def _default_groups(k: int, quantization: CheckpointQuantization) -> Array:
    return np.arange(k) // (quantization.group_size or k)


def _in_awq_order(words: Array) -> Array:
    codes = unpack_words(words).reshape(len(words), -1, _CODES_PER_WORD)
    return codes[:, :, list(_AWQ_PLACES)].reshape(len(words), -1)


def _check_shape(name: str, array: Array, shape: tuple[int, ...]) -> None:
    if array.shape != shape:
        raise ValueError(f"{name} has shape {list(array.shape)}, expected {list(shape)}")


def _is_zero(tensor: StoredTensor) -> bool:
    return not tensor.to_float32().any()
