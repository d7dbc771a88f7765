"""Weights in the formats that the kernels multiply with: quantizers and GGUF's own values."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.kernels.formats import GROUP_SIZE, WeightFormat

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class MatrixWeights:
    """One matrix, a row per output channel, before packing.

    | format       | values          | scales             | minimums           |
    |--------------|-----------------|--------------------|--------------------|
    | FLOAT32      | float32[n, k]   |                    |                    |
    | BFLOAT16     | uint16[n, k]    |                    |                    |
    | INT8         | int8[n, k]      | float32[n]         |                    |
    | INT8_GROUPED | int8[n, k]      | float16[n, groups] |                    |
    | INT4         | uint8[n, k] <16 | float16[n, groups] | float16[n, groups] |
    | INT4_CHANNEL | uint8[n, k] <16 | float32[n]         |                    |

    INT4_CHANNEL has `steps` and `origins`, uint16[n, groups], in 256ths of a channel's scale.
    """

    format: WeightFormat
    values: Array
    scales: Array | None = None
    minimums: Array | None = None
    steps: Array | None = None
    origins: Array | None = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.values.shape[0], self.values.shape[1]

    def rows(self, index: Array) -> "MatrixWeights":
        """The rows of these numbers, in this order; -1 is a row of zeros."""
        parts = (self.scales, self.minimums, self.steps, self.origins)
        rows = (None if part is None else _rows(part, index) for part in parts)
        return MatrixWeights(self.format, _rows(self.values, index), *rows)

    def dequantize(self) -> Array:
        """float32[n, k]: what the kernels' results are measured against."""
        if self.format is WeightFormat.FLOAT32:
            return self.values
        if self.format is WeightFormat.BFLOAT16:
            return (self.values.astype(np.uint32) << 16).view(np.float32)
        assert self.scales is not None
        values = self.values.astype(np.float32)
        if self.format is WeightFormat.INT8:
            return np.asarray(values * self.scales[:, None])
        k = values.shape[1]
        if self.format is WeightFormat.INT4_CHANNEL:
            codes = (
                values * _spread(_present(self.steps), k) + _spread(_present(self.origins), k)
            ) // 256 - 128
            return np.asarray(codes * self.scales[:, None])
        result = values * _spread(self.scales, k)
        return result if self.minimums is None else result + _spread(self.minimums, k)


def quantize(weights: Array, weight_format: WeightFormat) -> MatrixWeights:
    """Round a float32[n, k] matrix to the format."""
    values = np.ascontiguousarray(weights, dtype=np.float32)
    if not np.isfinite(values).all():
        raise ValueError("weights are not finite")
    if weight_format is WeightFormat.FLOAT32:
        return MatrixWeights(weight_format, values)
    if weight_format is WeightFormat.BFLOAT16:
        return MatrixWeights(weight_format, _bfloat16_bits(values))
    if weight_format is WeightFormat.INT8:
        scales = (np.abs(values).max(axis=1) / 127).astype(np.float32)
        return MatrixWeights(weight_format, _int8_codes(values, scales[:, None]), scales)
    if weight_format is WeightFormat.INT8_GROUPED:
        half_scales = _half(np.abs(_groups(values, 0.0)).max(axis=2) / 127)
        codes = _int8_codes(values, _spread(half_scales, values.shape[1]))
        return MatrixWeights(weight_format, codes, half_scales)
    int4 = _quantize_int4(values)
    return int4 if weight_format is WeightFormat.INT4 else by_channel(int4)


def by_channel(weights: MatrixWeights) -> MatrixWeights:
    """INT4 weights as INT4_CHANNEL: the same codes, which stand for whole numbers of a scale.

    That scale is INT8's of the channel, so that the rounding is INT8's.
    """
    k = weights.values.shape[1]
    # A negative scale counts the codes from the other end.
    flips = _spread(_present(weights.scales), k) < 0
    codes = np.where(flips, 15 - weights.values, weights.values).astype(np.uint8)
    scales = _present(weights.scales).astype(np.float64)
    minimums = _present(weights.minimums).astype(np.float64) + 15 * np.minimum(scales, 0)
    scales = np.abs(scales)
    # Codes that no weight has count too: none may leave sixteen bits.
    largest = np.maximum(np.abs(minimums), np.abs(minimums + 15 * scales)).max(axis=1)
    channel_scales = (largest / 127).astype(np.float32)
    safe = np.where(channel_scales == 0, 1, channel_scales)[:, None].astype(np.float64)
    steps = np.rint(scales / safe * 256)
    # Half of one more, because what follows the division by 256 is cut off.
    origins = np.rint((minimums / safe + 128.5) * 256)
    return MatrixWeights(
        WeightFormat.INT4_CHANNEL,
        codes,
        channel_scales,
        steps=steps.astype(np.uint16),
        origins=origins.astype(np.uint16),
    )


