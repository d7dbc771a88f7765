// Sixteen lanes in plain C++: the meaning of every function that the levels share.
//
// Each level computes the same lanes in the same order with the same roundings (fma is one
// rounding everywhere), so results do not depend on the machine's instruction set.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "numerics.h"

namespace pdmesh {
namespace portable {

struct F {
  float v[16];
};
struct I {
  std::uint32_t v[16];
};
struct W {
  std::uint8_t v[64];
};

constexpr int kMaxRows = 1;  // wider blocks only cost compile time here

#define PDMESH_LANES for (int i = 0; i < 16; ++i)

static inline F set1(float a) { F r; PDMESH_LANES r.v[i] = a; return r; }
static inline F zero() { return set1(0.0f); }
static inline F load(const float* p) { F r; std::memcpy(r.v, p, 64); return r; }
static inline void store(float* p, const F& a) { std::memcpy(p, a.v, 64); }
// The first n lanes from memory, zero in the others; memory past them is not read.
static inline F load_n(const float* p, int n) {
  F r = zero();
  std::memcpy(r.v, p, static_cast<std::size_t>(n) * 4);
  return r;
}
static inline void store_n(float* p, const F& a, int n) {
  std::memcpy(p, a.v, static_cast<std::size_t>(n) * 4);
}
static inline F add(const F& a, const F& b) { F r; PDMESH_LANES r.v[i] = a.v[i] + b.v[i]; return r; }
static inline F sub(const F& a, const F& b) { F r; PDMESH_LANES r.v[i] = a.v[i] - b.v[i]; return r; }
static inline F mul(const F& a, const F& b) { F r; PDMESH_LANES r.v[i] = a.v[i] * b.v[i]; return r; }
static inline F div(const F& a, const F& b) { F r; PDMESH_LANES r.v[i] = a.v[i] / b.v[i]; return r; }
static inline F fma(const F& a, const F& b, const F& c) {
  F r;
  PDMESH_LANES r.v[i] = std::fma(a.v[i], b.v[i], c.v[i]);
  return r;
}
// The second operand where the comparison is false, as x86 does (so NaN in `a` gives `b`).
static inline F max(const F& a, const F& b) {
  F r;
  PDMESH_LANES r.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
  return r;
}
static inline F min(const F& a, const F& b) {
  F r;
  PDMESH_LANES r.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i];
  return r;
}
// To the nearest integer, ties to even.
static inline F round(const F& a) { F r; PDMESH_LANES r.v[i] = std::nearbyint(a.v[i]); return r; }
static inline F keep_first(const F& a, const F& other, int n) {
  F r;
  PDMESH_LANES r.v[i] = i < n ? a.v[i] : other.v[i];
  return r;
}
// `a` where x >= limit (or x is NaN), zero elsewhere.
static inline F zero_below(const F& a, const F& x, const F& limit) {
  F r;
  PDMESH_LANES r.v[i] = x.v[i] < limit.v[i] ? 0.0f : a.v[i];
  return r;
}

static inline I iset1(std::int32_t a) {
  I r;
  PDMESH_LANES r.v[i] = static_cast<std::uint32_t>(a);
  return r;
}
static inline I iload(const void* p) { I r; std::memcpy(r.v, p, 64); return r; }
static inline I iload_n(const void* p, int n) {
  I r = iset1(0);
  std::memcpy(r.v, p, static_cast<std::size_t>(n) * 4);
  return r;
}
static inline void istore(void* p, const I& a) { std::memcpy(p, a.v, 64); }
static inline I iadd(const I& a, const I& b) { I r; PDMESH_LANES r.v[i] = a.v[i] + b.v[i]; return r; }
static inline I isub(const I& a, const I& b) { I r; PDMESH_LANES r.v[i] = a.v[i] - b.v[i]; return r; }
static inline I iand(const I& a, const I& b) { I r; PDMESH_LANES r.v[i] = a.v[i] & b.v[i]; return r; }
static inline I ior(const I& a, const I& b) { I r; PDMESH_LANES r.v[i] = a.v[i] | b.v[i]; return r; }
static inline I umax(const I& a, const I& b) {
  I r;
  PDMESH_LANES r.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
  return r;
}
static inline I umin(const I& a, const I& b) {
  I r;
  PDMESH_LANES r.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i];
  return r;
}
template <int N>
static inline I shl(const I& a) { I r; PDMESH_LANES r.v[i] = a.v[i] << N; return r; }
template <int N>
static inline I shr(const I& a) { I r; PDMESH_LANES r.v[i] = a.v[i] >> N; return r; }
template <int N>
static inline I sar(const I& a) {
  I r;
  PDMESH_LANES r.v[i] = static_cast<std::uint32_t>(static_cast<std::int32_t>(a.v[i]) >> N);
  return r;
}
// `yes` where a < b as unsigned numbers.
static inline I select_less(const I& a, const I& b, const I& yes, const I& no) {
  I r;
  PDMESH_LANES r.v[i] = a.v[i] < b.v[i] ? yes.v[i] : no.v[i];
  return r;
}
static inline F to_float(const I& a) {
  F r;
  PDMESH_LANES r.v[i] = static_cast<float>(static_cast<std::int32_t>(a.v[i]));
  return r;
}
// Ties to even; what does not fit becomes the smallest integer, as on x86.
static inline I to_int(const F& a) {
  I r;
  PDMESH_LANES {
    const float n = std::nearbyint(a.v[i]);
    const bool fits = n >= -2147483648.0f && n < 2147483648.0f;
    r.v[i] = fits ? static_cast<std::uint32_t>(static_cast<std::int32_t>(n)) : 0x80000000u;
  }
  return r;
}
static inline F as_float(const I& a) { F r; std::memcpy(r.v, a.v, 64); return r; }
static inline I as_int(const F& a) { I r; std::memcpy(r.v, a.v, 64); return r; }

