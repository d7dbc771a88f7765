// The products of attention in ordinary float32 registers, in the order of tiles. Included once per
// level.
//
// A chunk of keys is brought into float32 once (keys transposed, so that sixteen scores are one
// register) and then used by every query row and every head that shares the KV head.
#pragma once

#include "attention_impl.h"

namespace pdmesh {
namespace PDMESH_LEVEL {

constexpr int kQueryBlock = kMaxRows < 4 ? kMaxRows : 4;

template <int M, int NV>
static void add_halves(const F (*first)[NV], const F (*second)[NV], F (*sums)[4]) {
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) sums[m][v] = add(sums[m][v], add(first[m][v], second[m][v]));
  }
}

// The products of M queries with NV x 16 keys over every other dimension of one step.
template <int M, int NV>
static void score_half(const Query* queries, const float* keys, std::int64_t first,
                       std::int64_t last, F (*out)[NV]) {
  F sums[M][NV];
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) sums[m][v] = zero();
  }
  for (std::int64_t d = first; d < last; d += 2) {
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

template <int M, int NV>
static void score(const Query* queries, const float* keys, std::int64_t head_dim, F (*out)[4]) {
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) out[m][v] = zero();
  }
  for (std::int64_t d = 0; d < head_dim; d += kStep) {
    const std::int64_t last = d + kStep < head_dim ? d + kStep : head_dim;
    F even[M][NV], odd[M][NV];
    score_half<M, NV>(queries, keys, d, last, even);
    score_half<M, NV>(queries, keys, d + 1, last, odd);
    add_halves<M, NV>(even, odd, out);
  }
}

// The values of some consecutive keys, weighted, in NW registers for each of M queries.
template <int M, int NW>
static void accumulate_half(const float (*weights)[kKeyChunk], int first, int last,
                            const float* values, std::int64_t padded, F (*out)[NW]) {
  F sums[M][NW];
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int w = 0; w < NW; ++w) sums[m][w] = zero();
  }
  for (int key = first; key < last; ++key) {
    F v[NW];
#pragma GCC unroll 4
    for (int w = 0; w < NW; ++w) v[w] = load(values + key * padded + w * 16);
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
    for (int w = 0; w < NW; ++w) out[m][w] = sums[m][w];
  }
}

// Adds the values, weighted, to `NW` registers of the sums, for each of M queries.
template <int M, int NW>
static void accumulate(const Query* queries, const float (*weights)[kKeyChunk], int visible,
                       const float* values, std::int64_t padded, std::int64_t d) {
  F sums[M][4];
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int w = 0; w < NW; ++w) sums[m][w] = load(queries[m].state + d + w * 16);
  }
  for (int key = 0; key < visible; key += kStep) {
    const int middle = key + 16 < visible ? key + 16 : visible;
    const int last = key + kStep < visible ? key + kStep : visible;
    F low[M][NW], high[M][NW];
    accumulate_half<M, NW>(weights, key, middle, values + d, padded, low);
    accumulate_half<M, NW>(weights, middle, last, values + d, padded, high);
    add_halves<M, NW>(low, high, sums);
  }
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int w = 0; w < NW; ++w) store(queries[m].state + d + w * 16, sums[m][w]);
  }
}

template <int M>
static void attend_block(const Query* queries, const Chunk& chunk, std::int64_t head_dim) {
  const std::int64_t padded = padded_dims(head_dim);
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
  for (int m = 0; m < M; ++m) {
    weigh(queries[m], scores[m], chunk.scales, chunk.rounding, padded, weights[m]);
  }
  std::int64_t d = 0;
  for (; d + 64 <= padded; d += 64) {
    accumulate<M, 4>(queries, weights, visible, chunk.values, padded, d);
  }
  if (d < padded) accumulate<M, 2>(queries, weights, visible, chunk.values, padded, d);
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

// See RowAttention.
class VectorProducts {
 public:
  VectorProducts(const AttentionTask& task, Scratch& scratch) : task_(task) {
    const std::int64_t head_dim = task.kv.head_dim, padded = padded_dims(head_dim);
    const std::int64_t num_queries = task.num_rows * task.num_heads;
    chunk_.keys = scratch.take(padded * kKeyChunk);
    chunk_.values = scratch.take(kKeyChunk * padded);
    chunk_.scales = {scratch.take(kKeyChunk), scratch.take(kKeyChunk)};
    chunk_.rounding = rounding_of(task.kv.format);
    if (chunk_.rounding == Rounding::kNone) return;
    rounded_ = scratch.take(num_queries * padded);
    for (std::int64_t i = 0; i < num_queries; ++i) {
      for (std::int64_t d = 0; d < head_dim; d += 16) {
        const int n = head_dim - d < 16 ? static_cast<int>(head_dim - d) : 16;
        const F q = load_n(query_at(task, i) + d, n);
        store(rounded_ + i * padded + d, as_float(shl<16>(bfloat16_from_float(q))));
      }
    }
  }

  const float* query(std::int64_t i) const {
    return rounded_ == nullptr ? query_at(task_, i)
                               : rounded_ + i * padded_dims(task_.kv.head_dim);
  }
  void load_keys_and_values(std::int64_t start, int count) {
    load_chunk(task_, start, count, chunk_);
  }
  void attend(const Query* queries, std::int64_t first, std::int64_t last) {
    attend_queries(queries + first, last - first, chunk_, task_.kv.head_dim);
  }
  void close_state(float*) const {}

  FetchNow fetch;

 private:
  const AttentionTask& task_;
  Chunk chunk_;
  float* rounded_ = nullptr;
};

__attribute__((noinline)) static void attend_with_vectors(const AttentionTask& task) {
  RowAttention<VectorProducts>(task).run();
}

static void attend(const AttentionTask& task) {
  const DenormalsAreZero mode;
  attend_with_vectors(task);
}

}  // namespace PDMESH_LEVEL
}  // namespace pdmesh
