// The kernels compiled for AVX-512; only run after select_kernels has found the CPU able.
#define PDMESH_LEVEL avx512
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <type_traits>

#include "vec_avx512.h"

#include "dot_linear_impl.h"
#include "level_impl.h"

const pdmesh::Kernels* pdmesh::avx512_kernels() { return avx512::table("avx512"); }
