// The kernels for x86 processors with AVX-512.
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

#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c,bmi2,prefer-vector-width=512")
namespace avx512 {
#include "kernels.h"
extern const Kernels float32 = kernels_of<Float32>(), bfloat16 = kernels_of<BFloat16>();
}  // namespace avx512
#endif
