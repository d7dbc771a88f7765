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

struct Int8Group {
  static constexpr int kBlockBytes = 1088;
  static constexpr bool kHasMinimum = false;
  static W weights(const std::uint8_t* block, int step, int half) {
    return load_weights(block + (step * 2 + half) * 64);
  }
  static int step(int i) { return i; }
  static F minimum(const std::uint8_t*, int) { return zero(); }
  static F scale(const std::uint8_t* block, int half) {
    return load_f16(reinterpret_cast<const std::uint16_t*>(block + 1024) + half * 16);
  }
};

struct Int4Group {
  static constexpr int kBlockBytes = 640;
  static constexpr bool kHasMinimum = true;
  static W weights(const std::uint8_t* block, int step, int half) {
    const W packed = load_weights(block + ((step & 3) * 2 + half) * 64);
    return step < 4 ? low_nibbles(packed) : high_nibbles(packed);
  }
  // Both nibbles of a byte one after the other, so that it is loaded once.
  static int step(int i) { return (i & 1) * 4 + i / 2; }
  static F scale(const std::uint8_t* block, int half) {
    return load_f16(reinterpret_cast<const std::uint16_t*>(block + 512) + half * 16);
  }
  static F minimum(const std::uint8_t* block, int half) {
    return load_f16(reinterpret_cast<const std::uint16_t*>(block + 576) + half * 16);
  }
};

// Int4Group after `unpack_int4`: for many rows, one byte a weight and float scales.
struct Int4Unpacked : Int8Group {
  static constexpr int kBlockBytes = 1280;
  static constexpr bool kHasMinimum = true;
  static F scale(const std::uint8_t* block, int half) {
    return load(reinterpret_cast<const float*>(block + 1024) + half * 16);
  }
  static F minimum(const std::uint8_t* block, int half) {
    return load(reinterpret_cast<const float*>(block + 1152) + half * 16);
  }
};

// Bytes of 64 inputs of a unit, as int4_channel and as int8.
constexpr int kChannelBytes = 1280, kWideBytes = kTileInputs * kUnit;

// A sixteen-output half of 64 inputs of an int4_channel unit: what rounds its codes to int8's bytes.
struct ChannelHalf {
  const std::uint8_t* codes;
  I step[2], origin[2];

  ChannelHalf(const std::uint8_t* block, int half) : codes(block + half * 512) {
#pragma GCC unroll 2
    for (int part = 0; part < 2; ++part) {
      const std::uint8_t* place = block + 1024 + (half * 2 + part) * 32;
      const I s = load_u16(reinterpret_cast<const std::uint16_t*>(place));
      const I o = load_u16(reinterpret_cast<const std::uint16_t*>(place + 128));
      step[part] = ior(s, shl<16>(s));
      origin[part] = ior(o, shl<16>(o));
    }
  }
  // Four inputs of the first group and the same four of the second, as [16 outputs][4 inputs].
  void expand(int i, I* bytes) const {
    const I nibble = iset16(15), upper = iset16(static_cast<std::int16_t>(0xff00));
    const I packed = iload(codes + i * 64);
    const I even[2] = {iand(packed, nibble), iand(shr16<4>(packed), nibble)};
    const I odd[2] = {iand(shr16<8>(packed), nibble), shr16<12>(packed)};
#pragma GCC unroll 2
    for (int part = 0; part < 2; ++part) {
      const I low = iadd16(imul16(even[part], step[part]), origin[part]);
      const I high = iadd16(imul16(odd[part], step[part]), origin[part]);
      bytes[part] = ior(shr16<8>(low), iand(high, upper));
    }
  }
};

