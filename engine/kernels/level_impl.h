// The table of one level's kernels. Included once per level, after its lanes.
#pragma once

#include "attention_impl.h"
#include "linear_impl.h"

namespace pdmesh {
namespace PDMESH_LEVEL {

static double dot_gops() {
  constexpr int kChains = 12, kRounds = 200000;
  const std::int8_t four[4] = {1, 2, 3, 4};
  I sums[kChains];
  for (int i = 0; i < kChains; ++i) sums[i] = iset1(i);
  I ones = iset1(0x01010101);
  W weights;
  __builtin_memcpy(&weights, &ones, 64);
  const auto start = std::chrono::steady_clock::now();
  for (int round = 0; round < kRounds; ++round) {
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) sums[i] = dot4(sums[i], weights, four);
    __asm__ volatile("" : : : "memory");
  }
  const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
  I total = sums[0];
  for (int i = 1; i < kChains; ++i) total = iadd(total, sums[i]);
  const double operations = 2.0 * 64 * kChains * kRounds;
  return sum_lanes(total) == 1 ? 0.0 : operations / seconds.count() / 1e9;
}

static const Kernels* table(const char* name) {
  static const Kernels kernels = {name,     &rms_norm, &quantize, &linear, &rotate,
                                  &write_kv, &attend,   &merge,    &argmax, &exp_shifted,
                                  &dot_gops};
  return &kernels;
}

}  // namespace PDMESH_LEVEL
}  // namespace pdmesh
