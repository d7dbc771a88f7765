// The table of one level's kernels. Included once per level, after its lanes.
#pragma once

#include "vector_attention_impl.h"

#ifndef PDMESH_LINEAR
#define PDMESH_LINEAR linear
#endif
#ifndef PDMESH_ATTEND
#define PDMESH_ATTEND attend
#endif

namespace pdmesh {
namespace PDMESH_LEVEL {

static const Kernels* table(const char* name) {
  static const Kernels kernels = {
      name,   &rms_norm, &quantize, &quantize_wide, &PDMESH_LINEAR, &rotate, &write_kv,
      &PDMESH_ATTEND, &merge,   &argmax,   &exp_shifted,   &sum_from,      &dot_gops};
  return &kernels;
}

}  // namespace PDMESH_LEVEL
}  // namespace pdmesh