static inline I load_u16(const std::uint16_t* p) { I r; PDMESH_LANES r.v[i] = p[i]; return r; }
static inline I load_u8(const std::uint8_t* p) { I r; PDMESH_LANES r.v[i] = p[i]; return r; }
static inline F load_f16(const std::uint16_t* p) {
  F r;
  PDMESH_LANES r.v[i] = float_from_half(p[i]);
  return r;
}
// The low 16 (or 8) bits of each lane.
static inline void store_u16(std::uint16_t* p, const I& a) {
  PDMESH_LANES p[i] = static_cast<std::uint16_t>(a.v[i]);
}
static inline void store_u8(std::uint8_t* p, const I& a) {
  PDMESH_LANES p[i] = static_cast<std::uint8_t>(a.v[i]);
}

static inline W load_weights(const std::uint8_t* p) { W r; std::memcpy(r.v, p, 64); return r; }
static inline W low_nibbles(const W& packed) {
  W r;
  for (int i = 0; i < 64; ++i) r.v[i] = packed.v[i] & 15;
  return r;
}
static inline W high_nibbles(const W& packed) {
  W r;
  for (int i = 0; i < 64; ++i) r.v[i] = packed.v[i] >> 4;
  return r;
}
// Two halves of sixteen bits a lane, each with its own overflow.
static inline I iset16(std::int16_t a) {
  const std::uint32_t half = static_cast<std::uint16_t>(a);
  return iset1(static_cast<std::int32_t>(half << 16 | half));
}
static inline I imul16(const I& a, const I& b) {
  I r;
  PDMESH_LANES r.v[i] = ((a.v[i] >> 16) * (b.v[i] >> 16)) << 16 |
                        ((a.v[i] & 0xffff) * (b.v[i] & 0xffff) & 0xffff);
  return r;
}
static inline I iadd16(const I& a, const I& b) {
  I r;
  PDMESH_LANES r.v[i] = ((a.v[i] >> 16) + (b.v[i] >> 16)) << 16 | ((a.v[i] + b.v[i]) & 0xffff);
  return r;
}
template <int N>
static inline I shr16(const I& a) {
  I r;
  PDMESH_LANES r.v[i] = (a.v[i] >> 16 >> N) << 16 | (a.v[i] & 0xffff) >> N;
  return r;
}

// Adds to each of sixteen sums the product of its four weights with the same four activations.
static inline I dot4(const I& sum, const W& weights, const std::int8_t* activations) {
  I r;
  PDMESH_LANES {
    std::int32_t total = static_cast<std::int32_t>(sum.v[i]);
    for (int j = 0; j < 4; ++j) total += weights.v[4 * i + j] * activations[j];
    r.v[i] = static_cast<std::uint32_t>(total);
  }
  return r;
}

static inline float sum_lanes(const F& a) {
  float b[8], c[4];
  for (int i = 0; i < 8; ++i) b[i] = a.v[i] + a.v[i + 8];
  for (int i = 0; i < 4; ++i) c[i] = b[i] + b[i + 4];
  return (c[0] + c[2]) + (c[1] + c[3]);
}
static inline float max_lanes(const F& a) {
  float r = a.v[0];
  for (int i = 1; i < 16; ++i) r = a.v[i] > r ? a.v[i] : r;
  return r;
}
static inline std::int32_t sum_lanes(const I& a) {
  std::uint32_t r = 0;
  PDMESH_LANES r += a.v[i];
  return static_cast<std::int32_t>(r);
}
static inline std::uint32_t umax_lanes(const I& a) {
  std::uint32_t r = 0;
  PDMESH_LANES r = a.v[i] > r ? a.v[i] : r;
  return r;
}

// Turns sixteen rows of sixteen lanes into columns.
static inline void transpose(I r[16]) {
  for (int i = 0; i < 16; ++i) {
    for (int j = 0; j < i; ++j) {
      const std::uint32_t t = r[i].v[j];
      r[i].v[j] = r[j].v[i];
      r[j].v[i] = t;
    }
  }
}

#undef PDMESH_LANES

}  // namespace portable
}  // namespace pdmesh
