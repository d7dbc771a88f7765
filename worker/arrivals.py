"""Notices blocks that the transfer agent fills for this engine sooner than a message tells it."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

from engine.block_marks import BlockMarks

# A bell that was missed costs so much; the agent's message comes too.
_LONGEST_WAIT_S = 0.1


@dataclass(frozen=True, eq=False)
class _Expected:
    block_ids: Sequence[int]
    on_arrival: Callable[[int], None]


class Arrivals:
    """A thread that listens to the bell of this engine's segment while blocks are expected."""

    def __init__(self, marks: BlockMarks) -> None:
        self._marks = marks
        self._thread = threading.Thread(target=self._run, name="kv-arrivals", daemon=True)
        self._changed = threading.Condition()
        self._expected: set[_Expected] = set()
        self._is_stopping = False

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        with self._changed:
            self._is_stopping = True
            self._changed.notify()
        self._thread.join()

    @contextmanager
    def expect(self, block_ids: Sequence[int], on_arrival: Callable[[int], None]) -> Iterator[None]:
        """Call `on_arrival` with the token after these blocks, once, on the thread, as soon as
        they are filled; not after the end of the block."""
        expected = _Expected(block_ids, on_arrival)
        with self._changed:
            self._expected.add(expected)
            self._changed.notify()
        try:
            yield
        finally:
            with self._changed:
                self._expected.discard(expected)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._expected or self._is_stopping)
                if self._is_stopping:
                    return
                # Before looking: who rings afterwards ends the wait.
                count = self._marks.bell.count
                for expected in list(self._expected):
                    token_id = self._marks.token_after(expected.block_ids)
                    if token_id is not None:
                        self._expected.discard(expected)
                        expected.on_arrival(token_id)
                if not self._expected:
                    continue
            self._marks.bell.wait(count, _LONGEST_WAIT_S)
