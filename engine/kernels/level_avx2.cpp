// The kernels compiled for AVX2; only run after select_kernels has found the CPU able.
#define PDMESH_LEVEL avx2
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <type_traits>

#include "vec_avx2.h"

#include "avx2_attention_impl.h"
#include "avx2_linear_impl.h"
#define PDMESH_ATTEND attend_by_format
#include "level_impl.h"

const pdmesh::Kernels* pdmesh::avx2_kernels() { return avx2::table("avx2"); }
