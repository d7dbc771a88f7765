// See attention_plan.h.
#include "attention_plan.h"

#include <algorithm>
#include <utility>

#include "numerics.h"

namespace pdmesh {

namespace {

// Sequences with at most this many rows are cut by key segment, longer ones by rows.
constexpr std::int64_t kFewRows = 8;
// Rows that share a loading of keys: many, but enough pieces for the threads to balance.
constexpr std::int64_t kMinSlabRows = 16, kMaxSlabRows = 64, kSlabsPerThread = 8;
constexpr std::size_t kMaxGroupRows = 16;

}  // namespace

AttentionPlan::AttentionPlan(const pdmesh_config& config, int num_threads)
    : num_kv_heads_(config.num_kv_heads),
      heads_per_kv_(config.num_heads / config.num_kv_heads),
      head_dim_(config.head_dim),
      block_size_(config.block_size),
      num_threads_(num_threads),
      state_floats_(attention_state_floats(config.head_dim)) {}

std::int64_t AttentionPlan::max_item_queries() const { return kMaxSlabRows * heads_per_kv_; }

void AttentionPlan::make(const pdmesh_batch& batch, const float* queries,
                         std::int64_t query_stride) {
  batch_ = &batch;
  queries_ = queries;
  query_stride_ = query_stride;
  items_.clear();
  tails_.clear();
  find_sequences();
  // Pieces with most to do go first, so that no thread ends with one of them.
  plan_shared();
  for (std::int64_t i = 0; i < batch.num_seqs; ++i) {
    if (sequences_[static_cast<std::size_t>(i)].partial >= 0) {
      plan_segments(i);
    } else {
      plan_slabs(i);
    }
  }
}

void AttentionPlan::find_sequences() {
  sequences_.clear();
  row_sequence_.clear();
  std::int64_t num_states = 0;
  for (std::int64_t i = 0; i < batch_->num_seqs; ++i) {
    const std::int64_t first_row = batch_->query_starts[i];
    const std::int64_t num_rows = batch_->query_starts[i + 1] - first_row;
    const std::int64_t length = batch_->seq_lens[i], segments = ceil_div(length, kKeySegment);
    const bool is_cut = num_rows <= kFewRows && segments > 1;
    sequences_.push_back({first_row, num_rows, length, is_cut ? num_states * state_floats_ : -1});
    row_sequence_.insert(row_sequence_.end(), static_cast<std::size_t>(num_rows), i);
    if (is_cut) num_states += segments * num_kv_heads_ * num_rows * heads_per_kv_;
  }
  partial_.reserve(num_states * state_floats_);
  shared_rows_.reserve(num_states / heads_per_kv_);
  num_shared_rows_ = 0;
}

// A prefix that is not shared in one segment is not shared in the next.
void AttentionPlan::plan_shared() {
  groups_.assign(1, {});
  for (std::int64_t i = 0; i < batch_->num_seqs; ++i) {
    if (sequences_[static_cast<std::size_t>(i)].partial >= 0) groups_[0].push_back(i);
  }
  for (std::int64_t segment = 0; !groups_.empty(); ++segment) {
    next_groups_.clear();
    for (const Group& group : groups_) split(group, segment);
    std::swap(groups_, next_groups_);
  }
}

// Those that share the segment go through it together, and on to the next; of the others, those
// that share most of its chunks go through these, and then each through its own.
void AttentionPlan::split(const Group& group, std::int64_t segment) {
  const std::int64_t first_key = segment * kKeySegment;
  left_ = group;
  for (std::int64_t keys = kKeySegment; keys > 0 && left_.size() > 1; keys -= kKeyChunk) {
    const std::int64_t end_key = first_key + keys;
    parts_.clear();
    for (const std::int64_t i : left_) {
      std::size_t part = 0;
      while (part < parts_.size() && !is_shared(parts_[part][0], i, first_key, end_key)) ++part;
      if (part == parts_.size()) parts_.emplace_back();
      parts_[part].push_back(i);
    }
    left_.clear();
    for (const Group& part : parts_) {
      if (part.size() < 2) {
        left_.push_back(part[0]);
        continue;
      }
      plan_group(part, first_key, end_key);
      if (keys == kKeySegment) next_groups_.push_back(part);
    }
  }
}

void AttentionPlan::plan_group(const Group& group, std::int64_t first_key, std::int64_t end_key) {
  group_rows_.clear();
  for (const std::int64_t i : group) {
    Sequence& sequence = sequences_[static_cast<std::size_t>(i)];
    sequence.num_shared = first_key / kKeySegment + 1;
    for (std::int64_t row = 0; row < sequence.num_rows; ++row) {
      group_rows_.push_back(sequence.first_row + row);
    }
  }
  for (std::size_t first = 0; first < group_rows_.size(); first += kMaxGroupRows) {
    plan_rows(first, std::min(first + kMaxGroupRows, group_rows_.size()), first_key, end_key);
  }
}

void AttentionPlan::plan_rows(std::size_t first, std::size_t last, std::int64_t first_key,
                              std::int64_t end_key) {
  const std::int64_t sequence = row_sequence_[static_cast<std::size_t>(group_rows_[first])];
  for (std::int64_t head = 0; head < num_kv_heads_; ++head) {
    const AttentionRow* rows = shared_rows_.data() + num_shared_rows_;
    for (std::size_t i = first; i < last; ++i) {
      const std::int64_t row = group_rows_[i];
      shared_rows_.data()[num_shared_rows_++] = {
          queries_ + row * query_stride_ + head * heads_per_kv_ * head_dim_,
          states_of(row, first_key / kKeySegment, head)};
    }
    const std::size_t first_tail = tails_.size();
    if (end_key % kKeySegment != 0) plan_tails(first, last, head, end_key);
    // All of them see all of the keys, whatever their positions.
    items_.push_back({sequence, head, group_rows_[first], static_cast<std::int64_t>(last - first),
                      end_key, first_key, end_key, rows->partial, rows, first_tail, tails_.size()});
  }
}

void AttentionPlan::plan_tails(std::size_t first, std::size_t last, std::int64_t head,
                               std::int64_t first_key) {
  const std::int64_t limit = ceil_div(first_key, kKeySegment) * kKeySegment;
  for (std::size_t i = first, next; i < last; i = next) {
    const std::int64_t row = group_rows_[i];
    const std::int64_t index = row_sequence_[static_cast<std::size_t>(row)];
    const Sequence& sequence = sequences_[static_cast<std::size_t>(index)];
    next = std::min(last, i + static_cast<std::size_t>(sequence.first_row + sequence.num_rows - row));
    const std::int64_t num_rows = static_cast<std::int64_t>(next - i);
    const std::int64_t position = sequence.length - sequence.num_rows + row - sequence.first_row;
    tails_.push_back({index, head, row, num_rows, position, first_key,
                      std::min(limit, position + num_rows),
                      states_of(row, limit / kKeySegment - 1, head), nullptr});
  }
}

void AttentionPlan::plan_segments(std::int64_t index) {
  const Sequence& sequence = sequences_[static_cast<std::size_t>(index)];
  for (std::int64_t segment = sequence.num_shared; segment * kKeySegment < sequence.length;
       ++segment) {
    for (std::int64_t head = 0; head < num_kv_heads_; ++head) {
      items_.push_back({index, head, sequence.first_row, sequence.num_rows,
                        sequence.length - sequence.num_rows, segment * kKeySegment,
                        std::min((segment + 1) * kKeySegment, sequence.length),
                        states_of(sequence.first_row, segment, head), nullptr});
    }
  }
}

void AttentionPlan::plan_slabs(std::int64_t index) {
  const Sequence& sequence = sequences_[static_cast<std::size_t>(index)];
  const std::int64_t even = sequence.num_rows * num_kv_heads_ / (kSlabsPerThread * num_threads_);
  const std::int64_t slab_rows = std::min(std::max(even, kMinSlabRows), kMaxSlabRows);
  // The last rows have most keys.
  for (std::int64_t slab = ceil_div(sequence.num_rows, slab_rows) - 1; slab >= 0; --slab) {
    const std::int64_t first = slab * slab_rows;
    const std::int64_t count = std::min(slab_rows, sequence.num_rows - first);
    const std::int64_t first_position = sequence.length - sequence.num_rows + first;
    for (std::int64_t head = 0; head < num_kv_heads_; ++head) {
      items_.push_back({index, head, sequence.first_row + first, count, first_position, 0,
                        first_position + count, nullptr, nullptr});
    }
  }
}

// Whether all of a sequence's rows come after the keys.
bool AttentionPlan::is_behind(const Sequence& sequence, std::int64_t end_key) const {
  return sequence.length - sequence.num_rows >= end_key;
}

// Whether both have the keys in the same blocks, before all of their rows.
bool AttentionPlan::is_shared(std::int64_t a, std::int64_t b, std::int64_t first_key,
                              std::int64_t end_key) const {
  if (!is_behind(sequences_[static_cast<std::size_t>(a)], end_key) ||
      !is_behind(sequences_[static_cast<std::size_t>(b)], end_key)) {
    return false;
  }
  const std::int64_t first = first_key / block_size_, end = ceil_div(end_key, block_size_);
  const std::int64_t* blocks_of_a = batch_->block_tables + a * batch_->max_blocks;
  const std::int64_t* blocks_of_b = batch_->block_tables + b * batch_->max_blocks;
  return std::equal(blocks_of_a + first, blocks_of_a + end, blocks_of_b + first);
}

// A sequence's states are [segments][KV heads][rows][heads of a KV head].
float* AttentionPlan::states_of(std::int64_t row, std::int64_t segment,
                                std::int64_t kv_head) const {
  const std::int64_t index = row_sequence_[static_cast<std::size_t>(row)];
  const Sequence& sequence = sequences_[static_cast<std::size_t>(index)];
  const std::int64_t before = (segment * num_kv_heads_ + kv_head) * sequence.num_rows;
  return partial_.data() + sequence.partial +
         (before + row - sequence.first_row) * heads_per_kv_ * state_floats_;
}

void AttentionPlan::merge_row(const Kernels& kernels, std::int64_t row, float* out) const {
  const std::int64_t index = row_sequence_[static_cast<std::size_t>(row)];
  const Sequence& sequence = sequences_[static_cast<std::size_t>(index)];
  if (sequence.partial < 0) return;
  const std::int64_t stride = num_kv_heads_ * sequence.num_rows * heads_per_kv_ * state_floats_;
  const std::int64_t segments = ceil_div(batch_->positions[row] + 1, kKeySegment);
  for (std::int64_t head = 0; head < num_kv_heads_ * heads_per_kv_; ++head) {
    const float* states =
        states_of(row, 0, head / heads_per_kv_) + head % heads_per_kv_ * state_floats_;
    kernels.merge(states, stride, segments, head_dim_, out + head * head_dim_);
  }
}

}  // namespace pdmesh
