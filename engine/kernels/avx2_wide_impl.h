// Products of the formats with a scale per channel by AVX2. Included by level avx2 only.
#pragma once

#include "avx2_pass_impl.h"

namespace pdmesh {
namespace PDMESH_LEVEL {

// Bytes from 32 inputs of a row's wide codes to the next 32; those of the tile's other rows lie
// between.
constexpr int kPairsBytes = kTileRows * kGroup * 2;

// Sixteen bits of a row's codes meet weights widened to sixteen: two products a lane and
// instruction. A sum of so many inputs fits into 32 bits: 256 x 255 x 32512 < 2^31.
constexpr std::int64_t kExactInputs = 256;

// Bytes as they are stored; inputs 0 and 2 of each four, then 1 and 3.
struct ByteWeights {
  static constexpr int kStepBytes = PDMESH_LEVEL::kStepBytes;
  static __m256i even(const std::uint8_t* p) {
    return _mm256_and_si256(load_vector(p), _mm256_set1_epi16(255));
  }
  static __m256i odd(const std::uint8_t* p) { return _mm256_srli_epi16(load_vector(p), 8); }
};

// What `expand_pairs` makes of int4_channel.
struct PairWeights {
  static constexpr int kStepBytes = 2 * PDMESH_LEVEL::kStepBytes;
  static __m256i even(const std::uint8_t* p) { return load_vector(p); }
  static __m256i odd(const std::uint8_t* p) { return load_vector(p + PDMESH_LEVEL::kStepBytes); }
};

// A sum as 256 x high + low.
struct WideSum {
  __m256i high, low;
  void add(__m256i sum) {
    high = _mm256_add_epi32(high, _mm256_srai_epi32(sum, 8));
    low = _mm256_add_epi32(low, _mm256_and_si256(sum, _mm256_set1_epi32(255)));
  }
};

template <int R>
static inline void store_wide_sums(const Pass& pass, const Activations& x,
                                   const WideSum (*sums)[kVectors<R>]) {
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int c = 0; c < kVectors<R>; c += 2) {
      const int output = (pass.first_vector + c) * kVectorOutputs;
      const I high = {sums[r][c].high, sums[r][c + 1].high},
              low = {sums[r][c].low, sums[r][c + 1].low};
      store(pass.out + r * kUnit + output,
            wide_sum(high, low, x, pass.row + r, load(pass.channel_scales + output)));
    }
  }
}

// As `wide_block`.
template <class Weights, int R>
__attribute__((noinline)) static void wide_pass(const Pass& pass, const Activations& x) {
  const std::int64_t k = x.groups * kGroup;
  const std::int8_t* codes = x.codes + wide_row_offset(pass.row, k);
  const std::uint8_t* weights = pass.unit + pass.first_vector * 32;
  WideSum total[R][kVectors<R>];
#pragma GCC unroll 12
  for (int i = 0; i < R * kVectors<R>; ++i) {
    total[i / kVectors<R>][i % kVectors<R>] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
  }
  for (std::int64_t start = 0; start < k; start += kExactInputs) {
    const std::int64_t end = start + kExactInputs < k ? start + kExactInputs : k;
    __m256i sums[R][kVectors<R>];
#pragma GCC unroll 12
    for (int i = 0; i < R * kVectors<R>; ++i) {
      sums[i / kVectors<R>][i % kVectors<R>] = _mm256_setzero_si256();
    }
    for (std::int64_t i = start; i < end; i += kGroup, codes += kPairsBytes) {
      fetch(pass.ahead, i / kGroup);
      for (int step = 0; step < kGroup / 4; ++step, weights += Weights::kStepBytes) {
#pragma GCC unroll 2
        for (int odd = 0; odd < 2; ++odd) {
          __m256i w[kVectors<R>];
#pragma GCC unroll 4
          for (int c = 0; c < kVectors<R>; ++c) {
            w[c] = odd ? Weights::odd(weights + c * 32) : Weights::even(weights + c * 32);
          }
#pragma GCC unroll 8
          for (int r = 0; r < R; ++r) {
            const __m256i pair = broadcast_four_bytes(codes + r * kTileInputs + step * 8 + odd * 4);
#pragma GCC unroll 4
            for (int c = 0; c < kVectors<R>; ++c) {
              sums[r][c] = kept(_mm256_add_epi32(sums[r][c], _mm256_madd_epi16(w[c], pair)));
            }
          }
        }
      }
    }
#pragma GCC unroll 12
    for (int i = 0; i < R * kVectors<R>; ++i) {
      total[i / kVectors<R>][i % kVectors<R>].add(sums[i / kVectors<R>][i % kVectors<R>]);
    }
  }
  store_wide_sums<R>(pass, x, total);
}

