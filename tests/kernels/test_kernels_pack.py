"""Quantizers, the packed layout, and packed files."""

import gguf
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.kernels.formats import KvFormat, WeightFormat
from engine.kernels.library import Library, address
from engine.kernels.native_llama import pack_model
from engine.kernels.pack import gate_up_order, pack
from engine.kernels.quantize import (
    MatrixWeights,
    by_channel,
    concatenate,
    quantize,
    read_q4_1,
    read_q8_0,
)
from tests.kernels.kernel_models import SmallConfig, in_arena, random_weights

FORMATS = list(WeightFormat)


def make_matrix(n: int = 37, k: int = 96) -> np.ndarray:
    return np.random.default_rng(0).standard_normal((n, k)).astype(np.float32)


@pytest.mark.parametrize(
    ("weight_format", "worst"),
    [
        (WeightFormat.FLOAT32, 0.0),
        (WeightFormat.BFLOAT16, 2.0**-8),
        (WeightFormat.INT8, 0.5 / 127 + 1e-6),
        # A float16 scale that was rounded down costs a code a little more than half a step.
        (WeightFormat.INT8_GROUPED, 0.6 / 127),
        (WeightFormat.INT4, 1.2 / 15),
        (WeightFormat.INT4_CHANNEL, 1.3 / 15),
    ],
)
def test_quantizing_stays_within_a_step(weight_format: WeightFormat, worst: float) -> None:
    for k in (1, 31, 96, 100):
        matrix = make_matrix(k=k)

        error = np.abs(quantize(matrix, weight_format).dequantize() - matrix).max(axis=1)

        assert (error <= worst * np.abs(matrix).max(axis=1)).all()


@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 31, 64, 100]), st.booleans())
def test_int4_by_channel_is_within_int8_s_rounding_of_int4(
    seed: int, k: int, has_negative_scales: bool
) -> None:
    rng = np.random.default_rng(seed)
    spread = np.exp(rng.uniform(-6, 6, (5, k)))
    matrix = (rng.standard_normal((5, k)) * spread + rng.uniform(-2, 2)).astype(np.float32)
    int4 = quantize(matrix, WeightFormat.INT4)
    if has_negative_scales:
        assert int4.scales is not None
        assert int4.minimums is not None
        top = int4.minimums.astype(np.float32) + 15 * int4.scales.astype(np.float32)
        int4 = MatrixWeights(int4.format, 15 - int4.values, -int4.scales, top.astype(np.float16))

    rounded = by_channel(int4)

    assert rounded.scales is not None
    step = rounded.scales[:, None]
    # A code's step is in 256ths, and there are fifteen of them.
    worst = (0.5 + 16 / 512) * step + 1e-30
    assert (np.abs(rounded.dequantize() - int4.dequantize()) <= worst).all()


@pytest.mark.parametrize("weight_format", FORMATS, ids=lambda f: f.name)
def test_a_matrix_of_zeros_stays_zero(weight_format: WeightFormat) -> None:
    quantized = quantize(np.zeros((3, 40), dtype=np.float32), weight_format)

    assert not quantized.dequantize().any()


def test_weights_that_are_not_finite_are_refused() -> None:
    matrix = make_matrix()
    matrix[3, 3] = np.nan

    with pytest.raises(ValueError, match="finite"):
        quantize(matrix, WeightFormat.INT8)


@pytest.mark.parametrize(
    ("kind", "read"),
    [
        (gguf.GGMLQuantizationType.Q4_1, read_q4_1),
        (gguf.GGMLQuantizationType.Q8_0, read_q8_0),
    ],
)
def test_gguf_values_are_taken_over_without_a_second_rounding(kind, read) -> None:  # type: ignore[no-untyped-def]
    blocks = gguf.quantize(make_matrix(), kind)

    weights = read(blocks, (37, 96))

    assert np.array_equal(weights.dequantize(), gguf.dequantize(blocks, kind))


@pytest.mark.parametrize(
    ("kind", "weight_format"),
    [
        (gguf.GGMLQuantizationType.Q4_1, WeightFormat.INT4),
        (gguf.GGMLQuantizationType.Q8_0, WeightFormat.INT8_GROUPED),
    ],
)
def test_gguf_values_survive_a_checkpoint_in_float32(
    kind: gguf.GGMLQuantizationType, weight_format: WeightFormat
) -> None:
    values = gguf.dequantize(gguf.quantize(make_matrix(200, 96), kind), kind)

    assert np.array_equal(quantize(values, weight_format).dequantize(), values)


