"""Tells the control tokens that a chat template writes from those that a text spells."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

# Unpaired surrogates cannot occur in valid UTF-8, so no request can contain one.
MARK = "\ud800"

# A few models forget the `special` flag, but not this way of spelling.
_SPELLED_AS_CONTROL = re.compile(r"<[|｜].*[|｜]>", re.DOTALL)  # noqa: RUF001


def is_control_token(content: str, special: bool) -> bool:
    """Whether an added token steers the model, rather than being a word of its text."""
    return special or _SPELLED_AS_CONTROL.fullmatch(content) is not None


class ControlTokens:
    """Keeps a text's control tokens apart from a template's, through rendering.

    `mark` makes every value harmless before it is rendered: a mark breaks each
    spelling of a control token. What still reads as one afterwards was written by
    the template, and `seal` replaces it by a spelling that only this process knows.
    """

    def __init__(self, sealed: Mapping[str, str]) -> None:
        """`sealed` maps each control token to its secret spelling."""
        self._sealed = dict(sealed)
        longest_first = sorted(self._sealed, key=len, reverse=True)
        by_first: dict[str, list[str]] = {}
        for token in longest_first:
            by_first.setdefault(token[0], []).append(re.escape(token[1:]))
        # Only the first character is consumed, so that overlapping spellings are all seen.
        self._spelling = _any_of(
            f"{re.escape(first)}(?={'|'.join(rests)})" for first, rests in by_first.items()
        )
        # Every spelling, and every part of one at an end of a text, has one of these.
        ends = {char for token in longest_first for char in (token[0], token[-1])}
        self._hint = _any_of(map(re.escape, sorted(ends)))
        self._written = _any_of(
            re.escape(t) if len(t) > 1 else f"{re.escape(t)}(?!{MARK})" for t in longest_first
        )
        self._heads = {t[:i] for t in longest_first for i in range(1, len(t))}
        self._tails = {t[i:] for t in longest_first for i in range(1, len(t))}
        self._longest = max(map(len, longest_first), default=0)

    def mark(self, value: Any) -> Any:
        """A copy of a JSON value whose strings, keys included, are marked."""
        if isinstance(value, str):
            return self.mark_text(value)
        if isinstance(value, list):
            return [self.mark(item) for item in value]
        if isinstance(value, dict):
            return {self.mark(key): self.mark(item) for key, item in value.items()}
        return value

    def mark_text(self, text: str) -> str:
        """Break what spells a control token, alone or with what is written beside it."""
        if self._hint.search(text) is None:
            return text
        marked = self._spelling.sub(lambda match: match[0] + MARK, text)
        lengths = range(1, min(self._longest, len(text) + 1))
        if any(text[:i] in self._tails for i in lengths):
            marked = MARK + marked
        if any(text[-i:] in self._heads for i in lengths):
            marked += MARK
        return marked

    def seal(self, rendered: str) -> str:
        """Give the template's control tokens their secret spelling and drop all marks."""
        return self._written.sub(lambda match: self._sealed[match[0]], rendered).replace(MARK, "")


def unmark(value: Any) -> Any:
    """Undo `mark`."""
    if isinstance(value, str):
        return value.replace(MARK, "")
    if isinstance(value, list | tuple):
        return type(value)(map(unmark, value))
    if isinstance(value, Mapping):
        return {unmark(key): unmark(item) for key, item in value.items()}
    return value


def _any_of(patterns: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(patterns) or "(?!)")
