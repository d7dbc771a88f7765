"""Attention over the paged KV cache."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.forward_batch import ForwardBatch
from engine.kv_cache import KvCache, KvCacheLayout

# Keys that one batched call gathers at most; bounds its scratch memory.
_MAX_GATHERED_TOKENS = 8192
# In one batched call the longest sequence is at most this many times the shortest.
_MAX_LENGTH_RATIO = 1.5


@dataclass(frozen=True)
class SequenceGroup:
    """Sequences with equally many query tokens, computed in one call."""

    num_seqs: int
    query_len: int
    # Rows of the batch; None: all of them, in order.
    query_rows: Tensor | None
    # Cache rows of layer 0, `[num_seqs, 2 * num_kv_heads, kv_len]` flattened.
    kv_rows: Tensor
    kv_len: int
    # Added to the scores, `[num_seqs, 1, queries, kv_len]`; None: everything is visible.
    mask: Tensor | None


@dataclass(frozen=True)
class PagedAttention:
    """One step's attention: where its keys and values go, and what each token sees.

    Built once a step and used by every layer: in the page-first layout a layer's
    rows lie at a fixed distance from those of the layer before.
    """

    layout: KvCacheLayout
    # Cache rows of layer 0, `[T, 2 * num_kv_heads]` flattened.
    write_rows: Tensor
    groups: list[SequenceGroup]

    def __call__(self, layer: int, query: Tensor, key_value: Tensor, kv_cache: KvCache) -> Tensor:
        """Store the keys and values of layer `layer`, then attend.

        `query` is `[T, num_heads, head_dim]`; `key_value` is `[T, 2 * num_kv_heads,
        head_dim]`, keys before values; the result is `[T, num_heads * head_dim]`.
        """
        rows = kv_cache.rows[layer * _rows_per_layer(self.layout) :]
        rows.index_copy_(0, self.write_rows, key_value.reshape(-1, self.layout.head_dim))
        if len(self.groups) == 1 and self.groups[0].query_rows is None:
            return self._attend(self.groups[0], query, rows)
        output = query.new_empty(query.shape[0], query.shape[1] * query.shape[2])
        for group in self.groups:
            assert group.query_rows is not None
            output[group.query_rows] = self._attend(group, query[group.query_rows], rows)
        return output

    def _attend(self, group: SequenceGroup, query: Tensor, rows: Tensor) -> Tensor:
        num_kv_heads, head_dim = self.layout.num_kv_heads, self.layout.head_dim
        gathered = rows.index_select(0, group.kv_rows)
        gathered = gathered.view(group.num_seqs, 2 * num_kv_heads, group.kv_len, head_dim)
        # Query heads that share a key head are more queries of that head.
        query = query.view(group.num_seqs, group.query_len, num_kv_heads, -1, head_dim)
        query = query.permute(0, 2, 3, 1, 4)
        output = F.scaled_dot_product_attention(
            query.reshape(group.num_seqs, num_kv_heads, -1, head_dim),
            gathered[:, :num_kv_heads],
            gathered[:, num_kv_heads:],
            attn_mask=group.mask,
        )
        output = output.view(query.shape).permute(0, 3, 1, 2, 4)
        return output.reshape(group.num_seqs * group.query_len, -1)


def plan_attention(
    batch: ForwardBatch,
    layout: KvCacheLayout,
    num_kv_groups: int,
    sliding_window: int | None,
    hidden: Tensor,
) -> PagedAttention:
    """Work out what all layers of a step share, in the dtype and on the device of `hidden`."""
    heads = torch.arange(2 * layout.num_kv_heads, device=hidden.device)
    slots = torch.from_numpy(batch.slot_mapping).to(hidden.device)
    write_rows = _cache_rows(slots, layout)[:, None] + heads * layout.block_size
    groups = [
        _plan_group(batch, members, layout, num_kv_groups, sliding_window, hidden)
        for members in _group_sequences(batch)
    ]
    return PagedAttention(layout, write_rows.flatten(), groups)


def _group_sequences(batch: ForwardBatch) -> Iterator[list[int]]:
    """Put sequences together that have equally many queries and are about equally long."""
    query_lens = [
        end - start for start, end in zip(batch.query_starts, batch.query_starts[1:], strict=False)
    ]
    members: list[int] = []
    for seq in sorted(range(batch.num_seqs), key=lambda r: (query_lens[r], batch.seq_lens[r])):
        seq_len = batch.seq_lens[seq]
        if members and (
            query_lens[seq] != query_lens[members[0]]
            or seq_len > _MAX_LENGTH_RATIO * batch.seq_lens[members[0]]
            or seq_len * (len(members) + 1) > _MAX_GATHERED_TOKENS
        ):
            yield sorted(members)
            members = []
        members.append(seq)
    if members:
        yield sorted(members)


def _plan_group(
    batch: ForwardBatch,
    members: list[int],
    layout: KvCacheLayout,
    num_kv_groups: int,
    sliding_window: int | None,
    hidden: Tensor,
) -> SequenceGroup:
    device = hidden.device
    query_len = batch.query_starts[members[0] + 1] - batch.query_starts[members[0]]
    seq_lens = torch.tensor([batch.seq_lens[seq] for seq in members], device=device)
    kv_len = max(batch.seq_lens[seq] for seq in members)
    query_rows = None
    tables = torch.from_numpy(batch.block_tables).to(device)
    if len(members) < batch.num_seqs:
        starts = torch.tensor([batch.query_starts[seq] for seq in members], device=device)
        query_rows = (starts[:, None] + torch.arange(query_len, device=device)).flatten()
        tables = tables[torch.tensor(members, device=device)]
    return SequenceGroup(
        num_seqs=len(members),
        query_len=query_len,
        query_rows=query_rows,
        kv_rows=_kv_rows(tables, seq_lens, kv_len, layout),
        kv_len=kv_len,
        mask=_mask(seq_lens, query_len, kv_len, num_kv_groups, sliding_window, hidden.dtype),
    )


def _kv_rows(tables: Tensor, seq_lens: Tensor, kv_len: int, layout: KvCacheLayout) -> Tensor:
    positions = torch.arange(kv_len, device=tables.device)
    # Beyond its end a sequence reads its own last token: masked, but never another's NaN.
    positions = torch.minimum(positions, seq_lens[:, None] - 1)
    block_ids = tables.gather(1, positions // layout.block_size)
    tokens = _cache_rows(block_ids * layout.block_size + positions % layout.block_size, layout)
    heads = torch.arange(2 * layout.num_kv_heads, device=tables.device)
    return (tokens[:, None, :] + heads[:, None] * layout.block_size).flatten()


def _mask(
    seq_lens: Tensor,
    query_len: int,
    kv_len: int,
    num_kv_groups: int,
    sliding_window: int | None,
    dtype: torch.dtype,
) -> Tensor | None:
    if query_len == 1 and len(seq_lens) == 1 and (sliding_window or kv_len) >= kv_len:
        return None
    keys = torch.arange(kv_len, device=seq_lens.device)
    queries = seq_lens[:, None] - query_len + torch.arange(query_len, device=seq_lens.device)
    visible = keys <= queries[:, :, None]
    if sliding_window is not None:
        visible &= keys > queries[:, :, None] - sliding_window
    mask = torch.zeros(visible.shape, dtype=dtype, device=seq_lens.device)
    mask.masked_fill_(~visible, float("-inf"))
    return mask[:, None] if query_len == 1 else mask.repeat(1, num_kv_groups, 1)[:, None]


def _cache_rows(slots: Tensor, layout: KvCacheLayout) -> Tensor:
    """Return the row of each slot's first key head in layer 0."""
    block_ids, offsets = slots // layout.block_size, slots % layout.block_size
    return block_ids * (layout.num_layers * _rows_per_layer(layout)) + offsets


def _rows_per_layer(layout: KvCacheLayout) -> int:
    return 2 * layout.num_kv_heads * layout.block_size
