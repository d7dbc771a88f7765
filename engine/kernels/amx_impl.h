// Products of the formats with a scale per channel on AMX tiles. Included by level amx only.
//
// Tiles give the same exact integer sums as `wide_block`, so the results have the same bits. The
// grouped formats gain nothing here: taking sums out of the tiles for every group costs what the
// products save (measured: 1.0 to 1.2 times the speed of VNNI).
#pragma once

#include "dot_linear_impl.h"

namespace pdmesh {
namespace PDMESH_LEVEL {

struct alignas(64) TileConfig {
  std::uint8_t palette = 1, start_row = 0, reserved[14] = {};
  std::uint16_t row_bytes[16] = {};
  std::uint8_t rows[16] = {};
};

// Tiles 0 to 5, sums and activations, have this many rows; 6 and 7 are for weights.
static void configure_tiles(int rows) {
  TileConfig config;
  for (int i = 0; i < 8; ++i) {
    config.row_bytes[i] = 64;
    config.rows[i] = static_cast<std::uint8_t>(i < 6 ? rows : kTileRows);
  }
  // GCC takes only the first bytes for used, and would drop the stores to the others.
  asm volatile("" : : "r"(&config) : "memory");
  _tile_loadconfig(&config);
}

// What the core's other parts do while tiles multiply.
enum class Beside { kNothing, kFetch, kExpand };

template <Beside kBeside>
static inline void work_beside(const std::uint8_t* stored, int quarter, std::uint8_t* expanded,
                               const std::int8_t* next_codes) {
  // Rows of tiles are no stream that the hardware would guess.
#pragma GCC unroll 8
  for (int line = 0; line < 8; ++line) {
    __builtin_prefetch(next_codes + quarter * 512 + line * 64, 0, 3);
  }
  if (kBeside == Beside::kExpand) expand_quarter(stored, quarter, expanded);
  if (kBeside == Beside::kFetch) {
    const std::uint8_t* ahead = stored + kPrefetchBytes + quarter * (kWideBytes / 4);
#pragma GCC unroll 8
    for (int line = 0; line < kWideBytes / 4 / 64; ++line) {
      __builtin_prefetch(ahead + line * 64, 0, 3);
    }
  }
}

// `row` begins a tile, of which all rows are read: ActivationRows has room for sixteen. `bytes` are
// the unit's as int8; with kExpand they are made of those in `stored`.
template <Beside kBeside>
static void tile_block(const std::uint8_t* stored, std::uint8_t* bytes, const float* channel_scales,
                       const Activations& x, std::int64_t row, int count, const Epilogue& epilogue,
                       std::int64_t unit) {
  constexpr int kStoredBytes = kBeside == Beside::kExpand ? kChannelBytes : kWideBytes;
  const std::int64_t k = x.groups * kGroup;
  const std::int8_t* codes = x.codes + wide_row_offset(row, k);
  if (kBeside == Beside::kExpand) expand_codes(stored, bytes);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (std::int64_t i = 0; i < k; i += kTileInputs, codes += 2 * kTileBytes, bytes += kWideBytes) {
    // Expanding is a step ahead, and at the end once too often.
    if (i + kTileInputs < k) stored += kStoredBytes;
    work_beside<kBeside>(stored, 0, bytes + kWideBytes, codes + 2 * kTileBytes);
    _tile_loadd(6, bytes, 128);
    _tile_loadd(4, codes, kTileInputs);
    _tile_dpbsud(0, 4, 6);
    work_beside<kBeside>(stored, 1, bytes + kWideBytes, codes + 2 * kTileBytes);
    _tile_loadd(7, bytes + 64, 128);
    _tile_dpbsud(1, 4, 7);
    work_beside<kBeside>(stored, 2, bytes + kWideBytes, codes + 2 * kTileBytes);
    _tile_loadd(5, codes + kTileBytes, kTileInputs);
    _tile_dpbsud(2, 5, 6);
    work_beside<kBeside>(stored, 3, bytes + kWideBytes, codes + 2 * kTileBytes);
    _tile_dpbsud(3, 5, 7);
  }
  alignas(64) std::int32_t sums[4][kTileRows][16];
  _tile_stored(0, sums[0], 64);
  _tile_stored(1, sums[1], 64);
  _tile_stored(2, sums[2], 64);
  _tile_stored(3, sums[3], 64);
  const F low_scales = load(channel_scales), high_scales = load(channel_scales + 16);
  for_kind(epilogue.kind, [&](auto kind) {
    for (int r = 0; r < count; ++r) {
      finish_row<kind()>(
          wide_sum(iload(sums[0][r]), iload(sums[2][r]), x, row + r, low_scales),
          wide_sum(iload(sums[1][r]), iload(sums[3][r]), x, row + r, high_scales), epilogue, row + r,
          unit);
    }
  });
}

static void tile_linear(const Linear& weights, const Activations& x, std::int64_t rows,
                        std::int64_t first_unit, std::int64_t last_unit, const Epilogue& epilogue,
                        std::uint8_t* scratch) {
  const std::int64_t bytes = unit_bytes(weights.format, weights.k);
  configure_tiles(rows < kTileRows ? static_cast<int>(rows) : kTileRows);
  const bool expands = weights.format == WeightFormat::kInt4Channel;
  for (std::int64_t unit = first_unit; unit < last_unit; ++unit) {
    const std::uint8_t* data = weights.data + unit * bytes;
    // Tiles only read what is not expanded.
    std::uint8_t* wide = expands ? scratch : const_cast<std::uint8_t*>(data);
    for (std::int64_t row = 0; row < rows; row += kTileRows) {
      const int count = rows - row < kTileRows ? static_cast<int>(rows - row) : kTileRows;
      const auto multiply = row > 0    ? &tile_block<Beside::kNothing>
                            : expands ? &tile_block<Beside::kExpand>
                                      : &tile_block<Beside::kFetch>;
      multiply(data, wide, weights.scales + unit * kUnit, x, row, count, epilogue, unit);
    }
  }
  _tile_release();
}

// Below this, tiles are too empty to pay.
constexpr std::int64_t kMinTileRows = 2;

static void linear_or_tiles(const Linear& weights, const Activations& x, std::int64_t rows,
                            std::int64_t first_unit, std::int64_t last_unit,
                            const Epilogue& epilogue, std::uint8_t* scratch) {
  const bool fits = is_wide(weights.format) && rows >= kMinTileRows;
  const auto function = fits ? &tile_linear : &linear;
  function(weights, x, rows, first_unit, last_unit, epilogue, scratch);
}

}  // namespace PDMESH_LEVEL
}  // namespace pdmesh
