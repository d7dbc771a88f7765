// The C interface over the C++ parts.
#include "pdmesh_kernels.h"

#include <chrono>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "kernels.h"
#include "model.h"
#include "numerics.h"

struct pdmesh_model {
  pdmesh::Model model;
};

using pdmesh::Kernels;
using pdmesh::Status;

namespace {

constexpr std::int32_t code(Status status) { return static_cast<std::int32_t>(status); }

double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

std::int32_t pdmesh_abi_version() { return PDMESH_ABI_VERSION; }

const char* pdmesh_level(const char* name) {
  const Kernels* kernels = pdmesh::select_kernels(name);
  return kernels == nullptr ? nullptr : kernels->name;
}

const char* pdmesh_status_text(std::int32_t status) { return pdmesh::status_text(status); }

std::int64_t pdmesh_unit_bytes(std::int32_t format, std::int64_t k) {
  return pdmesh::unit_bytes(static_cast<pdmesh::WeightFormat>(format), k);
}

std::int64_t pdmesh_block_bytes(std::int32_t kv_format, std::int64_t num_layers,
                                std::int64_t num_kv_heads, std::int64_t head_dim,
                                std::int64_t block_size) {
  const auto format = static_cast<pdmesh::KvFormat>(kv_format);
  return pdmesh::KvLayout(format, num_layers, num_kv_heads, head_dim, block_size).block_bytes();
}

pdmesh_model* pdmesh_model_create(const pdmesh_config* config, std::int32_t* status) {
  const Kernels* kernels = pdmesh::select_kernels(config->level);
  *status = code(kernels == nullptr ? Status::kUnknownLevel : pdmesh::Model::check(*config));
  if (*status != 0) return nullptr;
  try {
    return new pdmesh_model{{*config, *kernels}};
  } catch (const std::exception&) {  // memory, or a thread that cannot start
    *status = code(Status::kOutOfMemory);
    return nullptr;
  }
}

void pdmesh_model_destroy(pdmesh_model* model) { delete model; }

std::int32_t pdmesh_model_forward(pdmesh_model* model, const pdmesh_batch* batch) {
  return code(model->model.forward(*batch));
}

std::int32_t pdmesh_model_sample(pdmesh_model* model, const float* logits, std::int64_t num_rows,
                                 std::int64_t stride, const pdmesh_sampling* params,
                                 std::int64_t* token_ids) {
  return code(model->model.sample(logits, num_rows, stride, params, token_ids));
}

namespace {

struct LinearCall {
  const Kernels& kernels;
  pdmesh::ThreadPool& pool;
  const pdmesh::Linear weights;
  pdmesh::Activations x;
  std::int64_t num_rows;
  pdmesh::Epilogue epilogue;
  std::vector<pdmesh::Buffer<std::uint8_t>> scratch;
  std::int32_t num_repeats;

  void run(int thread) {
    const std::int64_t units = pdmesh::ceil_div(weights.n, pdmesh::kUnit);
    for (std::int32_t i = 0; i < num_repeats; ++i) {
      kernels.linear(weights, x, num_rows, units * thread / pool.size(),
                     units * (thread + 1) / pool.size(), epilogue,
                     scratch[static_cast<std::size_t>(thread)].data());
      pool.barrier(thread);
    }
  }
};

}  // namespace

std::int32_t pdmesh_linear_forward(const char* level, const pdmesh_linear* weights, const float* x,
                                   std::int64_t num_rows, std::int64_t stride, float* out,
                                   std::int64_t out_stride, std::int32_t num_threads,
                                   std::int32_t num_repeats) {
  const Kernels* kernels = pdmesh::select_kernels(level);
  if (kernels == nullptr) return code(Status::kUnknownLevel);
  pdmesh::ThreadPool pool(num_threads);
  const auto format = static_cast<pdmesh::WeightFormat>(weights->format);
  pdmesh::ActivationRows rows;
  rows.reserve(num_rows, weights->k);
  for (std::int64_t row = 0; row < num_rows; ++row) {
    rows.quantize(*kernels, format, row, x + row * stride, weights->k);
  }
  LinearCall call{*kernels,
                  pool,
                  pdmesh::linear_view(*weights),
                  rows.view(format, x, stride, weights->k),
                  num_rows,
                  {pdmesh::Epilogue::Kind::kStore, out, out_stride, weights->n},
                  std::vector<pdmesh::Buffer<std::uint8_t>>(static_cast<std::size_t>(num_threads)),
                  num_repeats};
  for (auto& scratch : call.scratch) scratch.reserve(pdmesh::linear_scratch_bytes(weights->k));
  pool.run([](void* context, int thread) { static_cast<LinearCall*>(context)->run(thread); },
           &call);
  return code(Status::kOk);
}

std::int32_t pdmesh_rms_norm(const char* level, const float* x, const float* weight, float epsilon,
                             std::int64_t k, float* out) {
  const Kernels* kernels = pdmesh::select_kernels(level);
  if (kernels == nullptr) return code(Status::kUnknownLevel);
  kernels->rms_norm(x, weight, epsilon, k, out);
  return code(Status::kOk);
}

std::int32_t pdmesh_exp(const char* level, const float* x, std::int64_t n, float* out) {
  const Kernels* kernels = pdmesh::select_kernels(level);
  if (kernels == nullptr) return code(Status::kUnknownLevel);
  kernels->exp_shifted(x, n, 0.0f, 1.0f, out);
  return code(Status::kOk);
}

std::int32_t pdmesh_write_kv(const char* level, std::int32_t kv_format, std::int64_t head_dim,
                             const float* key, const float* value, std::uint8_t* block) {
  const Kernels* kernels = pdmesh::select_kernels(level);
  if (kernels == nullptr) return code(Status::kUnknownLevel);
  const auto format = static_cast<pdmesh::KvFormat>(kv_format);
  const pdmesh::KvLayout layout(format, 1, 1, head_dim, 1);
  kernels->write_kv(layout.view(block, 0, 0), 0, key, value);
  return code(Status::kOk);
}

double pdmesh_read_seconds(const std::uint8_t* data, std::int64_t bytes, std::int32_t num_threads) {
  struct Call {
    const std::uint8_t* data;
    std::int64_t words;
    int num_threads;
    std::uint64_t sums[256];
  } call{data, bytes / 64, num_threads, {}};
  pdmesh::ThreadPool pool(num_threads);
  const auto start = std::chrono::steady_clock::now();
  pool.run(
      [](void* context, int thread) {
        Call& c = *static_cast<Call*>(context);
        std::uint64_t sums[8] = {};
        const std::int64_t end = c.words * (thread + 1) / c.num_threads;
        for (std::int64_t i = c.words * thread / c.num_threads; i < end; ++i) {
          std::uint64_t line[8];
          std::memcpy(line, c.data + i * 64, 64);
          for (int j = 0; j < 8; ++j) sums[j] += line[j];
        }
        for (const std::uint64_t sum : sums) c.sums[thread] += sum;
      },
      &call);
  const double seconds = seconds_since(start);
  // The sums are used, so that the reading is not optimized away.
  return call.sums[0] == 1 ? -seconds : seconds;
}

double pdmesh_dot_gops(const char* level) {
  const Kernels* kernels = pdmesh::select_kernels(level);
  return kernels == nullptr ? 0.0 : kernels->dot_gops();
}
