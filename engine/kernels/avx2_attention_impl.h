// The products of attention in AVX2's sixteen registers, in the order of tiles. Included by level
// avx2 only.
//
// A score has one sum over the even and one over the odd dimensions of each step, so that two steps
// have four sums that advance side by side: half a register. The other half is another key's. Rows
// of keys thus meet queries nearly as they lie in the cache, and nothing is transposed.
#pragma once

#include "vector_attention_impl.h"

namespace pdmesh {
namespace PDMESH_LEVEL {

constexpr int kBlockDims = 2 * kStep;
constexpr int kPairs = kStep / 2;  // of dimensions in a step
constexpr int kTileKeys = 8;       // the first four keys in low halves, the others in high ones
constexpr int kGroupQueries = 12;  // that meet a tile of keys while it is in the nearest cache
#define PDMESH_INLINE static inline __attribute__((always_inline))

static constexpr std::int64_t block_padded(std::int64_t head_dim) {
  return (head_dim + kBlockDims - 1) / kBlockDims * kBlockDims;
}

// An fp8 number in the high half of each sixteen bits, as float16 of a 256th of it. That has room
// for the smallest ones too: converting them back does not count denormal numbers as zero.
PDMESH_INLINE __m256i half_from_fp8(__m256i x) {
  const __m256i sign = _mm256_and_si256(x, _mm256_set1_epi16(-0x8000));
  const __m256i low = _mm256_and_si256(x, _mm256_set1_epi16(0x7f00));
  return _mm256_or_si256(sign, _mm256_srli_epi16(low, 1));
}
PDMESH_INLINE F float_from_halves(__m256i x) {
  return mul({_mm256_cvtph_ps(_mm256_castsi256_si128(x)),
              _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1))},
             set1(256.0f));
}

// Four registers of the bytes of one; those of each half stay in it.
template <KvFormat kFormat>
PDMESH_INLINE void widen_bytes(__m256i bytes, __m256* out) {
  const __m256i zeros = _mm256_setzero_si256();
  if constexpr (kFormat == KvFormat::kFp8E4m3) {
    const F low = float_from_halves(half_from_fp8(_mm256_unpacklo_epi8(zeros, bytes)));
    const F high = float_from_halves(half_from_fp8(_mm256_unpackhi_epi8(zeros, bytes)));
    out[0] = _mm256_permute2f128_ps(low.a, low.b, 0x20);
    out[1] = _mm256_permute2f128_ps(low.a, low.b, 0x31);
    out[2] = _mm256_permute2f128_ps(high.a, high.b, 0x20);
    out[3] = _mm256_permute2f128_ps(high.a, high.b, 0x31);
    return;
  }
  // An integer plus 128 in the last bits of 2^23; both are taken off again.
  const __m256i top = _mm256_set1_epi16(0x4b00);
  bytes = _mm256_xor_si256(bytes, _mm256_set1_epi8(-128));
  const __m256i low = _mm256_unpacklo_epi8(bytes, zeros);
  const __m256i high = _mm256_unpackhi_epi8(bytes, zeros);
  const __m256i wide[4] = {_mm256_unpacklo_epi16(low, top), _mm256_unpackhi_epi16(low, top),
                           _mm256_unpacklo_epi16(high, top), _mm256_unpackhi_epi16(high, top)};
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    out[i] = _mm256_sub_ps(_mm256_castsi256_ps(wide[i]), _mm256_set1_ps(8388736.0f));
  }
}

// Sixteen values; those of bfloat16 even ones first, see `close_state`.
template <KvFormat kFormat>
PDMESH_INLINE void unpack_values(const std::uint8_t* row, __m256* out) {
  if constexpr (kFormat == KvFormat::kFloat32) {
    const F x = load(reinterpret_cast<const float*>(row));
    out[0] = x.a;
    out[1] = x.b;
  } else if constexpr (kFormat == KvFormat::kBfloat16) {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(row));
    const __m256i odd = _mm256_set1_epi32(static_cast<std::int32_t>(0xffff0000u));
    out[0] = _mm256_castsi256_ps(_mm256_slli_epi32(x, 16));
    out[1] = _mm256_castsi256_ps(_mm256_and_si256(x, odd));
  } else if constexpr (kFormat == KvFormat::kInt8) {
    const __m128i x = load128(row);
    out[0] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(x));
    out[1] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(x, 8)));
  } else {
    const __m256i x = _mm256_slli_epi16(_mm256_cvtepu8_epi16(load128(row)), 8);
    const F values = float_from_halves(half_from_fp8(x));
    out[0] = values.a;
    out[1] = values.b;
  }
}

