// Denormal numbers as zero, in what goes into an operation and in what comes out: as in tiles.
// Included once per level.
#pragma once

#include <cstdint>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace pdmesh {
namespace PDMESH_LEVEL {

// Holds for the calling thread while the object lives. What is computed under it must be behind a
// call that is not inlined: compilers move arithmetic across the change of mode.
class DenormalsAreZero {
 public:
#if defined(__x86_64__)
  DenormalsAreZero() : before_(_mm_getcsr()) { _mm_setcsr(before_ | 0x8040u); }
  ~DenormalsAreZero() { _mm_setcsr(before_); }

 private:
  const unsigned int before_;
#elif defined(__aarch64__)
  DenormalsAreZero() {
    asm volatile("mrs %0, fpcr" : "=r"(before_));
    asm volatile("msr fpcr, %0" : : "r"(before_ | std::uint64_t{1} << 24));
  }
  ~DenormalsAreZero() { asm volatile("msr fpcr, %0" : : "r"(before_)); }

 private:
  std::uint64_t before_;
#else
  DenormalsAreZero() {}  // one level only, so there is nothing to agree with
  ~DenormalsAreZero() {}
#endif
};

}  // namespace PDMESH_LEVEL
}  // namespace pdmesh
