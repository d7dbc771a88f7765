// Statuses, aligned buffers, and the layouts of cache blocks and packed rows.
#pragma once

#include <cstdint>
#include <memory>

#include "kernels.h"
#include "pdmesh_kernels.h"

namespace pdmesh {

enum class Status : std::int32_t {
  kOk = 0,
  kUnknownLevel,
  kBadConfig,
  kBadTokenId,
  kBadPosition,
  kBadBlock,
  kBadRow,
  kBadLayer,
  kOutOfMemory,
};

const char* status_text(std::int32_t status);

// Memory aligned to cache lines that grows and is kept.
template <class T>
class Buffer {
 public:
  T* data() const { return data_; }
  void reserve(std::int64_t count) {
    if (count <= count_) return;
    storage_ = std::make_unique<std::uint8_t[]>(static_cast<std::size_t>(count) * sizeof(T) + 64);
    const std::uintptr_t address = reinterpret_cast<std::uintptr_t>(storage_.get());
    data_ = reinterpret_cast<T*>((address + 63) / 64 * 64);
    count_ = count;
  }

 private:
  std::unique_ptr<std::uint8_t[]> storage_;
  T* data_ = nullptr;
  std::int64_t count_ = 0;
};

// Byte offsets inside one block: [layers][key, value][heads][block_size][head_dim] elements, then,
// in the 8-bit formats, [layers][key, value][heads][block_size] float scales.
class KvLayout {
 public:
  KvLayout(KvFormat format, std::int64_t num_layers, std::int64_t num_kv_heads,
           std::int64_t head_dim, std::int64_t block_size);
  std::int64_t block_bytes() const { return block_bytes_; }
  KvView view(std::uint8_t* base, std::int64_t layer, std::int64_t head) const;

 private:
  KvFormat format_;
  std::int64_t num_kv_heads_, head_dim_, block_size_, row_bytes_, scales_offset_, block_bytes_;
};

// Rows in the form that a weight format multiplies with: as they are, or quantized.
class ActivationRows {
 public:
  void reserve(std::int64_t num_rows, std::int64_t max_k);
  // Does nothing for the float formats.
  void quantize(const Kernels& kernels, WeightFormat format, std::int64_t row, const float* x,
                std::int64_t k);
  // `x`: the rows themselves, which the float formats multiply.
  Activations view(WeightFormat format, const float* x, std::int64_t stride, std::int64_t k) const;

 private:
  Buffer<std::int8_t> codes_;
  Buffer<float> scales_, sums_;
  Buffer<std::int32_t> offsets_;
};

Linear linear_view(const pdmesh_linear& linear);
// One output channel's weights, as the embedding table is read.
void dequantize_row(const Linear& weights, std::int64_t row, float* out);

}  // namespace pdmesh
