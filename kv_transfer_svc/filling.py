"""Blocks that an engine of this machine is filling: waiting for them without a message."""

import threading
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
from numpy.typing import NDArray

from kv_transfer_svc.segments import Segment
from mesh.errors import InvalidRequest, KvTransferFailed

# After so long it is noticed that nobody fills them any more.
_LONGEST_WAIT_S = 0.1


class Filling:
    """Blocks that are filled in this order, and the token that is sampled after them.

    For one thread, in which `wait_for_more` and `wait_for_token` block; they raise
    KvTransferFailed when nobody will fill the blocks, or `stopping` is set.
    """

    def __init__(
        self,
        segment: Segment,
        block_ids: Sequence[int] | NDArray[np.int64],
        generations: Sequence[int] | NDArray[np.uint32],
        on_wait: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_wait` is called before each wait, of which there are some in a second, and may
        raise what ends it."""
        if segment.fill_marks is None:
            engine_id = segment.spec.engine_id
            raise KvTransferFailed(f"engine {engine_id!r} does not tell which blocks are filled")
        if not len(block_ids):
            raise InvalidRequest("there is no block to follow")
        if len(generations) != len(block_ids):
            raise InvalidRequest(f"{len(generations)} generations for {len(block_ids)} blocks")
        self._segment = segment
        self._on_wait = on_wait
        self._marks = segment.fill_marks
        self._block_ids = np.asarray(block_ids, np.int64)
        self._generations = np.asarray(generations, np.uint32)
        if self._block_ids.max() >= segment.spec.num_blocks:
            raise InvalidRequest(
                f"block {self._block_ids.max()} is outside a segment of "
                f"{segment.spec.num_blocks} blocks"
            )
        self.num_filled = 0
        self.stopping = threading.Event()

    @property
    def is_complete(self) -> bool:
        return self.num_filled == len(self._block_ids)

    def wait_for_more(self) -> None:
        """Until `num_filled` has grown."""
        left = slice(self.num_filled, None)
        num_filled = partial(self._marks.num_filled, self._block_ids[left], self._generations[left])
        self.num_filled += self._wait_for(num_filled)

    def wait_for_token(self) -> int:
        """The token after the last block."""
        return self._wait_for(partial(self._marks.token_after, int(self._block_ids[-1]))) - 1

    def _wait_for(self, look: Callable[[], int]) -> int:
        """What is found that is not 0."""
        while True:
            # Before looking: what changes afterwards ends the wait.
            count = self._marks.bell.count
            found = look()
            # After looking: what was found belongs to these generations.
            self._segment.check_generations(self._block_ids, self._generations)
            if found:
                return found
            if self.stopping.is_set():
                raise KvTransferFailed("nobody waits for the blocks any more")
            if not self._segment.is_attached:
                raise KvTransferFailed(f"engine {self._segment.spec.engine_id!r} has left")
            self._on_wait()
            self._marks.bell.wait(count, _LONGEST_WAIT_S)
