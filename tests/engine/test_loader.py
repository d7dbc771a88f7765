"""Loading weights: what is right loads exactly, everything else is refused by name."""

import json
import pickle
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.config import DtypeName, ModelConfig
from engine.loader import EMBEDDING, LM_HEAD, LoadError, load_weights, stored_dtype
from engine.models.torch_weights import to_tensors
from engine.quantized_layouts import as_float32
from engine.safetensors_file import SafetensorsError, StoredTensor, map_tensors, read_header
from tests.tiny_llama import make_tiny_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny_model(folder, tie_word_embeddings=True)
    return folder


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    """A tiny model of the test's own, tied and without lm_head."""
    shutil.copytree(tiny, tmp_path, dirs_exist_ok=True)
    return tmp_path


def load(folder: Path, dtype: DtypeName = "float32") -> dict[str, Tensor]:
    return to_tensors(load_weights(folder, ModelConfig.from_folder(folder)), dtype=dtype)


def weights_file(folder: Path) -> Path:
    return folder / "model.safetensors"


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(weights_file(folder)).items()}
    save_file(change(tensors), weights_file(folder), metadata={"format": "pt"})


def edit_json(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def write_raw(path: Path, header: object, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(begin: int, end: int, shape: list[int] | None = None, dtype: str = "F32") -> Any:
    return {
        "dtype": dtype,
        "shape": [(end - begin) // 4] if shape is None else shape,
        "data_offsets": [begin, end],
    }


def test_weights_are_mapped_exactly_as_stored(folder: Path) -> None:
    expected = load_file(weights_file(folder))

    weights = load(folder)

    assert weights.keys() == {*expected, LM_HEAD}
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    with Path("/proc/self/maps").open() as maps:
        assert any(str(weights_file(folder)) in line for line in maps)


def split_into_shards(folder: Path) -> dict[str, str]:
    """Spread the model over three shards and return the weight map."""
    tensors = load_file(weights_file(folder))
    weight_map = {
        name: f"model-{index % 3 + 1:05}-of-00003.safetensors"
        for index, name in enumerate(sorted(tensors))
    }
    for shard in set(weight_map.values()):
        save_file({n: tensors[n] for n in tensors if weight_map[n] == shard}, folder / shard)
    weights_file(folder).unlink()
    write_index(folder, weight_map)
    return weight_map


def write_index(folder: Path, weight_map: object) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_shards_load_as_one(folder: Path) -> None:
    expected = load_file(weights_file(folder))
    split_into_shards(folder)

    weights = load(folder)

    assert stored_dtype(folder) == "float32"
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


# ML-01
def test_a_missing_shard_is_named(folder: Path) -> None:
    split_into_shards(folder)
    (folder / "model-00002-of-00003.safetensors").unlink()

    with pytest.raises(LoadError, match=r"model-00002-of-00003.safetensors: missing"):
        load(folder)


# ML-01
def test_a_tensor_that_its_shard_lacks_is_named(folder: Path) -> None:
    weight_map = split_into_shards(folder)
    write_index(folder, {**weight_map, "extra.weight": "model-00001-of-00003.safetensors"})

    with pytest.raises(LoadError, match=r"model-00001-of-00003.safetensors: lacks extra.weight"):
        load(folder)


# ML-01
@pytest.mark.parametrize("shard", ["../x.safetensors", "/etc/passwd", "a/b.safetensors", "", 5])
def test_a_shard_outside_the_folder_is_refused(folder: Path, shard: object) -> None:
    write_index(folder, {"model.norm.weight": shard})

    with pytest.raises(LoadError, match="not a file of the folder"):
        load(folder)


@pytest.mark.parametrize("weight_map", [None, {}, []])
def test_an_index_without_a_weight_map_is_refused(folder: Path, weight_map: object) -> None:
    write_index(folder, weight_map)

    with pytest.raises(LoadError, match="weight_map is missing or empty"):
        load(folder)


# ML-03: SmolLM2's case.
def test_a_tied_model_without_lm_head_uses_the_embedding(folder: Path) -> None:
    weights = load(folder)

    assert weights[LM_HEAD] is weights[EMBEDDING]


# ML-03
def test_a_tied_model_with_an_equal_lm_head_keeps_one_copy(folder: Path) -> None:
    rewrite(folder, lambda tensors: {**tensors, LM_HEAD: tensors[EMBEDDING].clone()})

    weights = load(folder)

    assert weights[LM_HEAD] is weights[EMBEDDING]


# ML-03
def test_a_tied_model_with_another_lm_head_is_refused(folder: Path) -> None:
    rewrite(folder, lambda tensors: {**tensors, LM_HEAD: tensors[EMBEDDING] + 1})

    with pytest.raises(LoadError, match=r"tie_word_embeddings is true, but lm_head.weight differs"):
        load(folder)


# ML-03
def test_an_untied_model_without_lm_head_is_refused(folder: Path) -> None:
    edit_json(folder / "config.json", tie_word_embeddings=False)

    with pytest.raises(LoadError, match=r"no lm_head.weight, and tie_word_embeddings is false"):
        load(folder)


# ML-03
def test_a_tied_model_with_only_lm_head_uses_it_for_both(folder: Path) -> None:
    expected = load_file(weights_file(folder))[EMBEDDING]
    rewrite(folder, lambda tensors: {LM_HEAD: tensors.pop(EMBEDDING), **tensors})

    weights = load(folder)

    assert torch.equal(weights[EMBEDDING], expected)
    assert weights[LM_HEAD] is weights[EMBEDDING]


def test_an_untied_model_keeps_its_own_lm_head(folder: Path) -> None:
    make_tiny_model(folder, tie_word_embeddings=False)

    weights = load(folder)

    assert not torch.equal(weights[LM_HEAD], weights[EMBEDDING])


# ML-04
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:-1], r"the file has \d+ bytes, its header accounts for \d+"),
        (lambda data: data[: len(data) // 2], r"the file has \d+ bytes, its header accounts for"),
        (lambda data: data + bytes(16), r"the file has \d+ bytes, its header accounts for"),
        (lambda data: b"", "0 bytes are too few"),
        (lambda data: data[:100], r"header ends at byte \d+, but the file has 100 bytes"),
        (lambda data: b"<!DOCTYPE html><html>not found</html>", "HTML"),
        (lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "LFS"),
    ],
)
def test_a_damaged_file_is_refused(
    folder: Path, change: Callable[[bytes], bytes], message: str
) -> None:
    path = weights_file(folder)
    path.write_bytes(change(path.read_bytes()))

    with pytest.raises(LoadError, match=message) as caught:
        load(folder)

    assert str(path) in str(caught.value)


# ML-05
@pytest.mark.parametrize(
    ("header", "data_bytes", "message"),
    [
        ({"a": entry(0, 8), "b": entry(4, 12)}, 12, "b: starts at byte 4, not 8: it overlaps"),
        ({"a": entry(0, 8), "b": entry(0, 8)}, 8, "overlaps"),
        ({"a": entry(0, 4), "b": entry(8, 12)}, 12, "b: starts at byte 8, not 4: it leaves a hole"),
        ({"a": entry(4, 8)}, 8, "a: starts at byte 4, not 0: it leaves a hole"),
        ({"a": entry(8, 0, [2])}, 8, "are no range"),
        ({"a": entry(0, 400)}, 8, "the file has"),
        ({"a": entry(0, 8, [1 << 61, 1 << 61])}, 8, "shape .* takes"),
        ({"a": entry(0, 8, [1 << 62, 1 << 62, 0, 1])}, 8, "takes 0 bytes"),
        ({"a": entry(0, 8, [1] * 1000)}, 8, "1000 dimensions"),
        ({"a": entry(0, 8, [3])}, 8, "takes 12 bytes"),
        ({"a": entry(-8, 0)}, 8, "natural numbers"),
        ({"a": entry(0, 8, [-2, -1])}, 8, "natural numbers"),
        ({"a": entry(0, 4, [True])}, 4, "natural numbers"),
        ({"a": entry(0, 8, [2.0])}, 8, "natural numbers"),  # type: ignore[list-item]
        ({"a": entry(0, 8, dtype="Q4")}, 8, "a: dtype 'Q4' is not supported"),
        ({"a": entry(0, 8, dtype=None)}, 8, "dtype None is not supported"),  # type: ignore[arg-type]
        ({"a": entry(0, 8, dtype=[])}, 8, "is not supported"),  # type: ignore[arg-type]
        ({"a": {"dtype": "F32"}}, 8, "expected dtype, shape and data_offsets"),
        ({"a": 5}, 8, "expected dtype, shape and data_offsets"),
        ({"__metadata__": {"format": "pt"}}, 0, "no tensors"),
        ({}, 8, "no tensors"),
        ({"a": entry(0, 8, dtype="F64")}, 8, "a: dtype 'F64' is not supported"),
        ([1], 8, "not a JSON object"),
        (b'{"a": 1, "a": 2}', 8, "'a' appears twice"),
        (b"[" * 100_000, 8, "header"),
        (b'{"a": ' + b"9" * 5000 + b"}", 8, "header"),
        (b"\xff\xfe", 8, "header"),
        (b"{", 8, "header"),
    ],
)
def test_a_hostile_header_is_refused(
    tmp_path: Path, header: object, data_bytes: int, message: str
) -> None:
    path = write_raw(tmp_path / "x.safetensors", header, bytes(data_bytes))

    with pytest.raises(SafetensorsError, match=message) as caught:
        map_tensors(path)

    assert str(caught.value).startswith(str(path))


# ML-05
@pytest.mark.parametrize("length", [2**64 - 1, 0, 1 << 40, 100_000_001, 1000])
def test_a_header_length_beyond_the_file_is_refused(tmp_path: Path, length: int) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(struct.pack("<Q", length) + b"{}" * 100)

    with pytest.raises(SafetensorsError, match="header"):
        map_tensors(path)


# ML-05
def test_a_long_valid_header_loads(tmp_path: Path) -> None:
    metadata = {"note": "x" * 100_000}
    path = write_raw(
        tmp_path / "x.safetensors",
        {"__metadata__": metadata, "a": entry(0, 8)},
        struct.pack("<2f", 1.5, -2.0),
    )

    assert map_tensors(path)["a"].array.tolist() == [1.5, -2.0]


def test_a_tensor_at_an_odd_offset_loads(tmp_path: Path) -> None:
    header = {"a": entry(0, 2, [1], "BF16"), "b": entry(2, 10), "empty": entry(10, 10)}
    path = write_raw(
        tmp_path / "x.safetensors", header, b"\x80\x3f" + struct.pack("<2f", 1.5, -2.0)
    )

    tensors = map_tensors(path)

    assert tensors["a"].to_float32().tolist() == [1.0]
    assert tensors["b"].array.tolist() == [1.5, -2.0]
    assert tensors["empty"].shape == (0,)


@given(st.binary(max_size=200), st.integers(0, 220))
def test_no_bytes_break_the_header_check(
    tmp_path_factory: pytest.TempPathFactory, text: bytes, length: int
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzzed.safetensors"
    path.write_bytes(struct.pack("<Q", length) + text)

    with pytest.raises(SafetensorsError):
        read_header(path)


class Marker:
    """Unpickling this creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


# ML-06
@pytest.mark.parametrize("has_safetensors", [True, False])
def test_pickled_weights_are_never_opened(folder: Path, has_safetensors: bool) -> None:
    marker = folder / "marker"
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Marker(marker)))

    if has_safetensors:
        load(folder)
    else:
        weights_file(folder).unlink()
        with pytest.raises(LoadError, match=r"pytorch_model.bin would have to be unpickled"):
            load(folder)

    assert not marker.exists()


# ML-08
@pytest.mark.parametrize("declared", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
def test_the_stored_dtype_counts_and_not_the_declared_one(
    folder: Path, declared: str, stored: str
) -> None:
    dtype = getattr(torch, stored)
    rewrite(folder, lambda tensors: {name: tensors[name].to(dtype) for name in tensors})
    edit_json(folder / "config.json", dtype=declared, torch_dtype=declared)

    assert stored_dtype(folder) == stored
    for tensor in load_weights(folder, ModelConfig.from_folder(folder)).values():
        assert isinstance(tensor, StoredTensor)
        assert tensor.dtype == stored


def test_stored_values_become_float32_exactly(folder: Path) -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        rewrite(folder, lambda tensors, to=dtype: {n: t.to(to) for n, t in tensors.items()})  # type: ignore[misc]
        stored = load_weights(folder, ModelConfig.from_folder(folder))
        expected = load_file(weights_file(folder))

        assert all(
            torch.equal(torch.from_numpy(as_float32(stored[name])), expected[name].float())
            for name in expected
        )


# ML-08
def test_an_unsupported_dtype_is_refused_by_name(folder: Path) -> None:
    rewrite(
        folder, lambda tensors: {name: tensors[name].to(torch.float8_e4m3fn) for name in tensors}
    )

    with pytest.raises(LoadError, match="dtype 'F8_E4M3' is not supported"):
        load(folder)


def test_the_asked_for_dtype_wins_over_the_stored_one(folder: Path) -> None:
    weights = load(folder, dtype="bfloat16")

    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert weights[LM_HEAD] is weights[EMBEDDING]


def write_tokenizer(folder: Path, *, highest: int, added: int | None = None) -> None:
    tokens = [] if added is None else [{"id": added, "content": "<x>"}]
    (folder / "tokenizer.json").write_text(
        json.dumps({"model": {"vocab": {"a": 0, "b": highest}}, "added_tokens": tokens})
    )


def test_a_tokenizer_that_fits_is_accepted(folder: Path) -> None:
    write_tokenizer(folder, highest=90, added=95)

    load(folder)


@pytest.mark.parametrize(("highest", "added"), [(96, None), (5, 96)])
def test_a_tokenizer_beyond_the_embeddings_is_refused(
    folder: Path, highest: int, added: int | None
) -> None:
    write_tokenizer(folder, highest=highest, added=added)

    with pytest.raises(LoadError, match=r"tokenizer.json: token id 96 is beyond .* 96 embeddings"):
        load(folder)


@pytest.mark.parametrize("text", ["[]", "{}", "nonsense", '{"model": {"vocab": {}}}'])
def test_an_unusable_tokenizer_is_refused(folder: Path, text: str) -> None:
    (folder / "tokenizer.json").write_text(text)

    with pytest.raises(LoadError, match=r"tokenizer.json"):
        load(folder)
