// What attention computes, up to the products: queries, weights and their sums. Included once per
// level.
//
// The arithmetic is that of bfloat16 tile products, which every level follows to the last bit:
// - Sums of products are taken in steps of 32. A step has two sums that start from zero: a score's
//   are over its even and odd dimensions, an output's over the first and last sixteen keys. Their
//   sum is added to what the steps before gave. Denormal numbers count as zero.
// - Keys and values of 16 and 8 bits meet queries and weights rounded to bfloat16; then products
//   are exact. An 8-bit key's scale multiplies its score, a value's its weight before the rounding.
// - The weights that are added up are the rounded ones where no scale comes between, so that what
//   rounding adds to an output it adds to the divisor.
// - Keys and values in float32 meet everything unrounded: the reference.
#pragma once

#include "rows_impl.h"

namespace pdmesh {
namespace PDMESH_LEVEL {

constexpr int kStep = 32;
constexpr int kKeyVectors = kKeyChunk / 16;
constexpr float kLowestScore = -3.0e38f;

enum class Rounding { kNone, kBfloat16, kScaled };

static constexpr Rounding rounding_of(KvFormat format) {
  return format == KvFormat::kFloat32    ? Rounding::kNone
         : format == KvFormat::kBfloat16 ? Rounding::kBfloat16
                                         : Rounding::kScaled;
}

static constexpr std::int64_t padded_dims(std::int64_t head_dim) {
  return (head_dim + kStep - 1) / kStep * kStep;
}

// The scales of a chunk's tokens.
struct ChunkScales {
  float* keys;    // [kKeyChunk]
  float* values;  // [kKeyChunk]
};

// One query's state: sums[padded head_dim], then the largest score, then the weights' sum; while a
// segment is open, that sum is kept as sixteen partial ones in `lanes`.
struct Query {
  const float* q;
  float* state;
  float* lanes;
  int visible;  // keys of this chunk that the query may see
};

// A weight is positive or zero, so half an ulp added and the rest cut off rounds it.
static inline F round_weight(F x) {
  const I kept = iset1(static_cast<std::int32_t>(0xffff0000u));
  return as_float(iand(iadd(as_int(x), iset1(0x8000)), kept));
}

constexpr float kLog2E = 1.44269504088896341f;

static inline F weight_shift(F largest, Rounding rounding) {
  return rounding == Rounding::kNone ? largest : mul(largest, set1(-kLog2E));
}

// exp(x) for a weight that is rounded to bfloat16 afterwards: `shift` is -log2(e) times the
// largest score. Relative error below 1.1e-4, where rounding has 4e-3; 0 below 2^-125.
static inline F rough_exp(F score, F shift) {
  const F magic = set1(12582912.0f);  // 1.5 x 2^23: the sum's low bits are the nearest integer
  const F t = fma(score, set1(kLog2E), shift);
  const F shifted = add(t, magic);
  const F r = sub(t, sub(shifted, magic));
  F p = fma(r, set1(0.05500891f), set1(0.24221100f));
  p = fma(p, r, set1(0.69328293f));
  p = fma(p, r, set1(1.0f));
  return zero_below(as_float(iadd(as_int(p), shl<23>(as_int(shifted)))), t, set1(-125.0f));
}

static inline F weight(F score, F shift, Rounding rounding) {
  if (rounding == Rounding::kNone) return exp_lanes(sub(score, shift));
  const F p = rough_exp(score, shift);
  return rounding == Rounding::kBfloat16 ? round_weight(p) : p;
}

// Turns scores into weights, and brings the state to the new largest score.
static void weigh(const Query& query, F* scores, const ChunkScales& scales, Rounding rounding,
                  std::int64_t padded, float* weights) {
  const float lowest = kLowestScore;
  F top = set1(lowest);
  for (int v = 0; v < kKeyVectors; ++v) {
    const int n = query.visible - v * 16;
    if (n <= 0) break;
    if (rounding == Rounding::kScaled) scores[v] = mul(scores[v], load(scales.keys + v * 16));
    if (n < 16) scores[v] = keep_first(scores[v], set1(lowest), n);
    top = max(scores[v], top);
  }
  float& largest = query.state[padded];
  const float chunk_largest = max_lanes(top);
  const float next = chunk_largest > largest ? chunk_largest : largest;
  const F shift = weight_shift(set1(next), rounding);
  F lanes = load(query.lanes);
  if (next > largest) {  // otherwise the factor is exactly one
    const F decay = exp_lanes(sub(set1(largest), set1(next)));
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
    F p = weight(scores[v], shift, rounding);
    if (n < 16) p = keep_first(p, zero(), n);
    lanes = add(lanes, p);
    if (rounding == Rounding::kScaled) {
      p = round_weight(mul(p, load(scales.values + v * 16)));
      if (n < 16) p = keep_first(p, zero(), n);
    }
    store(weights + v * 16, p);
  }
  store(query.lanes, lanes);
}

}  // namespace PDMESH_LEVEL
}  // namespace pdmesh
