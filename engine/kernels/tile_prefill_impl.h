// Attention of many queries on AMX tiles. Included by level amx only.
//
// Everything is transposed: queries are the lanes of a register, sixteen at a time, and tiles hold
// keys x queries and then dimensions x queries. So the largest score, the weights' sum and what
// they decay by are sixteen queries' at once, and weights go from registers into tiles as they are.
#pragma once

#include "tile_attention_impl.h"

namespace pdmesh {
namespace PDMESH_LEVEL {

#define PDMESH_TILE_FIRST_PAIRS 6   // 16 pairs of keys x queries: weights of the first step
#define PDMESH_TILE_SECOND_PAIRS 7  // and of the second

// Sixteen queries' states: sums[padded head_dim][16], then sixteen partial sums of weights for each
// query, then the largest scores.
struct ColumnState {
  float* sums;
  float* lanes;
  float* largest;
};

class ColumnAttention {
 public:
  explicit ColumnAttention(const AttentionTask& task)
      : task_(task),
        padded_(padded_dims(task.kv.head_dim)),
        num_queries_(task.num_rows * task.num_heads),
        num_blocks_((num_queries_ + kTile - 1) / kTile),
        rounding_(rounding_of(task.kv.format)),
        scratch_(task.scratch),
        chunk_(task, scratch_),
        queries_(take_words(num_blocks_ * kTile * padded_ / 2)),
        value_tiles_(take_words(kKeyChunk * padded_ / 2)),
        scores_(scratch_.take(kKeyChunk * kTile)),
        weight_tiles_(take_words(kStepsPerChunk * kTileWords)),
        states_(scratch_.take(num_blocks_ * state_floats())),
        running_(scratch_.take(num_blocks_ * state_floats())) {
    shape_tiles({kTile, kTile});
    for (std::int64_t i = 0; i < num_blocks_; ++i) {
      pack_queries(task, i * kTile, num_queries_, kTile, block_queries(i));
    }
  }

  void run() {
    for_each_segment(task_, [this](const Segment& segment) { attend_segment(segment); });
    if (task_.partial != nullptr) return;
    for (std::int64_t i = 0; i < num_blocks_; ++i) write_block(i);
  }

 private:
  std::uint32_t* take_words(std::int64_t count) {
    return reinterpret_cast<std::uint32_t*>(scratch_.take(count));
  }
  std::uint32_t* block_queries(std::int64_t i) const { return queries_ + i * kTile * padded_ / 2; }
  std::int64_t state_floats() const { return (padded_ + kTile + 1) * kTile; }
  ColumnState state_of(float* states, std::int64_t block) const {
    float* sums = states + block * state_floats();
    return {sums, sums + padded_ * kTile, sums + (padded_ + kTile) * kTile};
  }

  void attend_segment(const Segment& segment) {
    const std::int64_t first_block = segment.first_query / kTile;
    for (std::int64_t i = first_block; i < num_blocks_; ++i) {
      const ColumnState state = state_of(states_, i);
      for (std::int64_t j = 0; j < (padded_ + kTile) * kTile; j += 16) {
        store(state.sums + j, zero());
      }
      store(state.largest, set1(kLowestScore));
    }
    FetchNow fetch;
    for_each_chunk(task_, segment, fetch, [this](std::int64_t start, int count) {
      chunk_.load(start, count);
      chunk_.with_values([this](const auto& values) { transpose_values(values); });
      const std::int64_t before = start - task_.first_position;
      const std::int64_t first_seeing = before > 0 ? before * task_.num_heads / kTile : 0;
      for (std::int64_t i = first_seeing; i < num_blocks_; ++i) attend_block(i, start);
    });
    for (std::int64_t i = first_block; i < num_blocks_; ++i) {
      if (task_.partial == nullptr) {
        fold_block(state_of(running_, i), state_of(states_, i), segment.first_key == 0);
      } else {
        write_states(i);
      }
    }
  }

  // Tiles of [16 dimensions][16 pairs of keys]: the first step's tile of sixteen dimensions, then
  // the second's, then the next dimensions'.
  template <class Values>
  void transpose_values(const Values& values) const {
    for (int step = 0; step < chunk_.num_steps(); ++step) {
      for (std::int64_t d = 0; d < padded_; d += kStep) {
        I low[kTile], high[kTile];
        for (int i = 0; i < kTile; ++i) {
          const int key = step * kStep + i;
          const I a = values.at(key, d), b = values.at(key + kTile, d);
          low[i] = _mm512_unpacklo_epi16(a, b);
          high[i] = _mm512_unpackhi_epi16(a, b);
        }
        transpose(low);
        transpose(high);
        // Unpacking leaves dimensions 0-3, 8-11 and so on in `low`, and those between in `high`.
        std::uint32_t* tile = value_tiles_ + (d / kTile * kStepsPerChunk + step) * kTileWords;
        for (int i = 0; i < kTile; ++i) {
          const int row = i % 8 / 4 * 8 + i % 4;
          std::uint32_t* half = tile + i / 8 * kStepsPerChunk * kTileWords;
          istore(half + row * kTile, low[i]);
          istore(half + (row + 4) * kTile, high[i]);
        }
      }
    }
  }

