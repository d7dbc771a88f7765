// How a step's attention is cut into pieces that threads take.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels.h"
#include "pdmesh_kernels.h"
#include "storage.h"

namespace pdmesh {

// Sequences with few rows are cut by key segments, whose states are merged afterwards; those with
// many by rows. Sequences of few rows that have a prefix in the same blocks go through it
// together, so that its keys and values are loaded once for all (Hydragen; FlashInfer's cascade
// inference). Every query still meets the same keys in the same order.
class AttentionPlan {
 public:
  // A piece of one KV head's attention, the same in every layer.
  struct Item {
    std::int64_t sequence;  // whose blocks are read
    std::int64_t kv_head;
    std::int64_t first_row;
    std::int64_t num_rows;
    std::int64_t first_position;
    std::int64_t first_key;
    std::int64_t end_key;
    float* partial;            // where its segment's states are kept; null: it finishes by itself
    const AttentionRow* rows;  // of several sequences, in place of `first_row` and `partial`
    // What the thread does then, in `tails`: each sequence's own keys of the segment.
    std::size_t first_tail = 0, end_tail = 0;
  };

  AttentionPlan(const pdmesh_config& config, int num_threads);
  // Queries that one item has at most.
  std::int64_t max_item_queries() const;

  // `queries`: [rows][query_stride], query heads first. Throws std::bad_alloc.
  void make(const pdmesh_batch& batch, const float* queries, std::int64_t query_stride);
  const std::vector<Item>& items() const { return items_; }
  const std::vector<Item>& tails() const { return tails_; }
  // Merges what a row's segments came to into `out`, [heads][head_dim], if it has several.
  void merge_row(const Kernels& kernels, std::int64_t row, float* out) const;

 private:
  struct Sequence {
    std::int64_t first_row;
    std::int64_t num_rows;
    std::int64_t length;
    std::int64_t partial;  // offset of its states, or -1: it is not cut by segments
    std::int64_t num_shared = 0;  // segments that it goes through with others, wholly or in part
  };
  using Group = std::vector<std::int64_t>;  // indices of sequences

  void find_sequences();
  void plan_shared();
  void split(const Group& group, std::int64_t segment);
  void plan_group(const Group& group, std::int64_t first_key, std::int64_t end_key);
  void plan_rows(std::size_t first, std::size_t last, std::int64_t first_key,
                 std::int64_t end_key);
  void plan_tails(std::size_t first, std::size_t last, std::int64_t head, std::int64_t first_key);
  void plan_segments(std::int64_t index);
  void plan_slabs(std::int64_t index);
  bool is_behind(const Sequence& sequence, std::int64_t end_key) const;
  bool is_shared(std::int64_t a, std::int64_t b, std::int64_t first_key,
                 std::int64_t end_key) const;
  float* states_of(std::int64_t row, std::int64_t segment, std::int64_t kv_head) const;

  const std::int64_t num_kv_heads_, heads_per_kv_, head_dim_, block_size_;
  const std::int64_t num_threads_, state_floats_;
  const pdmesh_batch* batch_ = nullptr;
  const float* queries_ = nullptr;
  std::int64_t query_stride_ = 0;
  std::vector<Sequence> sequences_;
  std::vector<std::int64_t> row_sequence_;
  std::vector<Item> items_, tails_;
  // Sequences of few rows that have all segments so far in common.
  std::vector<Group> groups_, next_groups_, parts_;
  Group left_, group_rows_;
  Buffer<AttentionRow> shared_rows_;
  std::int64_t num_shared_rows_ = 0;
  Buffer<float> partial_;
};

}  // namespace pdmesh
