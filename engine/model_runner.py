"""From scheduled requests to rows of logits: the only place where the engine meets the model."""

from collections.abc import Callable, Sequence
from typing import Protocol
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from engine.batcher import ScheduledRequest
from engine.forward_batch import ForwardPass, Int64Array, SequenceSlice, build_batch
from engine.kv_cache import KvCache
from engine.models.registry import Model
from engine.request import Request


class Runner(Protocol):
    """Computes the tokens of a batch."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def block_bytes(self) -> int:
        """Bytes of one KV block."""
        ...

    def execute(
        self,
        scheduled: Sequence[ScheduledRequest],
        on_kv_written: Callable[[], None] | None = None,
    ) -> npt.NDArray[np.float32]:
        """Write the batch's KV; return each request's `num_logits` rows of logits, in order.

        The rows are the caller's to change, until the next call. `on_kv_written` is called as
        soon as the KV is whole, which is before there are logits.
        """
        ...

    def close(self) -> None:
        """Release the KV cache's memory."""
        ...


class ModelRunner:
    """Owns the model and the memory of its KV cache."""

    def __init__(self, model: Model, kv_cache: KvCache) -> None:
        self._model = model
        self._kv_cache = kv_cache
        self._block_tables = BlockTables()

    @property
    def vocab_size(self) -> int:
        return self._model.vocab_size

    @property
    def block_bytes(self) -> int:
        return self._kv_cache.layout.block_bytes

    def execute(
        self,
        scheduled: Sequence[ScheduledRequest],
        on_kv_written: Callable[[], None] | None = None,
    ) -> npt.NDArray[np.float32]:
        if on_kv_written is None:
            return self.forward([self._slice(item) for item in scheduled])
        under_way = self.begin(scheduled)
        logits = under_way.advance(under_way.num_layers_left, on_kv_written)
        assert logits is not None, "all layers were computed"
        return logits

    def begin(self, scheduled: Sequence[ScheduledRequest]) -> ForwardPass:
        """Compute the same in parts. The requests must keep their blocks until the end."""
        slices = [self._slice(item) for item in scheduled]
        batch = build_batch(slices, self._kv_cache.layout.block_size)
        return self._model.begin(batch, self._kv_cache)

    def forward(self, slices: Sequence[SequenceSlice]) -> npt.NDArray[np.float32]:
        """Compute any slices, whoever owns their blocks; logits of the rows that they ask for."""
        batch = build_batch(slices, self._kv_cache.layout.block_size)
        return self._model.forward(batch, self._kv_cache)

    def warm_up(self, num_tokens: int, max_model_len: int) -> None:
        """Compute prompts that nobody asked for, so that the first ones that somebody asks for
        find all buffers made and all pages touched. The cache must not be in use yet.
        """
        block_size, num_free_blocks = self._kv_cache.layout.block_size, self._kv_cache.num_blocks
        prompts: list[SequenceSlice] = []
        while num_tokens and num_free_blocks:
            # No sequence is longer than the model was loaded for; a step may be.
            length = min(num_tokens, max_model_len, num_free_blocks * block_size)
            first = num_free_blocks - -(-length // block_size)
            prompts.append(SequenceSlice([0] * length, 0, range(first, num_free_blocks)))
            num_tokens, num_free_blocks = num_tokens - length, first
        self.forward(prompts)

    def close(self) -> None:
        self._model.close()
        self._kv_cache.close()

    def _slice(self, item: ScheduledRequest) -> SequenceSlice:
        return SequenceSlice(
            token_ids=item.token_ids(),
            num_computed_tokens=item.request.num_computed_tokens,
            block_ids=self._block_tables.of(item.request),
            num_logits=item.num_logits,
        )


class BlockTables:
    """The running requests' blocks as arrays, kept from step to step.

    Making an array of a long sequence's list in every step would cost more than all else that
    a step does in Python.
    """

    def __init__(self) -> None:
        self._tables: WeakKeyDictionary[Request, _BlockTable] = WeakKeyDictionary()

    def of(self, request: Request) -> Int64Array:
        """The request's `block_ids`. Between two calls these may have been added to; all else
        that happens to the blocks of a request that runs is a preemption.
        """
        table = self._tables.get(request)
        if table is None or table.num_preemptions != request.num_preemptions:
            table = _BlockTable(request.num_preemptions)
            self._tables[request] = table
        table.extend(request.block_ids)
        return table.block_ids[: table.num_blocks]


class _BlockTable:
    def __init__(self, num_preemptions: int) -> None:
        self.num_preemptions = num_preemptions
        self.num_blocks = 0
        self.block_ids: Int64Array = np.empty(0, dtype=np.int64)

    def extend(self, block_ids: Sequence[int]) -> None:
        num_blocks = len(block_ids)
        if num_blocks == self.num_blocks:
            return
        if num_blocks > len(self.block_ids):
            grown = np.empty(2 * num_blocks, dtype=np.int64)
            grown[: self.num_blocks] = self.block_ids[: self.num_blocks]
            self.block_ids = grown
        self.block_ids[self.num_blocks : num_blocks] = block_ids[self.num_blocks :]
        self.num_blocks = num_blocks