  // Keys that each of a block's queries sees of the chunk that begins at `start`.
  I visible_keys(std::int64_t block, std::int64_t start) const {
    alignas(64) std::int32_t visible[kTile];
    for (int i = 0; i < kTile; ++i) {
      const std::int64_t row = (block * kTile + i) / task_.num_heads;
      const std::int64_t seen = task_.first_position + row + 1 - start;
      visible[i] = static_cast<std::int32_t>(seen < chunk_.count() ? seen : chunk_.count());
    }
    return iload(visible);
  }

  void attend_block(std::int64_t block, std::int64_t start) {
    const ColumnState state = state_of(states_, block);
    settle();
    score_tiles(chunk_, block_queries(block), kTile, padded_, scores_);
    const std::int64_t least = task_.first_position + block * kTile / task_.num_heads + 1 - start;
    if (least >= kKeyChunk) {
      weigh<false>(state, iset1(kKeyChunk));
    } else {
      weigh<true>(state, visible_keys(block, start));
    }
    accumulate(state);
  }

  // Turns scores into weights, and brings the states to the new largest scores.
  template <bool kIsMasked>
  void weigh(const ColumnState& state, I visible) {
    const int count = kIsMasked ? chunk_.num_key_tiles() * kTile : kKeyChunk;
    F tops[4] = {set1(kLowestScore), set1(kLowestScore), set1(kLowestScore), set1(kLowestScore)};
    for (int key = 0; key < count; key += 4) {
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        float* at = scores_ + (key + i) * kTile;
        F score = load(at);
        if (rounding_ == Rounding::kScaled) {
          score = mul(score, set1(chunk_.scales().keys[key + i]));
          if (!kIsMasked) store(at, score);
        }
        if (kIsMasked) {
          score = _mm512_mask_mov_ps(set1(kLowestScore), is_seen(key + i, visible), score);
          store(at, score);
        }
        tops[i] = max(score, tops[i]);
      }
    }
    const F largest = load(state.largest);
    const F top = max(max(tops[0], tops[1]), max(tops[2], tops[3]));
    const F next = max(top, largest);
    if (_mm512_cmp_ps_mask(next, largest, _CMP_GT_OQ) != 0) decay(state, largest, next);
    const F shift = weight_shift(next, rounding_);
    for (int key = 0; key < kTile; ++key) {
      F sum = load(state.lanes + key * kTile);
      F weights[kKeyTiles];
#pragma GCC unroll 4
      for (int i = 0; i < kKeyTiles; ++i) {
        const int at = key + i * kTile;
        if (kIsMasked && at >= count) {
          weights[i] = zero();
          continue;
        }
        F p = weight(load(scores_ + at * kTile), shift, rounding_);
        if (kIsMasked) p = _mm512_maskz_mov_ps(is_seen(at, visible), p);
        sum = add(sum, p);
        if (rounding_ == Rounding::kScaled) {
          p = round_weight(mul(p, set1(chunk_.scales().values[at])));
          if (kIsMasked) p = _mm512_maskz_mov_ps(is_seen(at, visible), p);
        }
        weights[i] = p;
      }
      store(state.lanes + key * kTile, sum);
      std::uint32_t* out = weight_tiles_ + key * kTile;
      istore(out, ior(shr<16>(as_int(weights[0])), as_int(weights[1])));
      istore(out + kTileWords, ior(shr<16>(as_int(weights[2])), as_int(weights[3])));
    }
  }

  static __mmask16 is_seen(int key, I visible) {
    return _mm512_cmpgt_epi32_mask(visible, iset1(key));
  }

  void decay(const ColumnState& state, F largest, F next) const {
    const F factor = exp_lanes(sub(largest, next));
    for (std::int64_t i = 0; i < (padded_ + kTile) * kTile; i += 16) {
      store(state.sums + i, mul(load(state.sums + i), factor));
    }
    store(state.largest, next);
  }

  void accumulate(const ColumnState& state) const {
    settle();
    const bool has_second = chunk_.num_steps() == 2;
    _tile_loadd(PDMESH_TILE_FIRST_PAIRS, weight_tiles_, 64);
    if (has_second) _tile_loadd(PDMESH_TILE_SECOND_PAIRS, weight_tiles_ + kTileWords, 64);
    for (std::int64_t d = 0; d < padded_; d += kTile) {
      const std::uint32_t* values = value_tiles_ + d / kTile * kStepsPerChunk * kTileWords;
      _tile_loadd(PDMESH_TILE_SUMS, state.sums + d * kTile, 64);
      _tile_loadd(PDMESH_TILE_ROWS, values, 64);
      _tile_dpbf16ps(PDMESH_TILE_SUMS, PDMESH_TILE_ROWS, PDMESH_TILE_FIRST_PAIRS);
      if (has_second) {
        _tile_loadd(PDMESH_TILE_ROWS, values + kTileWords, 64);
        _tile_dpbf16ps(PDMESH_TILE_SUMS, PDMESH_TILE_ROWS, PDMESH_TILE_SECOND_PAIRS);
      }
      _tile_stored(PDMESH_TILE_SUMS, state.sums + d * kTile, 64);
    }
  }