def concatenate(parts: Sequence[MatrixWeights]) -> MatrixWeights:
    """Matrices of one format and input size, one below the other."""
    first = parts[0]
    if any(part.format is not first.format for part in parts):
        raise ValueError("matrices to be joined have different formats")
    return MatrixWeights(
        first.format,
        np.concatenate([part.values for part in parts]),
        *(
            None
            if getattr(first, name) is None
            else np.concatenate([_present(getattr(part, name)) for part in parts])
            for name in ("scales", "minimums", "steps", "origins")
        ),
    )


def read_q4_1(blocks: Array, shape: tuple[int, int]) -> MatrixWeights:
    """GGUF's Q4_1 bytes as they are: per 32 values float16 d, float16 m, 16 bytes of nibbles."""
    raw = np.ascontiguousarray(blocks).view(np.uint8).reshape(shape[0], -1, 20)
    packed = raw[:, :, 4:]
    codes = np.concatenate((packed & 15, packed >> 4), axis=2).reshape(shape)
    halves = np.ascontiguousarray(raw[:, :, :4]).view(np.float16)
    return MatrixWeights(
        WeightFormat.INT4,
        codes,
        np.ascontiguousarray(halves[:, :, 0]),
        np.ascontiguousarray(halves[:, :, 1]),
    )


def read_q8_0(blocks: Array, shape: tuple[int, int]) -> MatrixWeights:
    """GGUF's Q8_0 bytes as they are: per 32 values float16 d, 32 int8."""
    raw = np.ascontiguousarray(blocks).view(np.uint8).reshape(shape[0], -1, 34)
    codes = np.ascontiguousarray(raw[:, :, 2:]).view(np.int8).reshape(shape)
    scales = np.ascontiguousarray(raw[:, :, :2]).view(np.float16)[:, :, 0]
    return MatrixWeights(WeightFormat.INT8_GROUPED, codes, np.ascontiguousarray(scales))


def _quantize_int4(values: Array) -> MatrixWeights:
    # Padding repeats the last input, so that it widens no group's range.
    groups = _groups(values, None)
    low, high = groups.min(axis=2), groups.max(axis=2)
    minimums = _half(low)
    scales = _half((high - minimums.astype(np.float32)) / 15)
    k = values.shape[1]
    steps = _spread(scales, k)
    safe = np.where(steps == 0, 1, steps)
    codes = np.clip(np.rint((values - _spread(minimums, k)) / safe), 0, 15).astype(np.uint8)
    return MatrixWeights(WeightFormat.INT4, codes, scales, minimums)


def _int8_codes(values: Array, scales: Array) -> Array:
    safe = np.where(scales == 0, 1, scales)
    return np.asarray(np.clip(np.rint(values / safe), -127, 127).astype(np.int8))


def _half(values: Array) -> Array:
    half = values.astype(np.float16)
    if not np.isfinite(half).all():
        raise ValueError("weights are too large for float16 scales")
    return half


def _groups(values: Array, padding: float | None) -> Array:
    n, k = values.shape
    missing = -k % GROUP_SIZE
    if missing:
        filler = np.repeat(values[:, -1:], missing, axis=1) if padding is None else padding
        tail = np.broadcast_to(np.asarray(filler, dtype=np.float32), (n, missing))
        values = np.concatenate((values, tail), axis=1)
    return values.reshape(n, -1, GROUP_SIZE)


def _spread(per_group: Array, k: int) -> Array:
    """One float32 per input from one number per group."""
    return np.asarray(np.repeat(per_group.astype(np.float32), GROUP_SIZE, axis=1)[:, :k])


def _bfloat16_bits(values: Array) -> Array:
    bits = values.view(np.uint32)
    odd = (bits >> 16) & 1
    return np.asarray(((bits + 0x7FFF + odd) >> 16).astype(np.uint16))


def _rows(array: Array, index: Array) -> Array:
    taken = array[np.maximum(index, 0)]
    taken[index < 0] = 0
    return np.asarray(taken)


def _present(array: Array | None) -> Array:
    assert array is not None
    return array
