// The kernels for x86 processors with AVX-512 and its products of bfloat16 numbers and of bytes.
#include <algorithm>
#include <atomic>
#include <memory>
#include <type_traits>
#include <utility>

#include "arguments.h"
#include "pool.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define HAVE_AVX512
#define HAVE_BFLOAT16_PRODUCTS
#define HAVE_BYTE_PRODUCTS

#pragma GCC target("avx512bf16,avx512vnni,avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c,bmi2,prefer-vector-width=512")
namespace avx512bf16 {
#include "kernels.h"
extern const Kernels float32 = kernels_of<Float32>(), bfloat16 = kernels_of<BFloat16>();
}  // namespace avx512bf16
#endif
