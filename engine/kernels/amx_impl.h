// Products of the formats with a scale per channel on AMX tiles. Included by level amx only.
//
// Tiles give the same exact integer sums as `wide_block`, so the results have the same bits. The
// grouped formats gain nothing here: taking sums out of the tiles for every group costs what the
// products save (measured: 1.0 to 1.2 times the speed of VNNI).
#pragma once

#include "linear_impl.h"

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

// The int8 bytes of a unit, 64 inputs at a time: those of int4_channel are expanded for the first
// rows, and the others find them in `expanded`.
struct WideUnit {
  const std::uint8_t* data;
  std::uint8_t* expanded;  // null: int8
  bool is_first;

  const std::uint8_t* at(std::int64_t i) const {
    if (expanded == nullptr) return data + i * kUnit;
    std::uint8_t* bytes = expanded + i * kUnit;
    if (is_first) expand_codes(data + i / kTileInputs * kChannelBytes, bytes);
    return bytes;
  }
  void fetch(std::int64_t i) const {
    if (expanded != nullptr || !is_first) return;
#pragma GCC unroll 32
    for (int line = 0; line < kWideBytes / 64; ++line) {
      __builtin_prefetch(data + i * kUnit + kPrefetchBytes + line * 64, 0, 3);
    }
  }
};

// `row` begins a tile, of which all rows are read: ActivationRows has room for sixteen.
static void tile_block(const WideUnit& unit, const float* channel_scales, const Activations& x,
                       std::int64_t row, int count, float* out) {
  const std::int64_t k = x.groups * kGroup;
  const std::int8_t* codes = x.codes + wide_row_offset(row, k);
  const std::uint8_t* next = unit.at(0);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (std::int64_t i = 0; i < k; i += kTileInputs, codes += 2 * kTileBytes) {
    const std::uint8_t* block = next;
    unit.fetch(i);
    // A step ahead, so that expanding and multiplying overlap.
    if (i + kTileInputs < k) next = unit.at(i + kTileInputs);
    _tile_loadd(6, block, 128);
    _tile_loadd(4, codes, kTileInputs);
    _tile_dpbsud(0, 4, 6);
    _tile_loadd(7, block + 64, 128);
    _tile_dpbsud(1, 4, 7);
    _tile_loadd(5, codes + kTileBytes, kTileInputs);
    _tile_dpbsud(2, 5, 6);
    _tile_dpbsud(3, 5, 7);
  }
  alignas(64) std::int32_t sums[4][kTileRows][16];
  _tile_stored(0, sums[0], 64);
  _tile_stored(1, sums[1], 64);
  _tile_stored(2, sums[2], 64);
  _tile_stored(3, sums[3], 64);
  for (int r = 0; r < count; ++r) {
    for (int half = 0; half < 2; ++half) {
      const F sum = wide_sum(iload(sums[half][r]), iload(sums[2 + half][r]), x, row + r,
                             channel_scales + half * 16);
      store(out + r * kUnit + half * 16, sum);
    }
  }
}

static void tile_linear(const Linear& weights, const Activations& x, std::int64_t rows,
                        std::int64_t first_unit, std::int64_t last_unit, const Epilogue& epilogue,
                        std::uint8_t* scratch) {
  const std::int64_t bytes = unit_bytes(weights.format, weights.k);
  float sums[kTileRows * kUnit];
  configure_tiles(rows < kTileRows ? static_cast<int>(rows) : kTileRows);
  std::uint8_t* expanded = weights.format == WeightFormat::kInt4Channel ? scratch : nullptr;
  for (std::int64_t unit = first_unit; unit < last_unit; ++unit) {
    const std::uint8_t* data = weights.data + unit * bytes;
    for (std::int64_t row = 0; row < rows; row += kTileRows) {
      const int count = rows - row < kTileRows ? static_cast<int>(rows - row) : kTileRows;
      tile_block({data, expanded, row == 0}, weights.scales + unit * kUnit, x, row, count, sums);
      finish(sums, epilogue, row, count, unit);
    }
  }
  _tile_release();
}

// Below this, tiles are too empty to pay.
constexpr std::int64_t kMinTileRows = 4;

static void linear_or_tiles(const Linear& weights, const Activations& x, std::int64_t rows,
                            std::int64_t first_unit, std::int64_t last_unit,
                            const Epilogue& epilogue, std::uint8_t* scratch) {
  const bool fits = is_wide(weights.format) && rows >= kMinTileRows;
  const auto function = fits ? &tile_linear : &linear;
  function(weights, x, rows, first_unit, last_unit, epilogue, scratch);
}

}  // namespace PDMESH_LEVEL
}  // namespace pdmesh
