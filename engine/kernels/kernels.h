// What each instruction-set level provides: one table of functions over plain arrays.
#pragma once

#include <cstddef>
#include <cstdint>

namespace pdmesh {

// Values are part of the C interface and of packed files.
enum class WeightFormat : std::int32_t {
  kFloat32 = 0,
  kBfloat16 = 1,
  kInt8 = 2,         // one scale per output channel
  kInt8Grouped = 3,  // one scale per output channel and 32 inputs (GGUF Q8_0)
  kInt4 = 4,         // scale and minimum per output channel and 32 inputs (GGUF Q4_1)
  kInt4Channel = 5,  // kInt4 in memory; multiplied as the kInt8 that it rounds to
};

enum class KvFormat : std::int32_t { kFloat32 = 0, kBfloat16 = 1, kInt8 = 2, kFp8E4m3 = 3 };

// Weights are packed in units of 32 output channels; a thread works on whole units. Integer
// formats and their activations are quantized in groups of 32 inputs. One unit, in memory order:
//   float32   [k][32]                                        float
//   bfloat16  [k/2][2 halves][16 outputs][2 inputs]          bfloat16
//   int8      [k/4][2 halves][16 outputs][4 inputs] byte = weight + 128; k padded to 64
//   grouped   [k/32] of { [8][2 halves][16 outputs][4 inputs] likewise, then [32] half scale }
//   int4      [k/32] of { [4][2 halves][16 outputs][4 inputs] byte, [32] half d, [32] half m };
//             the low nibbles hold inputs 0-15 of the group, the high ones inputs 16-31
//   int4_channel  [k/64] of { [2 halves][8][16 outputs][4 inputs] byte, [2 halves][2][16] steps,
//             [2 halves][2][16] origins }: the low nibbles, and the first step and origin of a
//             half, belong to the first 32 inputs; steps and origins are 16-bit 256ths, and int8's
//             byte is (step x code + origin) / 256; k padded to 64
constexpr int kUnit = 32;
constexpr int kGroup = 32;
// Rows and inputs of one tile of int8's activations.
constexpr int kTileRows = 16;
constexpr int kTileInputs = 64;
constexpr int kTileBytes = kTileRows * kTileInputs;

// Where a row's codes begin; the next 64 inputs are two tiles further, the low ones one tile.
static inline std::int64_t wide_row_offset(std::int64_t row, std::int64_t padded_k) {
  return row / kTileRows * kTileRows * 2 * padded_k + row % kTileRows * kTileInputs;
}

struct Linear {
  WeightFormat format;
  std::int64_t n;
  std::int64_t k;
  const std::uint8_t* data;
  const float* scales;  // kInt8, kInt4Channel: one per output channel, padded to whole units
};

// The rows that a matrix is multiplied with, as its format wants them.
struct Activations {
  const float* values;  // float formats
  std::int64_t values_stride;
  // Grouped formats: k codes, rounded up to whole groups, and per group a scale. Wide ones (a scale
  // per channel): the value is (256 x high + low) x the row's scale, and the codes of sixteen rows
  // lie together as [k/64][high, low][16 rows][64], whole AMX tiles one after the other.
  const std::int8_t* codes;
  const float* scales;
  const float* sums;  // scale x sum of the group's codes: what a minimum is multiplied with
  const std::int32_t* offsets;  // -128 x sum of codes (of each plane): undoes int8's + 128
  std::int64_t groups;
};

struct Epilogue {
  enum class Kind { kStore, kAdd, kSiluMul };
  Kind kind;
  float* out;
  std::int64_t stride;
  std::int64_t columns;
};

// Where one layer's and one KV head's keys and values lie inside every block.
struct KvView {
  KvFormat format;
  std::uint8_t* base;
  std::int64_t block_bytes;
  std::int64_t block_size;
  std::int64_t head_dim;
  std::int64_t key_offset;
  std::int64_t value_offset;
  std::int64_t key_scale_offset;  // 8-bit formats: one float per token
  std::int64_t value_scale_offset;
};

// Keys are visited in chunks, chunks in segments; both start at multiples of their size from
// position 0, and segments are merged in order. So a query sees one order of operations whether
// it is decoded alone, prefilled in any chunk, or its segments are computed by several threads.
constexpr std::int64_t kKeyChunk = 64;
constexpr std::int64_t kKeySegment = 256;

// Where one row's heads of a KV head are, and where their states are kept.
struct AttentionRow {
  const float* queries;
  float* partial;
};

struct AttentionTask {
  KvView kv;
  const std::int64_t* block_table;
  std::int64_t first_position;  // of row 0; the rows are consecutive tokens
  std::int64_t num_rows;
  std::int64_t num_heads;  // query heads that share this KV head
  const float* queries;    // rotated and scaled; heads of one row are adjacent
  std::int64_t query_stride;
  // From a segment's first key on, to a segment's or the sequence's end. With `partial`, of one
  // segment only, and two tasks may have a part each: the first stops after some chunks and leaves
  // the states open, the second goes on from there.
  std::int64_t first_key;
  std::int64_t end_key;
  float* partial;  // where one segment's states are kept, or null to finish into `out`
  // In place of `queries` and `partial`: rows of several sequences, which see all of the keys.
  const AttentionRow* rows;
  float* out;
  std::int64_t out_stride;
  float* scratch;
  std::int64_t fetched_heads;  // KV heads, from this one on, whose keys and values it fetches ahead
  const AttentionTask* next;   // what the thread will do then, or null: its keys are fetched ahead
};

struct Kernels {
  const char* name;
  void (*rms_norm)(const float* x, const float* weight, float epsilon, std::int64_t k, float* out);
  void (*quantize)(const float* x, std::int64_t k, std::int8_t* codes, float* scales, float* sums,
                   std::int32_t* offsets);
  void (*quantize_wide)(const float* x, std::int64_t k, std::int8_t* codes, float* scale,
                        std::int32_t* offsets);
  void (*linear)(const Linear& weights, const Activations& x, std::int64_t rows,
                 std::int64_t first_unit, std::int64_t last_unit, const Epilogue& epilogue,
                 std::uint8_t* scratch);
  void (*rotate)(float* heads, std::int64_t num_heads, std::int64_t head_dim, const float* cosine,
                 const float* sine, float scale);
  void (*write_kv)(const KvView& kv, std::int64_t slot, const float* key, const float* value);
  void (*attend)(const AttentionTask& task);
  // Merges consecutive segments' states of one query into its attention output.
  void (*merge)(const float* states, std::int64_t stride, std::int64_t num_states,
                std::int64_t head_dim, float* out);
  std::int64_t (*argmax)(const float* x, std::int64_t n, float* largest);
  void (*exp_shifted)(const float* x, std::int64_t n, float shift, float scale, float* out);
  // The sum of those of `n` values that are at least `floor`.
  double (*sum_from)(const float* x, std::int64_t n, float floor);
  // Billions of 8-bit operations a second that one thread reaches on registers alone.
  double (*dot_gops)();
};

const Kernels* amx_kernels();
const Kernels* avx512_kernels();
const Kernels* avx2_kernels();
const Kernels* portable_kernels();
// The best level that this machine runs, or the named one; null when it cannot run it.
const Kernels* select_kernels(const char* name);

// Whether weights have one scale per output channel, and activations sixteen bits and one per row.
static inline bool is_wide(WeightFormat format) {
  return format == WeightFormat::kInt8 || format == WeightFormat::kInt4Channel;
}

std::int64_t unit_bytes(WeightFormat format, std::int64_t k);
// Bytes of a thread's scratch for `linear`.
std::int64_t linear_scratch_bytes(std::int64_t k);
// Floats of one query's state: output sums, largest score and weight sum, then its sixteen lanes.
std::int64_t attention_state_floats(std::int64_t head_dim);
// Floats of a thread's scratch for `attend` over at most `num_queries` rows x heads.
std::int64_t attention_scratch_floats(std::int64_t head_dim, std::int64_t num_queries);

}  // namespace pdmesh
