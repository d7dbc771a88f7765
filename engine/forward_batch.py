"""What one forward pass computes: the tokens of several sequences, laid end to end."""

from collections.abc import Sequence
from dataclasses import dataclass

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
    query_starts = [0]
    seq_lens: list[int] = []
    logits_rows: list[int] = []
    for part in slices:
        end = query_starts[-1] + len(part.token_ids)
        query_starts.append(end)
        seq_lens.append(part.num_computed_tokens + len(part.token_ids))
        logits_rows.extend(range(end - part.num_logits, end))
    num_tokens = query_starts[-1]
    token_ids = np.empty(num_tokens, dtype=np.int64)
    positions = np.empty(num_tokens, dtype=np.int64)
    width = max((-(-seq_len // block_size) for seq_len in seq_lens), default=0)
    block_tables = np.zeros((len(slices), width), dtype=np.int64)
    owners = np.repeat(np.arange(len(slices)), np.diff(query_starts))
    for index, part in enumerate(slices):
        rows = slice(query_starts[index], query_starts[index + 1])
        token_ids[rows] = part.token_ids
        positions[rows] = np.arange(part.num_computed_tokens, seq_lens[index])
        num_blocks = -(-seq_lens[index] // block_size)
        block_tables[index, :num_blocks] = part.block_ids[:num_blocks]
    block_ids = block_tables[owners, positions // block_size]
    return ForwardBatch(
        token_ids=token_ids,
        positions=positions,
        slot_mapping=block_ids * block_size + positions % block_size,
        query_starts=query_starts,
        seq_lens=seq_lens,
        block_tables=block_tables,
        logits_rows=np.array(logits_rows, dtype=np.int64),
    )
