"""Matrix products of every format and level against float64, and bit by bit among each other."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from engine.kernels.formats import GROUP_SIZE, WeightFormat
from engine.kernels.library import KernelError, Library, address
from engine.kernels.pack import PackedMatrix
from engine.kernels.quantize import MatrixWeights, quantize
from tests.kernels.kernel_models import in_arena

Array = npt.NDArray[Any]

FORMATS = list(WeightFormat)
WIDE = (WeightFormat.INT8, WeightFormat.INT4_CHANNEL)
GROUPED = (WeightFormat.INT8_GROUPED, WeightFormat.INT4)
LEVELS = ("amx", "avx512", "avx2", "portable")
# Odd, smaller than any block, and larger than several of them.
SHAPES = ((1, 1), (5, 33), (33, 64), (70, 95), (131, 200))


def make(n: int, k: int, weight_format: WeightFormat) -> tuple[MatrixWeights, PackedMatrix]:
    rng = np.random.default_rng(n * 1000 + k)
    weights = quantize(rng.standard_normal((n, k)).astype(np.float32), weight_format)
    return weights, in_arena(weights)


def make_rows(num_rows: int, k: int, seed: int = 1) -> Array:
    """Rows of very different sizes, with an outlier channel as real activations have."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((num_rows, k)) * rng.uniform(1e-3, 1e3, (num_rows, 1))
    x[:, k // 2] *= 300
    return x.astype(np.float32)


def as_multiplied(x: Array, weight_format: WeightFormat) -> Array:
    """The activations in float64 after the rounding that the format brings."""
    if weight_format in GROUPED:
        padded = np.pad(x, ((0, 0), (0, -x.shape[1] % GROUP_SIZE)))
        groups = padded.reshape(len(x), -1, GROUP_SIZE)
        amax = np.abs(groups).max(axis=2, keepdims=True)
        amax = np.where(amax < 1e-36, np.float32(np.inf), amax)
        codes = np.rint(groups * (np.float32(127) / amax))
        scales = np.where(np.isinf(amax), np.float32(0), amax / np.float32(127))
        values = codes.astype(np.float64) * scales
        return np.asarray(values.reshape(len(x), -1)[:, : x.shape[1]])
    return x.astype(np.float64)


def require(library: Library, level: str) -> None:
    if library.level(level) is None:
        pytest.skip(f"this machine has no {level}")


@pytest.mark.parametrize("weight_format", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("level", LEVELS)
def test_products_agree_with_float64_at_odd_sizes(
    library: Library, level: str, weight_format: WeightFormat
) -> None:
    require(library, level)
    for n, k in SHAPES:
        weights, packed = make(n, k, weight_format)
        dense = weights.dequantize().astype(np.float64)
        for num_rows in (1, 2, 5, 7, 17):
            x = make_rows(num_rows, k)

            out = library.linear(packed, x, level=level)

            expected = as_multiplied(x, weight_format) @ dense.T
            # What float32 sums may lose, and what sixteen bits of the largest value leave out.
            size = np.abs(x) @ np.abs(dense).T
            coarse = np.abs(x).max(axis=1, keepdims=True) * np.abs(dense).sum(axis=1) / 32512
            allowed = 3e-6 * size + (coarse if weight_format in WIDE else 0)
            assert (np.abs(out - expected) <= allowed + 1e-30).all()


@pytest.mark.parametrize("weight_format", FORMATS, ids=lambda f: f.name)
def test_each_row_has_the_same_bits_alone_and_among_512(
    library: Library, weight_format: WeightFormat
) -> None:
    _, packed = make(70, 95, weight_format)
    x = make_rows(512, 95)

    together = library.linear(packed, x)

    for row in (0, 3, 100, 255, 510, 511):
        assert np.array_equal(library.linear(packed, x[row : row + 1])[0], together[row])
    for num_rows in (2, 3, 4, 6, 8, 15, 16, 33):
        start = 512 - num_rows
        assert np.array_equal(library.linear(packed, x[start:]), together[start:])


@pytest.mark.parametrize("weight_format", FORMATS, ids=lambda f: f.name)
def test_all_levels_give_the_same_bits(library: Library, weight_format: WeightFormat) -> None:
    _, packed = make(70, 200, weight_format)

    for num_rows in (1, 2, 3, 4, 5, 6, 7, 19, 33):
        x = make_rows(num_rows, 200)
        results = [library.linear(packed, x, level=level) for level in library.levels()]

        assert len(results) >= 1
        for result in results[1:]:
            assert np.array_equal(result, results[0])


@pytest.mark.parametrize("weight_format", WIDE, ids=lambda f: f.name)
def test_sums_of_large_codes_have_the_same_bits_at_all_levels(
    library: Library, weight_format: WeightFormat
) -> None:
    """They need more bits than a float has, so how a level splits them must not show."""
    rng = np.random.default_rng(4)
    n, k = 33, 2100
    packed = in_arena(quantize(rng.uniform(0.8, 1, (n, k)).astype(np.float32), weight_format))
    x = (
        rng.uniform(0.8, 1, (20, k)).astype(np.float32)
        * np.where(np.arange(20) % 2, -1, 1)[:, None]
    )

    results = [
        library.linear(packed, x.astype(np.float32), level=name) for name in library.levels()
    ]

    for result in results[1:]:
        assert np.array_equal(result, results[0])


@pytest.mark.parametrize("level", LEVELS)
def test_int4_by_channel_multiplies_as_the_int8_that_it_rounds_to(
    library: Library, level: str
) -> None:
    require(library, level)
    for n, k in SHAPES:
        weights, packed = make(n, k, WeightFormat.INT4_CHANNEL)
        assert weights.scales is not None
        codes = np.rint(weights.dequantize() / np.maximum(weights.scales, 1e-30)[:, None])
        int8 = MatrixWeights(WeightFormat.INT8, codes.astype(np.int8), weights.scales)
        for num_rows in (1, 2, 4, 17):
            x = make_rows(num_rows, k)

            out = library.linear(packed, x, level=level)

            assert np.array_equal(out, library.linear(in_arena(int8), x, level=level))


@pytest.mark.parametrize("weight_format", FORMATS, ids=lambda f: f.name)
def test_the_number_of_threads_does_not_show(library: Library, weight_format: WeightFormat) -> None:
    _, packed = make(131, 64, weight_format)
    x = make_rows(9, 64)

    one, two, three = (library.linear(packed, x, num_threads=n) for n in (1, 2, 3))

    assert np.array_equal(one, two)
    assert np.array_equal(one, three)


@pytest.mark.parametrize("weight_format", FORMATS, ids=lambda f: f.name)
def test_rows_may_be_strided_and_unaligned(library: Library, weight_format: WeightFormat) -> None:
    _, packed = make(33, 64, weight_format)
    wide = make_rows(5, 64 + 13)
    x = wide[:, 7 : 7 + 64]

    assert np.array_equal(library.linear(packed, x), library.linear(packed, x.copy()))


@pytest.mark.parametrize("weight_format", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("scale", [1e-41, 1e-30, 1e30])
def test_extreme_and_denormal_activations_neither_fail_nor_explode(
    library: Library, weight_format: WeightFormat, scale: float
) -> None:
    weights, packed = make(33, 64, weight_format)
    x = (np.random.default_rng(2).standard_normal((3, 64)) * scale).astype(np.float32)

    out = library.linear(packed, x)

    size = np.abs(x).astype(np.float64) @ np.abs(weights.dequantize()).astype(np.float64).T
    expected = x.astype(np.float64) @ weights.dequantize().astype(np.float64).T
    assert (np.abs(out - expected) <= 0.02 * size + 1e-34).all()


@pytest.mark.parametrize("weight_format", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_value_that_is_not_finite_reaches_its_own_row_only(
    library: Library, weight_format: WeightFormat, bad: float
) -> None:
    _, packed = make(33, 64, weight_format)
    x = make_rows(8, 64)
    x[2, 5] = bad

    out = library.linear(packed, x)

    assert not np.isfinite(out[2]).any()
    assert np.isfinite(np.delete(out, 2, axis=0)).all()


def test_an_unknown_level_is_refused(library: Library) -> None:
    _, packed = make(5, 33, WeightFormat.FLOAT32)

    with pytest.raises(KernelError, match="level"):
        library.linear(packed, make_rows(1, 33), level="sse9")


@pytest.mark.parametrize("level", LEVELS)
def test_exponential_is_accurate_to_single_precision(library: Library, level: str) -> None:
    require(library, level)
    x = np.linspace(-87, 88, 4001, dtype=np.float32)
    out = np.empty_like(x)

    library.check(library.functions.pdmesh_exp(level.encode(), address(x), len(x), address(out)))

    assert np.allclose(out, np.exp(x.astype(np.float64)), rtol=3e-7, atol=0)


@pytest.mark.parametrize("level", LEVELS)
def test_rms_norm_agrees_with_float64(library: Library, level: str) -> None:
    require(library, level)
    rng = np.random.default_rng(3)
    for k in (1, 15, 16, 100, 576):
        x, weight = rng.standard_normal((2, k)).astype(np.float32)
        out = np.empty_like(x)

        library.check(
            library.functions.pdmesh_rms_norm(
                level.encode(), address(x), address(weight), 1e-5, k, address(out)
            )
        )

        wide = x.astype(np.float64)
        expected = wide / np.sqrt((wide**2).mean() + 1e-5) * weight
        assert np.allclose(out, expected, rtol=2e-6, atol=1e-7)
