"""What the readers of a segment are told of its blocks, without a message."""

import mmap
from collections.abc import Sequence
from typing import Self

from engine.bell import Bell

_ITEM_BYTES = 4


class BlockMarks:
    """Numbers of 32 bits, one of each kind for a block, and a bell for those who wait.

    generations | generations in which blocks were filled | bell | next tokens
    """

    def __init__(self, memory: mmap.mmap | bytearray, num_blocks: int, offset: int = 0) -> None:
        """They begin `offset` bytes from the start of the memory."""
        numbers = memoryview(memory)[offset : offset + self.num_bytes(num_blocks)].cast("I")
        # Changes before the block gets new content.
        self.generations = numbers[:num_blocks]
        # The generation in which the block's content was last whole.
        self.filled = numbers[num_blocks : 2 * num_blocks]
        # Rung after others may have found something new.
        self.bell = Bell(memory, offset + 2 * num_blocks * _ITEM_BYTES)
        # One more than the token that was sampled after the block's last one; 0: none.
        self.next_tokens = numbers[2 * num_blocks + 1 :]

    @classmethod
    def private(cls, num_blocks: int) -> Self:
        """Marks that nobody else sees."""
        return cls(bytearray(cls.num_bytes(num_blocks)), num_blocks)

    @staticmethod
    def num_bytes(num_blocks: int) -> int:
        return 3 * num_blocks * _ITEM_BYTES + Bell.NUM_BYTES

    def token_after(self, block_ids: Sequence[int]) -> int | None:
        """The token that was sampled after these blocks, if they are all filled and one was."""
        if any(self.filled[block_id] != self.generations[block_id] for block_id in block_ids):
            return None
        token = self.next_tokens[block_ids[-1]]
        return token - 1 if token else None
