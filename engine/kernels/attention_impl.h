// Paged attention over the page-first cache. Included once per level.
//
// A chunk of keys is brought into float32 once (keys transposed, so that sixteen scores are one
// register) and then used by every query row and every head that shares the KV head.
#pragma once

#include "kv_impl.h"

namespace pdmesh {
namespace PDMESH_LEVEL {

constexpr int kKeyVectors = kKeyChunk / 16;
constexpr int kQueryBlock = kMaxRows < 4 ? kMaxRows : 4;

// One query's state: sums[padded head_dim], then the largest score, then the weights' sum.
// While a segment is open its weights' sum is kept as sixteen partial sums in `lanes`.
struct Query {
  const float* q;
  float* state;
  float* lanes;
  int visible;  // keys of this chunk that the query may see
};

template <int M, int NV>
static void score(const Query* queries, const float* keys, std::int64_t head_dim, F (*out)[4]) {
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) out[m][v] = zero();
  }
  F sums[M][NV];
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) sums[m][v] = zero();
  }
  for (std::int64_t d = 0; d < head_dim; ++d) {
    F k[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) k[v] = load(keys + d * kKeyChunk + v * 16);
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      const F q = set1(queries[m].q[d]);
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) sums[m][v] = fma(q, k[v], sums[m][v]);
    }
  }
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) out[m][v] = sums[m][v];
  }
}

// Adds the values, weighted, to `NW` registers of the sums, for each of M queries.
template <int M, int NW>
static void accumulate(const Query* queries, const float (*weights)[kKeyChunk], int visible,
                       const float* values, std::int64_t padded, std::int64_t d) {
  F sums[M][NW];
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int w = 0; w < NW; ++w) sums[m][w] = load(queries[m].state + d + w * 16);
  }
  for (int key = 0; key < visible; ++key) {
    F v[NW];
#pragma GCC unroll 4
    for (int w = 0; w < NW; ++w) v[w] = load(values + key * padded + d + w * 16);
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      const F p = set1(weights[m][key]);
#pragma GCC unroll 4
      for (int w = 0; w < NW; ++w) sums[m][w] = fma(p, v[w], sums[m][w]);
    }
  }
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int w = 0; w < NW; ++w) store(queries[m].state + d + w * 16, sums[m][w]);
  }
}

// Turns scores into weights, and brings the state to the new largest score.
static void weigh(const Query& query, F* scores, const Chunk& chunk, std::int64_t padded,
                  float* weights) {
  const float lowest = -3.0e38f;
  F top = set1(lowest);
  for (int v = 0; v < kKeyVectors; ++v) {
    const int n = query.visible - v * 16;
    if (n <= 0) break;
    if (chunk.has_scales) scores[v] = mul(scores[v], load(chunk.key_scales + v * 16));
    if (n < 16) scores[v] = keep_first(scores[v], set1(lowest), n);
    top = max(scores[v], top);
  }
  float& largest = query.state[padded];
  const float chunk_largest = max_lanes(top);
  const float next = chunk_largest > largest ? chunk_largest : largest;
  const F shift = set1(next);
  F lanes = load(query.lanes);
  if (next > largest) {  // otherwise the factor is exactly one
    const F decay = exp_lanes(sub(set1(largest), shift));
    largest = next;
    lanes = mul(lanes, decay);
    for (std::int64_t d = 0; d < padded; d += 16) {
      store(query.state + d, mul(load(query.state + d), decay));
    }
  }
  for (int v = 0; v < kKeyVectors; ++v) {
    const int n = query.visible - v * 16;
    if (n <= 0) {
      store(weights + v * 16, zero());
      continue;
    }
    F p = exp_lanes(sub(scores[v], shift));
    if (n < 16) p = keep_first(p, zero(), n);
    lanes = add(lanes, p);
    if (chunk.has_scales) p = mul(p, load(chunk.value_scales + v * 16));
    if (n < 16) p = keep_first(p, zero(), n);
    store(weights + v * 16, p);
  }
  store(query.lanes, lanes);
}

