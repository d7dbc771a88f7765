// Paged attention over the page-first cache, and its writes. Included once per level.
//
// A chunk of keys is brought into float32 once (keys transposed, so that sixteen scores are one
// register) and then used by every query row and every head that shares the KV head.
#pragma once

#include "rows_impl.h"

namespace pdmesh {
namespace PDMESH_LEVEL {

constexpr int kKeyVectors = kKeyChunk / 16;
constexpr int kQueryBlock = kMaxRows < 4 ? kMaxRows : 4;

static inline std::int64_t element_bytes(KvFormat format) {
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
  float* keys;          // [head_dim][kKeyChunk]
  float* values;        // [kKeyChunk][padded head_dim]
  float* key_scales;    // [kKeyChunk]
  float* value_scales;  // [kKeyChunk]
  bool has_scales;
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
  constexpr int per_lane = kFormat == KvFormat::kFloat32 ? 1 : kFormat == KvFormat::kBfloat16 ? 2 : 4;
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
  if constexpr (kFormat == KvFormat::kFloat32) return load_n(reinterpret_cast<const float*>(row), n);
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
  const std::int64_t padded = round_up(head_dim, 16);
  for (int i = 0; i < count; ++i) {
    for (std::int64_t d = 0; d < head_dim; d += 16) {
      const int n = head_dim - d < 16 ? static_cast<int>(head_dim - d) : 16;
      const std::uint8_t* row = rows[i] + d * (kFormat == KvFormat::kFloat32    ? 4
                                               : kFormat == KvFormat::kBfloat16 ? 2
                                                                                : 1);
      store(values + i * padded + d, load_value<kFormat>(row, n));
    }
  }
}

// Starts fetching a chunk's rows: they lie in blocks far apart, where the hardware cannot guess.
static void prefetch_chunk(const AttentionTask& task, std::int64_t first_key, std::int64_t end) {
  const KvView& kv = task.kv;
  const std::int64_t row_bytes = kv.head_dim * element_bytes(kv.format);
  const std::int64_t last = first_key + kKeyChunk < end ? first_key + kKeyChunk : end;
  for (const std::int64_t offset : {kv.key_offset, kv.value_offset}) {
    for (std::int64_t key = first_key; key < last;) {
      const std::int64_t in_block = key % kv.block_size;
      const std::int64_t run = kv.block_size - in_block < last - key ? kv.block_size - in_block : last - key;
      const std::int64_t slot = task.block_table[key / kv.block_size] * kv.block_size + in_block;
      const std::uint8_t* rows = row_at(kv, slot, offset);
      for (std::int64_t i = 0; i < run * row_bytes; i += 64) __builtin_prefetch(rows + i, 0, 3);
      key += run;
    }
  }
}

static void load_chunk(const AttentionTask& task, std::int64_t first_key, int count,
                       const Chunk& chunk) {
  const KvView& kv = task.kv;
  const std::uint8_t* key_rows[kKeyChunk];
  const std::uint8_t* value_rows[kKeyChunk];
  for (int i = 0; i < count; ++i) {
    const std::int64_t key = first_key + i;
    const std::int64_t slot =
        task.block_table[key / kv.block_size] * kv.block_size + key % kv.block_size;
    key_rows[i] = row_at(kv, slot, kv.key_offset);
    value_rows[i] = row_at(kv, slot, kv.value_offset);
    if (chunk.has_scales) {
      chunk.key_scales[i] = *scale_at(kv, slot, kv.key_scale_offset);
      chunk.value_scales[i] = *scale_at(kv, slot, kv.value_scale_offset);
    }
  }
  switch (kv.format) {
#define PDMESH_LOAD(format)                                      \
  case format:                                                   \
    load_keys<format>(key_rows, count, kv.head_dim, chunk.keys); \
    load_values<format>(value_rows, count, kv.head_dim, chunk.values); \
    break;
    PDMESH_LOAD(KvFormat::kFloat32)
    PDMESH_LOAD(KvFormat::kBfloat16)
    PDMESH_LOAD(KvFormat::kInt8)
    PDMESH_LOAD(KvFormat::kFp8E4m3)
#undef PDMESH_LOAD
  }
}

// One query's state: sums[padded head_dim], then the largest score, then the weights' sum.
// While a segment is open its weights' sum is kept as sixteen partial sums in `lanes`.
struct Query {
  const float* q;
  float* state;
  float* lanes;
  int visible;  // keys of this chunk that the query may see
};

template <int M, int NV>
static void score(const Query* queries, const float* keys, std::int64_t head_dim, F (*out)[4]) {
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) out[m][v] = zero();
  }
  F sums[M][NV];
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) sums[m][v] = zero();
  }
  for (std::int64_t d = 0; d < head_dim; ++d) {
    F k[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) k[v] = load(keys + d * kKeyChunk + v * 16);
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      const F q = set1(queries[m].q[d]);
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) sums[m][v] = fma(q, k[v], sums[m][v]);
    }
  }
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) out[m][v] = sums[m][v];
  }
}

