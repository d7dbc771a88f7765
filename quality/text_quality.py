"""How far a candidate's distributions are from the reference's over a fixed text."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.forward_batch import SequenceSlice

# Rows whose distributions are compared in float64 at a time; a vocabulary is wide.
_ROWS_AT_ONCE = 64


@runtime_checkable
class SliceRunner(Protocol):
    """The part of a model runner that is measured here."""

    def forward(self, slices: Sequence[SequenceSlice]) -> npt.NDArray[np.float32]:
        """Logits, a row for each position that a slice asks for; valid until the next call."""
        ...


@dataclass(frozen=True)
class Window:
    """How a text is put through a model."""

    # Tokens that see each other; the next ones start afresh.
    num_tokens: int
    # Tokens of one step.
    chunk: int
    block_size: int


@dataclass(frozen=True)
class TextQuality:
    """Over all predicted tokens of a text."""

    num_tokens: int
    reference_perplexity: float
    candidate_perplexity: float
    # 0.01 is one percent more.
    perplexity_increase: float
    # From the reference to the candidate, in nats a token.
    mean_kl: float
    max_kl: float
    # Share of positions with the same most likely token.
    top1_agreement: float


def compare_on_texts(
    reference: SliceRunner,
    candidate: SliceRunner,
    texts: Mapping[str, Sequence[int]],
    window: Window,
) -> dict[str, TextQuality]:
    """Compare on each text by its name, and on `all`.

    Uses the first blocks of both runners' caches as it likes.
    """
    tallies = {
        name: _tally(reference, candidate, token_ids, window) for name, token_ids in texts.items()
    }
    total = _Tally()
    for tally in tallies.values():
        total.add(tally)
    return {name: tally.quality() for name, tally in (*tallies.items(), ("all", total))}


@dataclass
class _Tally:
    num_tokens: int = 0
    reference_nll: float = 0.0
    candidate_nll: float = 0.0
    kl: float = 0.0
    max_kl: float = 0.0
    num_agreeing: int = 0

    def add(self, other: "_Tally") -> None:
        self.num_tokens += other.num_tokens
        self.reference_nll += other.reference_nll
        self.candidate_nll += other.candidate_nll
        self.kl += other.kl
        self.max_kl = max(self.max_kl, other.max_kl)
        self.num_agreeing += other.num_agreeing

    def count(self, reference: Tensor, candidate: Tensor, next_ids: Tensor) -> None:
        """Compare rows of logits that predict `next_ids`."""
        log_p = torch.log_softmax(reference.double(), -1)
        log_q = torch.log_softmax(candidate.double(), -1)
        kl = (log_p.exp() * (log_p - log_q)).sum(-1)
        rows = torch.arange(len(next_ids))
        self.num_tokens += len(next_ids)
        self.reference_nll -= float(log_p[rows, next_ids].sum())
        self.candidate_nll -= float(log_q[rows, next_ids].sum())
        self.kl += float(kl.sum())
        self.max_kl = max(self.max_kl, float(kl.max()))
        self.num_agreeing += int((log_p.argmax(-1) == log_q.argmax(-1)).sum())

    def quality(self) -> TextQuality:
        n = self.num_tokens
        reference = math.exp(self.reference_nll / n)
        candidate = math.exp(self.candidate_nll / n)
        return TextQuality(
            num_tokens=n,
            reference_perplexity=reference,
            candidate_perplexity=candidate,
            perplexity_increase=candidate / reference - 1,
            mean_kl=self.kl / n,
            max_kl=self.max_kl,
            top1_agreement=self.num_agreeing / n,
        )


def _tally(
    reference: SliceRunner, candidate: SliceRunner, token_ids: Sequence[int], window: Window
) -> _Tally:
    tally = _Tally()
    for part in _slices(token_ids, window):
        # Both run the same chunk before the next one: the logits of a whole text are too many.
        ours = torch.from_numpy(reference.forward([part.slice]))
        theirs = torch.from_numpy(candidate.forward([part.slice]))
        for start in range(0, len(part.next_ids), _ROWS_AT_ONCE):
            rows = slice(start, min(start + _ROWS_AT_ONCE, len(part.next_ids)))
            tally.count(ours[rows], theirs[rows], torch.tensor(part.next_ids[rows]))
    return tally


@dataclass(frozen=True)
class _Part:
    slice: SequenceSlice
    # What the first of the slice's rows predict; after the last token nothing is known.
    next_ids: Sequence[int]


def _slices(token_ids: Sequence[int], window: Window) -> Iterator[_Part]:
    block_ids = range(-(-window.num_tokens // window.block_size))
    for start in range(0, len(token_ids), window.num_tokens):
        seen = token_ids[start : start + window.num_tokens]
        for offset in range(0, len(seen), window.chunk):
            chunk = list(seen[offset : offset + window.chunk])
            next_ids = seen[offset + 1 : offset + 1 + len(chunk)]
            if next_ids:
                yield _Part(SequenceSlice(chunk, offset, block_ids, len(chunk)), next_ids)
