// The products of attention on AMX tiles, for few queries at a time. Included by level amx only.
//
// Scores are computed transposed, keys x queries: rows of keys are tiles as they lie in the cache,
// and only the queries are rearranged, once per task. Weights then meet values in pairs of keys
// that are sixteen apart.
#pragma once

#include "amx_impl.h"
#include "vector_attention_impl.h"

namespace pdmesh {
namespace PDMESH_LEVEL {

constexpr int kTile = 16;          // rows of a tile, and 32-bit columns
constexpr int kTileWords = 256;    // of 32 bits
constexpr int kKeyTiles = kKeyChunk / kTile;
constexpr int kStepsPerChunk = kKeyChunk / kStep;

// Tiles by what they hold; products of different names overlap in time, and so do those of one.
#define PDMESH_TILE_SCORES 0   // 16 keys x queries
#define PDMESH_TILE_QUERIES 1  // 16 pairs of dimensions x queries
#define PDMESH_TILE_ROWS 2     // 16 keys x 32 dimensions, or 16 pairs of keys x 16 dimensions
#define PDMESH_TILE_WEIGHTS 3  // queries x 32 keys: a first step
#define PDMESH_TILE_MORE_WEIGHTS 4  // and a second
#define PDMESH_TILE_SUMS 5     // queries x 16 dimensions

// What the thread's tiles are configured for: `queries` x `columns` of them; 0 when they are not.
struct TileShape {
  int rows;
  int columns;
};
static thread_local TileShape tile_shape = {0, 0};

static void shape_tiles(TileShape shape) {
  if (tile_shape.rows == shape.rows && tile_shape.columns == shape.columns) return;
  TileConfig config;
  for (int i = 0; i < 8; ++i) {
    config.row_bytes[i] = 64;
    config.rows[i] = kTile;
  }
  config.row_bytes[PDMESH_TILE_SCORES] = static_cast<std::uint16_t>(shape.columns * 4);
  config.row_bytes[PDMESH_TILE_QUERIES] = static_cast<std::uint16_t>(shape.columns * 4);
  for (const int i : {PDMESH_TILE_WEIGHTS, PDMESH_TILE_MORE_WEIGHTS, PDMESH_TILE_SUMS}) {
    config.rows[i] = static_cast<std::uint8_t>(shape.rows);
  }
  asm volatile("" : : "r"(&config) : "memory");  // or GCC 12 drops the stores
  _tile_loadconfig(&config);
  tile_shape = shape;
}

static void release_tiles() {
  _tile_release();
  tile_shape = {0, 0};
}

// Between writing memory and loading a tile from it: compilers do not see that tiles read.
static inline void settle() { asm volatile("" : : : "memory"); }

// The first `n` of 32 numbers of a row as bfloat16, zero in place of the others.
template <KvFormat kFormat>
static inline I wide_values(const std::uint8_t* row, std::int64_t n) {
  const __mmask32 mask = n >= kStep ? ~__mmask32{0} : (__mmask32{1} << n) - 1;
  if constexpr (kFormat == KvFormat::kBfloat16) return _mm512_maskz_loadu_epi16(mask, row);
  const __m256i bytes = _mm256_maskz_loadu_epi8(mask, row);
  if constexpr (kFormat == KvFormat::kInt8) {
    const F low = to_float(_mm512_cvtepi8_epi32(_mm256_castsi256_si128(bytes)));
    const F high = to_float(_mm512_cvtepi8_epi32(_mm256_extracti128_si256(bytes, 1)));
    // The upper half of each float is the number: small integers have nothing in the lower.
    alignas(64) static const std::uint16_t kUpper[kStep] = {
        1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
        33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
    return _mm512_permutex2var_epi16(as_int(low), iload(kUpper), as_int(high));
  }
  // As `float_from_fp8`; magnitudes below eight are multiples of 1/512.
  alignas(64) static const std::uint16_t kSmall[kStep] = {0,      0x3b00, 0x3b80, 0x3bc0,
                                                          0x3c00, 0x3c20, 0x3c40, 0x3c60};
  const I code = _mm512_cvtepu8_epi16(bytes);
  const I magnitude = iand(code, _mm512_set1_epi16(0x7f));
  const I normal =
      _mm512_add_epi16(_mm512_slli_epi16(magnitude, 4), _mm512_set1_epi16(120 << 7));
  const __mmask32 is_small = _mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16(8));
  const I value = _mm512_mask_permutexvar_epi16(normal, is_small, magnitude, iload(kSmall));
  return ior(value, _mm512_slli_epi16(iand(code, _mm512_set1_epi16(0x80)), 8));
}

// The values of a chunk's keys, 32 dimensions at a time. Whatever lies behind the last key is not
// multiplied: zero stands in its place.
template <KvFormat kFormat>
struct ValueRows {
  const std::uint8_t* const* rows;
  int count;
  std::int64_t head_dim;

