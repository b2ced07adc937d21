// The kernels for x86 processors with AVX-512 and its dot products of int8 elements, but not those of bfloat16.
#include "isa.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define HAVE_AVX512
#define HAVE_INT8_DOT

#pragma GCC target("avx512vnni,avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c,bmi2,prefer-vector-width=512")
namespace avx512vnni {
#include "ops.h"
}  // namespace avx512vnni
#endif