// Rounds a quarter of 64 inputs, four steps of one half, to int8's layout: [16][2 halves][16
// outputs][4 inputs].
static inline void expand_quarter(const std::uint8_t* block, int quarter, std::uint8_t* out) {
  const int half = quarter / 2, first = quarter % 2 * 4;
  const ChannelHalf weights(block, half);
  const std::uint8_t* ahead = block + kPrefetchBytes + quarter * (kChannelBytes / 4);
  __builtin_prefetch(ahead, 0, 2);
#pragma GCC unroll 4
  for (int i = first; i < first + 4; ++i) {
    I bytes[2];
    weights.expand(i, bytes);
    istore(out + (i * 2 + half) * 64, bytes[0]);
    istore(out + ((8 + i) * 2 + half) * 64, bytes[1]);
    // One line at a time: many at once would have to wait for each other.
    __builtin_prefetch(ahead += 64, 0, 2);
  }
}

static inline void expand_codes(const std::uint8_t* block, std::uint8_t* out) {
#pragma GCC unroll 4
  for (int quarter = 0; quarter < 4; ++quarter) expand_quarter(block, quarter, out);
}

// Unpacking costs as much as multiplying several blocks of rows.
constexpr std::int64_t kMinUnpackBlocks = 6;

static void unpack_int4(const std::uint8_t* unit, std::int64_t groups, std::uint8_t* out) {
  for (std::int64_t group = 0; group < groups; ++group) {
    const std::uint8_t* block = unit + group * Int4Group::kBlockBytes;
    std::uint8_t* to = out + group * Int4Unpacked::kBlockBytes;
    for (int step = 0; step < 8; ++step) {
      for (int half = 0; half < 2; ++half) {
        const W w = Int4Group::weights(block, step, half);
        __builtin_memcpy(to + (step * 2 + half) * 64, &w, 64);
      }
    }
    for (int half = 0; half < 2; ++half) {
      store(reinterpret_cast<float*>(to + 1024) + half * 16, Int4Group::scale(block, half));
      store(reinterpret_cast<float*>(to + 1152) + half * 16, Int4Group::minimum(block, half));
    }
  }
}

// What a block of rows fetches of the weights to come while it multiplies, per group of inputs. The
// blocks of one unit share the work: if the first did it all, memory would rest during the others.
struct Ahead {
  const std::uint8_t* first;
  int lines, group_bytes;
};

static Ahead share_of_fetching(const Linear& weights, const std::uint8_t* unit, std::int64_t block,
                               std::int64_t num_blocks) {
  const int group_bytes = weights.format == WeightFormat::kInt4 ? Int4Group::kBlockBytes
                                                                : Int8Group::kBlockBytes;
  const std::int64_t lines = group_bytes / 64;
  const std::int64_t begin = lines * block / num_blocks, end = lines * (block + 1) / num_blocks;
  return {unit + kPrefetchBytes + begin * 64, static_cast<int>(end - begin), group_bytes};
}

// Formats with a scale per group, for weights and for activations.
template <class Format, int R>
static void grouped_block(const std::uint8_t* unit, const Ahead& ahead, const Activations& x,
                          std::int64_t row, float* out) {
  const std::int64_t groups = x.groups;
  const std::int8_t* codes = x.codes + row * groups * kGroup;
  const std::int64_t codes_stride = groups * kGroup;
  F sums[R][2];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = zero();
  for (std::int64_t group = 0; group < groups; ++group) {
    const std::uint8_t* block = unit + group * Format::kBlockBytes;
    const std::int64_t first = row * groups + group;
    I dots[R][2];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const I start = iset1(Format::kHasMinimum ? 0 : x.offsets[first + r * groups]);
      dots[r][0] = dots[r][1] = start;
    }
    const std::uint8_t* next = ahead.first + group * ahead.group_bytes;
    if (ahead.lines == Format::kBlockBytes / 64) {
#pragma GCC unroll 20
      for (int line = 0; line < Format::kBlockBytes / 64; ++line) {
        __builtin_prefetch(next + line * 64, 0, 2);
      }
    } else {
      for (int line = 0; line < ahead.lines; ++line) __builtin_prefetch(next + line * 64, 0, 2);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      const int step = Format::step(i);
      const W low = Format::weights(block, step, 0);
      const W high = Format::weights(block, step, 1);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const std::int8_t* four = codes + r * codes_stride + group * kGroup + step * 4;
        dots[r][0] = dot4(dots[r][0], low, four);
        dots[r][1] = dot4(dots[r][1], high, four);
      }
    }
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const F scale = Format::scale(block, half);
      const F minimum = Format::minimum(block, half);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const F dot = mul(to_float(dots[r][half]), set1(x.scales[first + r * groups]));
        sums[r][half] = fma(dot, scale, sums[r][half]);
        if (Format::kHasMinimum) {
          sums[r][half] = fma(set1(x.sums[first + r * groups]), minimum, sums[r][half]);
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    store(out + r * kUnit, sums[r][0]);
    store(out + r * kUnit + 16, sums[r][1]);
  }
}

