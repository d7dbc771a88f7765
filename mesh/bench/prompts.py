"""Prompts of a wanted length that no cache has seen before."""

import random
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

_COMMON_WORDS = (
    "time person year way day thing man world life hand part child eye woman place work week case "
    "point government company number group problem fact water river mountain garden window bread "
    "market engine letter music paper school house story friend color summer winter good new first "
    "last long great little own other old right big high different small large next early young "
    "important few public bad same able make know take see come think look want give use find tell "
    "ask work seem feel try leave call about into over after between under again never"
)


@dataclass(frozen=True)
class Lengths:
    """Tokens of a prompt or an answer: one number, or a range that is drawn from evenly."""

    low: int
    high: int

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """Read "64" or "32:128"."""
        low, _, high = text.partition(":")
        try:
            lengths = cls(int(low), int(high or low))
        except ValueError:
            raise ValueError(f"{text!r} is neither a number nor LOW:HIGH") from None
        if not 1 <= lengths.low <= lengths.high:
            raise ValueError(f"{text!r}: expected 1 <= LOW <= HIGH")
        return lengths

    def draw(self, source: random.Random) -> int:
        return source.randint(self.low, self.high)

    def __str__(self) -> str:
        return f"{self.low}" if self.low == self.high else f"{self.low} to {self.high}, even"


class Vocabulary:
    """Common words; with a tokenizer, those that are one token each, so that lengths are exact."""

    def __init__(self, tokenizer: Tokenizer | None = None) -> None:
        self.token_ids: list[int] | None = None
        self.words = _COMMON_WORDS.split()
        if tokenizer is None:
            return
        single = {}
        for word in self.words:
            token_ids = tokenizer.encode(f" {word}", add_special_tokens=False).ids
            if len(token_ids) == 1:
                single[word] = token_ids[0]
        if not single:
            raise ValueError("no common English word is a single token of this tokenizer")
        self.words, self.token_ids = list(single), list(single.values())

    @classmethod
    def from_folder(cls, path: Path) -> "Vocabulary":
        """Read a tokenizer.json, or that of a model folder."""
        file = path / "tokenizer.json" if path.is_dir() else path
        return cls(Tokenizer.from_file(str(file)))


class PromptMaker:
    """Draws prompts; the same seed draws the same ones, and a cache then knows them."""

    def __init__(self, vocabulary: Vocabulary, seed: object) -> None:
        self._vocabulary = vocabulary
        self.random = random.Random(repr(seed))

    def text(self, num_tokens: int) -> str:
        """About this many tokens of text; the server's usage says how many they are."""
        return " ".join(self.random.choices(self._vocabulary.words, k=num_tokens))

    def prompt(self, num_tokens: int) -> str | list[int]:
        """Exactly this many token ids, or without a tokenizer about this many as text."""
        if self._vocabulary.token_ids is None:
            return self.text(num_tokens)
        return self.random.choices(self._vocabulary.token_ids, k=num_tokens)
