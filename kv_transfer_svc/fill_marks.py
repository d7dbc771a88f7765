"""What an engine tells of its blocks in shared memory, for many of them at once."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from engine.block_marks import BlockMarks

_Numbers = NDArray[np.uint32]


class FillMarks:
    """The marks of a segment whose engine tells which of its blocks are filled."""

    def __init__(self, marks: BlockMarks) -> None:
        self.bell = marks.bell
        self._generations: _Numbers = np.asarray(marks.generations)
        self._filled: _Numbers = np.asarray(marks.filled)
        self._next_tokens = marks.next_tokens

    def num_filled(self, block_ids: NDArray[np.int64], generations: _Numbers) -> int:
        """How many of the leading blocks are filled with the content of these generations."""
        is_missing = self._filled[block_ids] != generations
        return int(is_missing.argmax()) if is_missing.any() else len(block_ids)

    def token_after(self, block_id: int) -> int:
        """One more than the token that was sampled after the last one in the block, or 0."""
        return self._next_tokens[block_id]

    def announce(self, block_ids: Sequence[int], next_token_id: int) -> None:
        """Tell the engine that its blocks were filled for it, and what comes after them."""
        ids = np.asarray(block_ids, np.int64)
        self._next_tokens[block_ids[-1]] = next_token_id + 1
        self._filled[ids] = self._generations[ids]
        self.bell.ring()
