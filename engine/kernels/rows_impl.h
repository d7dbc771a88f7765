// Row operations: exponential, RMSNorm, quantization, rotary embedding. Included once per level.
#pragma once

#include "kernels.h"
#include "numerics.h"

namespace pdmesh {
namespace PDMESH_LEVEL {

// Relative error below 2e-7; 0 below -87, so that nothing is denormal.
static inline F exp_lanes(F x) {
  const F lowest = set1(-87.0f);
  // The operand order lets NaN through.
  const F y = max(lowest, min(set1(88.0f), x));
  const F n = round(mul(y, set1(1.44269504088896341f)));
  F r = fma(n, set1(-0.693359375f), y);
  r = fma(n, set1(2.12194440e-4f), r);
  F p = set1(1.9875691500e-4f);
  p = fma(p, r, set1(1.3981999507e-3f));
  p = fma(p, r, set1(8.3334519073e-3f));
  p = fma(p, r, set1(4.1665795894e-2f));
  p = fma(p, r, set1(1.6666665459e-1f));
  p = fma(p, r, set1(5.0000001201e-1f));
  p = add(fma(p, mul(r, r), r), set1(1.0f));
  return zero_below(as_float(iadd(as_int(p), shl<23>(to_int(n)))), x, lowest);
}

static inline F silu(F x) {
  return div(x, add(set1(1.0f), exp_lanes(sub(zero(), x))));
}

static void rms_norm(const float* x, const float* weight, float epsilon, std::int64_t k,
                     float* out) {
  F sums[4] = {zero(), zero(), zero(), zero()};
  const std::int64_t whole = k / 16 * 16;
  const int rest = static_cast<int>(k - whole);
  for (std::int64_t i = 0; i < whole; i += 16) {
    const F v = load(x + i);
    sums[(i / 16) % 4] = fma(v, v, sums[(i / 16) % 4]);
  }
  if (rest > 0) {
    const F v = load_n(x + whole, rest);
    sums[(whole / 16) % 4] = fma(v, v, sums[(whole / 16) % 4]);
  }
  const float square_sum = sum_lanes(add(add(sums[0], sums[1]), add(sums[2], sums[3])));
  const F scale = set1(1.0f / std::sqrt(square_sum / static_cast<float>(k) + epsilon));
  for (std::int64_t i = 0; i < whole; i += 16) {
    store(out + i, mul(mul(load(x + i), scale), load(weight + i)));
  }
  if (rest > 0) {
    store_n(out + whole, mul(mul(load_n(x + whole, rest), scale), load_n(weight + whole, rest)),
            rest);
  }
}

// Groups smaller than this have no float32 reciprocal; they count as zero.
constexpr float kSmallestAmax = 1e-36f;

static void quantize(const float* x, std::int64_t k, std::int8_t* codes, float* scales,
                     float* sums, std::int32_t* offsets) {
  const I magnitude = iset1(0x7fffffff);
  for (std::int64_t group = 0; group * kGroup < k; ++group) {
    const std::int64_t start = group * kGroup;
    const std::int64_t left = k - start;
    const F a = left >= 16 ? load(x + start) : load_n(x + start, static_cast<int>(left));
    const F b = left >= 32   ? load(x + start + 16)
                : left > 16 ? load_n(x + start + 16, static_cast<int>(left - 16))
                            : zero();
    // As unsigned integers, magnitudes order like the floats, and NaN is above infinity.
    const std::uint32_t bits =
        umax_lanes(umax(iand(as_int(a), magnitude), iand(as_int(b), magnitude)));
    const bool is_finite = bits < 0x7f800000u;
    const float amax = float_from_bits(bits);
    const bool has_codes = is_finite && amax >= kSmallestAmax;
    const F inverse = set1(has_codes ? 127.0f / amax : 0.0f);
    const I qa = has_codes ? to_int(mul(a, inverse)) : iset1(0);
    const I qb = has_codes ? to_int(mul(b, inverse)) : iset1(0);
    std::uint8_t* out = reinterpret_cast<std::uint8_t*>(codes + start);
    store_u8(out, qa);
    store_u8(out + 16, qb);
    const std::int32_t sum = sum_lanes(iadd(qa, qb));
    // A value that is not finite must reach the logits, where it is found and reported.
    const float scale = has_codes ? amax / 127.0f : is_finite ? 0.0f : float_from_bits(0x7fc00000u);
    scales[group] = scale;
    sums[group] = scale * static_cast<float>(sum);
    offsets[group] = -128 * sum;
  }
}

#ifndef PDMESH_PUT_WIDE
#define PDMESH_PUT_WIDE put_planes
// Puts sixteen codes of a row, from input `i` on, where tiles and bytes are multiplied.
static inline void put_planes(std::int8_t* codes, std::int64_t i, I code, I high) {
  std::int8_t* out = codes + i / kTileInputs * 2 * kTileBytes + i % kTileInputs;
  store_u8(reinterpret_cast<std::uint8_t*>(out), high);
  // The lowest eight bits, as a signed number, are what high x 256 leaves.
  store_u8(reinterpret_cast<std::uint8_t*>(out + kTileBytes), code);
}
#endif

// Sixteen bits of a value as 256 x high + low, with one scale for the row: outlier channels, up to
// thousands of times the median, leave the others enough bits.
static void quantize_wide(const float* x, std::int64_t k, std::int8_t* codes, float* scale,
                          std::int32_t* offsets) {
  const std::int64_t whole = k / 16 * 16, padded = round_up(k, kTileInputs);
  const int rest = static_cast<int>(k - whole);
  const I magnitude = iset1(0x7fffffff);
  I top = rest > 0 ? iand(as_int(load_n(x + whole, rest)), magnitude) : iset1(0);
  for (std::int64_t i = 0; i < whole; i += 16) {
    top = umax(top, iand(as_int(load(x + i)), magnitude));
  }
  const std::uint32_t bits = umax_lanes(top);
  const bool is_finite = bits < 0x7f800000u;
  const float amax = float_from_bits(bits);
  const bool has_codes = is_finite && amax >= kSmallestAmax;
  const F inverse = set1(has_codes ? 32512.0f / amax : 0.0f);
  I high_sum = iset1(0), sum = iset1(0);
  const auto put = [&](std::int64_t i, I code) {
    const I high = sar<8>(iadd(code, iset1(128)));
    high_sum = iadd(high_sum, high);
    sum = iadd(sum, code);
    PDMESH_PUT_WIDE(codes, i, code, high);
  };
  const std::int64_t end = has_codes ? whole : 0;
  for (std::int64_t i = 0; i < end; i += 16) put(i, to_int(mul(load(x + i), inverse)));
  if (has_codes && rest > 0) put(whole, to_int(mul(load_n(x + whole, rest), inverse)));
  for (std::int64_t i = has_codes ? round_up(k, 16) : 0; i < padded; i += 16) put(i, iset1(0));
  const std::int32_t high_total = sum_lanes(high_sum);
  offsets[0] = -128 * high_total;
  offsets[1] = -128 * (sum_lanes(sum) - 256 * high_total);
  *scale = has_codes ? amax / 32512.0f : is_finite ? 0.0f : float_from_bits(0x7fc00000u);
}

// Pairs are (i, i + head_dim / 2), as in Hugging Face's Llama.
static void rotate(float* heads, std::int64_t num_heads, std::int64_t head_dim,
                   const float* cosine, const float* sine, float scale) {
  const std::int64_t half = head_dim / 2;
  const F factor = set1(scale);
  for (std::int64_t head = 0; head < num_heads; ++head) {
    float* low = heads + head * head_dim;
    float* high = low + half;
    for (std::int64_t i = 0; i < half; i += 16) {
      const int n = half - i < 16 ? static_cast<int>(half - i) : 16;
      const F x = load_n(low + i, n), y = load_n(high + i, n);
      const F c = load_n(cosine + i, n), s = load_n(sine + i, n);
      store_n(low + i, mul(sub(mul(x, c), mul(y, s)), factor), n);
      store_n(high + i, mul(add(mul(y, c), mul(x, s)), factor), n);
    }
  }
}

static std::int64_t argmax(const float* x, std::int64_t n, float* largest) {
  // NaN compares above infinity here, so that it is found rather than skipped.
  std::int64_t best = 0;
  float best_value = n > 0 ? x[0] : 0.0f;
  for (std::int64_t start = 0; start < n; start += 512) {
    const std::int64_t end = start + 512 < n ? start + 512 : n;
    F top = set1(best_value);
    bool has_nan = false;
    std::int64_t i = start;
    F nans = zero();
    for (; i + 16 <= end; i += 16) {
      const F v = load(x + i);
      nans = add(nans, mul(v, zero()));
      top = max(v, top);
    }
    float value = max_lanes(top);
    const float nan_sum = sum_lanes(nans);
    has_nan = !(nan_sum == 0.0f);
    for (; i < end; ++i) {
      if (x[i] > value) value = x[i];
      if (!(x[i] - x[i] == 0.0f)) has_nan = true;
    }
    if (has_nan) {
      for (std::int64_t j = start; j < end; ++j) {
        if (x[j] != x[j]) {
          *largest = x[j];
          return j;
        }
      }
    }
    if (value > best_value) {
      best_value = value;
      for (best = start; x[best] != value; ++best) {
      }
    }
  }
  *largest = best_value;
  return best;
}

static double sum_from(const float* x, std::int64_t n, float floor) {
  const F limit = set1(floor);
  double total = 0.0;
  // Float sums of short stretches lose next to nothing, and doubles take them up.
  for (std::int64_t start = 0; start < n; start += 512) {
    const std::int64_t end = start + 512 < n ? start + 512 : n;
    F a = zero(), b = zero();
    std::int64_t i = start;
    for (; i + 32 <= end; i += 32) {
      const F v = load(x + i), w = load(x + i + 16);
      a = add(a, zero_below(v, v, limit));
      b = add(b, zero_below(w, w, limit));
    }
    for (; i < end; i += 16) {
      const F v = load_n(x + i, end - i < 16 ? static_cast<int>(end - i) : 16);
      a = add(a, zero_below(v, v, limit));
    }
    total += static_cast<double>(sum_lanes(add(a, b)));
  }
  return total;
}

static void exp_shifted(const float* x, std::int64_t n, float shift, float scale, float* out) {
  const F s = set1(shift), factor = set1(scale);
  for (std::int64_t i = 0; i < n; i += 16) {
    const int lanes = n - i < 16 ? static_cast<int>(n - i) : 16;
    store_n(out + i, exp_lanes(mul(sub(load_n(x + i, lanes), s), factor)), lanes);
  }
}

}  // namespace PDMESH_LEVEL
}  // namespace pdmesh
