// The kernels in plain C++, for any machine.
#define PDMESH_LEVEL portable
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <type_traits>

#include "vec_portable.h"

#include "dot_linear_impl.h"
#include "level_impl.h"

const pdmesh::Kernels* pdmesh::portable_kernels() { return portable::table("portable"); }