  // As `sum_lanes`, for sixteen queries.
  static F sum_of_lanes(const float* lanes) {
    F sums[kTile];
    for (int i = 0; i < kTile; ++i) sums[i] = load(lanes + i * kTile);
    for (int i = 0; i < 8; ++i) sums[i] = add(sums[i], sums[i + 8]);
    for (int i = 0; i < 4; ++i) sums[i] = add(sums[i], sums[i + 4]);
    return add(add(sums[0], sums[2]), add(sums[1], sums[3]));
  }

  // As `fold`; a running state's weights are one sum, in the first of its lanes.
  void fold_block(const ColumnState& running, const ColumnState& next, bool is_first) const {
    const F sum = sum_of_lanes(next.lanes), next_largest = load(next.largest);
    if (is_first) {
      std::memcpy(running.sums, next.sums, static_cast<std::size_t>(padded_ * kTile) * 4);
      store(running.lanes, sum);
      store(running.largest, next_largest);
      return;
    }
    const F before = load(running.largest);
    const F largest = max(before, next_largest);
    const F a = exp_lanes(sub(before, largest)), b = exp_lanes(sub(next_largest, largest));
    for (std::int64_t i = 0; i < padded_ * kTile; i += 16) {
      store(running.sums + i, fma(load(next.sums + i), b, mul(load(running.sums + i), a)));
    }
    store(running.lanes, add(mul(load(running.lanes), a), mul(sum, b)));
    store(running.largest, largest);
  }

  // The states of a block's queries, to be merged with those of other segments.
  void write_states(std::int64_t block) const {
    const ColumnState state = state_of(states_, block);
    const std::int64_t floats = attention_state_floats(task_.kv.head_dim);
    alignas(64) float sums_of_weights[kTile];
    store(sums_of_weights, sum_of_lanes(state.lanes));
    for (std::int64_t d = 0; d < padded_; d += kTile) {
      I rows[kTile];
      for (int i = 0; i < kTile; ++i) rows[i] = iload(state.sums + (d + i) * kTile);
      transpose(rows);
      for (int i = 0; i < kTile && block * kTile + i < num_queries_; ++i) {
        istore(partial_at(task_, block * kTile + i, floats) + d, rows[i]);
      }
    }
    for (int i = 0; i < kTile && block * kTile + i < num_queries_; ++i) {
      float* partial = partial_at(task_, block * kTile + i, floats);
      partial[padded_] = state.largest[i];
      partial[padded_ + 1] = sums_of_weights[i];
    }
  }

  void write_block(std::int64_t block) const {
    const ColumnState state = state_of(running_, block);
    const std::int64_t head_dim = task_.kv.head_dim;
    const F sum = load(state.lanes);
    for (std::int64_t d = 0; d < head_dim; d += 16) {
      I rows[kTile];
      for (int i = 0; i < kTile; ++i) {
        rows[i] = as_int(div(load(state.sums + (d + i) * kTile), sum));
      }
      transpose(rows);
      const int n = head_dim - d < 16 ? static_cast<int>(head_dim - d) : 16;
      for (int i = 0; i < kTile && block * kTile + i < num_queries_; ++i) {
        const std::int64_t query = block * kTile + i;
        store_n(task_.out + query / task_.num_heads * task_.out_stride +
                    query % task_.num_heads * head_dim + d,
                as_float(rows[i]), n);
      }
    }
  }

  const AttentionTask& task_;
  const std::int64_t padded_, num_queries_, num_blocks_;
  const Rounding rounding_;
  Scratch scratch_;
  TileChunk chunk_;
  std::uint32_t* queries_;
  std::uint32_t* value_tiles_;
  float* scores_;
  std::uint32_t* weight_tiles_;
  float* states_;
  float* running_;
};

__attribute__((noinline)) static void attend_with_tiles(const AttentionTask& task) {
  const bool are_many = task.num_rows * task.num_heads > kTile;
  if (are_many && !goes_on(task) && !stays_open(task)) {
    ColumnAttention(task).run();
  } else {
    RowAttention<TileProducts>(task).run();
  }
}

static void attend_or_tiles(const AttentionTask& task) {
  if (task.kv.format == KvFormat::kFloat32) {
    attend(task);
    return;
  }
  const DenormalsAreZero mode;
  attend_with_tiles(task);
  if (task.next == nullptr) release_tiles();
}

}  // namespace PDMESH_LEVEL
}  // namespace pdmesh
