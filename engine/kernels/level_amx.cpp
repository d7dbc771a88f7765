// The AVX-512 kernels with AMX tiles for integer products of many rows and for attention.
#define PDMESH_LEVEL amx
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <type_traits>

#include "vec_avx512.h"

#include "amx_impl.h"
#include "tile_prefill_impl.h"
#define PDMESH_LINEAR linear_or_tiles
#define PDMESH_ATTEND attend_or_tiles
#include "level_impl.h"

const pdmesh::Kernels* pdmesh::amx_kernels() { return amx::table("amx"); }
