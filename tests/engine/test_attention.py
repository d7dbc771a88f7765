"""How a step's sequences are laid out for attention."""

import torch

from engine.forward_batch import SequenceSlice, build_batch
from engine.kv_cache import KvCacheLayout
from engine.layers.attention import plan_attention

LAYOUT = KvCacheLayout(num_layers=3, num_kv_heads=2, head_dim=4, block_size=4, dtype="float32")
HIDDEN = torch.zeros(1)


def decode(seq_len: int) -> SequenceSlice:
    return SequenceSlice([1], seq_len - 1, list(range(-(-seq_len // 4))))


def test_build_batch_lays_slices_end_to_end() -> None:
    batch = build_batch([SequenceSlice([7, 8], 3, [5, 2], 1), SequenceSlice([9], 0, [4], 0)], 4)

    assert batch.token_ids.tolist() == [7, 8, 9]
    assert batch.positions.tolist() == [3, 4, 0]
    assert batch.slot_mapping.tolist() == [5 * 4 + 3, 2 * 4, 4 * 4]
    assert batch.query_starts == [0, 2, 3]
    assert batch.seq_lens == [5, 1]
    assert batch.block_tables.tolist() == [[5, 2], [4, 0]]
    assert batch.logits_rows.tolist() == [1]
    assert (batch.num_tokens, batch.num_seqs) == (3, 2)


def test_blocks_beyond_the_step_are_left_out_of_the_table() -> None:
    batch = build_batch([SequenceSlice([7], 0, [5, 2, 3])], 4)

    assert batch.block_tables.tolist() == [[5]]


def test_sequences_of_similar_length_are_computed_in_one_call() -> None:
    batch = build_batch([decode(40), decode(50), decode(45)], 4)

    plan = plan_attention(batch, LAYOUT, 1, None, HIDDEN)

    [group] = plan.groups
    assert (group.num_seqs, group.kv_len) == (3, 50)
    assert group.query_rows is None


def test_a_short_sequence_is_not_padded_to_a_long_one() -> None:
    batch = build_batch([decode(500), decode(20), decode(510)], 4)

    plan = plan_attention(batch, LAYOUT, 1, None, HIDDEN)

    assert [(group.num_seqs, group.kv_len) for group in plan.groups] == [(1, 20), (2, 510)]
    rows = [group.query_rows.tolist() for group in plan.groups if group.query_rows is not None]
    assert rows == [[1], [0, 2]]


def test_one_call_gathers_a_bounded_number_of_keys() -> None:
    batch = build_batch([decode(3000) for _ in range(5)], 4)

    plan = plan_attention(batch, LAYOUT, 1, None, HIDDEN)

    assert [group.num_seqs for group in plan.groups] == [2, 2, 1]


def test_rows_point_at_the_first_layer_of_each_block() -> None:
    batch = build_batch([SequenceSlice([1], 4, [2, 1])], 4)
    cache = torch.arange(3 * 3 * 2 * 2 * 4).view(3, 3, 2, 2, 4)

    plan = plan_attention(batch, LAYOUT, 1, None, HIDDEN)

    # block 1, layer 0, keys and values of both heads, first token
    assert plan.write_rows.tolist() == cache[1, 0, :, :, 0].flatten().tolist()
    [group] = plan.groups
    expected = torch.cat((cache[2, 0], cache[1, 0, :, :, :1]), -1)
    assert group.kv_rows.tolist() == expected.flatten().tolist()
    assert group.mask is None
