// Sixteen lanes as two AVX2 registers. See vec_portable.h for what each function promises.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace pdmesh {
namespace avx2 {

struct F {
  __m256 a, b;
};
struct I {
  __m256i a, b;
};

constexpr int kMaxRows = 2;

static inline F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
static inline F set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline void store(float* p, F x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
static inline I lanes() {
  return {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)};
}
static inline I first(int n) {
  const __m256i count = _mm256_set1_epi32(n);
  const I lane = lanes();
  return {_mm256_cmpgt_epi32(count, lane.a), _mm256_cmpgt_epi32(count, lane.b)};
}
static inline F load_n(const float* p, int n) {
  if (n >= 16) return load(p);
  const I m = first(n);
  return {_mm256_maskload_ps(p, m.a), _mm256_maskload_ps(p + 8, m.b)};
}
static inline void store_n(float* p, F x, int n) {
  if (n >= 16) return store(p, x);
  const I m = first(n);
  _mm256_maskstore_ps(p, m.a, x.a);
  _mm256_maskstore_ps(p + 8, m.b, x.b);
}
static inline F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
static inline F sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
static inline F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
static inline F div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
static inline F fma(F x, F y, F z) {
  return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)};
}
static inline F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
static inline F min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
static inline F round(F x) {
  return {_mm256_round_ps(x.a, 8), _mm256_round_ps(x.b, 8)};
}
static inline F keep_first(F x, F other, int n) {
  const I m = first(n);
  return {_mm256_blendv_ps(other.a, x.a, _mm256_castsi256_ps(m.a)),
          _mm256_blendv_ps(other.b, x.b, _mm256_castsi256_ps(m.b))};
}
static inline F zero_below(F v, F x, F limit) {
  return {_mm256_and_ps(v.a, _mm256_cmp_ps(x.a, limit.a, _CMP_NLT_UQ)),
          _mm256_and_ps(v.b, _mm256_cmp_ps(x.b, limit.b, _CMP_NLT_UQ))};
}

static inline I iset1(std::int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
static inline I iload(const void* p) {
  const __m256i* q = static_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(q), _mm256_loadu_si256(q + 1)};
}
static inline I iload_n(const void* p, int n) {
  if (n >= 16) return iload(p);
  const I m = first(n);
  const int* q = static_cast<const int*>(p);
  return {_mm256_maskload_epi32(q, m.a), _mm256_maskload_epi32(q + 8, m.b)};
}
static inline void istore(void* p, I x) {
  __m256i* q = static_cast<__m256i*>(p);
  _mm256_storeu_si256(q, x.a);
  _mm256_storeu_si256(q + 1, x.b);
}
static inline I iadd(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
static inline I isub(I x, I y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
static inline I iand(I x, I y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
static inline I ior(I x, I y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
static inline I umax(I x, I y) { return {_mm256_max_epu32(x.a, y.a), _mm256_max_epu32(x.b, y.b)}; }
static inline I umin(I x, I y) { return {_mm256_min_epu32(x.a, y.a), _mm256_min_epu32(x.b, y.b)}; }
template <int N>
static inline I shl(I x) { return {_mm256_slli_epi32(x.a, N), _mm256_slli_epi32(x.b, N)}; }
template <int N>
static inline I shr(I x) { return {_mm256_srli_epi32(x.a, N), _mm256_srli_epi32(x.b, N)}; }
template <int N>
static inline I sar(I x) { return {_mm256_srai_epi32(x.a, N), _mm256_srai_epi32(x.b, N)}; }
static inline __m256i select_less8(__m256i x, __m256i y, __m256i yes, __m256i no) {
  const __m256i not_less = _mm256_cmpeq_epi32(_mm256_max_epu32(x, y), x);
  return _mm256_blendv_epi8(yes, no, not_less);
}
static inline I select_less(I x, I y, I yes, I no) {
  return {select_less8(x.a, y.a, yes.a, no.a), select_less8(x.b, y.b, yes.b, no.b)};
}
static inline F to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
static inline I to_int(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
static inline F as_float(I x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
static inline I as_int(F x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }

static inline __m128i load128(const void* p) {
  return _mm_loadu_si128(static_cast<const __m128i*>(p));
}
static inline I load_u16(const std::uint16_t* p) {
  return {_mm256_cvtepu16_epi32(load128(p)), _mm256_cvtepu16_epi32(load128(p + 8))};
}
static inline I load_u8(const std::uint8_t* p) {
  const __m128i x = load128(p);
  return {_mm256_cvtepu8_epi32(x), _mm256_cvtepu8_epi32(_mm_srli_si128(x, 8))};
}
// The low halves, and the low quarters, of the lanes, packed.
static inline __m256i pack_u16(I x) {
  const __m256i low = _mm256_set1_epi32(0xffff);
  const __m256i packed =
      _mm256_packus_epi32(_mm256_and_si256(x.a, low), _mm256_and_si256(x.b, low));
  return _mm256_permute4x64_epi64(packed, 0xd8);
}
static inline __m128i pack_u8(I x) {
  const __m256i low = _mm256_set1_epi32(255);
  const __m256i halves =
      _mm256_packus_epi32(_mm256_and_si256(x.a, low), _mm256_and_si256(x.b, low));
  const __m128i packed =
      _mm_packus_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
  return _mm_shuffle_epi32(packed, 0xd8);
}
static inline void store_u16(std::uint16_t* p, I x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), pack_u16(x));
}
static inline void store_u8(std::uint8_t* p, I x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), pack_u8(x));
}

// Sixteen codes of a row, from input `i` on, as pairs of sixteen-bit numbers: inputs 0 and 2 of each
// four, then 1 and 3, as bytes of weights are widened. 32 inputs take a row of a tile's plane.
#define PDMESH_PUT_WIDE put_pairs
static inline void put_pairs(std::int8_t* codes, std::int64_t i, I code, I) {
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi32(code.a, code.b), 0xd8);
  const __m256i pairs = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(packed, 0xd8), 0xd8);
  std::int8_t* out = codes + i / 32 * 1024 + i % 32 * 2;
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), pairs);
}

