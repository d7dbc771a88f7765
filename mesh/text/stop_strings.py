"""Finds stop strings in a text that comes in pieces."""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

_MAX_SHARED_CHARS = 256


class StopStrings:
    """Some stop strings as one automaton (Aho and Corasick); shared by sequences.

    A state stands for the longest end of the text so far that begins a stop string.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._depth = [0]
        # The longest stop string that ends in this state.
        self._match: list[str | None] = [None]
        for string in strings:
            self._add(string)
        # The state of the next shorter end that begins a stop string.
        self._fallback = [0] * len(self._next)
        self._link()

    def advance(self, state: int, char: str) -> int:
        """The state after one more character."""
        while char not in self._next[state]:
            if state == 0:
                return 0
            state = self._fallback[state]
        return self._next[state][char]

    def match(self, state: int) -> str | None:
        """The longest stop string that ends here."""
        return self._match[state]

    def num_held(self, state: int) -> int:
        """How many of the last characters may still become part of a match to come."""
        while state and not self._next[state]:
            state = self._fallback[state]
        return self._depth[state]

    def _add(self, string: str) -> None:
        if not string:
            raise ValueError("a stop string must not be empty")
        state = 0
        for char in string:
            if char not in self._next[state]:
                self._next[state][char] = len(self._next)
                self._next.append({})
                self._depth.append(self._depth[state] + 1)
                self._match.append(None)
            state = self._next[state][char]
        self._match[state] = string

    def _link(self) -> None:
        """Set each fallback; breadth first, so that shorter ends are linked already."""
        states = deque(self._next[0].values())
        while states:
            state = states.popleft()
            if self._match[state] is None:
                self._match[state] = self._match[self._fallback[state]]
            for char, child in self._next[state].items():
                self._fallback[child] = self.advance(self._fallback[state], char)
                states.append(child)


@dataclass(frozen=True)
class Scanned:
    """What one piece of text makes final."""

    text: str
    matched_stop: str | None = None


class StopScanner:
    """One sequence's text on its way out.

    The match that is complete first wins, and of those complete at the same
    character the longest: so the result does not depend on how the text is cut.
    """

    def __init__(self, stops: StopStrings, *, include_stop: bool) -> None:
        self._stops = stops
        self._include_stop = include_stop
        self._state = 0
        self._held = ""

    @classmethod
    def of(cls, strings: tuple[str, ...], *, include_stop: bool) -> Self | None:
        """A scanner for these strings, none of them empty; None where there are none."""
        if not strings:
            return None
        # Most requests bring the same few short stop strings; only those are kept.
        is_short = sum(map(len, strings)) <= _MAX_SHARED_CHARS
        stops = _shared(strings) if is_short else StopStrings(strings)
        return cls(stops, include_stop=include_stop)

    def push(self, text: str, *, may_match: bool = True) -> Scanned:
        """Take more text; nothing must follow a match."""
        for i, char in enumerate(text):
            self._state = self._stops.advance(self._state, char)
            stop = self._stops.match(self._state)
            if stop is not None and may_match:
                final = self._held + text[: i + 1]
                self._held = ""
                return Scanned(final if self._include_stop else final[: -len(stop)], stop)
        final = self._held + text
        num_held = 0 if self._include_stop else self._stops.num_held(self._state)
        num_final = len(final) - num_held
        self._held = final[num_final:]
        return Scanned(final[:num_final])

    def flush(self) -> str:
        """The text held back, once none will follow."""
        held, self._held = self._held, ""
        return held


@lru_cache(maxsize=64)
def _shared(strings: tuple[str, ...]) -> StopStrings:
    return StopStrings(strings)