// Adds the values, weighted, to `NW` registers of the sums, for each of M queries.
template <int M, int NW>
static void accumulate(const Query* queries, const float (*weights)[kKeyChunk], int visible,
                       const float* values, std::int64_t padded, std::int64_t d) {
  F sums[M][NW];
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int w = 0; w < NW; ++w) sums[m][w] = load(queries[m].state + d + w * 16);
  }
  for (int key = 0; key < visible; ++key) {
    F v[NW];
#pragma GCC unroll 4
    for (int w = 0; w < NW; ++w) v[w] = load(values + key * padded + d + w * 16);
#pragma GCC unroll 4
    for (int m = 0; m < M; ++m) {
      const F p = set1(weights[m][key]);
#pragma GCC unroll 4
      for (int w = 0; w < NW; ++w) sums[m][w] = fma(p, v[w], sums[m][w]);
    }
  }
#pragma GCC unroll 4
  for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
    for (int w = 0; w < NW; ++w) store(queries[m].state + d + w * 16, sums[m][w]);
  }
}

// Turns scores into weights, and brings the state to the new largest score.
static void weigh(const Query& query, F* scores, const Chunk& chunk, std::int64_t padded,
                  float* weights) {
  const float lowest = -3.0e38f;
  F top = set1(lowest);
  for (int v = 0; v < kKeyVectors; ++v) {
    const int n = query.visible - v * 16;
    if (n <= 0) break;
    if (chunk.has_scales) scores[v] = mul(scores[v], load(chunk.key_scales + v * 16));
    if (n < 16) scores[v] = keep_first(scores[v], set1(lowest), n);
    top = max(scores[v], top);
  }
  float& largest = query.state[padded];
  const float chunk_largest = max_lanes(top);
  const float next = chunk_largest > largest ? chunk_largest : largest;
  const F shift = set1(next);
  F lanes = load(query.lanes);
  if (next > largest) {  // otherwise the factor is exactly one
    const F decay = exp_lanes(sub(set1(largest), shift));
    largest = next;
    lanes = mul(lanes, decay);
    for (std::int64_t d = 0; d < padded; d += 16) {
      store(query.state + d, mul(load(query.state + d), decay));
    }
  }
  for (int v = 0; v < kKeyVectors; ++v) {
    const int n = query.visible - v * 16;
    if (n <= 0) {
      store(weights + v * 16, zero());
      continue;
    }
    F p = exp_lanes(sub(scores[v], shift));
    if (n < 16) p = keep_first(p, zero(), n);
    lanes = add(lanes, p);
    if (chunk.has_scales) p = mul(p, load(chunk.value_scales + v * 16));
    if (n < 16) p = keep_first(p, zero(), n);
    store(weights + v * 16, p);
  }
  store(query.lanes, lanes);
}

template <int M>
static void attend_block(const Query* queries, const Chunk& chunk, std::int64_t head_dim) {
  const std::int64_t padded = round_up(head_dim, 16);
  int visible = 0;
  for (int m = 0; m < M; ++m) {
    if (queries[m].visible > visible) visible = queries[m].visible;
  }
  F scores[M][4];
  float weights[M][kKeyChunk];
  switch ((visible + 15) / 16) {
    case 1: score<M, 1>(queries, chunk.keys, head_dim, scores); break;
    case 2: score<M, 2>(queries, chunk.keys, head_dim, scores); break;
    case 3: score<M, 3>(queries, chunk.keys, head_dim, scores); break;
    default: score<M, 4>(queries, chunk.keys, head_dim, scores); break;
  }
  for (int m = 0; m < M; ++m) weigh(queries[m], scores[m], chunk, padded, weights[m]);
  std::int64_t d = 0;
  for (; d + 64 <= padded; d += 64) {
    accumulate<M, 4>(queries, weights, visible, chunk.values, padded, d);
  }
  if (padded - d == 48) accumulate<M, 3>(queries, weights, visible, chunk.values, padded, d);
  if (padded - d == 32) accumulate<M, 2>(queries, weights, visible, chunk.values, padded, d);
  if (padded - d == 16) accumulate<M, 1>(queries, weights, visible, chunk.values, padded, d);
}

static void attend_queries(const Query* queries, std::int64_t count, const Chunk& chunk,
                           std::int64_t head_dim) {
  std::int64_t i = 0;
  for (; i + kQueryBlock <= count; i += kQueryBlock) {
    attend_block<kQueryBlock>(queries + i, chunk, head_dim);
  }
  for (; kQueryBlock > 2 && i + 2 < count; i += 3) attend_block<3>(queries + i, chunk, head_dim);
  for (; i + 1 < count; i += 2) attend_block<2>(queries + i, chunk, head_dim);
  for (; i < count; ++i) attend_block<1>(queries + i, chunk, head_dim);
}

static void open_state(float* state, float* lanes, std::int64_t padded) {
  for (std::int64_t d = 0; d < padded; d += 16) store(state + d, zero());
  state[padded] = -3.0e38f;
  state[padded + 1] = 0.0f;
  store(lanes, zero());
}