PDMESH_INLINE __m256i load_halves(const std::uint8_t* low, const std::uint8_t* high) {
  return _mm256_inserti128_si256(_mm256_castsi128_si256(load128(low)), load128(high), 1);
}

// The pairs of dimensions of two steps of two keys, as many as sixteen bytes of a row hold.
template <KvFormat kFormat>
PDMESH_INLINE void unpack_keys(const std::uint8_t* low, const std::uint8_t* high, __m256* out) {
  constexpr std::int64_t step_bytes = kStep * element_bytes(kFormat);
  const __m256i a = load_halves(low, high), b = load_halves(low + step_bytes, high + step_bytes);
  if constexpr (kFormat == KvFormat::kFloat32) {
    out[0] = _mm256_castsi256_ps(_mm256_unpacklo_epi64(a, b));
    out[1] = _mm256_castsi256_ps(_mm256_unpackhi_epi64(a, b));
  } else if constexpr (kFormat == KvFormat::kBfloat16) {
    const __m256i zeros = _mm256_setzero_si256();
    const __m256i first = _mm256_unpacklo_epi32(a, b), second = _mm256_unpackhi_epi32(a, b);
    out[0] = _mm256_castsi256_ps(_mm256_unpacklo_epi16(zeros, first));
    out[1] = _mm256_castsi256_ps(_mm256_unpackhi_epi16(zeros, first));
    out[2] = _mm256_castsi256_ps(_mm256_unpacklo_epi16(zeros, second));
    out[3] = _mm256_castsi256_ps(_mm256_unpackhi_epi16(zeros, second));
  } else {
    widen_bytes<kFormat>(_mm256_unpacklo_epi16(a, b), out);
    widen_bytes<kFormat>(_mm256_unpackhi_epi16(a, b), out + 4);
  }
}

// A tile of eight keys: [blocks of dimensions][pairs][four keys and the four after them].
template <KvFormat kFormat>
static void load_key_tile(const std::uint8_t* const* rows, std::int64_t head_dim, float* tile) {
  constexpr int element = static_cast<int>(element_bytes(kFormat));
  constexpr int at_once = 8 / element;
  std::uint8_t padded[kTileKeys][kBlockDims * element];
  const std::uint8_t* parts[kTileKeys];
  for (std::int64_t d = 0; d < head_dim; d += kBlockDims, tile += kBlockDims * kTileKeys) {
    for (int i = 0; i < kTileKeys; ++i) parts[i] = rows[i] + d * element;
    if (head_dim - d < kBlockDims) {
      std::memset(padded, 0, sizeof padded);
      for (int i = 0; i < kTileKeys; ++i) {
        std::memcpy(padded[i], parts[i], static_cast<std::size_t>((head_dim - d) * element));
        parts[i] = padded[i];
      }
    }
#pragma GCC unroll 4
    for (int key = 0; key < 4; ++key) {
#pragma GCC unroll 8
      for (int pair = 0; pair < kPairs; pair += at_once) {
        __m256 out[at_once];
        unpack_keys<kFormat>(parts[key] + pair * 2 * element, parts[key + 4] + pair * 2 * element,
                             out);
#pragma GCC unroll 8
        for (int i = 0; i < at_once; ++i) {
          _mm256_storeu_ps(tile + ((pair + i) * 4 + key) * 8, out[i]);
        }
      }
    }
  }
}

// The scores of M queries with a tile of keys.
template <int M>
static void score_tile(const Query* queries, const float* tile, std::int64_t head_dim,
                       float (*out)[kKeyChunk]) {
  __m256 scores[M];
#pragma GCC unroll 3
  for (int m = 0; m < M; ++m) scores[m] = _mm256_setzero_ps();
  for (std::int64_t d = 0; d < head_dim; d += kBlockDims) {
    __m256 sums[M][4];
#pragma GCC unroll 3
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
      for (int key = 0; key < 4; ++key) sums[m][key] = _mm256_setzero_ps();
    }
    for (int pair = 0; pair < kPairs; ++pair, tile += 32) {
      __m256 q[M];
#pragma GCC unroll 3
      for (int m = 0; m < M; ++m) {
        q[m] = _mm256_broadcast_ps(reinterpret_cast<const __m128*>(queries[m].q + d) + pair);
      }
#pragma GCC unroll 4
      for (int key = 0; key < 4; ++key) {
        const __m256 k = _mm256_loadu_ps(tile + key * 8);
#pragma GCC unroll 3
        for (int m = 0; m < M; ++m) sums[m][key] = _mm256_fmadd_ps(q[m], k, sums[m][key]);
      }
    }
#pragma GCC unroll 3
    for (int m = 0; m < M; ++m) {
      __m256 steps[2];
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        const __m256 a = sums[m][2 * i], b = sums[m][2 * i + 1];
        steps[i] = _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x88), _mm256_shuffle_ps(a, b, 0xdd));
      }
      scores[m] = _mm256_add_ps(scores[m], _mm256_shuffle_ps(steps[0], steps[1], 0x88));
      scores[m] = _mm256_add_ps(scores[m], _mm256_shuffle_ps(steps[0], steps[1], 0xdd));
    }
  }
