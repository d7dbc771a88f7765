"""A small random Llama, its plain float64 computation, and batches over it, for kernel tests."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from engine.kernels.formats import KvFormat, WeightFormat
from engine.kernels.library import Library
from engine.kernels.native_llama import NativeLlama, pack_model
from engine.kernels.pack import Arena, PackedMatrix, pack
from engine.kernels.quantize import MatrixWeights

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class SmallConfig:
    """Sizes that are no multiples of any register or tile."""

    num_layers: int = 2
    hidden_size: int = 72
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 20
    intermediate_size: int = 104
    vocab_size: int = 131
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False


@dataclass(frozen=True)
class ArrayBatch:
    """engine.forward_batch.ForwardBatch over arrays."""

    token_ids: Array
    positions: Array
    slot_mapping: Array
    query_starts: list[int]
    seq_lens: list[int]
    block_tables: Array
    logits_rows: Array


@dataclass
class Piece:
    """Tokens of one sequence that a step computes, all of whose logits are wanted."""

    token_ids: Sequence[int]
    num_computed_tokens: int
    blocks: Sequence[int]


@dataclass
class Runner:
    """A model with a cache of its own."""

    model: NativeLlama
    num_blocks: int
    block_size: int
    cache: Array = field(init=False)

    def __post_init__(self) -> None:
        # Every byte set: reading what was never written gives NaN.
        self.cache = np.full(self.num_blocks * self.model.block_bytes, 255, dtype=np.uint8)

    def run(self, *pieces: Piece) -> Array:
        batch = make_batch(pieces, self.block_size)
        return self.model.forward(batch, self.cache, self.num_blocks).copy()


def make_batch(pieces: Sequence[Piece], block_size: int) -> ArrayBatch:
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    starts = [0]
    for piece in pieces:
        for offset, token_id in enumerate(piece.token_ids):
            position = piece.num_computed_tokens + offset
            token_ids.append(token_id)
            positions.append(position)
            slots.append(piece.blocks[position // block_size] * block_size + position % block_size)
        starts.append(len(token_ids))
    tables = np.zeros((len(pieces), max(len(piece.blocks) for piece in pieces)), dtype=np.int64)
    for row, piece in zip(tables, pieces, strict=True):
        row[: len(piece.blocks)] = piece.blocks
    return ArrayBatch(
        np.array(token_ids),
        np.array(positions),
        np.array(slots),
        starts,
        [piece.num_computed_tokens + len(piece.token_ids) for piece in pieces],
        tables,
        np.arange(len(token_ids)),
    )


def random_weights(config: SmallConfig, seed: int = 0) -> dict[str, Array]:
    rng = np.random.default_rng(seed)

    def matrix(n: int, k: int) -> Array:
        return np.asarray(rng.standard_normal((n, k)) / np.sqrt(k), dtype=np.float32)

    queries, keys = (n * config.head_dim for n in (config.num_heads, config.num_kv_heads))
    hidden, intermediate = config.hidden_size, config.intermediate_size
    weights = {
        "model.embed_tokens.weight": matrix(config.vocab_size, hidden) * 8,
        "lm_head.weight": matrix(config.vocab_size, hidden) * 3,
        "model.norm.weight": rng.uniform(0.5, 2, hidden).astype(np.float32),
    }
    for i in range(config.num_layers):
        layer = f"model.layers.{i}"
        weights |= {
            f"{layer}.self_attn.q_proj.weight": matrix(queries, hidden) * 2,
            f"{layer}.self_attn.k_proj.weight": matrix(keys, hidden) * 2,
            f"{layer}.self_attn.v_proj.weight": matrix(keys, hidden),
            f"{layer}.self_attn.o_proj.weight": matrix(hidden, queries),
            f"{layer}.mlp.gate_proj.weight": matrix(intermediate, hidden),
            f"{layer}.mlp.up_proj.weight": matrix(intermediate, hidden),
            f"{layer}.mlp.down_proj.weight": matrix(hidden, intermediate),
            f"{layer}.input_layernorm.weight": rng.uniform(0.5, 2, hidden).astype(np.float32),
            f"{layer}.post_attention_layernorm.weight": rng.uniform(0.5, 2, hidden).astype(
                np.float32
            ),
        }
    return weights


def rope_tables(
    head_dim: int, num_positions: int = 1024, theta: float = 10000.0
) -> tuple[Array, Array]:
    frequencies = theta ** -(np.arange(0, head_dim, 2) / head_dim)
    angles = np.arange(num_positions)[:, None] * frequencies
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def make_runner(
    library: Library,
    weight_format: WeightFormat = WeightFormat.FLOAT32,
    kv_format: KvFormat = KvFormat.FLOAT32,
    *,
    config: SmallConfig | None = None,
    weights: dict[str, Array] | None = None,
    num_threads: int = 1,
    level: str | None = None,
    num_blocks: int = 256,
    block_size: int = 4,
) -> Runner:
    config = config or SmallConfig()
    model = NativeLlama(
        library,
        config,
        pack_model(config, weights or random_weights(config), weight_format),
        rope_tables(config.head_dim),
        kv_format=kv_format,
        block_size=block_size,
        num_threads=num_threads,
        level=level,
    )
    return Runner(model, num_blocks, block_size)


def reference_logits(
    config: SmallConfig, weights: dict[str, Any], token_ids: Sequence[int]
) -> Array:
    """All positions' logits in float64, by the textbook."""
    w = {name: _float64(weight) for name, weight in weights.items()}
    cosine, sine = (table.astype(np.float64) for table in rope_tables(config.head_dim))
    length = len(token_ids)
    x = w["model.embed_tokens.weight"][list(token_ids)]
    mask = np.triu(np.full((length, length), -np.inf), 1)
    for i in range(config.num_layers):
        layer = f"model.layers.{i}"
        h = _rms_norm(x, w[f"{layer}.input_layernorm.weight"], config.rms_norm_eps)
        q, k, v = (
            (h @ w[f"{layer}.self_attn.{name}_proj.weight"].T)
            .reshape(length, -1, config.head_dim)
            .swapaxes(0, 1)
            for name in "qkv"
        )
        group = config.num_heads // config.num_kv_heads
        q, k = (_rotate(heads, cosine[:length], sine[:length]) for heads in (q, k))
        k, v = (heads.repeat(group, axis=0) for heads in (k, v))
        scores = q @ k.swapaxes(1, 2) / np.sqrt(config.head_dim) + mask
        weights_ = np.exp(scores - scores.max(axis=-1, keepdims=True))
        attended = weights_ / weights_.sum(axis=-1, keepdims=True) @ v
        x = (
            x
            + attended.swapaxes(0, 1).reshape(length, -1) @ w[f"{layer}.self_attn.o_proj.weight"].T
        )
        h = _rms_norm(x, w[f"{layer}.post_attention_layernorm.weight"], config.rms_norm_eps)
        gate, up = (h @ w[f"{layer}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"{layer}.mlp.down_proj.weight"].T
    head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
    return np.asarray(_rms_norm(x, w["model.norm.weight"], config.rms_norm_eps) @ w[head].T)


def in_arena(weights: MatrixWeights) -> PackedMatrix:
    """Packed, in aligned memory."""
    packed = pack(weights)
    arrays = {"data": packed.data}
    if packed.scales is not None:
        arrays["scales"] = packed.scales
    arena = Arena(arrays)
    return PackedMatrix(packed.format, packed.n, packed.k, arena["data"], arena.get("scales"))


def _float64(weight: Any) -> Array:
    values = weight.dequantize() if isinstance(weight, MatrixWeights) else weight
    return np.asarray(values, dtype=np.float64)


def _rms_norm(x: Array, weight: Array, epsilon: float) -> Array:
    return np.asarray(x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + epsilon) * weight)


def _rotate(heads: Array, cosine: Array, sine: Array) -> Array:
    low, high = np.split(heads, 2, axis=-1)
    return np.concatenate((low * cosine - high * sine, high * cosine + low * sine), axis=-1)