static inline float sum_lanes(F x) {
  const __m256 b = _mm256_add_ps(x.a, x.b);
  __m128 c = _mm_add_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
  c = _mm_add_ps(c, _mm_movehl_ps(c, c));
  return _mm_cvtss_f32(_mm_add_ss(c, _mm_movehdup_ps(c)));
}
static inline float max_lanes(F x) {
  const __m256 b = _mm256_max_ps(x.a, x.b);
  __m128 c = _mm_max_ps(_mm256_castps256_ps128(b), _mm256_extractf128_ps(b, 1));
  c = _mm_max_ps(c, _mm_movehl_ps(c, c));
  return _mm_cvtss_f32(_mm_max_ss(c, _mm_movehdup_ps(c)));
}
static inline std::int32_t sum_lanes(I x) {
  const __m256i b = _mm256_add_epi32(x.a, x.b);
  __m128i c = _mm_add_epi32(_mm256_castsi256_si128(b), _mm256_extracti128_si256(b, 1));
  c = _mm_add_epi32(c, _mm_shuffle_epi32(c, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(c, _mm_shuffle_epi32(c, 0xb1)));
}
static inline std::uint32_t umax_lanes(I x) {
  const __m256i b = _mm256_max_epu32(x.a, x.b);
  __m128i c = _mm_max_epu32(_mm256_castsi256_si128(b), _mm256_extracti128_si256(b, 1));
  c = _mm_max_epu32(c, _mm_shuffle_epi32(c, 0x4e));
  c = _mm_max_epu32(c, _mm_shuffle_epi32(c, 0xb1));
  return static_cast<std::uint32_t>(_mm_cvtsi128_si32(c));
}

// Turns eight rows of eight lanes into columns.
static inline void transpose8(const __m256i r[8], __m256i columns[8]) {
  __m256i t[8], u[8];
  for (int i = 0; i < 4; ++i) {
    t[2 * i] = _mm256_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 2; ++i) {
    u[4 * i] = _mm256_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    u[4 * i + 1] = _mm256_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    u[4 * i + 2] = _mm256_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    u[4 * i + 3] = _mm256_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    columns[i] = _mm256_permute2x128_si256(u[i], u[i + 4], 0x20);
    columns[i + 4] = _mm256_permute2x128_si256(u[i], u[i + 4], 0x31);
  }
}

static inline void transpose(I r[16]) {
  for (int half = 0; half < 2; ++half) {
    __m256i a[8], b[8], columns[2][8];
    for (int i = 0; i < 8; ++i) {
      a[i] = r[8 * half + i].a;
      b[i] = r[8 * half + i].b;
    }
    transpose8(a, columns[0]);
    transpose8(b, columns[1]);
    for (int i = 0; i < 8; ++i) {
      r[8 * half + i].a = columns[0][i];
      r[8 * half + i].b = columns[1][i];
    }
  }
  // The blocks off the diagonal change places.
  for (int i = 0; i < 8; ++i) {
    const __m256i block = r[i].b;
    r[i].b = r[8 + i].a;
    r[8 + i].a = block;
  }
}

}  // namespace avx2
}  // namespace pdmesh