#pragma GCC unroll 3
  for (int m = 0; m < M; ++m) _mm256_storeu_ps(out[m], scores[m]);
}

// The dimensions whose sums stay in registers.
template <int M>
constexpr int kValueVectors = M == 1 ? 4 : 2;

// One key's values, weighted, onto the sums of M queries.
template <int M, class Values>
PDMESH_INLINE void add_values(const float (*weights)[kKeyChunk], int key, const Values& values,
                              std::int64_t d, __m256 (*sums)[kValueVectors<M>]) {
  constexpr int vectors = kValueVectors<M>;
  __m256 v[vectors];
#pragma GCC unroll 2
  for (int i = 0; i < vectors; i += 2) values.load(key, d + i * 8, v + i);
#pragma GCC unroll 3
  for (int m = 0; m < M; ++m) {
    const __m256 p = _mm256_set1_ps(weights[m][key]);
#pragma GCC unroll 4
    for (int i = 0; i < vectors; ++i) sums[m][i] = _mm256_fmadd_ps(p, v[i], sums[m][i]);
  }
}

// Adds the values, weighted, to some dimensions' sums of M queries. The two sums of a step advance
// side by side.
template <int M, class Values>
static void accumulate_values(const Query* queries, const float (*weights)[kKeyChunk],
                              const Values& values, std::int64_t d) {
  constexpr int vectors = kValueVectors<M>;
  int visible = 0;
  for (int m = 0; m < M; ++m) {
    if (queries[m].visible > visible) visible = queries[m].visible;
  }
  for (int key = 0; key < visible; key += kStep) {
    const int middle = key + 16 < visible ? key + 16 : visible;
    const int last = key + kStep < visible ? key + kStep : visible;
    __m256 low[M][vectors], high[M][vectors];
#pragma GCC unroll 3
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
      for (int i = 0; i < vectors; ++i) low[m][i] = high[m][i] = _mm256_setzero_ps();
    }
    int next = key;
    for (; next + 16 < last; ++next) {
      add_values<M>(weights, next, values, d, low);
      add_values<M>(weights, next + 16, values, d, high);
    }
    for (; next < middle; ++next) add_values<M>(weights, next, values, d, low);
#pragma GCC unroll 3
    for (int m = 0; m < M; ++m) {
#pragma GCC unroll 4
      for (int i = 0; i < vectors; ++i) {
        float* sum = queries[m].state + d + i * 8;
        const __m256 both = _mm256_add_ps(low[m][i], high[m][i]);
        _mm256_storeu_ps(sum, _mm256_add_ps(_mm256_loadu_ps(sum), both));
      }
    }
  }
}

// A chunk's values as they lie in the cache.
template <KvFormat kFormat>
struct PackedValues {
  const std::uint8_t* const* rows;
  inline __attribute__((always_inline)) void load(int key, std::int64_t d, __m256* out) const {
    unpack_values<kFormat>(rows[key] + d * element_bytes(kFormat), out);
  }
};

// In float32: [steps of dimensions][keys][32].
struct UnpackedValues {
  float* values;
  inline __attribute__((always_inline)) float* at(int key, std::int64_t d) const {
    return values + d / kStep * kStep * kKeyChunk + key * kStep + d % kStep;
  }
  inline __attribute__((always_inline)) void load(int key, std::int64_t d, __m256* out) const {
    out[0] = _mm256_loadu_ps(at(key, d));
    out[1] = _mm256_loadu_ps(at(key, d) + 8);
  }
};

