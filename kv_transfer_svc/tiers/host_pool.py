"""The host-memory tier: copies of full blocks, as many as fit, least recently used out first."""

from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class TierBlock:
    """One block's content and what it may be used for. The bytes are never changed."""

    key: bytes
    model: str
    layout_fingerprint: str
    data: NDArray[np.uint8]


class HostPool:
    """Holds at most `max_bytes`. Whoever reads a block keeps it alive, evicted or not."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._blocks: OrderedDict[bytes, TierBlock] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: bytes) -> bool:
        return key in self._blocks

    def get(self, key: bytes) -> TierBlock | None:
        """The block, which is now the most recently used one."""
        block = self._blocks.get(key)
        if block is not None:
            self._blocks.move_to_end(key)
        return block

    def put(self, block: TierBlock) -> list[TierBlock]:
        """Keep a block; returns those that had to go for it, itself if it is too large."""
        if block.data.nbytes > self.max_bytes:
            return [block]
        if (old := self._blocks.pop(block.key, None)) is not None:
            self.num_bytes -= old.data.nbytes
        self._blocks[block.key] = block
        self.num_bytes += block.data.nbytes
        evicted = []
        while self.num_bytes > self.max_bytes:
            _, oldest = self._blocks.popitem(last=False)
            self.num_bytes -= oldest.data.nbytes
            evicted.append(oldest)
        return evicted
