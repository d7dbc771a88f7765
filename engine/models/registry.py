"""Which code runs which architecture."""

from typing import Protocol

import torch
from torch import Tensor

from engine.config import ModelConfig
from engine.forward_batch import ForwardBatch
from engine.kv_cache import KvCache
from engine.models.llama import LlamaModel


class Model(Protocol):
    """Anything that turns tokens into logits over a paged KV cache."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def dtype(self) -> torch.dtype:
        """What it computes in, and what the KV cache holds."""
        ...

    def forward(self, batch: ForwardBatch, kv_cache: KvCache) -> Tensor:
        """Write the batch's keys and values, and return float32 logits `[L, vocab_size]`."""
        ...


def build_model(config: ModelConfig, weights: dict[str, Tensor]) -> Model:
    """Return the model that `config.architecture` names.

    ModelConfig has refused all others: Mistral differs from Llama by its window only.
    """
    return LlamaModel(config, weights)
