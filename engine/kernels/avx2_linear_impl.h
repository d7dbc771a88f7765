// Matrix products by AVX2. Included by level avx2 only.
#pragma once

#include "avx2_grouped_impl.h"
#include "avx2_wide_impl.h"

namespace pdmesh {
namespace PDMESH_LEVEL {

// Multiplies `count` rows with a unit. `pass` says where, but not with which of the unit's outputs.
template <int R>
static void multiply_block(const Linear& weights, const std::uint8_t* stored, std::int64_t count,
                           Pass pass, const Activations& x) {
  if constexpr (R < kBlockRows) {
    if (count > R) {
      multiply_block<R + 1>(weights, stored, count, pass, x);
      return;
    }
  }
  constexpr int num_passes = kUnitVectors / kVectors<R>;
  for (int i = 0; i < num_passes; ++i) {
    pass.first_vector = i * kVectors<R>;
    if (pass.row == 0) pass.ahead = share_of_fetching(weights, stored, i, num_passes);
    switch (weights.format) {
      case WeightFormat::kInt8: wide_pass<ByteWeights, R>(pass, x); break;
      case WeightFormat::kInt4Channel:
        if (pass.unit == stored) {
          channel_pass(pass, x);
        } else {
          wide_pass<PairWeights, R>(pass, x);
        }
        break;
      case WeightFormat::kInt8Grouped: grouped_pass<Int8Dots, R>(pass, x); break;
      default: grouped_pass<Int4Dots, R>(pass, x); break;
    }
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
  const bool is_expanded = weights.format == WeightFormat::kInt4Channel && rows > 1;
  float sums[kBlockRows * kUnit];
  for (std::int64_t unit = first_unit; unit < last_unit; ++unit) {
    const std::uint8_t* stored = weights.data + unit * bytes;
    const float* channel_scales = weights.scales + (weights.scales ? unit * kUnit : 0);
    if (is_expanded) expand_pairs(stored, weights.k, scratch);
    const std::uint8_t* unit_data = is_expanded ? scratch : stored;
    for (std::int64_t tile = 0; tile < rows; tile += kTileRows) {
      // Wide activations lie together in tiles.
      const std::int64_t left = rows - tile < kTileRows ? rows - tile : kTileRows;
      for_blocks(left, kBlockRows, [&](std::int64_t row, std::int64_t count) {
        row += tile;
        multiply_block<1>(weights, stored, count, {unit_data, channel_scales, {}, row, 0, sums}, x);
        finish(sums, epilogue, row, count, unit);
      });
    }
  }
}

// Billions of 8-bit operations a second that one thread reaches on registers alone.
static double dot_gops() {
  constexpr int kChains = 12, kRounds = 2000000;
  __m256i sums[kChains], weights = _mm256_set1_epi8(1);
#pragma GCC unroll 12
  for (int i = 0; i < kChains; ++i) sums[i] = _mm256_set1_epi8(static_cast<char>(i));
  const double start = thread_seconds();
  for (int round = 0; round < kRounds; ++round) {
#pragma GCC unroll 12
    for (int i = 0; i < kChains; ++i) {
      sums[i] = kept(_mm256_add_epi16(sums[i], _mm256_maddubs_epi16(kept(weights), sums[i])));
    }
  }
  const double seconds = thread_seconds() - start;
#pragma GCC unroll 12
  for (int i = 1; i < kChains; ++i) sums[0] = _mm256_add_epi16(sums[0], sums[i]);
  const double operations = 2.0 * 32 * kChains * kRounds;
  return _mm256_testz_si256(sums[0], sums[0]) ? 0.0 : operations / seconds / 1e9;
}

}  // namespace PDMESH_LEVEL
}  // namespace pdmesh
