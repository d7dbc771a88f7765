"""What the tokens of a vocabulary stand for, where each is a run of bytes by itself."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


class UnknownToken(Exception):
    """An id outside the vocabulary."""


@dataclass(frozen=True)
class TokenBytes:
    """Every id's bytes; ids without a token have none."""

    table: Sequence[bytes]
    special_ids: frozenset[int]

    def check(self, token_ids: Iterable[int]) -> None:
        """Raise UnknownToken unless all ids exist."""
        highest = max(token_ids, default=0)
        if highest >= len(self.table):
            raise UnknownToken(f"token id {highest} is outside the vocabulary of {len(self.table)}")
