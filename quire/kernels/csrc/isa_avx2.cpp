// The kernels for x86 processors with AVX2 and FMA.
#include "isa.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define HAVE_AVX2

#pragma GCC target("avx2,fma,f16c,bmi2")
namespace avx2 {
#include "ops.h"
}  // namespace avx2
#endif
