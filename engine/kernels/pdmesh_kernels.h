/* The C interface of the kernel library. The caller owns all memory that it passes in, and keeps
 * weights alive for as long as the model that refers to them. */
#ifndef PDMESH_KERNELS_H_
#define PDMESH_KERNELS_H_

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define PDMESH_ABI_VERSION 3

/* Weights packed as kernels.h describes; `format` is its WeightFormat. */
typedef struct {
  int32_t format;
  int32_t reserved;
  int64_t n;
  int64_t k;
  const void* data;
  const float* scales;
} pdmesh_linear;

typedef struct {
  const float* input_norm;
  const float* post_attention_norm;
  pdmesh_linear qkv;     /* queries, keys, values, one after the other */
  pdmesh_linear output;
  pdmesh_linear gate_up; /* in each unit sixteen gates, then the sixteen ups of the same columns */
  pdmesh_linear down;
} pdmesh_layer;

typedef struct {
  int64_t num_layers;
  int64_t hidden_size;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t intermediate_size;
  int64_t vocab_size;
  int64_t max_positions;
  int64_t block_size;
  float rms_norm_eps;
  int32_t kv_format;
  const float* cosine; /* [max_positions][head_dim / 2] */
  const float* sine;
  pdmesh_linear embedding;
  const float* final_norm;
  pdmesh_linear head;
  const pdmesh_layer* layers;
  const char* level; /* "amx", "avx512", "avx2", "portable", or null for the best */
  int32_t num_threads;
  int32_t reserved;
} pdmesh_config;

/* One step: num_rows tokens of num_seqs sequences, the rows of a sequence adjacent and at
 * consecutive positions, its last one at seq_lens - 1.
 *
 * The layers from first_layer to end_layer, exclusive, are computed; the output head counts as the
 * one after the last. What goes from one layer to the next is in `hidden`: several calls, one after
 * the other with the same batch, compute what one call would, and other batches may come in
 * between. Only the one with the first layer reads token_ids, and only the one with the output head
 * writes logits. */
typedef struct {
  int64_t num_rows;
  int64_t num_seqs;
  int64_t num_logits;
  int64_t max_blocks;
  const int64_t* token_ids;
  const int64_t* positions;
  const int64_t* slot_mapping;
  const int64_t* query_starts; /* [num_seqs + 1] */
  const int64_t* seq_lens;
  const int64_t* block_tables; /* [num_seqs][max_blocks] */
  const int64_t* logits_rows;
  uint8_t* kv_cache;
  int64_t num_blocks;
  float* logits; /* [num_logits][vocab_size] */
  int64_t first_layer;
  int64_t end_layer;
  float* hidden; /* [num_rows][hidden_size] */
} pdmesh_batch;

/* One row of sampling: temperature below 1e-5 is greedy; top_k 0, top_p 1 and min_p 0 are off. */
typedef struct {
  int64_t seed;
  int64_t position;
  float temperature;
  float top_p;
  float min_p;
  int32_t top_k;
} pdmesh_sampling;

typedef struct pdmesh_model pdmesh_model;

int32_t pdmesh_abi_version(void);
/* The level that would be used: the named one, or the best; null if this machine cannot. */
const char* pdmesh_level(const char* name);
/* Why a call returned this status; "" for 0. */
const char* pdmesh_status_text(int32_t status);

int64_t pdmesh_unit_bytes(int32_t format, int64_t k);
int64_t pdmesh_block_bytes(int32_t kv_format, int64_t num_layers, int64_t num_kv_heads,
                           int64_t head_dim, int64_t block_size);

/* Null when the configuration is not supported; *status says why. */
pdmesh_model* pdmesh_model_create(const pdmesh_config* config, int32_t* status);
void pdmesh_model_destroy(pdmesh_model* model);
/* Not thread-safe: one call at a time per model. Returns 0 or a status, having checked every
 * index of the batch first. */
int32_t pdmesh_model_forward(pdmesh_model* model, const pdmesh_batch* batch);
/* Draws a token per row of processed logits; -1 for a row whose largest logit is not finite. */
int32_t pdmesh_model_sample(pdmesh_model* model, const float* logits, int64_t num_rows,
                            int64_t stride, const pdmesh_sampling* params, int64_t* token_ids);

/* Single kernels, for tests and benchmarks. */
int32_t pdmesh_linear_forward(const char* level, const pdmesh_linear* weights, const float* x,
                              int64_t num_rows, int64_t stride, float* out, int64_t out_stride,
                              int32_t num_threads, int32_t num_repeats);
int32_t pdmesh_rms_norm(const char* level, const float* x, const float* weight, float epsilon,
                        int64_t k, float* out);
int32_t pdmesh_exp(const char* level, const float* x, int64_t n, float* out);
int32_t pdmesh_write_kv(const char* level, int32_t kv_format, int64_t head_dim, const float* key,
                        const float* value, uint8_t* block);
/* Machine limits: seconds for reading `bytes` from `data` with `num_threads`, and billions of
 * 8-bit operations (multiply and add) a second of one thread. */
double pdmesh_read_seconds(const uint8_t* data, int64_t bytes, int32_t num_threads);
double pdmesh_dot_gops(const char* level);

#ifdef __cplusplus
}
#endif

#endif  /* PDMESH_KERNELS_H_ */