  I at(int key, std::int64_t d) const {
    if (key >= count) return iset1(0);
    return wide_values<kFormat>(rows[key] + d * element_bytes(kFormat), head_dim - d);
  }
};

// One chunk of keys as rows of bfloat16, in the cache itself where they lie there so, and of
// values as they lie.
class TileChunk {
 public:
  TileChunk(const AttentionTask& task, Scratch& scratch)
      : task_(task),
        padded_(padded_dims(task.kv.head_dim)),
        are_keys_tiles_(task.kv.format == KvFormat::kBfloat16 && padded_ == task.kv.head_dim &&
                        task.kv.block_size % kTile == 0),
        keys_(reinterpret_cast<std::uint16_t*>(scratch.take(kKeyChunk * padded_ / 2))),
        scales_{scratch.take(kKeyChunk), scratch.take(kKeyChunk)} {}

  void load(std::int64_t start, int count) {
    find_rows(task_, start, count, scales_, rows_);
    count_ = count;
    if (are_keys_tiles_) return;
    switch (task_.kv.format) {
      case KvFormat::kBfloat16: widen_keys<KvFormat::kBfloat16>(); break;
      case KvFormat::kInt8: widen_keys<KvFormat::kInt8>(); break;
      default: widen_keys<KvFormat::kFp8E4m3>(); break;
    }
  }

  // Keys from the 16 x i-th on. Behind the last one is anything: it spoils its own score only.
  const void* key_tile(int i, std::int64_t d) const {
    if (are_keys_tiles_) return rows_.keys[i * kTile] + d * 2;
    return keys_ + i * kTile * padded_ + d;
  }
  std::int64_t key_stride() const { return padded_ * 2; }

  // Calls `use` with the chunk's ValueRows.
  template <class Use>
  void with_values(const Use& use) const {
    const std::int64_t head_dim = task_.kv.head_dim;
    switch (task_.kv.format) {
      case KvFormat::kBfloat16:
        use(ValueRows<KvFormat::kBfloat16>{rows_.values, count_, head_dim});
        break;
      case KvFormat::kInt8: use(ValueRows<KvFormat::kInt8>{rows_.values, count_, head_dim}); break;
      default: use(ValueRows<KvFormat::kFp8E4m3>{rows_.values, count_, head_dim}); break;
    }
  }

  const ChunkScales& scales() const { return scales_; }
  int num_key_tiles() const { return (count_ + kTile - 1) / kTile; }
  int num_steps() const { return (count_ + kStep - 1) / kStep; }
  int count() const { return count_; }

 private:
  template <KvFormat kFormat>
  void widen_keys() {
    const std::int64_t head_dim = task_.kv.head_dim;
    for (int i = 0; i < count_; ++i) {
      for (std::int64_t d = 0; d < head_dim; d += kStep) {
        const std::uint8_t* row = rows_.keys[i] + d * element_bytes(kFormat);
        istore(keys_ + i * padded_ + d, wide_values<kFormat>(row, head_dim - d));
      }
    }
  }

