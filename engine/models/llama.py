"""The Llama family: Llama 2 and 3, SmolLM2, Mistral."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.config import ModelConfig, ModelError
from engine.forward_batch import ForwardBatch
from engine.kv_cache import KvCache
from engine.layers.attention import PagedAttention, plan_attention
from engine.layers.linear import Linear
from engine.layers.norm import RmsNorm
from engine.layers.rotary import RotaryEmbedding, Rotation


class WeightsError(ModelError):
    """The weights do not fit config.json."""


@dataclass(frozen=True)
class LlamaLayer:
    """One layer's weights."""

    input_norm: RmsNorm
    q_proj: Linear
    k_proj: Linear
    v_proj: Linear
    o_proj: Linear
    post_attention_norm: RmsNorm
    gate_proj: Linear
    up_proj: Linear
    down_proj: Linear

    def attend(
        self,
        index: int,
        hidden: Tensor,
        rotate: Rotation,
        attention: PagedAttention,
        kv_cache: KvCache,
    ) -> Tensor:
        """Let the batch's tokens look at each other and at the cache."""
        head_dim = kv_cache.layout.head_dim
        query = self.q_proj(hidden).view(len(hidden), -1, head_dim)
        key = self.k_proj(hidden).view(len(hidden), -1, head_dim)
        value = self.v_proj(hidden).view(len(hidden), -1, head_dim)
        key_value = torch.cat((rotate(key), value), 1)
        return self.o_proj(attention(index, rotate(query), key_value, kv_cache))

    def feed_forward(self, hidden: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(hidden)).mul_(self.up_proj(hidden)))


class LlamaModel:
    """Runs on plain torch operators, over weights that it does not own and never writes."""

    def __init__(self, config: ModelConfig, weights: dict[str, Tensor]) -> None:
        check_weights(config, weights)
        self.config = config
        self._embedding = weights["model.embed_tokens.weight"]
        self._layers = [_layer(config, weights, index) for index in range(config.num_layers)]
        self._norm = RmsNorm(weights["model.norm.weight"], config.rms_norm_eps)
        self._lm_head = Linear(weights["lm_head.weight"])
        self._rotary = RotaryEmbedding(
            config.head_dim, config.rope_theta, config.rope_scaling, str(self._embedding.device)
        )

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    @property
    def dtype(self) -> torch.dtype:
        """What it computes in, and what the KV cache holds."""
        return self._embedding.dtype

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv_cache: KvCache) -> Tensor:
        """Write the batch's keys and values, and return float32 logits `[L, vocab_size]`."""
        config = self.config
        hidden = F.embedding(batch.token_ids, self._embedding)
        rotate = self._rotary.at(batch.positions, hidden.dtype)
        attention = plan_attention(
            batch, kv_cache.layout, config.num_kv_groups, config.sliding_window, hidden.dtype
        )
        for index, layer in enumerate(self._layers):
            normed = layer.input_norm(hidden)
            hidden = hidden + layer.attend(index, normed, rotate, attention, kv_cache)
            hidden = hidden + layer.feed_forward(layer.post_attention_norm(hidden))
        return self._lm_head(self._norm(hidden[batch.logits_rows])).float()


def check_weights(config: ModelConfig, weights: dict[str, Tensor]) -> None:
    """Raise unless the weights are exactly those that the config describes."""
    expected = dict(expected_shapes(config))
    for name, shape in expected.items():
        if name not in weights:
            raise WeightsError(f"{name} is missing from the weights")
        if weights[name].shape != shape:
            actual = list(weights[name].shape)
            raise WeightsError(f"{name} has shape {actual}, config.json implies {list(shape)}")
    for name in weights:
        # Old checkpoints store the rotary frequencies, which the config determines.
        if name not in expected and not name.endswith("rotary_emb.inv_freq"):
            raise WeightsError(f"{name} is a tensor that config.json has no place for")


def expected_shapes(config: ModelConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of every tensor of the model."""
    yield "model.embed_tokens.weight", (config.vocab_size, config.hidden_size)
    yield "lm_head.weight", (config.vocab_size, config.hidden_size)
    yield "model.norm.weight", (config.hidden_size,)
    for index in range(config.num_layers):
        layer = f"model.layers.{index}"
        yield f"{layer}.input_layernorm.weight", (config.hidden_size,)
        yield f"{layer}.post_attention_layernorm.weight", (config.hidden_size,)
        for name, (num_rows, num_columns, has_bias) in _matrices(config).items():
            yield f"{layer}.{name}.weight", (num_rows, num_columns)
            if has_bias:
                yield f"{layer}.{name}.bias", (num_rows,)


def _matrices(config: ModelConfig) -> dict[str, tuple[int, int, bool]]:
    """Name each matrix of a layer with its rows, its columns and whether it has a bias."""
    hidden, intermediate = config.hidden_size, config.intermediate_size
    query = config.num_heads * config.head_dim
    key = config.num_kv_heads * config.head_dim
    return {
        "self_attn.q_proj": (query, hidden, config.attention_bias),
        "self_attn.k_proj": (key, hidden, config.attention_bias),
        "self_attn.v_proj": (key, hidden, config.attention_bias),
        "self_attn.o_proj": (hidden, query, config.attention_bias),
        "mlp.gate_proj": (intermediate, hidden, config.mlp_bias),
        "mlp.up_proj": (intermediate, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, intermediate, config.mlp_bias),
    }


def _layer(config: ModelConfig, weights: dict[str, Tensor], index: int) -> LlamaLayer:
    prefix = f"model.layers.{index}"

    def norm(name: str) -> RmsNorm:
        return RmsNorm(weights[f"{prefix}.{name}.weight"], config.rms_norm_eps)

    def linear(name: str) -> Linear:
        return Linear(weights[f"{prefix}.{name}.weight"], weights.get(f"{prefix}.{name}.bias"))

    return LlamaLayer(
        input_norm=norm("input_layernorm"),
        q_proj=linear("self_attn.q_proj"),
        k_proj=linear("self_attn.k_proj"),
        v_proj=linear("self_attn.v_proj"),
        o_proj=linear("self_attn.o_proj"),
        post_attention_norm=norm("post_attention_layernorm"),
        gate_proj=linear("mlp.gate_proj"),
        up_proj=linear("mlp.up_proj"),
        down_proj=linear("mlp.down_proj"),
    )