// The value of sixteen outputs from their exact integer sums over both planes of codes.
static inline F wide_sum(I high, I low, const Activations& x, std::int64_t row,
                         F channel_scales) {
  const F high_sum = to_float(iadd(high, iset1(x.offsets[row * 2])));
  const F low_sum = to_float(iadd(low, iset1(x.offsets[row * 2 + 1])));
  const F sum = fma(high_sum, set1(256.0f), low_sum);
  return mul(mul(sum, set1(x.scales[row])), channel_scales);
}

// One scale per channel and per row, activations of sixteen bits.
template <int R>
static void wide_block(const std::uint8_t* unit, bool is_first, const float* channel_scales,
                       const Activations& x, std::int64_t row, float* out) {
  const std::int64_t k = x.groups * kGroup;
  const std::int8_t* codes[R];
  I sums[R][2][2];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    codes[r] = x.codes + wide_row_offset(row + r, k);
    sums[r][0][0] = sums[r][0][1] = sums[r][1][0] = sums[r][1][1] = iset1(0);
  }
  for (std::int64_t i = 0; i < k; i += 4) {
    const std::uint8_t* block = unit + i * kUnit;
    const W a = load_weights(block), b = load_weights(block + 64);
    if (is_first) {
      __builtin_prefetch(block + kPrefetchBytes, 0, 2);
      __builtin_prefetch(block + kPrefetchBytes + 64, 0, 2);
    }
    const std::int64_t offset = i / kTileInputs * 2 * kTileBytes + i % kTileInputs;
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
      for (int plane = 0; plane < 2; ++plane) {
        const std::int8_t* four = codes[r] + offset + plane * kTileBytes;
        sums[r][plane][0] = dot4(sums[r][plane][0], a, four);
        sums[r][plane][1] = dot4(sums[r][plane][1], b, four);
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      store(out + r * kUnit + half * 16, wide_sum(sums[r][0][half], sums[r][1][half], x, row + r,
                                                  load(channel_scales + half * 16)));
    }
  }
}

// int4_channel's product of one row, which takes the bytes as they are expanded.
static void channel_row(const std::uint8_t* unit, const float* channel_scales,
                        const Activations& x, std::int64_t row, float* out) {
  const std::int64_t k = x.groups * kGroup;
  const std::int8_t* codes = x.codes + wide_row_offset(row, k);
  I sums[2][2][2];  // half, plane, group: more of them than a sum, so that none waits for itself
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) sums[i / 4][i / 2 % 2][i % 2] = iset1(0);
  for (std::int64_t i = 0; i < k; i += kTileInputs, unit += kChannelBytes, codes += 2 * kTileBytes) {
    const std::uint8_t* ahead = unit + kPrefetchBytes;
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const ChannelHalf weights(unit, half);
#pragma GCC unroll 8
      for (int step = 0; step < 8; ++step, ahead += 64) {
        I bytes[2];
        weights.expand(step, bytes);
        __builtin_prefetch(ahead, 0, 2);
        if (step % 4 == 3) __builtin_prefetch(ahead += 64, 0, 2);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          const int plane = i / 2, part = i % 2;
          W w;
          __builtin_memcpy(&w, &bytes[part], 64);
          const std::int8_t* four = codes + plane * kTileBytes + part * kGroup + step * 4;
          sums[half][plane][part] = dot4(sums[half][plane][part], w, four);
        }
      }
    }
  }
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    store(out + half * 16,
          wide_sum(iadd(sums[half][0][0], sums[half][0][1]),
                   iadd(sums[half][1][0], sums[half][1][1]), x, row, load(channel_scales + half * 16)));
  }
}

