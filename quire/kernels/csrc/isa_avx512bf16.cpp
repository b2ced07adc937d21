// The kernels for x86 processors with AVX-512 and its dot products of bfloat16 and of int8 elements.
#include "isa.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define HAVE_AVX512
#define HAVE_BF16_DOT
#define HAVE_INT8_DOT

#pragma GCC target("avx512bf16,avx512vnni,avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c,bmi2,prefer-vector-width=512")
namespace avx512bf16 {
#include "ops.h"
}  // namespace avx512bf16
#endif
