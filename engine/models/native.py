"""The Llama family on the compiled kernels."""

from typing import Any

import numpy as np
import numpy.typing as npt

from engine.config import KvDtypeName, ModelConfig
from engine.forward_batch import ForwardBatch
from engine.kernels.formats import KvFormat
from engine.kernels.library import Library
from engine.kernels.native_llama import NativeLlama, NativePass, PackedModel
from engine.kv_cache import KvCache, KvCacheLayout
from engine.rope import rotary_frequencies, rotary_tables

_KV_FORMATS: dict[KvDtypeName, KvFormat] = {
    "float32": KvFormat.FLOAT32,
    "bfloat16": KvFormat.BFLOAT16,
    "int8": KvFormat.INT8,
    "fp8": KvFormat.FP8_E4M3,
}


class NativeModel:
    """Owns the kernels' threads; the weights may be shared with other processes."""

    def __init__(
        self,
        library: Library,
        config: ModelConfig,
        weights: PackedModel,
        layout: KvCacheLayout,
        *,
        num_positions: int,
        num_threads: int,
        level: str | None = None,
    ) -> None:
        """`level`: as `Library.level` has it; None: the best one."""
        frequencies = rotary_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        self.vocab_size = config.vocab_size
        self._llama = NativeLlama(
            library,
            config,
            weights,
            rotary_tables(frequencies, num_positions),
            kv_format=_KV_FORMATS[layout.dtype],
            block_size=layout.block_size,
            num_threads=num_threads,
            level=level,
        )
        assert self._llama.block_bytes == layout.block_bytes, "the kernels' blocks are different"

    def forward(self, batch: ForwardBatch, kv_cache: KvCache) -> npt.NDArray[np.float32]:
        """Write the batch's keys and values, and return float32 logits `[L, vocab_size]`."""
        return self._llama.forward(batch, kv_cache.memory, kv_cache.num_blocks)

    def begin(self, batch: ForwardBatch, kv_cache: KvCache) -> NativePass:
        """Compute the same in parts."""
        return self._llama.begin(batch, kv_cache.memory, kv_cache.num_blocks)

    def draw(
        self, logits: npt.NDArray[np.float32], params: npt.NDArray[Any]
    ) -> npt.NDArray[np.int64]:
        """`engine.sampling.draw` on the model's threads."""
        return self._llama.sample(logits, params)

    def close(self) -> None:
        """End the kernels' threads."""
        self._llama.close()
