"""The Llama family on torch: Llama 2 and 3, SmolLM2, Mistral."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.config import ModelConfig
from engine.forward_batch import ForwardBatch
from engine.kv_cache import KvCache
from engine.layers.attention import PagedAttention, plan_attention
from engine.layers.linear import Linear
from engine.layers.norm import RmsNorm
from engine.layers.rotary import RotaryEmbedding, Rotation
from engine.loader import check_weights

Float32Array = npt.NDArray[np.float32]


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
        check_weights(config, {name: tuple(tensor.shape) for name, tensor in weights.items()})
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

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, kv_cache: KvCache) -> Float32Array:
        """Write the batch's keys and values, and return float32 logits `[L, vocab_size]`."""
        config, device = self.config, self._embedding.device
        hidden = F.embedding(torch.from_numpy(batch.token_ids).to(device), self._embedding)
        positions = torch.from_numpy(batch.positions).to(device)
        rotate = self._rotary.at(positions, hidden.dtype)
        attention = plan_attention(
            batch, kv_cache.layout, config.num_kv_groups, config.sliding_window, hidden
        )
        for index, layer in enumerate(self._layers):
            normed = layer.input_norm(hidden)
            hidden = hidden + layer.attend(index, normed, rotate, attention, kv_cache)
            hidden = hidden + layer.feed_forward(layer.post_attention_norm(hidden))
        wanted = hidden[torch.from_numpy(batch.logits_rows).to(device)]
        logits: Float32Array = self._lm_head(self._norm(wanted)).float().cpu().numpy()
        return logits

    def close(self) -> None:
        """Nothing to end: torch's threads are the process's."""


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