template <KvFormat kFormat>
static void unpack_chunk(const std::uint8_t* const* rows, int count, std::int64_t head_dim,
                         const UnpackedValues& values) {
  constexpr std::int64_t element = element_bytes(kFormat);
  for (int key = 0; key < count; ++key) {
    for (std::int64_t d = 0; d < head_dim; d += 16) {
      const std::uint8_t* row = rows[key] + d * element;
      std::uint8_t padded[16 * element] = {};
      if (head_dim - d < 16) {
        std::memcpy(padded, row, static_cast<std::size_t>((head_dim - d) * element));
        row = padded;
      }
      __m256 v[2];
      unpack_values<kFormat>(row, v);
      store(values.at(key, d), {v[0], v[1]});
    }
    for (std::int64_t d = round_up(head_dim, 16); d < padded_dims(head_dim); d += 16) {
      store(values.at(key, d), zero());
    }
  }
}

// Rows to be fetched, a part with each tile of keys: all at once they would hold up what computes.
class FetchQueue {
 public:
  // A task fetches for its own head only, as it goes along.
  void operator()(const std::uint8_t* rows, std::int64_t bytes, std::int64_t, std::int64_t) {
    if (first_ == last_) first_ = last_ = num_lines_ = 0;
    if (last_ == kMaxRuns) return;
    runs_[last_++] = {rows, bytes};
    num_lines_ += (bytes + 63) / 64;
  }

  // A tile's part of them.
  void advance() {
    for (std::int64_t lines = num_lines_ / (kKeyChunk / kTileKeys) + 1; first_ < last_; ++first_) {
      Run& run = runs_[first_];
      for (; run.bytes > 0; run.rows += 64, run.bytes -= 64) {
        if (lines-- == 0) return;
        __builtin_prefetch(run.rows, 0, 3);
      }
    }
  }

 private:
  static constexpr int kMaxRuns = 64;
  struct Run {
    const std::uint8_t* rows;
    std::int64_t bytes;
  };
  Run runs_[kMaxRuns];
  int first_ = 0, last_ = 0;
  std::int64_t num_lines_ = 0;
};

// Calls `visit` with each of the blocks that `count` queries are cut into: the first query, and how
// many as a type.
template <class Visit>
PDMESH_INLINE void for_each_block(int count, const Visit& visit) {
  int i = 0;
  for (; count - i == 3 || count - i > 4; i += 3) visit(i, std::integral_constant<int, 3>());
  for (; count - i >= 2; i += 2) visit(i, std::integral_constant<int, 2>());
  if (i < count) visit(i, std::integral_constant<int, 1>());
}

// How many queries are so few that what is unpacked for one block of them is not worth keeping.
static constexpr std::int64_t few_queries(KvFormat format) {
  return format == KvFormat::kFp8E4m3 ? 3 : format == KvFormat::kInt8 ? 8 : kGroupQueries;
}

// See RowAttention.
template <KvFormat kFormat>
class NarrowProducts {
 public:
  NarrowProducts(const AttentionTask& task, Scratch& scratch)
      : task_(task),
        head_dim_(task.kv.head_dim),
        padded_(padded_dims(head_dim_)),
        query_floats_(block_padded(head_dim_)),
        are_few_(task.num_rows * task.num_heads <= few_queries(kFormat) && head_dim_ % kStep == 0),
        keys_(scratch.take(query_floats_ * kKeyChunk)),
        values_{scratch.take(padded_ * kKeyChunk)},
        scales_{scratch.take(kKeyChunk), scratch.take(kKeyChunk)},
        queries_(scratch.take(task.num_rows * task.num_heads * query_floats_)) {
    for (std::int64_t i = 0; i < task.num_rows * task.num_heads; ++i) pair_query(i);
  }

  const float* query(std::int64_t i) const { return queries_ + i * query_floats_; }

  void load_keys_and_values(std::int64_t start, int count) {
    find_rows(task_, start, count, scales_, rows_);
    // A tile's last keys may be missing; nobody sees those in their place.
    for (int i = count; i % kTileKeys != 0; ++i) rows_.keys[i] = rows_.keys[count - 1];
    if (are_few_) return;
    unpack_chunk<kFormat>(rows_.values, count, head_dim_, values_);
    for (int key = 0; key < count; key += kTileKeys) {
      fetch.advance();
      load_key_tile<kFormat>(rows_.keys + key, head_dim_, keys_ + key * query_floats_);
    }
  }

  void attend(const Query* queries, std::int64_t first, std::int64_t last) {
    for (std::int64_t i = first; i < last; i += kGroupQueries) {
      const std::int64_t count = last - i < kGroupQueries ? last - i : kGroupQueries;
      attend_group(queries + i, static_cast<int>(count));
    }
  }

