// The kernels for x86 processors with AVX2 and FMA.
#include <algorithm>
#include <atomic>
#include <memory>
#include <type_traits>
#include <utility>

#include "arguments.h"
#include "pool.h"

#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c,bmi2")
namespace avx2 {
#include "kernels.h"
extern const Kernels float32 = kernels_of<Float32>(), bfloat16 = kernels_of<BFloat16>();
}  // namespace avx2
#endif
