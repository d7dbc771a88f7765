"""From scheduled requests to rows of logits: the only place where the engine meets the model."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from engine.batcher import ScheduledRequest
from engine.forward_batch import SequenceSlice, build_batch
from engine.kv_cache import KvCache
from engine.models.registry import Model


class Runner(Protocol):
    """Computes the tokens of a batch."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def block_bytes(self) -> int:
        """Bytes of one KV block."""
        ...

    def execute(self, scheduled: Sequence[ScheduledRequest]) -> Tensor:
        """Write the batch's KV; return a row of float32 logits for each request that samples."""
        ...

    def close(self) -> None:
        """Release the KV cache's memory."""
        ...


class ModelRunner:
    """Owns the model and the memory of its KV cache."""

    def __init__(self, model: Model, kv_cache: KvCache, device: str = "cpu") -> None:
        self._model = model
        self._device = device
        self._kv_cache = kv_cache

    @property
    def vocab_size(self) -> int:
        return self._model.vocab_size

    @property
    def block_bytes(self) -> int:
        return self._kv_cache.layout.block_bytes

    def execute(self, scheduled: Sequence[ScheduledRequest]) -> Tensor:
        return self.forward([_slice(item) for item in scheduled])

    @torch.inference_mode()
    def forward(self, slices: Sequence[SequenceSlice]) -> Tensor:
        """Compute any slices, whoever owns their blocks; logits of the rows that they ask for."""
        batch = build_batch(slices, self._kv_cache.layout.block_size, self._device)
        return self._model.forward(batch, self._kv_cache)

    def close(self) -> None:
        self._kv_cache.close()


def _slice(item: ScheduledRequest) -> SequenceSlice:
    start = item.request.num_computed_tokens
    return SequenceSlice(
        token_ids=item.request.slice_token_ids(start, start + item.num_tokens),
        num_computed_tokens=start,
        block_ids=item.request.block_ids,
        num_logits=int(item.samples),
    )
