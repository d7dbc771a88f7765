"""By what an engine tells, in shared memory, which of its blocks are filled."""

import mmap
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.bell import Bell

MARK = np.dtype("<u4")


class FillMarks:
    """The marks behind the generations, which `engine.block_marks` describes."""

    def __init__(
        self, memory: mmap.mmap, generations: NDArray[np.uint32], num_blocks: int, offset: int
    ) -> None:
        self._generations = generations
        self._filled: NDArray[np.uint32] = np.frombuffer(memory, MARK, num_blocks, offset)
        offset += num_blocks * MARK.itemsize
        self.bell = Bell(memory, offset)
        offset += Bell.NUM_BYTES
        self._next_tokens: NDArray[np.uint32] = np.frombuffer(memory, MARK, num_blocks, offset)

    @staticmethod
    def num_bytes(num_blocks: int) -> int:
        return 2 * num_blocks * MARK.itemsize + Bell.NUM_BYTES

    def num_filled(self, block_ids: NDArray[np.int64], generations: NDArray[np.uint32]) -> int:
        """How many of the leading blocks are filled with the content of these generations."""
        is_missing = self._filled[block_ids] != generations
        return int(is_missing.argmax()) if is_missing.any() else len(block_ids)

    def token_after(self, block_id: int) -> int:
        """One more than the token that was sampled after the last one in the block, or 0."""
        return int(self._next_tokens[block_id])

    def announce(self, block_ids: Sequence[int], next_token_id: int) -> None:
        """Tell the engine that its blocks were filled for it, and what comes after them."""
        ids = np.asarray(block_ids, np.int64)
        self._next_tokens[ids[-1]] = next_token_id + 1
        self._filled[ids] = self._generations[ids]
        self.bell.ring()
