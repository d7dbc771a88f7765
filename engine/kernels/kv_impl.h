// Keys and values in and out of the paged cache, in its formats. Included once per level.
#pragma once

#include "attention_weights_impl.h"

namespace pdmesh {
namespace PDMESH_LEVEL {

static constexpr std::int64_t element_bytes(KvFormat format) {
  return format == KvFormat::kFloat32 ? 4 : format == KvFormat::kBfloat16 ? 2 : 1;
}

static inline F float_from_fp8(I bytes) {
  const I sign = shl<24>(iand(bytes, iset1(0x80)));
  const I low = iand(bytes, iset1(0x7f));
  const I normal = iadd(shl<20>(low), iset1(120 << 23));
  const I denormal = as_int(mul(to_float(low), set1(1.0f / 512.0f)));
  return as_float(ior(select_less(low, iset1(8), denormal, normal), sign));
}

// Ties to even; finite input of magnitude up to 448.
static inline I fp8_from_float(F x) {
  const I bits = as_int(x);
  const I low = iand(bits, iset1(0x7fffffff));
  const I odd = iand(shr<20>(low), iset1(1));
  const I rounded = shr<20>(isub(iadd(iadd(low, iset1(0x7ffff)), odd), iset1(120 << 23)));
  const I denormal = to_int(mul(as_float(low), set1(512.0f)));
  const I magnitude = select_less(low, iset1(121 << 23), denormal, umin(rounded, iset1(0x7e)));
  return ior(magnitude, shr<24>(iand(bits, iset1(static_cast<std::int32_t>(0x80000000u)))));
}

static inline I bfloat16_from_float(F x) {
  const I bits = as_int(x);
  const I odd = iand(shr<16>(bits), iset1(1));
  const I rounded = shr<16>(iadd(iadd(bits, iset1(0x7fff)), odd));
  const I infinity = iset1(0x7f800000);
  const I quiet_nan = ior(shr<16>(bits), iset1(0x40));
  return select_less(infinity, iand(bits, iset1(0x7fffffff)), quiet_nan, rounded);
}

static inline float* scale_at(const KvView& kv, std::int64_t slot, std::int64_t offset) {
  std::uint8_t* block = kv.base + slot / kv.block_size * kv.block_bytes;
  return reinterpret_cast<float*>(block + offset) + slot % kv.block_size;
}

static inline std::uint8_t* row_at(const KvView& kv, std::int64_t slot, std::int64_t offset) {
  const std::int64_t row_bytes = kv.head_dim * element_bytes(kv.format);
  std::uint8_t* block = kv.base + slot / kv.block_size * kv.block_bytes;
  return block + offset + slot % kv.block_size * row_bytes;
}

static void write_row(const KvView& kv, std::uint8_t* row, float* scale, const float* x) {
  const std::int64_t n = kv.head_dim;
  float inverse = 1.0f;
  if (scale != nullptr) {
    I top = iset1(0);
    for (std::int64_t i = 0; i < n; i += 16) {
      const int lanes = n - i < 16 ? static_cast<int>(n - i) : 16;
      top = umax(top, iand(as_int(load_n(x + i, lanes)), iset1(0x7fffffff)));
    }
    const std::uint32_t bits = umax_lanes(top);
    const bool is_finite = bits < 0x7f800000u;
    const float amax = float_from_bits(bits);
    const bool has_codes = is_finite && amax >= kSmallestAmax;
    const float limit = kv.format == KvFormat::kInt8 ? 127.0f : 448.0f;
    inverse = has_codes ? limit / amax : 0.0f;
    *scale = has_codes ? amax / limit : is_finite ? 0.0f : float_from_bits(0x7fc00000u);
    if (!has_codes) {
      std::memset(row, 0, static_cast<std::size_t>(n));
      return;
    }
  }
  for (std::int64_t i = 0; i < n; i += 16) {
    const int lanes = n - i < 16 ? static_cast<int>(n - i) : 16;
    const F v = load_n(x + i, lanes);
    std::uint16_t wide[16];
    std::uint8_t narrow[16];
    switch (kv.format) {
      case KvFormat::kFloat32: store_n(reinterpret_cast<float*>(row) + i, v, lanes); break;
      case KvFormat::kBfloat16:
        store_u16(wide, bfloat16_from_float(v));
        std::memcpy(row + i * 2, wide, static_cast<std::size_t>(lanes) * 2);
        break;
      case KvFormat::kInt8:
        store_u8(narrow, to_int(mul(v, set1(inverse))));
        std::memcpy(row + i, narrow, static_cast<std::size_t>(lanes));
        break;
      case KvFormat::kFp8E4m3: {
        const F limit = set1(448.0f);
        const F scaled = max(set1(-448.0f), min(limit, mul(v, set1(inverse))));
        store_u8(narrow, fp8_from_float(scaled));
        std::memcpy(row + i, narrow, static_cast<std::size_t>(lanes));
        break;
      }
    }
  }
}

static void write_kv(const KvView& kv, std::int64_t slot, const float* key, const float* value) {
  const bool has_scales = element_bytes(kv.format) == 1;
  write_row(kv, row_at(kv, slot, kv.key_offset),
            has_scales ? scale_at(kv, slot, kv.key_scale_offset) : nullptr, key);
  write_row(kv, row_at(kv, slot, kv.value_offset),
            has_scales ? scale_at(kv, slot, kv.value_scale_offset) : nullptr, value);
}

// One chunk of keys and values in float32, in a thread's scratch.
struct Chunk {
  float* keys;    // [head_dim][kKeyChunk]
  float* values;  // [kKeyChunk][padded head_dim]
  ChunkScales scales;
  Rounding rounding;
};

// The `element`-th of the values that each 32-bit lane of a row holds.
static inline F unpack_lane(KvFormat format, I lane, int element) {
  switch (format) {
    case KvFormat::kFloat32: return as_float(lane);
    case KvFormat::kBfloat16:
      return element == 0 ? as_float(shl<16>(lane))
                          : as_float(iand(lane, iset1(static_cast<std::int32_t>(0xffff0000u))));
    default: break;
  }
  const bool is_int8 = format == KvFormat::kInt8;
  I byte = lane;
  if (element == 0) byte = is_int8 ? sar<24>(shl<24>(lane)) : lane;
  if (element == 1) byte = is_int8 ? sar<24>(shl<16>(lane)) : shr<8>(lane);
  if (element == 2) byte = is_int8 ? sar<24>(shl<8>(lane)) : shr<16>(lane);
  if (element == 3) byte = is_int8 ? sar<24>(lane) : shr<24>(lane);
  return is_int8 ? to_float(byte) : float_from_fp8(iand(byte, iset1(255)));
}

template <KvFormat kFormat>
static void load_keys(const std::uint8_t* const* rows, int count, std::int64_t head_dim,
                      float* keys) {
  constexpr int per_lane = 4 / static_cast<int>(element_bytes(kFormat));
  const std::int64_t lanes = head_dim / per_lane;
  for (int group = 0; group * 16 < count; ++group) {
    const int valid = count - group * 16 < 16 ? count - group * 16 : 16;
    for (std::int64_t start = 0; start < lanes; start += 16) {
      const int n = lanes - start < 16 ? static_cast<int>(lanes - start) : 16;
      I r[16];
      for (int i = 0; i < valid; ++i) r[i] = iload_n(rows[group * 16 + i] + start * 4, n);
      for (int i = valid; i < 16; ++i) r[i] = iset1(0);
      transpose(r);
      for (int i = 0; i < n; ++i) {
        float* out = keys + (start + i) * per_lane * kKeyChunk + group * 16;
#pragma GCC unroll 4
        for (int element = 0; element < per_lane; ++element) {
          store(out + element * kKeyChunk, unpack_lane(kFormat, r[i], element));
        }
      }
    }
  }
}

template <KvFormat kFormat>
static inline F load_value(const std::uint8_t* row, int n) {
  if constexpr (kFormat == KvFormat::kFloat32) {
    return load_n(reinterpret_cast<const float*>(row), n);
  }
  if constexpr (kFormat == KvFormat::kBfloat16) {
    std::uint16_t part[16] = {};
    if (n < 16) std::memcpy(part, row, static_cast<std::size_t>(n) * 2);
    return as_float(shl<16>(load_u16(n < 16 ? part : reinterpret_cast<const std::uint16_t*>(row))));
  }
  std::uint8_t part[16] = {};
  if (n < 16) std::memcpy(part, row, static_cast<std::size_t>(n));
  return unpack_lane(kFormat, load_u8(n < 16 ? part : row), 0);
}

template <KvFormat kFormat>
static void load_values(const std::uint8_t* const* rows, int count, std::int64_t head_dim,
                        float* values) {
  const std::int64_t padded = padded_dims(head_dim);
  for (int i = 0; i < count; ++i) {
    for (std::int64_t d = 0; d < padded; d += 16) {
      const std::int64_t left = head_dim - d;
      const int n = left >= 16 ? 16 : left > 0 ? static_cast<int>(left) : 0;
      const std::uint8_t* row = rows[i] + d * element_bytes(kFormat);
      store(values + i * padded + d, load_value<kFormat>(row, n));
    }
  }
}

// Fetches the same rows of several heads at once, one head after the other.
struct FetchNow {
  void operator()(const std::uint8_t* rows, std::int64_t bytes, std::int64_t head_bytes,
                  std::int64_t num_heads) const {
    for (std::int64_t head = 0; head < num_heads; ++head, rows += head_bytes) {
      for (std::int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(rows + i, 0, 3);
    }
  }
};

// Starts fetching a chunk's rows: they lie in blocks far apart, where the hardware cannot guess.
template <class Fetch>
static void prefetch_chunk(const AttentionTask& task, std::int64_t first_key, std::int64_t end,
                           Fetch& fetch) {
  const KvView& kv = task.kv;
  const std::int64_t row_bytes = kv.head_dim * element_bytes(kv.format);
  const bool has_scales = element_bytes(kv.format) == 1;
  const std::int64_t last = first_key + kKeyChunk < end ? first_key + kKeyChunk : end;
  for (std::int64_t key = first_key; key < last;) {
    const std::int64_t in_block = key % kv.block_size, in_run = kv.block_size - in_block;
    const std::int64_t run = in_run < last - key ? in_run : last - key;
    const std::uint8_t* block = kv.base + task.block_table[key / kv.block_size] * kv.block_bytes;
    const std::uint8_t* keys = block + kv.key_offset + in_block * row_bytes;
    const std::uint8_t* values = block + kv.value_offset + in_block * row_bytes;
    const std::int64_t heads = task.fetched_heads, head_bytes = kv.block_size * row_bytes;
    fetch(keys, run * row_bytes, head_bytes, heads);
    fetch(values, run * row_bytes, head_bytes, heads);
    if (has_scales) {
      const std::uint8_t* scales = block + in_block * 4;
      fetch(scales + kv.key_scale_offset, run * 4, kv.block_size * 4, heads);
      fetch(scales + kv.value_scale_offset, run * 4, kv.block_size * 4, heads);
    }
    key += run;
  }
}

// Where a chunk's keys and values lie.
struct ChunkRows {
  const std::uint8_t* keys[kKeyChunk];
  const std::uint8_t* values[kKeyChunk];
};

// Finds a chunk's rows, and reads their scales where the format has them.
static void find_rows(const AttentionTask& task, std::int64_t first_key, int count,
                      const ChunkScales& scales, ChunkRows& rows) {
  const KvView& kv = task.kv;
  const bool has_scales = element_bytes(kv.format) == 1;
  const std::int64_t row_bytes = kv.head_dim * element_bytes(kv.format);
  for (int i = 0; i < count;) {
    const std::int64_t key = first_key + i, in_block = key % kv.block_size;
    const std::uint8_t* block = kv.base + task.block_table[key / kv.block_size] * kv.block_bytes;
    const std::int64_t in_run = kv.block_size - in_block;
    const int last = in_run < count - i ? i + static_cast<int>(in_run) : count;
    const std::uint8_t* key_row = block + kv.key_offset + in_block * row_bytes;
    const std::uint8_t* value_row = block + kv.value_offset + in_block * row_bytes;
    if (has_scales) {
      const std::size_t bytes = static_cast<std::size_t>(last - i) * 4;
      std::memcpy(scales.keys + i, block + kv.key_scale_offset + in_block * 4, bytes);
      std::memcpy(scales.values + i, block + kv.value_scale_offset + in_block * 4, bytes);
    }
    for (; i < last; ++i, key_row += row_bytes, value_row += row_bytes) {
      rows.keys[i] = key_row;
      rows.values[i] = value_row;
    }
  }
}

static void load_chunk(const AttentionTask& task, std::int64_t first_key, int count,
                       const Chunk& chunk) {
  const std::int64_t head_dim = task.kv.head_dim;
  ChunkRows rows;
  find_rows(task, first_key, count, chunk.scales, rows);
  switch (task.kv.format) {
#define PDMESH_LOAD(format)                                     \
  case format:                                                  \
    load_keys<format>(rows.keys, count, head_dim, chunk.keys);  \
    load_values<format>(rows.values, count, head_dim, chunk.values); \
    break;
    PDMESH_LOAD(KvFormat::kFloat32)
    PDMESH_LOAD(KvFormat::kBfloat16)
    PDMESH_LOAD(KvFormat::kInt8)
    PDMESH_LOAD(KvFormat::kFp8E4m3)
#undef PDMESH_LOAD
  }
}

}  // namespace PDMESH_LEVEL
}  // namespace pdmesh