  const AttentionTask& task_;
  const std::int64_t padded_;
  const bool are_keys_tiles_;
  std::uint16_t* keys_;
  ChunkScales scales_;
  ChunkRows rows_;
  int count_ = 0;
};

// Rounds up to sixteen queries to bfloat16 and turns them into tiles of [pairs of dimensions]
// [columns], one after the other.
static void pack_queries(const AttentionTask& task, std::int64_t first, std::int64_t last,
                         int columns, std::uint32_t* out) {
  const std::int64_t head_dim = task.kv.head_dim;
  for (std::int64_t start = 0; start < head_dim; start += kStep) {
    I pairs[kTile];
    for (int i = 0; i < kTile; ++i) {
      alignas(64) std::uint16_t row[kStep] = {};
      for (std::int64_t d = start; first + i < last && d < start + kStep && d < head_dim; d += 16) {
        const int n = head_dim - d < 16 ? static_cast<int>(head_dim - d) : 16;
        store_u16(row + (d - start), bfloat16_from_float(load_n(query_at(task, first + i) + d, n)));
      }
      pairs[i] = iload(row);
    }
    transpose(pairs);
    for (int i = 0; i < kTile; ++i, out += columns) {
      store_n(reinterpret_cast<float*>(out), as_float(pairs[i]), columns);
    }
  }
}

// Scores of a chunk's keys: out[key][columns].
static inline void score_tiles(const TileChunk& chunk, const std::uint32_t* queries, int columns,
                               std::int64_t padded, float* out) {
  for (int i = 0; i < chunk.num_key_tiles(); ++i, out += kTile * columns) {
    _tile_zero(PDMESH_TILE_SCORES);
    for (std::int64_t d = 0; d < padded; d += kStep) {
      _tile_loadd(PDMESH_TILE_QUERIES, queries + d / 2 * columns, columns * 4);
      _tile_loadd(PDMESH_TILE_ROWS, chunk.key_tile(i, d), chunk.key_stride());
      _tile_dpbf16ps(PDMESH_TILE_SCORES, PDMESH_TILE_ROWS, PDMESH_TILE_QUERIES);
    }
    _tile_stored(PDMESH_TILE_SCORES, out, columns * 4);
  }
}

// Sixteen keys' scores of four queries, [key][4], to each query's row of scores.
static inline void spread_four(const float* scores, float* out) {
  const I low = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
  const I high = iadd(low, iset1(2));
  const F a = load(scores), b = load(scores + 16), c = load(scores + 32), d = load(scores + 48);
  const F low_ab = _mm512_permutex2var_ps(a, low, b), low_cd = _mm512_permutex2var_ps(c, low, d);
  const F high_ab = _mm512_permutex2var_ps(a, high, b);
  const F high_cd = _mm512_permutex2var_ps(c, high, d);
  store(out, _mm512_shuffle_f32x4(low_ab, low_cd, 0x44));
  store(out + kKeyChunk, _mm512_shuffle_f32x4(low_ab, low_cd, 0xee));
  store(out + 2 * kKeyChunk, _mm512_shuffle_f32x4(high_ab, high_cd, 0x44));
  store(out + 3 * kKeyChunk, _mm512_shuffle_f32x4(high_ab, high_cd, 0xee));
}

static inline void spread_sixteen(const float* scores, float* out) {
  I rows[kTile];
  for (int i = 0; i < kTile; ++i) rows[i] = iload(scores + i * kTile);
  transpose(rows);
  for (int i = 0; i < kTile; ++i) istore(out + i * kKeyChunk, rows[i]);
}

// See RowAttention.
class TileProducts {
 public:
  TileProducts(const AttentionTask& task, Scratch& scratch)
      : padded_(padded_dims(task.kv.head_dim)),
        num_queries_(task.num_rows * task.num_heads),
        rows_(num_queries_ < kTile ? static_cast<int>(num_queries_) : kTile),
        columns_(num_queries_ <= 4 ? 4 : kTile),
        rounding_(rounding_of(task.kv.format)),
        chunk_(task, scratch),
        queries_(reinterpret_cast<std::uint32_t*>(
            scratch.take(round_up(num_queries_, kTile) * padded_ / 2))),
        value_tiles_(reinterpret_cast<std::uint32_t*>(scratch.take(kKeyChunk * padded_ / 2))),
        weight_tiles_(reinterpret_cast<std::uint32_t*>(scratch.take(kStepsPerChunk * kTileWords))) {
    shape_tiles({rows_, columns_});
    for (std::int64_t i = 0; i < num_queries_; i += kTile) {
      pack_queries(task, i, num_queries_, columns_, block_queries(i));
    }
  }

  const float* query(std::int64_t) const { return nullptr; }

  void load_keys_and_values(std::int64_t start, int count) {
    chunk_.load(start, count);
    chunk_.with_values([this](const auto& values) { pair_values(values); });
  }

  void attend(const Query* queries, std::int64_t first, std::int64_t last) {
    for (std::int64_t i = first / kTile * kTile; i < last; i += kTile) {
      weigh_block(queries, first, i, last);
      const std::int64_t skipped = first > i ? first - i : 0;
      accumulate_block(queries[i + skipped].state - skipped * stride());
    }
  }

