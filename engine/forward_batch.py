"""What one forward pass computes: the tokens of several sequences, laid end to end."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ForwardBatch:
    """T tokens of R sequences, and where their keys and values live.

    Row t belongs to the sequence r with `query_starts[r] <= t < query_starts[r + 1]`.
    """

    # i64[T]
    token_ids: Tensor
    # i64[T]: place of each token in its sequence.
    positions: Tensor
    # i64[T]: block_id * block_size + offset, where the token's key and value go.
    slot_mapping: Tensor
    # R + 1 row numbers, from 0 to T.
    query_starts: list[int]
    # R lengths: tokens of the sequence up to and including this step's.
    seq_lens: list[int]
    # i64[R, most blocks of a sequence], filled up with block 0.
    block_tables: Tensor
    # i64[L]: rows whose logits are wanted, in order.
    logits_rows: Tensor

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
    block_ids: Sequence[int]
    # Rows, counted from the end, whose logits are wanted.
    num_logits: int = 1


def build_batch(
    slices: Sequence[SequenceSlice], block_size: int, device: str = "cpu"
) -> ForwardBatch:
    """Lay the slices end to end."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    query_starts = [0]
    seq_lens: list[int] = []
    block_tables: list[list[int]] = []
    logits_rows: list[int] = []
    for part in slices:
        seq_len = part.num_computed_tokens + len(part.token_ids)
        token_ids.extend(part.token_ids)
        for position in range(part.num_computed_tokens, seq_len):
            positions.append(position)
            block_index, offset = divmod(position, block_size)
            slots.append(part.block_ids[block_index] * block_size + offset)
        query_starts.append(len(token_ids))
        logits_rows.extend(range(len(token_ids) - part.num_logits, len(token_ids)))
        seq_lens.append(seq_len)
        block_tables.append(list(part.block_ids[: -(-seq_len // block_size)]))
    width = max(map(len, block_tables), default=0)
    padded = [table + [0] * (width - len(table)) for table in block_tables]
    return ForwardBatch(
        token_ids=torch.tensor(token_ids, dtype=torch.int64, device=device),
        positions=torch.tensor(positions, dtype=torch.int64, device=device),
        slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
        query_starts=query_starts,
        seq_lens=seq_lens,
        block_tables=torch.tensor(padded, dtype=torch.int64, device=device).view(len(slices), -1),
        logits_rows=torch.tensor(logits_rows, dtype=torch.int64, device=device),
    )
