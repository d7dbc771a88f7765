// Products of the integer formats by dot products of four bytes a lane. Included once per level that
// has these.
#pragma once

#include "linear_impl.h"

namespace pdmesh {
namespace PDMESH_LEVEL {

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
    case WeightFormat::kInt8: wide_block<R>(unit, row == 0, channel_scales, x, row, out); break;
    case WeightFormat::kInt4Channel:
      if (is_unpacked) {
        wide_block<R>(unit, false, channel_scales, x, row, out);
      } else {
        channel_row(unit, channel_scales, x, row, out);
      }
      break;
    case WeightFormat::kInt8Grouped: grouped_block<Int8Group, R>(unit, ahead, x, row, out); break;
    default:
      if (is_unpacked) {
        grouped_block<Int4Unpacked, R>(unit, ahead, x, row, out);
      } else {
        grouped_block<Int4Group, R>(unit, ahead, x, row, out);
      }
      break;
  }
}

static void linear(const Linear& weights, const Activations& x, std::int64_t rows,
                   std::int64_t first_unit, std::int64_t last_unit, const Epilogue& epilogue,
                   std::uint8_t* scratch) {
  if (is_float(weights.format)) {
    float_linear(weights, x, rows, first_unit, last_unit, epilogue);
    return;
  }
  const std::int64_t bytes = unit_bytes(weights.format, weights.k);
  const std::int64_t num_blocks = ceil_div(rows, kMaxRows);
  const bool is_channel = weights.format == WeightFormat::kInt4Channel;
  const bool unpacks = is_channel ? rows > 1
                                  : weights.format == WeightFormat::kInt4 &&
                                        num_blocks >= kMinUnpackBlocks;
  float sums[kMaxRows * kUnit];
  for (std::int64_t unit = first_unit; unit < last_unit; ++unit) {
    const std::uint8_t* stored = weights.data + unit * bytes;
    const float* channel_scales = weights.scales + (weights.scales ? unit * kUnit : 0);
    if (unpacks) {
      if (is_channel) {
        expand_unit(stored, weights.k, scratch);
      } else {
        unpack_int4(stored, x.groups, scratch);
      }
    }
    std::int64_t index = 0;
    for_blocks(rows, kMaxRows, [&](std::int64_t row, std::int64_t count) {
      const Ahead ahead = share_of_fetching(weights, stored, index++, num_blocks);
      block<1>(weights, unpacks, unpacks ? scratch : stored, ahead, channel_scales, x, row, count,
               sums);
      finish(sums, epilogue, row, count, unit);
    });
  }
}

// Billions of 8-bit operations a second that one thread reaches on registers alone.
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

}  // namespace PDMESH_LEVEL
}  // namespace pdmesh