  // Sums are kept in the order in which unpacking leaves the values.
  void close_state(float* state) const {
    const I first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const I second = iadd(first, iset1(8));
    for (std::int64_t d = 0; d < padded_; d += kStep) {
      const F low = load(state + d), high = load(state + d + 16);
      store(state + d, _mm512_permutex2var_ps(low, first, high));
      store(state + d + 16, _mm512_permutex2var_ps(low, second, high));
    }
  }

  FetchNow fetch;

 private:
  std::int64_t stride() const { return attention_state_floats(padded_); }
  std::uint32_t* block_queries(std::int64_t i) const { return queries_ + i * padded_ / 2; }

  // Tiles of [16 pairs of keys][16 dimensions], all of the first step before those of the second.
  template <class Values>
  void pair_values(const Values& values) const {
    const std::int64_t padded = padded_;
    std::uint32_t* out = value_tiles_;
    for (int key = 0; key < values.count; key += kStep, out += padded * kTile) {
      for (int i = 0; i < kTile; ++i) {
        for (std::int64_t d = 0; d < padded; d += kStep) {
          const I a = values.at(key + i, d), b = values.at(key + kTile + i, d);
          std::uint32_t* tiles = out + d * kTile + i * kTile;
          istore(tiles, _mm512_unpacklo_epi16(a, b));
          istore(tiles + kTileWords, _mm512_unpackhi_epi16(a, b));
        }
      }
    }
  }

  void weigh_block(const Query* queries, std::int64_t first, std::int64_t block,
                   std::int64_t last) {
    alignas(64) float by_key[kKeyChunk * kTile], scores[kTile * kKeyChunk];
    settle();
    score_tiles(chunk_, block_queries(block), columns_, padded_, by_key);
    for (int i = 0; i < chunk_.num_key_tiles(); ++i) {
      if (columns_ == 4) spread_four(by_key + i * kTile * 4, scores + i * kTile);
      else spread_sixteen(by_key + i * kTileWords, scores + i * kTile);
    }
    for (int i = 0; i < rows_; ++i) {
      const bool is_seen = block + i >= first && block + i < last;
      F own[4] = {zero(), zero(), zero(), zero()};
      if (is_seen) {
        alignas(64) float weights[kKeyChunk];
        for (int v = 0; v < kKeyVectors; ++v) own[v] = load(scores + i * kKeyChunk + v * 16);
        weigh(queries[block + i], own, chunk_.scales(), rounding_, padded_, weights);
        for (int v = 0; v < kKeyVectors; ++v) own[v] = load(weights + v * 16);
      }
      for (int step = 0; step < kStepsPerChunk; ++step) {
        // Weights are bfloat16 numbers by now: their low halves are empty.
        const I pair = ior(shr<16>(as_int(own[2 * step])), as_int(own[2 * step + 1]));
        istore(weight_tiles_ + step * kTileWords + i * kTile, pair);
      }
    }
  }

  void accumulate_block(float* states) const {
    settle();
    _tile_loadd(PDMESH_TILE_WEIGHTS, weight_tiles_, 64);
    _tile_loadd(PDMESH_TILE_MORE_WEIGHTS, weight_tiles_ + kTileWords, 64);
    const std::uint32_t* values = value_tiles_;
    for (std::int64_t d = 0; d < padded_; d += 16, values += kTileWords) {
      _tile_loadd(PDMESH_TILE_SUMS, states + d, stride() * 4);
      _tile_loadd(PDMESH_TILE_ROWS, values, 64);
      _tile_dpbf16ps(PDMESH_TILE_SUMS, PDMESH_TILE_WEIGHTS, PDMESH_TILE_ROWS);
      if (chunk_.num_steps() == 2) {
        _tile_loadd(PDMESH_TILE_ROWS, values + padded_ * kTile, 64);
        _tile_dpbf16ps(PDMESH_TILE_SUMS, PDMESH_TILE_MORE_WEIGHTS, PDMESH_TILE_ROWS);
      }
      _tile_stored(PDMESH_TILE_SUMS, states + d, stride() * 4);
    }
  }

  const std::int64_t padded_, num_queries_;
  const int rows_, columns_;
  const Rounding rounding_;
  TileChunk chunk_;
  std::uint32_t* queries_;
  std::uint32_t* value_tiles_;
  std::uint32_t* weight_tiles_;
};

}  // namespace PDMESH_LEVEL
}  // namespace pdmesh
