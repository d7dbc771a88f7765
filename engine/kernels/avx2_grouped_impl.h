// Products of the formats with a scale per group by AVX2. Included by level avx2 only.
#pragma once

#include "avx2_pass_impl.h"

namespace pdmesh {
namespace PDMESH_LEVEL {

// Codes of four bits, 0 to 15, by signed bytes: eight sums of two products each fit into 16 bits.
struct Int4Dots {
  static constexpr int kBlockBytes = 640;
  static constexpr bool kHasMinimum = true;
  static __m256 scale(const std::uint8_t* block, int vector) {
    return load_f16_vector(block + 512 + vector * 16);
  }
  static __m256 minimum(const std::uint8_t* block, int vector) {
    return load_f16_vector(block + 576 + vector * 16);
  }

  template <int R>
  __attribute__((always_inline)) static inline void sums(const std::uint8_t* weights,
                                                         const std::int8_t* codes,
                                                         std::int64_t stride,
                                                         __m256i (*out)[kVectors<R>]) {
    const __m256i nibble = _mm256_set1_epi8(15);
#pragma GCC unroll 12
    for (int i = 0; i < R * kVectors<R>; ++i)
      out[i / kVectors<R>][i % kVectors<R>] = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      const int step = i / 2, upper = i % 2;
      __m256i w[kVectors<R>];
#pragma GCC unroll 4
      for (int c = 0; c < kVectors<R>; ++c) {
        w[c] = load_vector(weights + step * kStepBytes + c * 32);
        w[c] = _mm256_and_si256(upper ? _mm256_srli_epi16(w[c], 4) : w[c], nibble);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const __m256i x = broadcast_four_bytes(codes + r * stride + upper * 16 + step * 4);
#pragma GCC unroll 4
        for (int c = 0; c < kVectors<R>; ++c) {
          out[r][c] = kept(_mm256_add_epi16(out[r][c], _mm256_maddubs_epi16(w[c], x)));
        }
      }
    }
#pragma GCC unroll 12
    for (int i = 0; i < R * kVectors<R>; ++i) {
      out[i / kVectors<R>][i % kVectors<R>] =
          _mm256_madd_epi16(out[i / kVectors<R>][i % kVectors<R>], _mm256_set1_epi16(1));
    }
  }
};

// Signed bytes by signed bytes: the weight's sign goes to the activation.
struct Int8Dots {
  static constexpr int kBlockBytes = 1088;
  static constexpr bool kHasMinimum = false;
  static __m256 scale(const std::uint8_t* block, int vector) {
    return load_f16_vector(block + 1024 + vector * 16);
  }
  static __m256 minimum(const std::uint8_t*, int) { return _mm256_setzero_ps(); }

  template <int R>
  __attribute__((always_inline)) static inline void sums(const std::uint8_t* weights,
                                                         const std::int8_t* codes,
                                                         std::int64_t stride,
                                                         __m256i (*out)[kVectors<R>]) {
#pragma GCC unroll 12
    for (int i = 0; i < R * kVectors<R>; ++i)
      out[i / kVectors<R>][i % kVectors<R>] = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int step = 0; step < 8; ++step) {
      __m256i w[kVectors<R>], size[kVectors<R>];
#pragma GCC unroll 4
      for (int c = 0; c < kVectors<R>; ++c) {
        w[c] = _mm256_xor_si256(load_vector(weights + step * kStepBytes + c * 32),
                                _mm256_set1_epi8(-128));
        size[c] = _mm256_abs_epi8(w[c]);
      }
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const __m256i x = broadcast_four_bytes(codes + r * stride + step * 4);
#pragma GCC unroll 4
        for (int c = 0; c < kVectors<R>; ++c) {
          const __m256i pairs = _mm256_maddubs_epi16(size[c], _mm256_sign_epi8(x, w[c]));
          out[r][c] =
              kept(_mm256_add_epi32(out[r][c], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))));
        }
      }
    }
  }
};

// As `grouped_block`.
template <class Dots, int R>
__attribute__((noinline)) static void grouped_pass(const Pass& pass, const Activations& x) {
  const std::int64_t groups = x.groups, stride = groups * kGroup;
  const std::int8_t* codes = x.codes + pass.row * stride;
  __m256 sums[R][kVectors<R>];
#pragma GCC unroll 12
  for (int i = 0; i < R * kVectors<R>; ++i)
    sums[i / kVectors<R>][i % kVectors<R>] = _mm256_setzero_ps();
  for (std::int64_t group = 0; group < groups; ++group) {
    const std::uint8_t* block = pass.unit + group * Dots::kBlockBytes;
    fetch(pass.ahead, group);
    __m256i dots[R][kVectors<R>];
    Dots::template sums<R>(block + pass.first_vector * 32, codes + group * kGroup, stride, dots);
#pragma GCC unroll 4
    for (int c = 0; c < kVectors<R>; ++c) {
      const __m256 scale = Dots::scale(block, pass.first_vector + c);
      const __m256 minimum = Dots::minimum(block, pass.first_vector + c);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const std::int64_t i = (pass.row + r) * groups + group;
        const __m256 dot =
            _mm256_mul_ps(_mm256_cvtepi32_ps(dots[r][c]), _mm256_set1_ps(x.scales[i]));
        sums[r][c] = _mm256_fmadd_ps(dot, scale, sums[r][c]);
        if (Dots::kHasMinimum) {
          sums[r][c] = _mm256_fmadd_ps(_mm256_set1_ps(x.sums[i]), minimum, sums[r][c]);
        }
      }
    }
  }
#pragma GCC unroll 12
  for (int i = 0; i < R * kVectors<R>; ++i) {
    float* out =
        pass.out + i / kVectors<R> * kUnit + (pass.first_vector + i % kVectors<R>)*kVectorOutputs;
    _mm256_storeu_ps(out, sums[i / kVectors<R>][i % kVectors<R>]);
  }
}

}  // namespace PDMESH_LEVEL
}  // namespace pdmesh
