// Paged attention over the page-first cache: chunks, segments, and what is kept between them.
// Included once per level.
#pragma once

#include "denormals.h"
#include "kv_impl.h"

namespace pdmesh {
namespace PDMESH_LEVEL {

// Hands out a thread's memory for one task, in whole cache lines.
class Scratch {
 public:
  explicit Scratch(float* memory) : next_(memory) {}
  float* take(std::int64_t floats) {
    float* taken = next_;
    next_ += round_up(floats, 16);
    return taken;
  }

 private:
  float* next_;
};

static inline const float* query_at(const AttentionTask& task, std::int64_t i) {
  const std::int64_t row = i / task.num_heads;
  const float* heads =
      task.rows != nullptr ? task.rows[row].queries : task.queries + row * task.query_stride;
  return heads + i % task.num_heads * task.kv.head_dim;
}

// Where the state of a query is kept that others will go on with, or merge with those of other
// segments.
static inline float* partial_at(const AttentionTask& task, std::int64_t i, std::int64_t floats) {
  if (task.rows == nullptr) return task.partial + i * floats;
  return task.rows[i / task.num_heads].partial + i % task.num_heads * floats;
}

// Where a state's partial sums of weights are while its segment is open.
static inline float* lanes_of(float* state, std::int64_t padded) { return state + padded + 16; }

static void open_state(float* state, std::int64_t padded) {
  for (std::int64_t d = 0; d < padded; d += 16) store(state + d, zero());
  state[padded] = kLowestScore;
  state[padded + 1] = 0.0f;
  store(lanes_of(state, padded), zero());
}

// Whether another task has had the segment's first keys, or will have the others.
static inline bool goes_on(const AttentionTask& task) {
  return task.partial != nullptr && task.first_key % kKeySegment != 0;
}
static inline bool stays_open(const AttentionTask& task) {
  return task.rows != nullptr && task.end_key % kKeySegment != 0;
}

// Folds the next segment's state into the running one.
static void fold(float* running, const float* next, std::int64_t padded, bool is_first) {
  if (is_first) {
    std::memcpy(running, next, static_cast<std::size_t>(padded + 2) * 4);
    return;
  }
  const float largest = running[padded] > next[padded] ? running[padded] : next[padded];
  float factors[16] = {running[padded] - largest, next[padded] - largest};
  store(factors, exp_lanes(load(factors)));
  const F a = set1(factors[0]), b = set1(factors[1]);
  for (std::int64_t d = 0; d < padded; d += 16) {
    store(running + d, fma(load(next + d), b, mul(load(running + d), a)));
  }
  running[padded] = largest;
  running[padded + 1] = running[padded + 1] * factors[0] + next[padded + 1] * factors[1];
}

static void write_output(const float* state, std::int64_t head_dim, float* out) {
  const F sum = set1(state[padded_dims(head_dim) + 1]);
  for (std::int64_t d = 0; d < head_dim; d += 16) {
    const int n = head_dim - d < 16 ? static_cast<int>(head_dim - d) : 16;
    store_n(out + d, div(load(state + d), sum), n);
  }
}

__attribute__((noinline)) static void merge_states(const float* states, std::int64_t stride,
                                                   std::int64_t num_states, std::int64_t head_dim,
                                                   float* out) {
  const std::int64_t padded = padded_dims(head_dim);
  float running[1024 + 16];
  for (std::int64_t i = 0; i < num_states; ++i) fold(running, states + i * stride, padded, i == 0);
  write_output(running, head_dim, out);
}

static void merge(const float* states, std::int64_t stride, std::int64_t num_states,
                  std::int64_t head_dim, float* out) {
  const DenormalsAreZero mode;
  merge_states(states, stride, num_states, head_dim, out);
}

// The keys of one segment, or the part of it that a task has.
struct Segment {
  std::int64_t first_key;
  std::int64_t last_key;
  std::int64_t first_query;  // those before it see nothing of the segment
};

// Calls `visit` for each segment of a task.
template <class Visit>
static void for_each_segment(const AttentionTask& task, const Visit& visit) {
  for (std::int64_t first_key = task.first_key; first_key < task.end_key;) {
    const std::int64_t limit = (first_key / kKeySegment + 1) * kKeySegment;
    const std::int64_t last_key = limit < task.end_key ? limit : task.end_key;
    const std::int64_t before = first_key - task.first_position;
    visit(Segment{first_key, last_key, before > 0 ? before * task.num_heads : 0});
    first_key = last_key;
  }
}

// Has chunks fetched while the one at `start` is computed: the one some places on, in this task or
// the next, and those of the next that a short task would leave out.
template <class Fetch>
static void prefetch_ahead(const AttentionTask& task, std::int64_t start, Fetch& fetch) {
  constexpr std::int64_t kAhead = 2 * kKeyChunk;
  const std::int64_t first = task.first_key, end = task.end_key;
  if (start + kAhead < end) {
    prefetch_chunk(task, start + kAhead, end, fetch);
    return;
  }
  if (task.next == nullptr) return;
  const std::int64_t chunks_end = first + round_up(end - first, kKeyChunk);
  const std::int64_t next_first = task.next->first_key, next_end = task.next->end_key;
  const std::int64_t target = next_first + start + kAhead - chunks_end;
  for (std::int64_t key = start == first ? next_first : target; key <= target && key < next_end;
       key += kKeyChunk) {
    prefetch_chunk(*task.next, key, next_end, fetch);
  }
}

// Calls `visit` with the first key and the number of keys of each chunk of a segment.
template <class Fetch, class Visit>
static void for_each_chunk(const AttentionTask& task, const Segment& segment, Fetch& fetch,
                           const Visit& visit) {
  for (std::int64_t start = segment.first_key; start < segment.last_key; start += kKeyChunk) {
    prefetch_ahead(task, start, fetch);
    const std::int64_t left = segment.last_key - start;
    visit(start, static_cast<int>(left < kKeyChunk ? left : kKeyChunk));
  }
}

// Attention with a state per query and keys as the lanes of a register. `Products` brings keys and
// values in, and multiplies queries with them. (A query's index is row x heads + head.)
template <class Products>
class RowAttention {
 public:
  explicit RowAttention(const AttentionTask& task)
      : task_(task),
        num_queries_(task.num_rows * task.num_heads),
        padded_(padded_dims(task.kv.head_dim)),
        state_floats_(attention_state_floats(task.kv.head_dim)),
        scratch_(task.scratch),
        products_(task, scratch_),
        states_(scratch_.take(round_up(num_queries_, 16) * state_floats_)),
        running_(scratch_.take(num_queries_ * state_floats_)),
        queries_(reinterpret_cast<Query*>(scratch_.take(num_queries_ * 16))) {}

