// What products of integer formats by AVX2 have in common. Included by level avx2 only.
//
// AVX2 multiplies pairs of numbers; a register holds four inputs of eight outputs. Integer sums are
// exact in any order, and what follows them is done in the order of dot_linear_impl.h, so results
// have the same bits.
#pragma once

#include "linear_impl.h"

namespace pdmesh {
namespace PDMESH_LEVEL {

constexpr int kVectorOutputs = 8;
// At most so many rows are multiplied together, and with so many registers of outputs: sums fill
// twelve of sixteen registers. Few rows take a unit whole, as it comes from memory.
constexpr int kBlockRows = 6, kUnitVectors = kUnit / kVectorOutputs;
template <int R>
constexpr int kVectors = R <= 3 ? kUnitVectors : 2;
// Bytes from four inputs to the next four: all outputs of a unit.
constexpr int kStepBytes = 4 * kUnit;

// Where a pass of some rows over some outputs of a unit reads and writes.
struct Pass {
  const std::uint8_t* unit;
  const float* channel_scales;
  Ahead ahead;
  std::int64_t row;
  int first_vector;  // of eight outputs
  float* out;        // [rows][kUnit]
};

static inline __m256i load_vector(const std::uint8_t* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}

static inline __m256i broadcast_four_bytes(const std::int8_t* p) {
  std::int32_t four;
  __builtin_memcpy(&four, p, 4);
  return _mm256_set1_epi32(four);
}

static inline __m256 load_f16_vector(const std::uint8_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

// A sum that stays in its register: the compiler would add products up first, and keep more of them
// than there are registers.
static inline __m256i kept(__m256i sum) {
  asm("" : "+x"(sum));
  return sum;
}

static inline void fetch(const Ahead& ahead, std::int64_t group) {
  const std::uint8_t* next = ahead.first + group * ahead.group_bytes;
  for (int line = 0; line < ahead.lines; ++line) __builtin_prefetch(next + line * 64, 0, 2);
}

}  // namespace PDMESH_LEVEL
}  // namespace pdmesh