// Expands a unit into `out`.
static void expand_unit(const std::uint8_t* unit, std::int64_t k, std::uint8_t* out) {
  for (std::int64_t i = 0; i < k; i += kTileInputs, unit += kChannelBytes, out += kWideBytes) {
    expand_codes(unit, out);
  }
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

// Rows x kUnit products of `count` rows from `row` with one unit.
template <int R>
static void block(const Linear& weights, bool is_unpacked, const std::uint8_t* unit,
                  const Ahead& ahead, const float* channel_scales, const Activations& x,
                  std::int64_t row, std::int64_t count, float* out) {
  if constexpr (R < kMaxRows) {
    if (count > R) {
      block<R + 1>(weights, is_unpacked, unit, ahead, channel_scales, x, row, count, out);
      return;
    }
  }
  switch (weights.format) {
    case WeightFormat::kFloat32: float32_block<R>(unit, weights.k, x, row, out); break;
    case WeightFormat::kBfloat16: bfloat16_block<R>(unit, weights.k, x, row, out); break;
    case WeightFormat::kInt8: wide_block<R>(unit, row == 0, channel_scales, x, row, out); break;
    case WeightFormat::kInt4Channel:
      if (is_unpacked) {
        wide_block<R>(unit, false, channel_scales, x, row, out);
      } else {
        channel_row(unit, channel_scales, x, row, out);
      }
      break;
    case WeightFormat::kInt8Grouped: grouped_block<Int8Group, R>(unit, ahead, x, row, out); break;
    case WeightFormat::kInt4:
      if (is_unpacked) {
        grouped_block<Int4Unpacked, R>(unit, ahead, x, row, out);
      } else {
        grouped_block<Int4Group, R>(unit, ahead, x, row, out);
      }
      break;
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

static void linear(const Linear& weights, const Activations& x, std::int64_t rows,
                   std::int64_t first_unit, std::int64_t last_unit, const Epilogue& epilogue,
                   std::uint8_t* scratch) {
  const std::int64_t bytes = unit_bytes(weights.format, weights.k);
  const std::int64_t num_blocks = ceil_div(rows, kMaxRows);
  const bool is_channel = weights.format == WeightFormat::kInt4Channel;
  const bool unpacks = is_channel ? rows > 1
                                  : weights.format == WeightFormat::kInt4 &&
                                        num_blocks >= kMinUnpackBlocks;
  float sums[kMaxRows * kUnit];
  for (std::int64_t unit = first_unit; unit < last_unit; ++unit) {
    const std::uint8_t* data = weights.data + unit * bytes;
    const float* channel_scales = weights.scales + (weights.scales ? unit * kUnit : 0);
    if (unpacks) {
      if (is_channel) {
        expand_unit(data, weights.k, scratch);
      } else {
        unpack_int4(data, x.groups, scratch);
      }
      data = scratch;
    }
    std::int64_t row = 0;
    for (std::int64_t i = 0; i < num_blocks; ++i) {
      // Blocks of nearly equal height: seven rows are 4 + 3, not 6 + 1.
      const std::int64_t count = rows / num_blocks + (i < rows % num_blocks ? 1 : 0);
      const Ahead ahead = share_of_fetching(weights, weights.data + unit * bytes, i, num_blocks);
      block<1>(weights, unpacks, data, ahead, channel_scales, x, row, count, sums);
      finish(sums, epilogue, row, count, unit);
      row += count;
    }
  }
}

}  // namespace PDMESH_LEVEL
}  // namespace pdmesh
