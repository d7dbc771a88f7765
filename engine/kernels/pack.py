"""Lays weights out as the kernels read them: units of 32 output channels, see kernels.h."""

import mmap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.kernels.formats import GROUP_SIZE, UNIT_SIZE, WeightFormat
from engine.kernels.quantize import MatrixWeights

Array = npt.NDArray[Any]

ALIGNMENT = 64
_LARGE_PAGE = 2 << 20
# Inputs of an INT8 matrix are padded to this: one AMX tile is as deep.
WIDE_STEP = 64
# Goes up with every change of a layout, so that kept packed weights are packed anew.
PACK_VERSION = "3"


@dataclass(frozen=True)
class PackedMatrix:
    """A matrix in the kernels' layout; `data` is aligned once it lies in an arena."""

    format: WeightFormat
    n: int
    k: int
    data: Array
    # INT8 only: float32, padded to whole units.
    scales: Array | None


def pack(weights: MatrixWeights) -> PackedMatrix:
    n, k = weights.shape
    padded_n = -(-n // UNIT_SIZE) * UNIT_SIZE
    if weights.format is WeightFormat.FLOAT32:
        values = _padded(weights.values, padded_n, k)
        data = values.reshape(-1, UNIT_SIZE, k).transpose(0, 2, 1)
        return _packed(weights, data)
    if weights.format is WeightFormat.BFLOAT16:
        values = _padded(weights.values, padded_n, -(-k // 2) * 2)
        pairs = values.reshape(-1, UNIT_SIZE, values.shape[1] // 2, 2).transpose(0, 2, 1, 3)
        return _packed(weights, pairs)
    return _pack_integers(weights, padded_n)


def gate_up_order(intermediate_size: int) -> Array:
    """Rows of [gate; up] so that each unit has 16 gates and the 16 ups of the same columns."""
    padded = -(-intermediate_size // 16) * 16
    column = np.arange(padded)
    gate = np.where(column < intermediate_size, column, -1)
    up = np.where(column < intermediate_size, column + intermediate_size, -1)
    return np.stack((gate.reshape(-1, 16), up.reshape(-1, 16)), axis=1).reshape(-1)


def large_pages(num_bytes: int) -> Array:
    """Zeroed uint8[num_bytes] in memory of its own, in large pages where the system has them."""
    # Begins at a large page's boundary, or the first and last stretch would be in small ones.
    memory = mmap.mmap(-1, max(num_bytes, 1) + _LARGE_PAGE)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, dtype=np.uint8)
    begin = -whole.ctypes.data % _LARGE_PAGE
    return whole[begin : begin + num_bytes]


class Arena:
    """Packed matrices in one stretch of memory, in large pages where the system has them."""

    def __init__(self, arrays: Mapping[str, Array]) -> None:
        offsets: dict[str, int] = {}
        end = 0
        for name, array in arrays.items():
            offsets[name] = end
            end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        bytes_view = large_pages(end)
        self._arrays: dict[str, Array] = {}
        for name, array in arrays.items():
            place = bytes_view[offsets[name] : offsets[name] + array.nbytes]
            place[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            self._arrays[name] = place.view(array.dtype).reshape(array.shape)
        self.num_bytes = end

    def __getitem__(self, name: str) -> Array:
        return self._arrays[name]

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    def get(self, name: str) -> Array | None:
        return self._arrays.get(name)


def _pack_integers(weights: MatrixWeights, padded_n: int) -> PackedMatrix:
    k = weights.shape[1]
    if weights.format is WeightFormat.INT4_CHANNEL:
        return _pack_int4_channel(weights, padded_n)
    is_int4 = weights.format is WeightFormat.INT4
    codes = weights.values if is_int4 else (weights.values.view(np.uint8) ^ 128)
    if weights.format is WeightFormat.INT8:
        # Activations are zero where inputs are padding, so their codes may be anything.
        codes = _padded(codes, padded_n, -(-k // WIDE_STEP) * WIDE_STEP)
        steps = codes.reshape(-1, 2, 16, codes.shape[1] // 4, 4).transpose(0, 3, 1, 2, 4)
        return _packed(weights, steps, _padded_scales(weights, padded_n))
    num_groups = -(-k // GROUP_SIZE)
    codes = _padded(codes, padded_n, num_groups * GROUP_SIZE)
    steps = codes.reshape(-1, 2, 16, num_groups, 8, 4).transpose(0, 3, 4, 1, 2, 5)
    if is_int4:
        steps = steps[:, :, :4] | (steps[:, :, 4:] << 4)
    blocks = [np.ascontiguousarray(steps).reshape(*steps.shape[:2], -1)]
    for halves in (weights.scales, weights.minimums):
        if halves is not None:
            padded = _padded(halves, padded_n, num_groups).reshape(-1, UNIT_SIZE, num_groups)
            blocks.append(np.ascontiguousarray(padded.transpose(0, 2, 1)).view(np.uint8))
    return _packed(weights, np.concatenate(blocks, axis=2))


def _pack_int4_channel(weights: MatrixWeights, padded_n: int) -> PackedMatrix:
    steps = -(-weights.shape[1] // WIDE_STEP)
    codes = _padded(weights.values, padded_n, steps * WIDE_STEP)
    # [units, 2 halves, 16 outputs, steps, 2 groups, 8, 4 inputs]
    groups = codes.reshape(-1, 2, 16, steps, 2, 8, 4).transpose(0, 3, 4, 1, 5, 2, 6)
    blocks = [groups[:, :, 0] | (groups[:, :, 1] << 4)]
    for per_group in (weights.steps, weights.origins):
        assert per_group is not None
        padded = _padded(per_group, padded_n, steps * 2).reshape(-1, 2, 16, steps, 2)
        blocks.append(padded.transpose(0, 3, 1, 4, 2))
    parts = [
        np.ascontiguousarray(block).reshape(*block.shape[:2], -1).view(np.uint8) for block in blocks
    ]
    return _packed(weights, np.concatenate(parts, axis=2), _padded_scales(weights, padded_n))


def _padded_scales(weights: MatrixWeights, padded_n: int) -> Array:
    scales = np.zeros(padded_n, dtype=np.float32)
    scales[: weights.shape[0]] = weights.scales
    return scales


def _packed(weights: MatrixWeights, data: Array, scales: Array | None = None) -> PackedMatrix:
    n, k = weights.shape
    flat = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    return PackedMatrix(weights.format, n, k, flat, scales)


def _padded(values: Array, n: int, k: int) -> Array:
    padded = np.zeros((n, k), dtype=values.dtype)
    padded[: values.shape[0], : values.shape[1]] = values
    return padded