// Folds the next segment's state into the running one.
static void fold(float* running, const float* next, std::int64_t padded, bool is_first) {
  if (is_first) {
    std::memcpy(running, next, static_cast<std::size_t>(padded + 2) * 4);
    return;
  }
  const float largest = running[padded] > next[padded] ? running[padded] : next[padded];
  float factors[16] = {running[padded] - largest, next[padded] - largest};
  store(factors, exp_lanes(load(factors)));
  const F a = set1(factors[0]), b = set1(factors[1]);
  for (std::int64_t d = 0; d < padded; d += 16) {
    store(running + d, fma(load(next + d), b, mul(load(running + d), a)));
  }
  running[padded] = largest;
  running[padded + 1] = running[padded + 1] * factors[0] + next[padded + 1] * factors[1];
}

static void write_output(const float* state, std::int64_t head_dim, float* out) {
  const F sum = set1(state[round_up(head_dim, 16) + 1]);
  for (std::int64_t d = 0; d < head_dim; d += 16) {
    const int n = head_dim - d < 16 ? static_cast<int>(head_dim - d) : 16;
    store_n(out + d, div(load(state + d), sum), n);
  }
}

static void merge(const float* states, std::int64_t stride, std::int64_t num_states,
                  std::int64_t head_dim, float* out) {
  const std::int64_t padded = round_up(head_dim, 16);
  float running[1024 + 16];
  for (std::int64_t i = 0; i < num_states; ++i) fold(running, states + i * stride, padded, i == 0);
  write_output(running, head_dim, out);
}

static void attend(const AttentionTask& task) {
  const std::int64_t head_dim = task.kv.head_dim, padded = round_up(head_dim, 16);
  const std::int64_t num_queries = task.num_rows * task.num_heads;
  const std::int64_t state_floats = padded + 2;
  float* next = task.scratch;
  const auto take = [&next](std::int64_t floats) {
    float* taken = next;
    next += round_up(floats, 16);
    return taken;
  };
  const Chunk chunk = {take(head_dim * kKeyChunk), take(kKeyChunk * padded), take(kKeyChunk),
                       take(kKeyChunk), element_bytes(task.kv.format) == 1};
  float* lanes = take(num_queries * 16);
  float* states = take(num_queries * state_floats);
  float* running = take(num_queries * state_floats);
  Query* queries = reinterpret_cast<Query*>(next);
  const std::int64_t end = task.first_position + task.num_rows;  // one past the last key
  const std::int64_t last_key =
      (task.first_segment + task.num_segments) * kKeySegment < end
          ? (task.first_segment + task.num_segments) * kKeySegment
          : end;
  for (std::int64_t segment = 0; segment < task.num_segments; ++segment) {
    const std::int64_t first_key = (task.first_segment + segment) * kKeySegment;
    const std::int64_t segment_end = first_key + kKeySegment < end ? first_key + kKeySegment : end;
    // Rows before the segment's first key see nothing of it.
    const std::int64_t skipped_rows = first_key > task.first_position ? first_key - task.first_position : 0;
    for (std::int64_t i = skipped_rows * task.num_heads; i < num_queries; ++i) {
      open_state(states + i * state_floats, lanes + i * 16, padded);
    }
    for (std::int64_t start = first_key; start < segment_end; start += kKeyChunk) {
      const int count = static_cast<int>(segment_end - start < kKeyChunk ? segment_end - start : kKeyChunk);
      if (start + kKeyChunk < last_key) {
        prefetch_chunk(task, start + kKeyChunk, last_key);
      } else if (task.next != nullptr) {
        const std::int64_t next_key = task.next->first_segment * kKeySegment;
        prefetch_chunk(*task.next, next_key, task.next->first_position + task.next->num_rows);
      }
      load_chunk(task, start, count, chunk);
      std::int64_t num = 0;
      for (std::int64_t row = 0; row < task.num_rows; ++row) {
        const std::int64_t visible = task.first_position + row + 1 - start;
        if (visible <= 0) continue;
        for (std::int64_t head = 0; head < task.num_heads; ++head) {
          const std::int64_t i = row * task.num_heads + head;
          queries[num++] = {task.queries + row * task.query_stride + head * head_dim,
                            states + i * state_floats, lanes + i * 16,
                            static_cast<int>(visible < count ? visible : count)};
        }
      }
      attend_queries(queries, num, chunk, head_dim);
    }
    for (std::int64_t i = skipped_rows * task.num_heads; i < num_queries; ++i) {
      float* state = states + i * state_floats;
      state[padded + 1] = sum_lanes(load(lanes + i * 16));
      if (task.partial == nullptr) {
        fold(running + i * state_floats, state, padded, segment == 0);
      } else {
        std::memcpy(task.partial + i * attention_state_floats(head_dim), state,
                    static_cast<std::size_t>(state_floats) * 4);
      }
    }
  }
  if (task.partial != nullptr) return;
  for (std::int64_t row = 0; row < task.num_rows; ++row) {
    for (std::int64_t head = 0; head < task.num_heads; ++head) {
      write_output(running + (row * task.num_heads + head) * state_floats, head_dim,
                   task.out + row * task.out_stride + head * head_dim);
    }
  }
}

}  // namespace PDMESH_LEVEL
}  // namespace pdmesh