  void run() {
    for_each_segment(task_, [this](const Segment& segment) { attend_segment(segment); });
    if (task_.partial != nullptr) return;
    for (std::int64_t i = 0; i < num_queries_; ++i) {
      write_output(running_ + i * state_floats_, task_.kv.head_dim,
                   task_.out + i / task_.num_heads * task_.out_stride +
                       i % task_.num_heads * task_.kv.head_dim);
    }
  }

 private:
  void attend_segment(const Segment& segment) {
    for (std::int64_t i = segment.first_query; i < num_queries_; ++i) {
      if (goes_on(task_)) {
        copy_state(states_ + i * state_floats_, partial_at(task_, i, state_floats_));
      } else {
        open_state(states_ + i * state_floats_, padded_);
      }
    }
    for_each_chunk(task_, segment, products_.fetch,
                   [this](std::int64_t start, int count) { attend_chunk(start, count); });
    for (std::int64_t i = segment.first_query; i < num_queries_; ++i) {
      float* state = states_ + i * state_floats_;
      if (!stays_open(task_)) {
        products_.close_state(state);
        state[padded_ + 1] = sum_lanes(load(lanes_of(state, padded_)));
      }
      if (task_.partial == nullptr) {
        fold(running_ + i * state_floats_, state, padded_, segment.first_key == 0);
      } else {
        copy_state(partial_at(task_, i, state_floats_), state);
      }
    }
  }

  void copy_state(float* to, const float* from) const {
    std::memcpy(to, from, static_cast<std::size_t>(state_floats_) * 4);
  }

  void attend_chunk(std::int64_t start, int count) {
    products_.load_keys_and_values(start, count);
    const std::int64_t before = start - task_.first_position;
    const std::int64_t first = before > 0 ? before * task_.num_heads : 0;
    for (std::int64_t i = first; i < num_queries_; ++i) {
      const std::int64_t visible = task_.first_position + i / task_.num_heads + 1 - start;
      float* state = states_ + i * state_floats_;
      queries_[i] = {products_.query(i), state, lanes_of(state, padded_),
                     static_cast<int>(visible < count ? visible : count)};
    }
    products_.attend(queries_, first, num_queries_);
  }

  const AttentionTask& task_;
  const std::int64_t num_queries_, padded_, state_floats_;
  Scratch scratch_;
  Products products_;
  float* states_;
  float* running_;
  Query* queries_;
};

}  // namespace PDMESH_LEVEL
}  // namespace pdmesh
