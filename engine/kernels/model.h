// A whole Llama-family forward pass over packed weights and a paged cache.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "attention_plan.h"
#include "kernels.h"
#include "pdmesh_kernels.h"
#include "pool.h"
#include "sampler.h"
#include "storage.h"

namespace pdmesh {

class Model {
 public:
  Model(const pdmesh_config& config, const Kernels& kernels);
  static Status check(const pdmesh_config& config);

  Status forward(const pdmesh_batch& batch);
  Status sample(const float* logits, std::int64_t num_rows, std::int64_t stride,
                const pdmesh_sampling* params, std::int64_t* token_ids);

 private:
  struct Range {
    std::int64_t begin, end;
  };
  // How much of a thread's share of a matrix has been taken, by itself or by others.
  struct alignas(64) Taken {
    std::atomic<std::int64_t> units;
  };

  // Where a thread is in a layer's attention.
  struct Turn {
    const int thread;
    const std::int64_t layer, heads_at_once;
    std::int64_t index;
    std::size_t tail, end_tail;
  };

  Status check(const pdmesh_batch& batch) const;
  void reserve(const pdmesh_batch& batch);
  void plan();
  Range share(std::int64_t count, int thread) const;

  void run(int thread);
  void embed(int thread);
  void norm(int thread, const float* weight, const Linear& next);
  void quantize(int thread, const Linear& next, const float* x);
  void merge_and_quantize(int thread, const Linear& next);
  // `index`: which of the step's products this is.
  void project(int thread, std::int64_t index, const Linear& weights, const float* x,
               std::int64_t num_rows, const Epilogue& epilogue);
  void rotate_and_store(int thread, std::int64_t layer);
  void attend(int thread, std::int64_t layer);
  bool next_task(Turn& turn, AttentionTask& task);
  AttentionTask attention_task(const Turn& turn, const AttentionPlan::Item& item) const;
  void head(int thread);

  const pdmesh_config config_;
  const Kernels& kernels_;
  const std::vector<pdmesh_layer> layers_;
  const KvLayout kv_layout_;
  const std::int64_t query_size_, kv_size_, max_k_;
  ThreadPool pool_;

  AttentionPlan attention_;
  Buffer<float> normed_, qkv_, attended_, activated_;
  ActivationRows rows_;
  std::vector<Buffer<float>> attention_scratch_;
  std::vector<Buffer<std::uint8_t>> linear_scratch_;
  std::vector<Sampler> samplers_;
  std::unique_ptr<std::atomic<std::int64_t>[]> next_item_;  // one counter per layer
  std::unique_ptr<Taken[]> taken_;                          // [products][threads]

  const pdmesh_batch* batch_ = nullptr;
};

}  // namespace pdmesh