template <int M>
static void attend_block(const Query* queries, const Chunk& chunk, std::int64_t head_dim) {
  const std::int64_t padded = round_up(head_dim, 16);
  int visible = 0;
  for (int m = 0; m < M; ++m) {
    if (queries[m].visible > visible) visible = queries[m].visible;
  }
  F scores[M][4];
  float weights[M][kKeyChunk];
  switch ((visible + 15) / 16) {
    case 1: score<M, 1>(queries, chunk.keys, head_dim, scores); break;
    case 2: score<M, 2>(queries, chunk.keys, head_dim, scores); break;
    case 3: score<M, 3>(queries, chunk.keys, head_dim, scores); break;
    default: score<M, 4>(queries, chunk.keys, head_dim, scores); break;
  }
  for (int m = 0; m < M; ++m) weigh(queries[m], scores[m], chunk, padded, weights[m]);
  std::int64_t d = 0;
  for (; d + 64 <= padded; d += 64) {
    accumulate<M, 4>(queries, weights, visible, chunk.values, padded, d);
  }
  if (padded - d == 48) accumulate<M, 3>(queries, weights, visible, chunk.values, padded, d);
  if (padded - d == 32) accumulate<M, 2>(queries, weights, visible, chunk.values, padded, d);
  if (padded - d == 16) accumulate<M, 1>(queries, weights, visible, chunk.values, padded, d);
}

static void attend_queries(const Query* queries, std::int64_t count, const Chunk& chunk,
                           std::int64_t head_dim) {
  std::int64_t i = 0;
  for (; i + kQueryBlock <= count; i += kQueryBlock) {
    attend_block<kQueryBlock>(queries + i, chunk, head_dim);
  }
  for (; kQueryBlock > 2 && i + 2 < count; i += 3) attend_block<3>(queries + i, chunk, head_dim);
  for (; i + 1 < count; i += 2) attend_block<2>(queries + i, chunk, head_dim);
  for (; i < count; ++i) attend_block<1>(queries + i, chunk, head_dim);
}

static void open_state(float* state, float* lanes, std::int64_t padded) {
  for (std::int64_t d = 0; d < padded; d += 16) store(state + d, zero());
  state[padded] = -3.0e38f;
  state[padded + 1] = 0.0f;
  store(lanes, zero());
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
  const F sum = set1(state[round_up(head_dim, 16) + 1]);
  for (std::int64_t d = 0; d < head_dim; d += 16) {
    const int n = head_dim - d < 16 ? static_cast<int>(head_dim - d) : 16;
    store_n(out + d, div(load(state + d), sum), n);
  }
}

static void merge(const float* states, std::int64_t stride, std::int64_t num_states,
                  std::int64_t head_dim, float* out) {
  const std::int64_t padded = round_up(head_dim, 16);
  float running[1024 + 16];
  for (std::int64_t i = 0; i < num_states; ++i) fold(running, states + i * stride, padded, i == 0);
  write_output(running, head_dim, out);
}

// A thread's memory for one task: the chunk, and a state per query for the segment that is open
// and for those before it.
struct Workspace {
  Chunk chunk;
  float* lanes;
  float* states;
  float* running;
  Query* queries;
};

static Workspace lay_out(const AttentionTask& task) {
  const std::int64_t head_dim = task.kv.head_dim, padded = round_up(head_dim, 16);
  const std::int64_t num_queries = task.num_rows * task.num_heads;
  float* next = task.scratch;
  const auto take = [&next](std::int64_t floats) {
    float* taken = next;
    next += round_up(floats, 16);
    return taken;
  };
  Workspace space;
  space.chunk = {take(head_dim * kKeyChunk), take(kKeyChunk * padded), take(kKeyChunk),
                 take(kKeyChunk), element_bytes(task.kv.format) == 1};
  space.lanes = take(num_queries * 16);
  space.states = take(num_queries * (padded + 2));
  space.running = take(num_queries * (padded + 2));
  space.queries = reinterpret_cast<Query*>(next);
  return space;
}