// Eight outputs of 64 inputs of an int4_channel unit.
struct ChannelVector {
  const std::uint8_t* codes;
  __m256i step[2], origin[2];

  ChannelVector(const std::uint8_t* block, int vector)
      : codes(block + vector / 2 * 512 + vector % 2 * 32) {
#pragma GCC unroll 2
    for (int part = 0; part < 2; ++part) {
      const std::uint8_t* place = block + 1024 + (vector / 2 * 2 + part) * 32 + vector % 2 * 16;
      step[part] = twice(place);
      origin[part] = twice(place + 128);
    }
  }
  // Four inputs of the 64's first half or second: as Weights::even and odd.
  void expand(int i, int part, __m256i* even, __m256i* odd) const {
    const __m256i packed = load_vector(codes + i * 64), nibble = _mm256_set1_epi16(15);
    const __m256i shifted = part ? _mm256_srli_epi16(packed, 4) : packed;
    const __m256i upper = part ? _mm256_srli_epi16(packed, 12)
                               : _mm256_and_si256(_mm256_srli_epi16(packed, 8), nibble);
    *even = value(_mm256_and_si256(shifted, nibble), part);
    *odd = value(upper, part);
  }

 private:
  static __m256i twice(const std::uint8_t* p) {
    const __m256i x = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    return _mm256_or_si256(x, _mm256_slli_epi32(x, 16));
  }
  __m256i value(__m256i code, int part) const {
    return _mm256_srli_epi16(_mm256_add_epi16(_mm256_mullo_epi16(code, step[part]), origin[part]),
                             8);
  }
};

// An int4_channel unit as [k/4][even, odd][32 outputs][2 inputs] of sixteen bits.
static void expand_pairs(const std::uint8_t* unit, std::int64_t k, std::uint8_t* out) {
  for (std::int64_t i = 0; i < k; i += kTileInputs, unit += kChannelBytes, out += 2 * kWideBytes) {
    for (int vector = 0; vector < kUnit / kVectorOutputs; ++vector) {
      const ChannelVector weights(unit, vector);
#pragma GCC unroll 2
      for (int part = 0; part < 2; ++part) {
        for (int step = 0; step < 8; ++step) {
          __m256i even, odd;
          weights.expand(step, part, &even, &odd);
          std::uint8_t* to = out + (part * 8 + step) * PairWeights::kStepBytes + vector * 32;
          _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), even);
          _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + kStepBytes), odd);
        }
      }
    }
  }
}

// int4_channel's product of one row with sixteen outputs, which takes weights as they are expanded.
static void channel_pass(const Pass& pass, const Activations& x) {
  const std::int64_t k = x.groups * kGroup;
  const std::int8_t* codes = x.codes + wide_row_offset(pass.row, k);
  WideSum total[1][kVectors<1>] = {};
  for (std::int64_t i = 0; i < k; i += kTileInputs, codes += 2 * kPairsBytes) {
    const std::uint8_t* block = pass.unit + i / kTileInputs * kChannelBytes;
    fetch(pass.ahead, i / kGroup);
    fetch(pass.ahead, i / kGroup + 1);
#pragma GCC unroll 4
    for (int c = 0; c < kVectors<1>; ++c) {
      const ChannelVector weights(block, pass.first_vector + c);
      __m256i sums[2] = {_mm256_setzero_si256(), _mm256_setzero_si256()};
#pragma GCC unroll 2
      for (int part = 0; part < 2; ++part) {
#pragma GCC unroll 8
        for (int step = 0; step < 8; ++step) {
          __m256i even, odd;
          weights.expand(step, part, &even, &odd);
          const std::int8_t* pairs = codes + part * kPairsBytes + step * 8;
          sums[0] = _mm256_add_epi32(sums[0], _mm256_madd_epi16(even, broadcast_four_bytes(pairs)));
          sums[1] =
              _mm256_add_epi32(sums[1], _mm256_madd_epi16(odd, broadcast_four_bytes(pairs + 4)));
        }
      }
      total[0][c].add(_mm256_add_epi32(sums[0], sums[1]));
    }
  }
  store_wide_sums<1>(pass, x, total);
}

}  // namespace PDMESH_LEVEL
}  // namespace pdmesh
