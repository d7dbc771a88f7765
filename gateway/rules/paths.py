"""Names in the rules file: JSON paths and globs."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

_STEP = re.compile(
    r"(?P<bare>[^.\[\]\"\s]+)|\[(?P<index>[0-9]{1,9})\]|\[(?P<every>\*)\]"
    r"|\[(?P<quoted>\"(?:[^\"\\]|\\.)*\")\]"
)


class Every(Enum):
    """The step `[*]`: each element of an array."""

    EVERY = "*"


Step = str | int | Every


@dataclass(frozen=True)
class Path:
    """`stream_options.include_usage`, `messages[0].role`, `messages[*].role`, `["a.b"]`."""

    text: str
    steps: tuple[Step, ...]

    @classmethod
    def parse(cls, text: str) -> "Path":
        """Raises ValueError."""
        steps: list[Step] = []
        at = 2 if text.startswith("$.") else 1 if text.startswith("$[") else 0
        while at < len(text):
            match = _STEP.match(text, at)
            if match is None:
                break
            steps.append(_step(match))
            at = match.end()
            if text[at : at + 1] == "." and at + 1 < len(text) and text[at + 1] != "[":
                at += 1
            elif text[at : at + 1] not in ("[", ""):
                break
        if not steps or at != len(text):
            raise ValueError(f'{text!r} is not a path such as a.b, a[0].b, a[*] or ["a.b"]')
        return cls(text, tuple(steps))

    def keys(self) -> tuple[str, ...] | None:
        """The steps, when all of them are keys of objects."""
        keys = tuple(step for step in self.steps if isinstance(step, str))
        return keys if len(keys) == len(self.steps) else None


@dataclass(frozen=True)
class Glob:
    """`*` stands for any text, also none; everything else for itself."""

    parts: tuple[str, ...]

    @classmethod
    def parse(cls, pattern: str) -> "Glob":
        return cls(tuple(pattern.split("*")))

    def matches(self, text: str) -> bool:
        first, *middle = self.parts
        if not middle:
            return text == first
        last = middle.pop()
        end = len(text) - len(last)
        if end < len(first) or not text.startswith(first) or not text.endswith(last):
            return False
        at = len(first)
        for part in middle:
            found = text.find(part, at, end)
            if found < 0:
                return False
            at = found + len(part)
        return True


def values_at(value: Any, steps: tuple[Step, ...]) -> Iterator[Any]:
    """Every value that the path leads to."""
    if not steps:
        yield value
        return
    step, rest = steps[0], steps[1:]
    if isinstance(step, str):
        if isinstance(value, dict) and step in value:
            yield from values_at(value[step], rest)
    elif isinstance(value, list):
        if isinstance(step, Every):
            for element in value:
                yield from values_at(element, rest)
        elif step < len(value):
            yield from values_at(value[step], rest)


def _step(match: re.Match[str]) -> Step:
    if match["every"]:
        return Every.EVERY
    if match["index"]:
        return int(match["index"])
    if match["quoted"]:
        key = json.loads(match["quoted"])
        assert isinstance(key, str)
        return key
    return match["bare"]