static void attend_chunk(const AttentionTask& task, const Workspace& space, std::int64_t start,
                         int count) {
  const std::int64_t head_dim = task.kv.head_dim, state_floats = round_up(head_dim, 16) + 2;
  load_chunk(task, start, count, space.chunk);
  std::int64_t num = 0;
  for (std::int64_t row = 0; row < task.num_rows; ++row) {
    const std::int64_t visible = task.first_position + row + 1 - start;
    if (visible <= 0) continue;
    for (std::int64_t head = 0; head < task.num_heads; ++head) {
      const std::int64_t i = row * task.num_heads + head;
      space.queries[num++] = {task.queries + row * task.query_stride + head * head_dim,
                              space.states + i * state_floats, space.lanes + i * 16,
                              static_cast<int>(visible < count ? visible : count)};
    }
  }
  attend_queries(space.queries, num, space.chunk, head_dim);
}

// Attends to one segment's keys, up to `end`, and folds or hands out its states.
static void attend_segment(const AttentionTask& task, const Workspace& space,
                           std::int64_t first_key, std::int64_t last_key, std::int64_t end) {
  const std::int64_t padded = round_up(task.kv.head_dim, 16), state_floats = padded + 2;
  const std::int64_t num_queries = task.num_rows * task.num_heads;
  const std::int64_t before = first_key - task.first_position;
  // Rows before the segment's first key see nothing of it.
  const std::int64_t first_query = before > 0 ? before * task.num_heads : 0;
  for (std::int64_t i = first_query; i < num_queries; ++i) {
    open_state(space.states + i * state_floats, space.lanes + i * 16, padded);
  }
  for (std::int64_t start = first_key; start < last_key; start += kKeyChunk) {
    const std::int64_t left = last_key - start;
    if (start + kKeyChunk < end) {
      prefetch_chunk(task, start + kKeyChunk, end);
    } else if (task.next != nullptr) {
      const std::int64_t next_key = task.next->first_segment * kKeySegment;
      prefetch_chunk(*task.next, next_key, task.next->first_position + task.next->num_rows);
    }
    attend_chunk(task, space, start, static_cast<int>(left < kKeyChunk ? left : kKeyChunk));
  }
  for (std::int64_t i = first_query; i < num_queries; ++i) {
    float* state = space.states + i * state_floats;
    state[padded + 1] = sum_lanes(load(space.lanes + i * 16));
    if (task.partial == nullptr) {
      fold(space.running + i * state_floats, state, padded, first_key == 0);
    } else {
      std::memcpy(task.partial + i * attention_state_floats(task.kv.head_dim), state,
                  static_cast<std::size_t>(state_floats) * 4);
    }
  }
}

static void attend(const AttentionTask& task) {
  const std::int64_t head_dim = task.kv.head_dim, state_floats = round_up(head_dim, 16) + 2;
  const Workspace space = lay_out(task);
  const std::int64_t length = task.first_position + task.num_rows;
  const std::int64_t last_segment = task.first_segment + task.num_segments;
  const std::int64_t limit = last_segment * kKeySegment;
  const std::int64_t end = limit < length ? limit : length;
  for (std::int64_t segment = task.first_segment; segment < last_segment; ++segment) {
    const std::int64_t first_key = segment * kKeySegment;
    const std::int64_t last_key = first_key + kKeySegment < end ? first_key + kKeySegment : end;
    attend_segment(task, space, first_key, last_key, end);
  }
  if (task.partial != nullptr) return;
  for (std::int64_t row = 0; row < task.num_rows; ++row) {
    for (std::int64_t head = 0; head < task.num_heads; ++head) {
      write_output(space.running + (row * task.num_heads + head) * state_floats, head_dim,
                   task.out + row * task.out_stride + head * head_dim);
    }
  }
}

}  // namespace PDMESH_LEVEL
}  // namespace pdmesh
