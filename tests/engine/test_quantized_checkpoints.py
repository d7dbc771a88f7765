"""Quantized checkpoints: GPTQ's and AWQ's layouts, and those that the engine writes itself."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.numpy import load_file, save_file

from engine.config import EngineConfig, ModelConfig, ModelConfigError
from engine.forward_batch import SequenceSlice
from engine.kernels.formats import WeightFormat
from engine.kernels.library import load_library
from engine.kernels.quantize import MatrixWeights, read_q4_1, read_q8_0
from engine.loader import LoadError, load_weights
from engine.models.native_weights import SOURCE_GGUF, StoredModel, WeightsName, load_packed
from engine.models.registry import BackendError, Choice, choose
from engine.quantization_config import CheckpointQuantization, parse_quantization
from engine.quantize_checkpoint import QuantizedName, quantize_checkpoint
from engine.quantized_layouts import ScatteredGroups, pack_words, read_weights, unpack_words
from engine.safetensors_file import StoredTensor
from engine.sampling import SamplingParams
from quality.text_quality import SliceRunner
from tests.engine_runs import run, running_engine, token_ids
from tests.quantized_checkpoints import (
    Codes,
    awq_tensors,
    edit_config,
    gptq_tensors,
    make_codes,
    make_quantized_model,
)
from tests.tiny_llama import make_tiny_model, reference_logits

needs_kernels = pytest.mark.skipif(load_library() is None, reason="the kernels could not be built")

Array = npt.NDArray[Any]
TOKENS = [5, 17, 80, 3, 44, 44, 9, 61]
DOWN = "model.layers.0.mlp.down_proj"


def gptq_config(group_size: int = 32, **values: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": group_size, **values}


def awq_config(group_size: int = 32, **values: Any) -> dict[str, Any]:
    config = {"quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True}
    return {**config, "version": "GEMM", **values}


def gptq_v1(matrix: Codes) -> dict[str, Array]:
    return gptq_tensors(matrix, first_format=True)


def gptq_v2(matrix: Codes) -> dict[str, Array]:
    return gptq_tensors(matrix, first_format=False)


LAYOUTS: dict[str, tuple[Callable[..., dict[str, Any]], Callable[[Codes], dict[str, Array]], bool]]
LAYOUTS = {
    "gptq": (gptq_config, gptq_v1, True),
    "gptq asymmetric": (gptq_config, gptq_v1, False),
    "gptq_v2": (lambda size: gptq_config(size, checkpoint_format="gptq_v2"), gptq_v2, False),
    "awq": (awq_config, awq_tensors, False),
}


def read(folder: Path) -> dict[str, Any]:
    return dict(load_weights(folder, ModelConfig.from_folder(folder)))


def logits_of(folder: Path, **settings: Any) -> torch.Tensor:
    """Of every position of TOKENS."""
    with running_engine(EngineConfig(folder, num_blocks=8, num_threads=1, **settings)) as engine:
        assert isinstance(engine.runner, SliceRunner)
        rows = engine.runner.forward([SequenceSlice(TOKENS, 0, range(1), len(TOKENS))])
        return torch.from_numpy(rows.copy())


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_codes_and_scales_are_taken_over_in_groups_of_32(layout: str, group_size: int) -> None:
    config, tensors_of, is_symmetric = LAYOUTS[layout]
    matrix = make_codes(256, 40, group_size, symmetric=is_symmetric)
    stored = as_stored_tensors(tensors_of(matrix))

    weight = read_weights(stored, parse(config(group_size)))["m.weight"]

    assert isinstance(weight, MatrixWeights)
    assert weight.format is WeightFormat.INT4
    assert np.array_equal(weight.values, matrix.codes.T)
    assert weight.scales is not None
    assert weight.scales.dtype == np.float16
    assert np.array_equal(weight.scales, matrix.scales.T.repeat(group_size // 32, axis=1))
    error = np.abs(weight.dequantize() - matrix.values)
    if is_symmetric:
        assert not error.any()
    else:
        # Only -scale * zero is rounded, to float16.
        assert error.max() <= 0.01 * matrix.scales.max()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checkpoint_computes_what_transformers_computes_on_its_values(
    layout: str, tmp_path: Path
) -> None:
    config, tensors_of, is_symmetric = LAYOUTS[layout]
    model = make_quantized_model(
        tmp_path, config(64), tensors_of, group_size=64, symmetric=is_symmetric
    )
    expected = reference_logits(model, TOKENS)

    on_torch = logits_of(tmp_path, backend="torch", dtype="float32")

    assert torch.allclose(on_torch, expected, atol=1e-4 if is_symmetric else 0.05)
    if load_library() is not None:
        # Here activations are rounded to 8 bits.
        native = logits_of(tmp_path, backend="native", kv_cache_dtype="float32")
        assert choice(tmp_path) == Choice("native", "int4", "bfloat16")
        error = (native - expected).abs().mean() / expected.abs().mean()
        assert error < 0.05


def test_act_order_is_served_in_float_and_refused_as_int4(tmp_path: Path) -> None:
    model = make_quantized_model(
        tmp_path,
        gptq_config(64, desc_act=True),
        gptq_v1,
        group_size=64,
        symmetric=False,
        scattered=True,
    )

    assert isinstance(read(tmp_path)[f"{DOWN}.weight"], ScatteredGroups)
    expected = reference_logits(model, TOKENS)
    on_torch = logits_of(tmp_path, backend="torch", dtype="float32")
    assert torch.allclose(on_torch, expected, atol=1e-4)
    if load_library() is not None:
        native = logits_of(tmp_path, backend="native", quantization="none")
        assert torch.allclose(native, expected, atol=1e-3)
        with pytest.raises(LoadError, match=r"proj.*act-order \(desc_act\).*none or int8"):
            load_packed(tmp_path, ModelConfig.from_folder(tmp_path), "int4")


def test_act_order_with_static_groups_is_no_obstacle() -> None:
    matrix = make_codes(64, 8, 32, symmetric=True)

    weight = read_weights(
        as_stored_tensors(gptq_v1(matrix)), parse(gptq_config(desc_act=True, static_groups=True))
    )["m.weight"]

    assert isinstance(weight, MatrixWeights)


def test_one_group_a_row_is_as_many_groups_of_32() -> None:
    matrix = make_codes(96, 8, 96, symmetric=True)
    tensors = gptq_v1(matrix)
    del tensors["g_idx"]

    weight = read_weights(as_stored_tensors(tensors), parse(gptq_config(-1)))["m.weight"]

    assert isinstance(weight, MatrixWeights)
    assert np.array_equal(weight.dequantize(), matrix.values)


def test_a_bias_of_zeros_is_no_bias() -> None:
    tensors = gptq_v1(make_codes(64, 8, 32, symmetric=True))

    dropped = read_weights(
        as_stored_tensors({**tensors, "bias": np.zeros(8, np.float16)}), parse(gptq_config())
    )
    kept = read_weights(
        as_stored_tensors({**tensors, "bias": np.ones(8, np.float16)}), parse(gptq_config())
    )

    assert dropped.keys() == {"m.weight"}
    # The engine's check of names and shapes refuses it.
    assert kept.keys() == {"m.weight", "m.bias"}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"scales": None}, "m: scales is missing"),
        ({"qzeros": np.zeros((2, 1), np.float32)}, "qzeros is float32, expected int32"),
        ({"qweight": np.zeros(8, np.int32)}, r"qweight has shape \[8\]"),
        ({"scales": np.ones((3, 8), np.float16)}, r"scales has shape \[3, 8\], expected \[2, 8\]"),
        ({"scales": np.full((2, 8), 0.1, np.float32)}, "float16 cannot hold exactly"),
        ({"scales": np.full((2, 8), 1e30, np.float32)}, "float16 cannot hold exactly"),
        ({"scales": np.ones((2, 8), np.int32)}, "scales is int32, expected floats"),
        ({"g_idx": np.full(64, 2, np.int32)}, "beyond the 2 that scales has"),
        ({"g_idx": np.full(64, -1, np.int32)}, "beyond the 2 that scales has"),
        ({"g_idx": np.zeros(63, np.int32)}, r"g_idx has shape \[63\]"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    damage: dict[str, Array | None], message: str
) -> None:
    tensors = gptq_v1(make_codes(64, 8, 32, symmetric=True)) | damage
    present = {name: array for name, array in tensors.items() if array is not None}

    with pytest.raises(Exception, match=message):
        read_weights(as_stored_tensors(present), parse(gptq_config()))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' is not supported"),
        ({}, "quant_method None is not supported"),
        (gptq_config(bits=8), "bits 8 is not supported; supported: 4"),
        (gptq_config(16), "group_size 16 is not supported"),
        (gptq_config("64"), "group_size '64' is not supported"),  # type: ignore[arg-type]
        (gptq_config(checkpoint_format="marlin"), "checkpoint_format 'marlin'"),
        (gptq_config(dynamic={"-:.*": {}}), "dynamic"),
        (awq_config(version="gemv"), "version 'gemv' is not supported; supported: 'gemm'"),
        (awq_config(zero_point=False), "zero_point False"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "'pack-quantized'"),
        ({"quant_method": "pdmesh", "format": 2, "bits": 4, "group_size": 32}, "format 2"),
        ([], "not an object"),
    ],
)
def test_what_cannot_be_read_is_refused_before_any_weight_is(
    config: Any, message: str, tmp_path: Path
) -> None:
    make_tiny_model(tmp_path)
    edit_config(tmp_path, quantization_config=config)

    with pytest.raises(ModelConfigError, match=message):
        ModelConfig.from_folder(tmp_path)


def test_a_quantization_config_without_quantized_tensors_is_refused(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    edit_config(tmp_path, quantization_config=awq_config())

    with pytest.raises(LoadError, match="quantization_config is awq, but no tensor is"):
        read(tmp_path)


def test_integers_without_a_quantization_config_are_refused(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(np.int8)
    save_file(tensors, tmp_path / "model.safetensors")

    with pytest.raises(LoadError, match=r"model\.norm\.weight: dtype int8 is not supported"):
        read(tmp_path)


@pytest.mark.parametrize("k", [8, 24, 30])
def test_words_hold_eight_codes_from_the_lowest_bits_up(k: int) -> None:
    codes = np.random.default_rng(1).integers(0, 16, (3, k), dtype=np.uint8)

    words = pack_words(codes)

    assert words.dtype == np.int32
    assert words.shape == (3, -(-k // 8))
    assert int(words[0, 0]) & 0xFF == codes[0, 0] | codes[0, 1] << 4
    assert np.array_equal(unpack_words(words)[:, :k], codes)


@pytest.fixture(params=["int8", "int4"])
def name(request: pytest.FixtureRequest) -> QuantizedName:
    chosen: QuantizedName = request.param
    return chosen


def assert_packed_equal(a: Path, b: Path, name: WeightsName) -> None:
    ours, theirs = (
        cast(StoredModel, load_packed(each, ModelConfig.from_folder(each), name)) for each in (a, b)
    )
    assert len(ours.arena) > 10
    for key in ours.arena:
        assert np.array_equal(ours.arena[key], theirs.arena[key]), key


@needs_kernels
@pytest.mark.parametrize("is_tied", [True, False])
def test_a_written_checkpoint_gives_the_tokens_of_quantizing_at_start(
    name: QuantizedName, is_tied: bool, tmp_path: Path
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    # Rows of 48 and 36 inputs: no whole groups, no whole words.
    make_tiny_model(source, hidden_size=36, head_dim=8, tie_word_embeddings=is_tied)
    target.mkdir()

    quantize_checkpoint(source, target, name)

    assert choice(target) == Choice("native", name, "bfloat16")
    assert_packed_equal(target, source, name)
    prompts = {"a": TOKENS, "b": TOKENS[:3]}
    results = []
    for folder, quantization in ((source, name), (target, "auto")):
        config = EngineConfig(folder, quantization=quantization, num_blocks=16, num_threads=1)  # type: ignore[arg-type]
        with running_engine(config) as engine:
            results.append(run(engine, prompts, lambda _: SamplingParams(12, temperature=0.0)))
    assert results[0] == results[1]
    assert len(token_ids(results[0])["a"]) == 12


def test_values_of_the_gguf_that_a_model_was_made_from_are_written_as_they_are(
    tmp_path: Path,
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    make_tiny_model(source, hidden_size=64, intermediate_size=96)
    target.mkdir()
    tensors = load_file(source / "model.safetensors")
    writer = gguf.GGUFWriter(source / SOURCE_GGUF, "llama")
    kind = gguf.GGMLQuantizationType
    blocks = {}
    for name, gguf_name, as_kind in (
        ("model.embed_tokens", "token_embd", kind.Q8_0),
        (DOWN, "blk.0.ffn_down", kind.Q4_1),
    ):
        blocks[name] = gguf.quantize(tensors[f"{name}.weight"], as_kind)
        tensors[f"{name}.weight"] = gguf.dequantize(blocks[name], as_kind)
        writer.add_tensor(f"{gguf_name}.weight", blocks[name], raw_dtype=as_kind)
    save_file(tensors, source / "model.safetensors")
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file):
        write()
    writer.write_tensors_to_file()
    writer.close()

    quantize_checkpoint(source, target, "int4")

    written = read(target)
    embedding, down = (written[f"{name}.weight"] for name in blocks)
    assert (embedding.format, down.format) == (WeightFormat.INT8_GROUPED, WeightFormat.INT4)
    for ours, theirs in (
        (embedding, read_q8_0(blocks["model.embed_tokens"], (96, 64))),
        (down, read_q4_1(blocks[DOWN], (64, 96))),
    ):
        for part in ("values", "scales", "minimums"):
            assert np.array_equal(getattr(ours, part), getattr(theirs, part))


def test_any_safetensors_library_reads_what_is_written(name: QuantizedName, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    make_tiny_model(source)
    target.mkdir()
    quantize_checkpoint(source, target, name)

    tensors = load_file(target / "model.safetensors")

    config = json.loads((target / "config.json").read_text())["quantization_config"]
    if name == "int8":
        assert config["quant_method"] == "compressed-tensors"
        assert tensors[f"{DOWN}.weight"].dtype == np.int8
        assert tensors[f"{DOWN}.weight_scale"].shape == (32, 1)
        values = tensors[f"{DOWN}.weight"] * tensors[f"{DOWN}.weight_scale"]
    else:
        assert tensors[f"{DOWN}.weight_shape"].tolist() == [32, 48]
        nibbles = tensors[f"{DOWN}.weight_packed"].view(np.uint32)[..., None] >> np.arange(
            0, 32, 4, dtype=np.uint32
        )
        codes = (nibbles & 15).reshape(32, 48)
        scales, minimums = (
            tensors[f"{DOWN}.{part}"].astype(np.float32).repeat(32, axis=1)[:, :48]
            for part in ("weight_scale", "weight_minimum")
        )
        values = codes * scales + minimums
    assert np.array_equal(values, load_dequantized(target)[f"{DOWN}.weight"])
    original = load_file(source / "model.safetensors")[f"{DOWN}.weight"]
    error = np.abs(values - original)
    assert error.max() < 0.1


def test_a_quantized_checkpoint_is_not_quantized_again(name: QuantizedName, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    make_tiny_model(source)
    target.mkdir()
    quantize_checkpoint(source, target, name)

    with pytest.raises(LoadError, match=f"is quantized to {name} already"):
        quantize_checkpoint(target, tmp_path, "int4")
    if name == "int8" and load_library() is not None:
        with pytest.raises(BackendError, match="int8 weights again"):
            choice(target, quantization="int4")


def choice(folder: Path, **values: Any) -> Choice:
    return choose(EngineConfig(folder, **values), ModelConfig.from_folder(folder), 256)


def parse(config: dict[str, Any]) -> CheckpointQuantization:
    return parse_quantization(config)


def as_stored_tensors(tensors: dict[str, Array]) -> dict[str, StoredTensor]:
    return {f"m.{part}": StoredTensor(a.dtype.name, a) for part, a in tensors.items()}  # type: ignore[arg-type]


def load_dequantized(folder: Path) -> dict[str, Array]:
    return {
        name: weight.dequantize()
        for name, weight in read(folder).items()
        if isinstance(weight, MatrixWeights)
    }
