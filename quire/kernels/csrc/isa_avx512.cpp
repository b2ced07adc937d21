// The kernels for x86 processors with AVX-512.
#include "isa.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define HAVE_AVX512

#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c,bmi2,prefer-vector-width=512")
namespace avx512 {
#include "ops.h"
}  // namespace avx512
#endif
