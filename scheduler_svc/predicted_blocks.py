"""Blocks that placed requests are about to leave on their workers."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence


class PredictedBlocks:
    """Remembers for a short time where prompts were sent, before any event tells.

    Without it a burst of one prefix is spread over all workers, each computing it anew.
    """

    def __init__(
        self,
        *,
        ttl_s: float = 5.0,
        max_blocks: int = 500_000,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ttl_s = ttl_s
        self._max_blocks = max_blocks
        self._clock = clock
        # How many of the entries below name a holder, by block.
        self._holders: dict[bytes, dict[str, int]] = {}
        self._entries: deque[tuple[float, str, Sequence[bytes]]] = deque()
        self._num_blocks = 0

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    def add(self, keys: Sequence[bytes], holder_ids: Iterable[str]) -> None:
        """A request with these blocks was placed on these workers."""
        for holder_id in holder_ids:
            self._entries.append((self._clock() + self._ttl_s, holder_id, keys))
            self._num_blocks += len(keys)
            for key in keys:
                counts = self._holders.setdefault(key, {})
                counts[holder_id] = counts.get(holder_id, 0) + 1
        self._expire()

    def longest_prefix(self, keys: Sequence[bytes]) -> dict[str, int]:
        """How many of the leading blocks each holder is expected to have."""
        self._expire()
        found: dict[str, int] = {}
        leading: set[str] | None = None
        for number, key in enumerate(keys, 1):
            here = self._holders.get(key)
            if here is None:
                break
            leading = set(here) if leading is None else leading & here.keys()
            if not leading:
                break
            for holder_id in leading:
                found[holder_id] = number
        return found

    def _expire(self) -> None:
        now = self._clock()
        while self._entries and (self._entries[0][0] <= now or self._num_blocks > self._max_blocks):
            _, holder_id, keys = self._entries.popleft()
            self._num_blocks -= len(keys)
            for key in keys:
                counts = self._holders[key]
                counts[holder_id] -= 1
                if not counts[holder_id]:
                    del counts[holder_id]
                    if not counts:
                        del self._holders[key]
