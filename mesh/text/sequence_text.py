"""One generated sequence: tokens in, final text out."""

from collections.abc import Sequence
from dataclasses import dataclass

from mesh.text.detokenizer import Detokenizer
from mesh.text.stop_strings import Scanned, StopScanner


@dataclass(frozen=True)
class TextDelta:
    """What some tokens made final."""

    text: str
    matched_stop: str | None
    # All tokens so far; with a match, those up to the one that completed it.
    num_tokens: int


class SequenceText:
    """The text of one sequence: whole characters, cut at the first stop string."""

    def __init__(
        self, detokenizer: Detokenizer, stops: StopScanner | None, *, min_tokens: int
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._min_tokens = min_tokens
        self._num_tokens = 0

    @property
    def num_tokens(self) -> int:
        """Tokens appended so far, up to a match."""
        return self._num_tokens

    def append(
        self, token_ids: Sequence[int], *, is_last: bool, ends_with_stop_token: bool
    ) -> TextDelta:
        """Take the next tokens; after a match, or the last ones, the sequence is over."""
        pieces: list[str] = []
        num_with_text = len(token_ids) - (1 if ends_with_stop_token and token_ids else 0)
        for token_id in token_ids[:num_with_text]:
            self._num_tokens += 1
            scanned = self._scan(self._detokenizer.push(token_id))
            pieces.append(scanned.text)
            if scanned.matched_stop is not None:
                return TextDelta("".join(pieces), scanned.matched_stop, self._num_tokens)
        self._num_tokens += len(token_ids) - num_with_text
        if is_last:
            scanned = self._scan(self._detokenizer.flush())
            pieces.append(scanned.text)
            if scanned.matched_stop is not None:
                return TextDelta("".join(pieces), scanned.matched_stop, self._num_tokens)
            if self._stops is not None:
                pieces.append(self._stops.flush())
        return TextDelta("".join(pieces), None, self._num_tokens)

    def _scan(self, text: str) -> Scanned:
        if self._stops is None or not text:
            return Scanned(text)
        return self._stops.push(text, may_match=self._num_tokens >= self._min_tokens)
