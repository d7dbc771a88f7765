// Matrix products over packed weights. Included once per level.
//
// Every output is one sum in one order, whatever the number of rows, the block that a row falls
// into, and the thread: integer sums are exact, and the float sum over groups (or over inputs,
// in the float formats) runs from first to last in a register of its own.
#pragma once

#include "rows_impl.h"

namespace pdmesh {
namespace PDMESH_LEVEL {

// How far ahead of the multiplication weights are fetched.
constexpr int kPrefetchBytes = 16384;

// Bytes of 64 inputs of a unit, as int4_channel and as int8.
constexpr int kChannelBytes = 1280, kWideBytes = kTileInputs * kUnit;

// What a block of rows fetches of the weights to come while it multiplies, per group of inputs. The
// blocks of one unit share the work: if the first did it all, memory would rest during the others.
struct Ahead {
  const std::uint8_t* first;
  int lines, group_bytes;
};

static Ahead share_of_fetching(const Linear& weights, const std::uint8_t* unit, std::int64_t block,
                               std::int64_t num_blocks) {
  const int group_bytes = static_cast<int>(unit_bytes(weights.format, 2 * kGroup) / 2);
  const std::int64_t lines = group_bytes / 64;
  const std::int64_t begin = lines * block / num_blocks, end = lines * (block + 1) / num_blocks;
  return {unit + kPrefetchBytes + begin * 64, static_cast<int>(end - begin), group_bytes};
}

// The value of sixteen outputs from their exact integer sums, 256 x high + low. Carrying makes these
// two the same numbers however a level has split the sum.
static inline F wide_sum(I high, I low, const Activations& x, std::int64_t row,
                         F channel_scales) {
  const I low_sum = iadd(low, iset1(x.offsets[row * 2 + 1]));
  const I carry = sar<8>(low_sum);
  const I high_sum = iadd(iadd(high, iset1(x.offsets[row * 2])), carry);
  const F sum = fma(to_float(high_sum), set1(256.0f), to_float(isub(low_sum, shl<8>(carry))));
  return mul(mul(sum, set1(x.scales[row])), channel_scales);
}

template <int R>
static void float32_block(const std::uint8_t* unit, std::int64_t k, const Activations& x,
                          std::int64_t row, float* out) {
  const float* w = reinterpret_cast<const float*>(unit);
  const float* values = x.values + row * x.values_stride;
  F sums[R][2];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = zero();
  for (std::int64_t i = 0; i < k; ++i, w += kUnit) {
    const F low = load(w), high = load(w + 16);
    __builtin_prefetch(w + kPrefetchBytes / 4, 0, 2);
    __builtin_prefetch(w + kPrefetchBytes / 4 + 16, 0, 2);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const F value = set1(values[r * x.values_stride + i]);
      sums[r][0] = fma(value, low, sums[r][0]);
      sums[r][1] = fma(value, high, sums[r][1]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    store(out + r * kUnit, sums[r][0]);
    store(out + r * kUnit + 16, sums[r][1]);
  }
}

template <int R>
static void bfloat16_block(const std::uint8_t* unit, std::int64_t k, const Activations& x,
                           std::int64_t row, float* out) {
  const float* values = x.values + row * x.values_stride;
  const I high_half = iset1(static_cast<std::int32_t>(0xffff0000u));
  F sums[R][2];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = zero();
  for (std::int64_t i = 0; i < k; i += 2, unit += 128) {
    const I a = iload(unit), b = iload(unit + 64);
    __builtin_prefetch(unit + kPrefetchBytes, 0, 2);
    __builtin_prefetch(unit + kPrefetchBytes + 64, 0, 2);
    const F a0 = as_float(shl<16>(a)), b0 = as_float(shl<16>(b));
    const F a1 = as_float(iand(a, high_half)), b1 = as_float(iand(b, high_half));
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const F even = set1(values[r * x.values_stride + i]);
      sums[r][0] = fma(even, a0, sums[r][0]);
      sums[r][1] = fma(even, b0, sums[r][1]);
    }
    if (i + 1 == k) break;
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const F odd = set1(values[r * x.values_stride + i + 1]);
      sums[r][0] = fma(odd, a1, sums[r][0]);
      sums[r][1] = fma(odd, b1, sums[r][1]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    store(out + r * kUnit, sums[r][0]);
    store(out + r * kUnit + 16, sums[r][1]);
  }
}

// Puts sixteen outputs of a row where they belong; `other`: what goes with a gate.
template <Epilogue::Kind kKind>
static inline void finish_half(F value, F other, const Epilogue& epilogue, std::int64_t row,
                               std::int64_t column) {
  const std::int64_t left = epilogue.columns - column;
  if (left <= 0) return;
  float* out = epilogue.out + row * epilogue.stride + column;
  if (kKind == Epilogue::Kind::kSiluMul) value = mul(silu(value), other);
  if (left >= 16) {
    store(out, kKind == Epilogue::Kind::kAdd ? add(load(out), value) : value);
  } else {
    const int n = static_cast<int>(left);
    store_n(out, kKind == Epilogue::Kind::kAdd ? add(load_n(out, n), value) : value, n);
  }
}

template <Epilogue::Kind kKind>
static inline void finish_row(F low, F high, const Epilogue& epilogue, std::int64_t row,
                              std::int64_t unit) {
  if (kKind == Epilogue::Kind::kSiluMul) {
    finish_half<kKind>(low, high, epilogue, row, unit * 16);
  } else {
    finish_half<kKind>(low, low, epilogue, row, unit * kUnit);
    finish_half<kKind>(high, high, epilogue, row, unit * kUnit + 16);
  }
}

// Calls `finish` with the epilogue's kind as a constant.
template <class Finish>
static inline void for_kind(Epilogue::Kind kind, const Finish& finish) {
  using Kind = Epilogue::Kind;
  switch (kind) {
    case Kind::kStore: finish(std::integral_constant<Kind, Kind::kStore>{}); break;
    case Kind::kAdd: finish(std::integral_constant<Kind, Kind::kAdd>{}); break;
    case Kind::kSiluMul: finish(std::integral_constant<Kind, Kind::kSiluMul>{}); break;
  }
}

static void finish(const float* sums, const Epilogue& epilogue, std::int64_t row,
                   std::int64_t count, std::int64_t unit) {
  for_kind(epilogue.kind, [&](auto kind) {
    for (std::int64_t r = 0; r < count; ++r, sums += kUnit) {
      finish_row<kind()>(load(sums), load(sums + 16), epilogue, row + r, unit);
    }
  });
}

// Calls `multiply` with the first row and the number of rows of each block of at most `max_rows`.
// Their heights are nearly equal: seven rows are 4 + 3, not 6 + 1.
template <class Multiply>
static inline void for_blocks(std::int64_t rows, std::int64_t max_rows, const Multiply& multiply) {
  const std::int64_t num_blocks = ceil_div(rows, max_rows);
  std::int64_t row = 0;
  for (std::int64_t i = 0; i < num_blocks; ++i) {
    const std::int64_t count = rows / num_blocks + (i < rows % num_blocks ? 1 : 0);
    multiply(row, count);
    row += count;
  }
}

template <int R>
static void float_block(const Linear& weights, const std::uint8_t* unit, const Activations& x,
                        std::int64_t row, std::int64_t count, float* out) {
  if constexpr (R < kMaxRows) {
    if (count > R) {
      float_block<R + 1>(weights, unit, x, row, count, out);
      return;
    }
  }
  if (weights.format == WeightFormat::kFloat32) {
    float32_block<R>(unit, weights.k, x, row, out);
  } else {
    bfloat16_block<R>(unit, weights.k, x, row, out);
  }
}

static bool is_float(WeightFormat format) {
  return format == WeightFormat::kFloat32 || format == WeightFormat::kBfloat16;
}

static void float_linear(const Linear& weights, const Activations& x, std::int64_t rows,
                         std::int64_t first_unit, std::int64_t last_unit,
                         const Epilogue& epilogue) {
  const std::int64_t bytes = unit_bytes(weights.format, weights.k);
  float sums[kMaxRows * kUnit];
  for (std::int64_t unit = first_unit; unit < last_unit; ++unit) {
    for_blocks(rows, kMaxRows, [&](std::int64_t row, std::int64_t count) {
      float_block<1>(weights, weights.data + unit * bytes, x, row, count, sums);
      finish(sums, epilogue, row, count, unit);
    });
  }
}

}  // namespace PDMESH_LEVEL
}  // namespace pdmesh