  // Sums are kept in the order in which values are unpacked.
  void close_state(float* state) const {
    if (kFormat != KvFormat::kBfloat16) return;
    for (std::int64_t d = 0; d < padded_; d += 16) {
      const F x = load(state + d);
      const __m256 low = _mm256_unpacklo_ps(x.a, x.b), high = _mm256_unpackhi_ps(x.a, x.b);
      store(state + d, {_mm256_permute2f128_ps(low, high, 0x20),
                        _mm256_permute2f128_ps(low, high, 0x31)});
    }
  }

  FetchQueue fetch;

 private:
  // Pairs of dimensions of two steps side by side, as keys have them.
  void pair_query(std::int64_t i) {
    const float* query = query_at(task_, i);
    float* out = queries_ + i * query_floats_;
    for (std::int64_t start = 0; start < head_dim_; start += kBlockDims, out += kBlockDims) {
      float block[kBlockDims];
      for (int d = 0; d < kBlockDims; d += 16) {
        const std::int64_t left = head_dim_ - start - d;
        const F q = left > 0 ? load_n(query + start + d, left < 16 ? static_cast<int>(left) : 16)
                             : zero();
        store(block + d, kFormat == KvFormat::kFloat32
                             ? q
                             : as_float(shl<16>(bfloat16_from_float(q))));
      }
      for (int d = 0; d < kStep; d += 4) {
        const __m128d a = _mm_castps_pd(_mm_loadu_ps(block + d));
        const __m128d b = _mm_castps_pd(_mm_loadu_ps(block + kStep + d));
        _mm_storeu_ps(out + d * 2, _mm_castpd_ps(_mm_unpacklo_pd(a, b)));
        _mm_storeu_ps(out + d * 2 + 4, _mm_castpd_ps(_mm_unpackhi_pd(a, b)));
      }
    }
  }

  void attend_group(const Query* queries, int count) {
    float scores[kGroupQueries][kKeyChunk], weights[kGroupQueries][kKeyChunk];
    int visible = 0;
    for (int i = 0; i < count; ++i) {
      if (queries[i].visible > visible) visible = queries[i].visible;
    }
    int key = 0;
    for (; key < visible; key += kTileKeys) {
      const float* tile = keys_ + key * query_floats_;
      if (are_few_) {
        fetch.advance();
        load_key_tile<kFormat>(rows_.keys + key, head_dim_, keys_);
        tile = keys_;
      }
      for_each_block(count, [&](int i, auto size) {
        auto out = reinterpret_cast<float(*)[kKeyChunk]>(scores[i] + key);
        score_tile<size.value>(queries + i, tile, head_dim_, out);
      });
    }
    for (int i = 0; i < count; ++i) {
      if (key % 16 != 0) _mm256_storeu_ps(scores[i] + key, _mm256_setzero_ps());
      F lanes[kKeyVectors];
      for (int v = 0; v * 16 < visible; ++v) lanes[v] = load(scores[i] + v * 16);
      weigh(queries[i], lanes, scales_, rounding_of(kFormat), padded_, weights[i]);
    }
    for (std::int64_t d = 0; d < padded_; d += 16) {
      for_each_block(count, [&](int i, auto size) {
        if (d % (kValueVectors<size.value> * 8) != 0) return;
        if (are_few_) {
          const PackedValues<kFormat> values{rows_.values};
          accumulate_values<size.value>(queries + i, weights + i, values, d);
        } else {
          accumulate_values<size.value>(queries + i, weights + i, values_, d);
        }
      });
    }
  }

  const AttentionTask& task_;
  const std::int64_t head_dim_, padded_, query_floats_;
  const bool are_few_;
  float* keys_;  // tiles
  UnpackedValues values_;
  ChunkScales scales_;
  float* queries_;
  ChunkRows rows_;
};

template <KvFormat kFormat>
__attribute__((noinline)) static void attend_narrow(const AttentionTask& task) {
  RowAttention<NarrowProducts<kFormat>>(task).run();
}

static void attend_by_format(const AttentionTask& task) {
  const DenormalsAreZero mode;
  switch (task.kv.format) {
    case KvFormat::kFloat32: return attend_narrow<KvFormat::kFloat32>(task);
    case KvFormat::kBfloat16: return attend_narrow<KvFormat::kBfloat16>(task);
    case KvFormat::kInt8: return attend_narrow<KvFormat::kInt8>(task);
    case KvFormat::kFp8E4m3: return attend_narrow<KvFormat::kFp8E4m3>(task);
  }
}

}  // namespace PDMESH_LEVEL
}  // namespace pdmesh
