// Sixteen lanes on AVX-512 with VNNI (levels avx512 and amx). See vec_portable.h for what each
// function promises.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace pdmesh {
namespace PDMESH_LEVEL {

using F = __m512;
using I = __m512i;
using W = __m512i;  // sixteen outputs x four unsigned weights

constexpr int kMaxRows = 6;  // 2 x 6 integer and 2 x 6 float sums fit in 32 registers

static inline F zero() { return _mm512_setzero_ps(); }
static inline F set1(float a) { return _mm512_set1_ps(a); }
static inline F load(const float* p) { return _mm512_loadu_ps(p); }
static inline void store(float* p, F a) { _mm512_storeu_ps(p, a); }
static inline __mmask16 first(int n) { return static_cast<__mmask16>((1u << n) - 1u); }
static inline F load_n(const float* p, int n) { return _mm512_maskz_loadu_ps(first(n), p); }
static inline void store_n(float* p, F a, int n) { _mm512_mask_storeu_ps(p, first(n), a); }
static inline F add(F a, F b) { return _mm512_add_ps(a, b); }
static inline F sub(F a, F b) { return _mm512_sub_ps(a, b); }
static inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
static inline F div(F a, F b) { return _mm512_div_ps(a, b); }
static inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
static inline F max(F a, F b) { return _mm512_max_ps(a, b); }
static inline F min(F a, F b) { return _mm512_min_ps(a, b); }
static inline F round(F a) { return _mm512_roundscale_ps(a, 8); }
static inline F keep_first(F a, F other, int n) { return _mm512_mask_mov_ps(other, first(n), a); }
static inline F zero_below(F a, F x, F limit) {
  return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, limit, _CMP_NLT_UQ), a);
}

static inline I iset1(std::int32_t a) { return _mm512_set1_epi32(a); }
static inline I iload(const void* p) { return _mm512_loadu_si512(p); }
static inline I iload_n(const void* p, int n) { return _mm512_maskz_loadu_epi32(first(n), p); }
static inline void istore(void* p, I a) { _mm512_storeu_si512(p, a); }
static inline I iadd(I a, I b) { return _mm512_add_epi32(a, b); }
static inline I isub(I a, I b) { return _mm512_sub_epi32(a, b); }
static inline I iand(I a, I b) { return _mm512_and_si512(a, b); }
static inline I ior(I a, I b) { return _mm512_or_si512(a, b); }
static inline I umax(I a, I b) { return _mm512_max_epu32(a, b); }
static inline I umin(I a, I b) { return _mm512_min_epu32(a, b); }
template <int N>
static inline I shl(I a) { return _mm512_slli_epi32(a, N); }
template <int N>
static inline I shr(I a) { return _mm512_srli_epi32(a, N); }
template <int N>
static inline I sar(I a) { return _mm512_srai_epi32(a, N); }
static inline I select_less(I a, I b, I yes, I no) {
  return _mm512_mask_mov_epi32(no, _mm512_cmplt_epu32_mask(a, b), yes);
}
static inline F to_float(I a) { return _mm512_cvtepi32_ps(a); }
static inline I to_int(F a) { return _mm512_cvtps_epi32(a); }
static inline F as_float(I a) { return _mm512_castsi512_ps(a); }
static inline I as_int(F a) { return _mm512_castps_si512(a); }

static inline I load_u16(const std::uint16_t* p) {
  return _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
static inline F load_f16(const std::uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
static inline void store_u16(std::uint16_t* p, I a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(a));
}
static inline void store_u8(std::uint8_t* p, I a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a));
}
static inline I load_u8(const std::uint8_t* p) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}

static inline W load_weights(const std::uint8_t* p) { return _mm512_loadu_si512(p); }
static inline W low_nibbles(W packed) { return _mm512_and_si512(packed, _mm512_set1_epi8(15)); }
static inline W high_nibbles(W packed) {
  return _mm512_and_si512(_mm512_srli_epi16(packed, 4), _mm512_set1_epi8(15));
}
// Sixteen bits a lane.
static inline I iset16(std::int16_t a) { return _mm512_set1_epi16(a); }
static inline I imul16(I a, I b) { return _mm512_mullo_epi16(a, b); }
static inline I iadd16(I a, I b) { return _mm512_add_epi16(a, b); }
template <int N>
static inline I shr16(I a) { return _mm512_srli_epi16(a, N); }

static inline I dot4(I sum, W weights, const std::int8_t* activations) {
  std::int32_t four;
  __builtin_memcpy(&four, activations, 4);
  return _mm512_dpbusd_epi32(sum, weights, _mm512_set1_epi32(four));
}

// The trees of the two sums below are the same in every level.
static inline float sum_lanes(F a) {
  __m256 b = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
  __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
  c = _mm_add_ps(c, _mm_movehl_ps(c, c));
  return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}
static inline float max_lanes(F a) { return _mm512_reduce_max_ps(a); }
static inline std::int32_t sum_lanes(I a) { return _mm512_reduce_add_epi32(a); }
static inline std::uint32_t umax_lanes(I a) { return _mm512_reduce_max_epu32(a); }

static inline void transpose(I r[16]) {
  I t[16];
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 4; ++i) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

}  // namespace PDMESH_LEVEL
}  // namespace pdmesh
