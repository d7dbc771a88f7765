// Chooses the instruction-set level, and the sizes that all levels share.
#include <cstring>
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "kernels.h"
#include "numerics.h"

namespace pdmesh {

namespace {

#if defined(__x86_64__)
bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("fma");
}
// Tiles also need the kernel's leave, which holds for the process and all its threads.
bool has_amx() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  unsigned int a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  const bool has_tiles = (d >> 22 & 1u) != 0 && (d >> 24 & 1u) != 0 && (d >> 25 & 1u) != 0;
  static const bool has_leave =
      has_tiles && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return has_leave && has_avx512();
#else
  return false;
#endif
}
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
#endif

}  // namespace

const Kernels* select_kernels(const char* name) {
  const bool any = name == nullptr || name[0] == '\0';
#if defined(__x86_64__)
  if ((any || std::strcmp(name, "amx") == 0) && has_amx()) return amx_kernels();
  if ((any || std::strcmp(name, "avx512") == 0) && has_avx512()) return avx512_kernels();
  if ((any || std::strcmp(name, "avx2") == 0) && has_avx2()) return avx2_kernels();
#endif
  return any || std::strcmp(name, "portable") == 0 ? portable_kernels() : nullptr;
}

std::int64_t unit_bytes(WeightFormat format, std::int64_t k) {
  switch (format) {
    case WeightFormat::kFloat32: return k * kUnit * 4;
    case WeightFormat::kBfloat16: return round_up(k, 2) * kUnit * 2;
    case WeightFormat::kInt8: return round_up(k, kTileInputs) * kUnit;
    case WeightFormat::kInt8Grouped: return ceil_div(k, kGroup) * 1088;
    case WeightFormat::kInt4: return ceil_div(k, kGroup) * 640;
    case WeightFormat::kInt4Channel: return ceil_div(k, kTileInputs) * 1280;
  }
  return 0;
}

std::int64_t linear_scratch_bytes(std::int64_t k) {
  const std::int64_t int4 = ceil_div(k, kGroup) * 1280;
  // At two bytes a weight for AVX2, and with room for the step that is expanded once too often.
  const std::int64_t int4_channel = (2 * round_up(k, kTileInputs) + kTileInputs) * kUnit;
  return int4 > int4_channel ? int4 : int4_channel;
}

std::int64_t attention_state_floats(std::int64_t head_dim) {
  return round_up(head_dim, 32) + 16 + 16;
}

std::int64_t attention_scratch_floats(std::int64_t head_dim, std::int64_t num_queries) {
  const std::int64_t padded = round_up(head_dim, 64), queries = round_up(num_queries, 16);
  const std::int64_t chunk_floats = 2 * padded * kKeyChunk + 2 * kKeyChunk;
  const std::int64_t tile_floats = 16 * kKeyChunk + 16 * kKeyChunk / 2;  // scores, weights
  // The query itself, two states, and its place in a list.
  const std::int64_t query_floats = padded + 2 * attention_state_floats(head_dim) + 16;
  return chunk_floats + tile_floats + queries * query_floats + 64;
}

}  // namespace pdmesh
