"""The arithmetic of KV caches: bytes, blocks, concurrency, transfer time and cost."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DTYPE_BITS = {
    "float32": 32,
    "float16": 16,
    "bfloat16": 16,
    "int8": 8,
    "fp8": 8,
    "int4": 4,
}


class ShapeError(Exception):
    """The shape of the attention cannot be told; the message says why."""


@dataclass(frozen=True)
class HeadShape:
    """MHA, GQA or MQA: a key and a value per KV head, token and layer."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    # Heads that ask; with `num_kv_heads` it tells the kind.
    num_heads: int | None = None

    @property
    def kind(self) -> str:
        if self.num_kv_heads == 1:
            return "MQA"
        if self.num_heads is None:
            return "MHA or GQA"
        return "MHA" if self.num_heads == self.num_kv_heads else "GQA"

    @property
    def elements_per_token(self) -> int:
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim


@dataclass(frozen=True)
class LatentShape:
    """MLA: one compressed vector and one rotary key per token and layer, for all heads."""

    num_layers: int
    kv_lora_rank: int
    qk_rope_head_dim: int

    @property
    def kind(self) -> str:
        return "MLA"

    @property
    def elements_per_token(self) -> int:
        return self.num_layers * (self.kv_lora_rank + self.qk_rope_head_dim)


KvShape = HeadShape | LatentShape


@dataclass(frozen=True)
class KvSize:
    """What the cache of one model takes. Scales of quantized formats are not counted."""

    shape: KvShape
    bits: int
    block_size: int = 16

    @property
    def bytes_per_token(self) -> float:
        return self.shape.elements_per_token * self.bits / 8

    @property
    def bytes_per_block(self) -> float:
        return self.bytes_per_token * self.block_size

    def num_blocks(self, num_tokens: int) -> int:
        """Blocks of one sequence; the last one may be partly filled."""
        return -(-num_tokens // self.block_size)

    def num_blocks_in(self, memory_bytes: float) -> int:
        return int(memory_bytes // self.bytes_per_block)

    def concurrency(self, num_tokens: int, memory_bytes: float) -> int:
        """Sequences of this length that fit at the same time."""
        return self.num_blocks_in(memory_bytes) // self.num_blocks(num_tokens)

    def transfer_s(self, num_tokens: int, bytes_per_s: float) -> float:
        """Seconds to move one sequence's blocks; whole blocks move."""
        return self.num_blocks(num_tokens) * self.bytes_per_block / bytes_per_s


def cost_per_million_tokens(price_per_hour: float, tokens_per_s: float) -> float:
    """Price of a million tokens at a steady rate."""
    return price_per_hour * 1e6 / (tokens_per_s * 3600)


def shape_from_config(path: Path) -> KvShape:
    """Read the shape from a model folder, or from its config.json.

    Raises:
        ShapeError: the file cannot be read, or says too little.
    """
    file = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ShapeError(f"{file}: not readable as JSON: {error}") from error
    if not isinstance(values, dict):
        raise ShapeError(f"{file}: expected a JSON object")
    # Multimodal models keep the language model's part in an object of its own.
    text_config = values.get("text_config")
    try:
        return _shape(text_config if isinstance(text_config, dict) else values)
    except ShapeError as error:
        raise ShapeError(f"{file}: {error}") from None


def _shape(values: dict[str, Any]) -> KvShape:
    num_layers = _count(values, "num_hidden_layers")
    if values.get("kv_lora_rank") is not None:
        return LatentShape(
            num_layers, _count(values, "kv_lora_rank"), _count(values, "qk_rope_head_dim")
        )
    num_heads = _count(values, "num_attention_heads")
    # Absent or null means that every head has its own key and value.
    num_kv_heads = (
        num_heads
        if values.get("num_key_value_heads") is None
        else _count(values, "num_key_value_heads")
    )
    head_dim = (
        _count(values, "hidden_size") // num_heads
        if values.get("head_dim") is None
        else _count(values, "head_dim")
    )
    return HeadShape(num_layers, num_kv_heads, head_dim, num_heads)


def _count(values: dict[str, Any], key: str) -> int:
    value = values.get(key)
    if type(value) is not int or value < 1:
        raise ShapeError(f"{key} is {value!r}, expected a positive integer")
    return value