@pytest.mark.parametrize("weight_format", FORMATS, ids=lambda f: f.name)
def test_every_packed_value_is_found_by_its_row_and_column(
    library: Library, weight_format: WeightFormat
) -> None:
    weights = quantize(make_matrix(37, 41), weight_format)

    # The unit vectors are exact in every activation format.
    out = library.linear(in_arena(weights), np.eye(41, dtype=np.float32))

    assert np.allclose(out.T, weights.dequantize(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("weight_format", FORMATS, ids=lambda f: f.name)
def test_packed_sizes_are_what_the_library_expects(
    library: Library, weight_format: WeightFormat
) -> None:
    for n, k in ((1, 1), (33, 65), (64, 576)):
        packed = pack(quantize(make_matrix(n, k), weight_format))

        unit_bytes = library.functions.pdmesh_unit_bytes(weight_format, k)
        assert packed.data.nbytes == -(-n // 32) * unit_bytes


def test_gate_and_up_rows_alternate_by_sixteen() -> None:
    order = gate_up_order(20)

    assert order[:16].tolist() == list(range(16))
    assert order[16:32].tolist() == list(range(20, 36))
    assert order[32:48].tolist() == [16, 17, 18, 19] + [-1] * 12
    assert order[48:].tolist() == [36, 37, 38, 39] + [-1] * 12


def test_matrices_of_different_formats_are_not_joined() -> None:
    parts = [quantize(make_matrix(), f) for f in (WeightFormat.INT8, WeightFormat.INT4)]

    with pytest.raises(ValueError, match="different formats"):
        concatenate(parts)


def test_a_weight_of_the_wrong_shape_is_refused() -> None:
    config = SmallConfig()
    weights = random_weights(config)
    weights["model.layers.1.mlp.down_proj.weight"] = make_matrix()

    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.down_proj"):
        pack_model(config, weights, WeightFormat.FLOAT32)


def test_quantized_weights_pass_through_as_they_are() -> None:
    config = SmallConfig(num_layers=1)
    name = "model.layers.0.mlp.down_proj.weight"
    quantized = quantize(random_weights(config)[name], WeightFormat.INT4)

    packed = pack_model(config, random_weights(config) | {name: quantized}, WeightFormat.INT4)

    assert np.array_equal(packed.arena["0.down.data"], pack(quantized).data)


@pytest.mark.parametrize("level", ["amx", "avx512", "avx2", "portable"])
@pytest.mark.parametrize("kv_format", list(KvFormat), ids=lambda f: f.name)
def test_cache_rows_hold_the_nearest_representable_values(
    library: Library, level: str, kv_format: KvFormat
) -> None:
    if library.level(level) is None:
        pytest.skip(f"this machine has no {level}")
    rng = np.random.default_rng(5)
    key, value = (rng.standard_normal((2, 36)) * [[1e-3], [50]]).astype(np.float32)
    block = np.zeros(library.block_bytes(kv_format, 1, 1, 36, 1), dtype=np.uint8)

    library.check(
        library.functions.pdmesh_write_kv(
            level.encode(), kv_format, 36, address(key), address(value), address(block)
        )
    )

    for row, stored in zip((key, value), _read_rows(block, kv_format), strict=True):
        amax = np.abs(row).max()
        allowed = {
            KvFormat.FLOAT32: 0.0,
            KvFormat.BFLOAT16: np.abs(row) * 2.0**-8,
            KvFormat.INT8: amax / 127 * 0.5001,
            KvFormat.FP8_E4M3: np.maximum(np.abs(row) * 2.0**-4, amax / 448 * 2.0**-10) * 1.0001,
        }[kv_format]
        assert (np.abs(stored - row) <= allowed).all()


def _read_rows(block: np.ndarray, kv_format: KvFormat) -> np.ndarray:
    if kv_format is KvFormat.FLOAT32:
        return block.view(np.float32).reshape(2, 36)
    if kv_format is KvFormat.BFLOAT16:
        return MatrixWeights(
            WeightFormat.BFLOAT16, block.view(np.uint16).reshape(2, 36)
        ).dequantize()
    scales = block[72:].view(np.float32)[:, None]
    if kv_format is KvFormat.INT8:
        return block[:72].view(np.int8).reshape(2, 36) * scales
    return np.asarray(_FP8_VALUES[block[:72].reshape(2, 36)] * scales)


def _fp8_value(code: int) -> float:
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    magnitude = (1 + mantissa / 8) * 2.0 ** (exponent - 7) if exponent else mantissa / 8 * 2.0**-6
    return -magnitude if sign else magnitude


_FP8_VALUES = np.array([_fp8_value(code) for code in range(256)])
