// See storage.h.
#include "storage.h"

#include <algorithm>
#include <cstring>

#include "numerics.h"

namespace pdmesh {

namespace {

std::uint16_t half_bits(const std::uint8_t* p) {
  std::uint16_t bits;
  std::memcpy(&bits, p, 2);
  return bits;
}

// Channel `lane` (of kUnit) and input `i` of an integer unit, as [8][2 halves][16][4] bytes.
std::int64_t byte_offset(std::int64_t i, std::int64_t lane) {
  return i / 4 * 128 + lane * 4 + i % 4;
}

int channel_weight(const Linear& weights, const std::uint8_t* unit, std::int64_t lane,
                   std::int64_t i) {
  const std::uint8_t* block = unit + i / kTileInputs * unit_bytes(weights.format, kTileInputs);
  const std::int64_t half = lane / 16, part = i % kTileInputs / kGroup;
  const std::uint8_t packed = block[half * 512 + i % kGroup / 4 * 64 + lane % 16 * 4 + i % 4];
  const std::uint8_t* step = block + 1024 + ((half * 2 + part) * 16 + lane % 16) * 2;
  const int code = part == 0 ? packed & 15 : packed >> 4;
  return (half_bits(step) * code + half_bits(step + 128)) / 256 - 128;
}

float integer_weight(const Linear& weights, const std::uint8_t* unit, std::int64_t lane,
                     std::int64_t i) {
  const std::int64_t block_bytes = unit_bytes(weights.format, kGroup);
  if (weights.format == WeightFormat::kInt8) return unit[byte_offset(i, lane)] - 128;
  if (weights.format == WeightFormat::kInt4Channel) {
    return static_cast<float>(channel_weight(weights, unit, lane, i));
  }
  const std::uint8_t* block = unit + i / kGroup * block_bytes;
  const std::int64_t input = i % kGroup;
  if (weights.format == WeightFormat::kInt4) {
    const std::uint8_t packed = block[byte_offset(input % 16, lane)];
    const float code = static_cast<float>(input < 16 ? packed & 15 : packed >> 4);
    const float scale = float_from_half(half_bits(block + 512 + lane * 2));
    return scale * code + float_from_half(half_bits(block + 576 + lane * 2));
  }
  const float code = static_cast<float>(block[byte_offset(input, lane)] - 128);
  return code * float_from_half(half_bits(block + 1024 + lane * 2));
}

}  // namespace

const char* status_text(std::int32_t status) {
  switch (static_cast<Status>(status)) {
    case Status::kOk: return "";
    case Status::kUnknownLevel: return "this machine cannot run the instruction-set level";
    case Status::kBadConfig: return "the model configuration is not supported";
    case Status::kBadTokenId: return "a token id is outside the vocabulary";
    case Status::kBadPosition: return "positions do not match the sequence lengths";
    case Status::kBadBlock: return "a block or slot is outside the cache or the block table";
    case Status::kBadRow: return "row indexes are inconsistent";
    case Status::kBadLayer: return "the layers are none of the model's";
    case Status::kOutOfMemory: return "out of memory or threads";
  }
  return "unknown status";
}

KvLayout::KvLayout(KvFormat format, std::int64_t num_layers, std::int64_t num_kv_heads,
                   std::int64_t head_dim, std::int64_t block_size)
    : format_(format), num_kv_heads_(num_kv_heads), head_dim_(head_dim), block_size_(block_size) {
  const bool has_scales = format == KvFormat::kInt8 || format == KvFormat::kFp8E4m3;
  const std::int64_t element = has_scales ? 1 : format == KvFormat::kBfloat16 ? 2 : 4;
  const std::int64_t num_rows = num_layers * 2 * num_kv_heads * block_size;
  row_bytes_ = head_dim * element;
  scales_offset_ = num_rows * row_bytes_;
  block_bytes_ = scales_offset_ + (has_scales ? num_rows * 4 : 0);
}

KvView KvLayout::view(std::uint8_t* base, std::int64_t layer, std::int64_t head) const {
  const std::int64_t key_row = (layer * 2 * num_kv_heads_ + head) * block_size_;
  const std::int64_t value_row = key_row + num_kv_heads_ * block_size_;
  return {format_,
          base,
          block_bytes_,
          block_size_,
          head_dim_,
          key_row * row_bytes_,
          value_row * row_bytes_,
          scales_offset_ + key_row * 4,
          scales_offset_ + value_row * 4};
}

void ActivationRows::reserve(std::int64_t num_rows, std::int64_t max_k) {
  const std::int64_t groups = ceil_div(max_k, kGroup);
  num_rows = round_up(num_rows, kTileRows);
  codes_.reserve(num_rows * 2 * round_up(max_k, kTileInputs));
  scales_.reserve(num_rows * groups);
  sums_.reserve(num_rows * groups);
  offsets_.reserve(num_rows * std::max<std::int64_t>(groups, 2));
}

void ActivationRows::quantize(const Kernels& kernels, WeightFormat format, std::int64_t row,
                              const float* x, std::int64_t k) {
  if (is_wide(format)) {
    std::int8_t* codes = codes_.data() + wide_row_offset(row, round_up(k, kTileInputs));
    kernels.quantize_wide(x, k, codes, scales_.data() + row, offsets_.data() + row * 2);
  } else if (format != WeightFormat::kFloat32 && format != WeightFormat::kBfloat16) {
    const std::int64_t first = row * ceil_div(k, kGroup);
    kernels.quantize(x, k, codes_.data() + first * kGroup, scales_.data() + first,
                     sums_.data() + first, offsets_.data() + first);
  }
}

Activations ActivationRows::view(WeightFormat format, const float* x, std::int64_t stride,
                                 std::int64_t k) const {
  const std::int64_t groups =
      is_wide(format) ? round_up(k, kTileInputs) / kGroup : ceil_div(k, kGroup);
  return {x, stride, codes_.data(), scales_.data(), sums_.data(), offsets_.data(), groups};
}

Linear linear_view(const pdmesh_linear& linear) {
  return {static_cast<WeightFormat>(linear.format), linear.n, linear.k,
          static_cast<const std::uint8_t*>(linear.data), linear.scales};
}

void dequantize_row(const Linear& weights, std::int64_t row, float* out) {
  const std::uint8_t* unit = weights.data + row / kUnit * unit_bytes(weights.format, weights.k);
  const std::int64_t lane = row % kUnit;
  switch (weights.format) {
    case WeightFormat::kFloat32:
      for (std::int64_t i = 0; i < weights.k; ++i) {
        std::memcpy(out + i, unit + (i * kUnit + lane) * 4, 4);
      }
      return;
    case WeightFormat::kBfloat16:
      for (std::int64_t i = 0; i < weights.k; ++i) {
        out[i] = float_from_bfloat16(half_bits(unit + i / 2 * 128 + lane * 4 + i % 2 * 2));
      }
      return;
    default: break;
  }
  for (std::int64_t i = 0; i < weights.k; ++i) {
    out[i] = integer_weight(weights, unit, lane, i);
    if (is_wide(weights.format)) out[i] *= weights.scales[row];
  }
}

}  // namespace pdmesh
