"""What one forward pass computes: the tokens of several sequences, laid end to end."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ForwardBatch:
    """T tokens of R sequences, and where their keys and values live.

    Row t belongs to the sequence r with `query_starts[r] <= t < query_starts[r + 1]`.
    """

    # i64[T]
    token_ids: Int64Array
    # i64[T]: place of each token in its sequence.
    positions: Int64Array
    # i64[T]: block_id * block_size + offset, where the token's key and value go.
    slot_mapping: Int64Array
    # R + 1 row numbers, from 0 to T.
    query_starts: list[int]
    # R lengths: tokens of the sequence up to and including this step's.
    seq_lens: list[int]
    # i64[R, most blocks of a sequence], filled up with block 0.
    block_tables: Int64Array
    # i64[L]: rows whose logits are wanted, in order.
    logits_rows: Int64Array

    @property
    def num_tokens(self) -> int:
        return self.query_starts[-1]

    @property
    def num_seqs(self) -> int:
        return len(self.seq_lens)


class ForwardPass(Protocol):
    """A batch on its way through the layers; others may be computed between two calls."""

    @property
    def num_layers_left(self) -> int: ...

    def advance(
        self, num_layers: int, on_kv_written: Callable[[], None] | None = None
    ) -> npt.NDArray[np.float32] | None:
        """Compute so many layers more; after the last one, the logits that are wanted.

        `on_kv_written` is called between the two, when all keys and values are written.
        """
        ...


@dataclass(frozen=True)
class SequenceSlice:
    """The tokens of one sequence that a step computes."""

    token_ids: Sequence[int]
    # Tokens of the sequence before these.
    num_computed_tokens: int
    # Blocks of the whole sequence, in order, up to the last of these tokens at least.
    block_ids: Sequence[int] | Int64Array
    # Rows, counted from the end, whose logits are wanted.
    num_logits: int = 1


def build_batch(slices: Sequence[SequenceSlice], block_size: int) -> ForwardBatch:
    """Lay the slices end to end."""
    token_ids: list[int] = []
    query_starts = [0]
    seq_lens: list[int] = []
    logits_rows: list[int] = []
    for part in slices:
        token_ids.extend(part.token_ids)
        query_starts.append(len(token_ids))
        seq_lens.append(part.num_computed_tokens + len(part.token_ids))
        logits_rows.extend(range(len(token_ids) - part.num_logits, len(token_ids)))
    width = -(-max(seq_lens, default=0) // block_size)
    block_tables = np.zeros((len(slices), width), dtype=np.int64)
    for index, part in enumerate(slices):
        num_blocks = -(-seq_lens[index] // block_size)
        block_tables[index, :num_blocks] = part.block_ids[:num_blocks]
    owners = np.arange(len(slices))
    positions = np.array([part.num_computed_tokens for part in slices], dtype=np.int64)
    if len(token_ids) > len(slices):
        starts = np.array(query_starts)
        owners = owners.repeat(np.diff(starts))
        positions = np.arange(len(token_ids)) + (positions - starts[:-1])[owners]
    block_indexes, offsets = np.divmod(positions, block_size)
    return ForwardBatch(
        token_ids=np.array(token_ids, dtype=np.int64),
        positions=positions,
        slot_mapping=block_tables[owners, block_indexes] * block_size + offsets,
        query_starts=query_starts,
        seq_lens=seq_lens,
        block_tables=block_tables,
        logits_rows=np.array(logits_rows, dtype=np.int64),
    )
