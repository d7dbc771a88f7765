"""The Llama family on torch: Llama 2 and 3, SmolLM2, Mistral."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.config import ModelConfig
from engine.forward_batch import ForwardBatch, Int64Array
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
        self.embedding = weights["model.embed_tokens.weight"]
        self.layers = [_layer(config, weights, index) for index in range(config.num_layers)]
        self.norm = RmsNorm(weights["model.norm.weight"], config.rms_norm_eps)
        self.lm_head = Linear(weights["lm_head.weight"])
        self._rotary = RotaryEmbedding(
            config.head_dim, config.rope_theta, config.rope_scaling, str(self.embedding.device)
        )

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    def forward(self, batch: ForwardBatch, kv_cache: KvCache) -> Float32Array:
        """Write the batch's keys and values, and return float32 logits `[L, vocab_size]`."""
        logits = self.begin(batch, kv_cache).advance(self.config.num_layers)
        assert logits is not None
        return logits

    @torch.inference_mode()
    def begin(self, batch: ForwardBatch, kv_cache: KvCache) -> "LlamaPass":
        """Compute the same in parts."""
        device = self.embedding.device
        hidden = F.embedding(torch.from_numpy(batch.token_ids).to(device), self.embedding)
        rotate = self._rotary.at(torch.from_numpy(batch.positions).to(device), hidden.dtype)
        attention = plan_attention(
            batch, kv_cache.layout, self.config.num_kv_groups, self.config.sliding_window, hidden
        )
        return LlamaPass(self, batch.logits_rows, hidden, rotate, attention, kv_cache)

    def close(self) -> None:
        """Nothing to end: torch's threads are the process's."""


class LlamaPass:
    """A batch on its way through the layers."""

    def __init__(
        self,
        model: LlamaModel,
        logits_rows: Int64Array,
        hidden: Tensor,
        rotate: Rotation,
        attention: PagedAttention,
        kv_cache: KvCache,
    ) -> None:
        self._model = model
        self._logits_rows = logits_rows
        self._hidden = hidden
        self._rotate = rotate
        self._attention = attention
        self._kv_cache = kv_cache
        self._next_layer = 0

    @property
    def num_layers_left(self) -> int:
        return len(self._model.layers) - self._next_layer

    @torch.inference_mode()
    def advance(
        self, num_layers: int, on_kv_written: Callable[[], None] | None = None
    ) -> Float32Array | None:
        """Compute so many layers more; after the last one, the logits, as `forward` has them.

        `on_kv_written` is called between the two.
        """
        model, hidden = self._model, self._hidden
        first = self._next_layer
        self._next_layer += min(num_layers, self.num_layers_left)
        for index, layer in enumerate(model.layers[first : self._next_layer], first):
            normed = layer.input_norm(hidden)
            hidden = hidden + layer.attend(
                index, normed, self._rotate, self._attention, self._kv_cache
            )
            hidden = hidden + layer.feed_forward(layer.post_attention_norm(hidden))
        self._hidden = hidden
        if self.num_layers_left:
            return None
        if on_kv_written is not None:
            on_kv_written()
        wanted = hidden[torch.from_numpy(self._logits_rows).to(hidden.device)]
        logits: Float32Array = model.lm_head(model.norm(wanted)).float().cpu().numpy()
        return logits


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
