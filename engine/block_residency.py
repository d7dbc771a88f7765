"""How long cached blocks keep their content, and how soon it is asked for again."""

import time
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

# Of each kind: a step that moves more leaves the oldest out.
_MAX_KEPT = 4096


@dataclass(frozen=True)
class Residency:
    """What happened to cached blocks, in seconds."""

    # Of blocks whose content made room: since they got it, and since it was last wanted.
    lifetimes_s: tuple[float, ...] = ()
    idle_s: tuple[float, ...] = ()
    # Of blocks that another request shared: since they were wanted before.
    reuse_gaps_s: tuple[float, ...] = ()


NOTHING_MOVED = Residency()


class ResidencyClock:
    """Knows when each block was handed out and last wanted."""

    def __init__(self, num_blocks: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._filled_at = array("d", bytes(8 * num_blocks))
        self._wanted_at = array("d", bytes(8 * num_blocks))
        self._lifetimes_s: deque[float] = deque(maxlen=_MAX_KEPT)
        self._idle_s: deque[float] = deque(maxlen=_MAX_KEPT)
        self._reuse_gaps_s: deque[float] = deque(maxlen=_MAX_KEPT)

    def handed_out(self, block_id: int) -> None:
        """A block gets new content."""
        self._filled_at[block_id] = self._wanted_at[block_id] = self._clock()

    def shared(self, block_id: int) -> None:
        """A request found a block's content in the cache."""
        now = self._clock()
        self._reuse_gaps_s.append(now - self._wanted_at[block_id])
        self._wanted_at[block_id] = now

    def evicted(self, block_id: int) -> None:
        """A block's content makes room."""
        now = self._clock()
        self._lifetimes_s.append(now - self._filled_at[block_id])
        self._idle_s.append(now - self._wanted_at[block_id])

    def drain(self) -> Residency:
        """What happened since the last call."""
        kept = self._lifetimes_s, self._idle_s, self._reuse_gaps_s
        drained = Residency(*map(tuple, kept))
        for one in kept:
            one.clear()
        return drained
