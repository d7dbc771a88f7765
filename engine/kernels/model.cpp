// See model.h.
#include "model.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <new>

#include "numerics.h"

namespace pdmesh {

namespace {

// Products of a layer, and in how many pieces a thread takes its share of one.
constexpr std::int64_t kProducts = 4, kPieces = 8;
// Pieces of attention that a thread has at least before it takes several heads' at once.
constexpr std::int64_t kPiecesPerThread = 4;

}  // namespace

Model::Model(const pdmesh_config& config, const Kernels& kernels)
    : config_(config),
      kernels_(kernels),
      layers_(config.layers, config.layers + config.num_layers),
      kv_layout_(static_cast<KvFormat>(config.kv_format), config.num_layers, config.num_kv_heads,
                 config.head_dim, config.block_size),
      query_size_(config.num_heads * config.head_dim),
      kv_size_(config.num_kv_heads * config.head_dim),
      max_k_(std::max({config.hidden_size, config.intermediate_size, query_size_})),
      pool_(config.num_threads),
      attention_(config, config.num_threads),
      attention_scratch_(static_cast<std::size_t>(config.num_threads)),
      linear_scratch_(static_cast<std::size_t>(config.num_threads)),
      samplers_(static_cast<std::size_t>(config.num_threads)),
      next_item_(new std::atomic<std::int64_t>[static_cast<std::size_t>(config.num_layers)]),
      taken_(new Taken[static_cast<std::size_t>((config.num_layers * kProducts + 1) *
                                                config.num_threads)]) {
  for (auto& scratch : attention_scratch_) {
    scratch.reserve(attention_scratch_floats(config.head_dim, attention_.max_item_queries()));
  }
  for (auto& scratch : linear_scratch_) scratch.reserve(linear_scratch_bytes(max_k_));
}

Status Model::check(const pdmesh_config& config) {
  const bool is_positive = config.num_layers > 0 && config.hidden_size > 0 &&
                           config.num_heads > 0 && config.num_kv_heads > 0 &&
                           config.head_dim > 0 && config.intermediate_size > 0 &&
                           config.vocab_size > 0 && config.max_positions > 0 &&
                           config.block_size > 0 && config.num_threads > 0;
  if (!is_positive || config.num_heads % config.num_kv_heads != 0) return Status::kBadConfig;
  if (config.head_dim % 4 != 0 || config.head_dim > 1024) return Status::kBadConfig;
  if (config.kv_format < 0 || config.kv_format > 3) return Status::kBadConfig;
  return Status::kOk;
}

Status Model::check(const pdmesh_batch& batch) const {
  if (batch.num_rows <= 0 || batch.num_seqs <= 0 || batch.query_starts[0] != 0 ||
      batch.query_starts[batch.num_seqs] != batch.num_rows) {
    return Status::kBadRow;
  }
  if (batch.first_layer < 0 || batch.first_layer >= batch.end_layer ||
      batch.end_layer > config_.num_layers + 1) {
    return Status::kBadLayer;
  }
  for (std::int64_t seq = 0; seq < batch.num_seqs; ++seq) {
    const std::int64_t begin = batch.query_starts[seq], end = batch.query_starts[seq + 1];
    const std::int64_t length = batch.seq_lens[seq];
    if (begin >= end || end > batch.num_rows) return Status::kBadRow;
    if (length > config_.max_positions || length < end - begin) return Status::kBadPosition;
    const std::int64_t blocks = ceil_div(length, config_.block_size);
    if (blocks > batch.max_blocks) return Status::kBadBlock;
    for (std::int64_t i = 0; i < blocks; ++i) {
      const std::int64_t block = batch.block_tables[seq * batch.max_blocks + i];
      if (block < 0 || block >= batch.num_blocks) return Status::kBadBlock;
    }
    for (std::int64_t row = begin; row < end; ++row) {
      if (batch.positions[row] != length - end + row) return Status::kBadPosition;
    }
  }
  for (std::int64_t row = 0; row < batch.num_rows; ++row) {
    const std::int64_t token = batch.token_ids[row], slot = batch.slot_mapping[row];
    if (token < 0 || token >= config_.vocab_size) return Status::kBadTokenId;
    if (slot < 0 || slot >= batch.num_blocks * config_.block_size) return Status::kBadBlock;
  }
  for (std::int64_t i = 0; i < batch.num_logits; ++i) {
    if (batch.logits_rows[i] < 0 || batch.logits_rows[i] >= batch.num_rows) return Status::kBadRow;
  }
  return Status::kOk;
}

void Model::reserve(const pdmesh_batch& batch) {
  // Rounded up, so that batches of growing size do not allocate each time.
  const std::int64_t rows = round_up(std::max(batch.num_rows, batch.num_logits), 64);
  normed_.reserve(rows * config_.hidden_size);
  qkv_.reserve(rows * (query_size_ + 2 * kv_size_));
  attended_.reserve(rows * query_size_);
  activated_.reserve(rows * config_.intermediate_size);
  rows_.reserve(rows, max_k_);
}

Status Model::forward(const pdmesh_batch& batch) {
  const Status status = check(batch);
  if (status != Status::kOk) return status;
  batch_ = &batch;
  try {
    reserve(batch);
    plan();
  } catch (const std::bad_alloc&) {
    return Status::kOutOfMemory;
  }
  pool_.run([](void* model, int thread) { static_cast<Model*>(model)->run(thread); }, this);
  return Status::kOk;
}

void Model::plan() {
  attention_.make(*batch_, qkv_.data(), query_size_ + 2 * kv_size_);
  for (std::int64_t layer = 0; layer < config_.num_layers; ++layer) next_item_[layer] = 0;
  const std::int64_t products = config_.num_layers * kProducts + 1;
  for (std::int64_t i = 0; i < products * pool_.size(); ++i) taken_[i].units = 0;
}

Model::Range Model::share(std::int64_t count, int thread) const {
  return {count * thread / pool_.size(), count * (thread + 1) / pool_.size()};
}

void Model::run(int thread) {
  using Kind = Epilogue::Kind;
  const std::int64_t rows = batch_->num_rows;
  const std::int64_t hidden_size = config_.hidden_size;
  const std::int64_t qkv_size = query_size_ + 2 * kv_size_;
  const std::int64_t intermediate_size = config_.intermediate_size;
  if (batch_->first_layer == 0) embed(thread);
  const std::int64_t end = std::min<std::int64_t>(batch_->end_layer, config_.num_layers);
  for (std::int64_t i = batch_->first_layer; i < end; ++i) {
    const pdmesh_layer& layer = layers_[static_cast<std::size_t>(i)];
    const Linear qkv = linear_view(layer.qkv), output = linear_view(layer.output);
    const Linear gate_up = linear_view(layer.gate_up), down = linear_view(layer.down);
    norm(thread, layer.input_norm, qkv);
    project(thread, i * kProducts, qkv, normed_.data(), rows, {Kind::kStore, qkv_.data(), qkv_size, qkv_size});
    rotate_and_store(thread, i);
    attend(thread, i);
    merge_and_quantize(thread, output);
    project(thread, i * kProducts + 1, output, attended_.data(), rows,
            {Kind::kAdd, batch_->hidden, hidden_size, hidden_size});
    norm(thread, layer.post_attention_norm, gate_up);
    project(thread, i * kProducts + 2, gate_up, normed_.data(), rows,
            {Kind::kSiluMul, activated_.data(), intermediate_size, intermediate_size});
    quantize(thread, down, activated_.data());
    project(thread, i * kProducts + 3, down, activated_.data(), rows,
            {Kind::kAdd, batch_->hidden, hidden_size, hidden_size});
  }
  if (batch_->end_layer > config_.num_layers) head(thread);
}

void Model::embed(int thread) {
  const Linear embedding = linear_view(config_.embedding);
  const Range range = share(batch_->num_rows, thread);
  for (std::int64_t row = range.begin; row < range.end; ++row) {
    dequantize_row(embedding, batch_->token_ids[row],
                   batch_->hidden + row * config_.hidden_size);
  }
  // No barrier: the norm that follows has the same thread on the same rows.
}

void Model::norm(int thread, const float* weight, const Linear& next) {
  const std::int64_t k = config_.hidden_size;
  const Range range = share(batch_->num_rows, thread);
  for (std::int64_t row = range.begin; row < range.end; ++row) {
    float* normed = normed_.data() + row * k;
    kernels_.rms_norm(batch_->hidden + row * k, weight, config_.rms_norm_eps, k, normed);
    rows_.quantize(kernels_, next.format, row, normed, k);
  }
  pool_.barrier(thread);
}

void Model::merge_and_quantize(int thread, const Linear& next) {
  const Range range = share(batch_->num_rows, thread);
  for (std::int64_t row = range.begin; row < range.end; ++row) {
    attention_.merge_row(kernels_, row, attended_.data() + row * query_size_);
  }
  quantize(thread, next, attended_.data());
}

void Model::quantize(int thread, const Linear& next, const float* x) {
  const Range range = share(batch_->num_rows, thread);
  for (std::int64_t row = range.begin; row < range.end; ++row) {
    rows_.quantize(kernels_, next.format, row, x + row * next.k, next.k);
  }
  pool_.barrier(thread);
}

// A thread takes its own share piece by piece, in order, and then what is left of the others': one
// that another process has displaced does not keep the rest waiting for all of its share.
void Model::project(int thread, std::int64_t index, const Linear& weights, const float* x,
                    std::int64_t num_rows, const Epilogue& epilogue) {
  const Activations activations = rows_.view(weights.format, x, weights.k, weights.k);
  std::uint8_t* scratch = linear_scratch_[static_cast<std::size_t>(thread)].data();
  for (int i = 0; i < pool_.size(); ++i) {
    const int owner = (thread + i) % pool_.size();
    const Range range = share(ceil_div(weights.n, kUnit), owner);
    const std::int64_t piece = ceil_div(range.end - range.begin, kPieces);
    std::atomic<std::int64_t>& taken = taken_[index * pool_.size() + owner].units;
    for (std::int64_t begin; (begin = range.begin + taken.fetch_add(piece)) < range.end;) {
      kernels_.linear(weights, activations, num_rows, begin, std::min(begin + piece, range.end),
                      epilogue, scratch);
    }
  }
  pool_.barrier(thread);
}

void Model::rotate_and_store(int thread, std::int64_t layer) {
  const std::int64_t half = config_.head_dim / 2;
  const float scale = 1.0f / std::sqrt(static_cast<float>(config_.head_dim));
  const Range range = share(batch_->num_rows, thread);
  for (std::int64_t row = range.begin; row < range.end; ++row) {
    float* query = qkv_.data() + row * (query_size_ + 2 * kv_size_);
    float* key = query + query_size_;
    const float* cosine = config_.cosine + batch_->positions[row] * half;
    const float* sine = config_.sine + batch_->positions[row] * half;
    kernels_.rotate(query, config_.num_heads, config_.head_dim, cosine, sine, scale);
    kernels_.rotate(key, config_.num_kv_heads, config_.head_dim, cosine, sine, 1.0f);
    for (std::int64_t head = 0; head < config_.num_kv_heads; ++head) {
      const float* head_key = key + head * config_.head_dim;
      kernels_.write_kv(kv_layout_.view(batch_->kv_cache, layer, head), batch_->slot_mapping[row],
                        head_key, head_key + kv_size_);
    }
  }
  pool_.barrier(thread);
}

// A thread takes pieces of one sequence for all KV heads at once where there are enough of them: what
// these heads read lies side by side in each block, and comes from memory in one go.
void Model::attend(int thread, std::int64_t layer) {
  const std::int64_t count = static_cast<std::int64_t>(attention_.items().size());
  const bool are_many = count >= kPiecesPerThread * config_.num_kv_heads * pool_.size();
  Turn turn{thread, layer, are_many ? config_.num_kv_heads : 1, -1, 0, 0};
  AttentionTask tasks[2];
  bool has_task = next_task(turn, tasks[0]);
  for (int current = 0; has_task; current ^= 1) {
    has_task = next_task(turn, tasks[current ^ 1]);
    tasks[current].next = has_task ? &tasks[current ^ 1] : nullptr;
    kernels_.attend(tasks[current]);
  }
  pool_.barrier(thread);
}

// False once all is taken.
bool Model::next_task(Turn& turn, AttentionTask& task) {
  if (turn.tail < turn.end_tail) {
    task = attention_task(turn, attention_.tails()[turn.tail++]);
    task.fetched_heads = 1;
    return true;
  }
  if (++turn.index % turn.heads_at_once == 0) {
    turn.index = next_item_[turn.layer].fetch_add(turn.heads_at_once);
  }
  const auto& items = attention_.items();
  if (turn.index >= static_cast<std::int64_t>(items.size())) return false;
  const AttentionPlan::Item& item = items[static_cast<std::size_t>(turn.index)];
  turn.tail = item.first_tail;
  turn.end_tail = item.end_tail;
  task = attention_task(turn, item);
  // The first head fetches for all. More than one segment might not stay in the cache so long.
  const bool is_first = turn.index % turn.heads_at_once == 0;
  const bool is_short = item.end_key - item.first_key <= kKeySegment;
  task.fetched_heads = !is_short ? 1 : is_first ? turn.heads_at_once : 0;
  return true;
}

AttentionTask Model::attention_task(const Turn& turn, const AttentionPlan::Item& item) const {
  const std::int64_t heads_per_kv = config_.num_heads / config_.num_kv_heads;
  const std::int64_t stride = query_size_ + 2 * kv_size_;
  const std::int64_t head_offset = item.kv_head * heads_per_kv * config_.head_dim;
  AttentionTask task;
  task.kv = kv_layout_.view(batch_->kv_cache, turn.layer, item.kv_head);
  task.block_table = batch_->block_tables + item.sequence * batch_->max_blocks;
  task.first_position = item.first_position;
  task.num_rows = item.num_rows;
  task.num_heads = heads_per_kv;
  task.queries = qkv_.data() + item.first_row * stride + head_offset;
  task.query_stride = stride;
  task.first_key = item.first_key;
  task.end_key = item.end_key;
  task.partial = item.partial;
  task.rows = item.rows;
  task.out = attended_.data() + item.first_row * query_size_ + head_offset;
  task.out_stride = query_size_;
  task.scratch = attention_scratch_[static_cast<std::size_t>(turn.thread)].data();
  task.next = nullptr;
  return task;
}

void Model::head(int thread) {
  const std::int64_t k = config_.hidden_size;
  const Linear head = linear_view(config_.head);
  const Range range = share(batch_->num_logits, thread);
  for (std::int64_t i = range.begin; i < range.end; ++i) {
    float* normed = normed_.data() + i * k;
    kernels_.rms_norm(batch_->hidden + batch_->logits_rows[i] * k, config_.final_norm,
                      config_.rms_norm_eps, k, normed);
    rows_.quantize(kernels_, head.format, i, normed, k);
  }
  pool_.barrier(thread);
  project(thread, config_.num_layers * kProducts, head, normed_.data(), batch_->num_logits,
          {Epilogue::Kind::kStore, batch_->logits, config_.vocab_size, config_.vocab_size});
}

Status Model::sample(const float* logits, std::int64_t num_rows, std::int64_t stride,
                     const pdmesh_sampling* params, std::int64_t* token_ids) {
  struct Call {
    Model& model;
    const float* logits;
    std::int64_t num_rows, stride;
    const pdmesh_sampling* params;
    std::int64_t* token_ids;
    std::atomic<std::int64_t> next{0};
  } call{*this, logits, num_rows, stride, params, token_ids};
  try {
    for (auto& sampler : samplers_) sampler.reserve(config_.vocab_size);
  } catch (const std::bad_alloc&) {
    return Status::kOutOfMemory;
  }
  pool_.run(
      [](void* context, int thread) {
        Call& c = *static_cast<Call*>(context);
        Sampler& sampler = c.model.samplers_[static_cast<std::size_t>(thread)];
        for (std::int64_t row; (row = c.next.fetch_add(1)) < c.num_rows;) {
          c.token_ids[row] = sampler.sample(c.model.kernels_, c.logits + row * c.stride,
                                            c.model.config_.vocab_size, c.params[row]);
        }
      },
      &call);
  return Status::kOk;
}

}  // namespace pdmesh
