// The kernels for any processor of the family.
#include <algorithm>
#include <atomic>
#include <memory>
#include <type_traits>
#include <utility>

#include "arguments.h"
#include "pool.h"

namespace any {
#include "kernels.h"
extern const Kernels float32 = kernels_of<Float32>(), bfloat16 = kernels_of<BFloat16>();
}  // namespace any
