// The table of one level's kernels. Included once per level, after its lanes.
#pragma once

#include "linear_impl.h"
#include "vector_attention_impl.h"

#ifndef PDMESH_LINEAR
#define PDMESH_LINEAR linear
#endif
#ifndef PDMESH_ATTEND
#define PDMESH_ATTEND attend
#endif

namespace pdmesh {
namespace PDMESH_LEVEL {

static double dot_gops() {
  constexpr int kChains = 12, kRounds = 2000000;
  const std::int8_t four[4] = {1, 2, 3, 4};
  I sums[kChains];
#pragma GCC unroll 12
  for (int i = 0; i < kChains; ++i) sums[i] = iset1(i);
  I ones = iset1(0x01010101);
  W weights;
  __builtin_memcpy(&weights, &ones, 64);
  const double start = thread_seconds();
  for (int round = 0; round < kRounds; ++round) {
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) sums[i] = dot4(sums[i], weights, four);
  }
  const double seconds = thread_seconds() - start;
  I total = sums[0];
#pragma GCC unroll 12
  for (int i = 1; i < kChains; ++i) total = iadd(total, sums[i]);
  const double operations = 2.0 * 64 * kChains * kRounds;
  return sum_lanes(total) == 1 ? 0.0 : operations / seconds / 1e9;
}

static const Kernels* table(const char* name) {
  static const Kernels kernels = {
      name,   &rms_norm, &quantize, &quantize_wide, &PDMESH_LINEAR, &rotate, &write_kv,
      &PDMESH_ATTEND, &merge,   &argmax,   &exp_shifted,   &sum_from,      &dot_gops};
  return &kernels;
}

}  // namespace PDMESH_LEVEL
}  // namespace pdmesh
