// The kernels for any processor of the family.
#include "isa.h"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace any {
#include "ops.h"
}  // namespace any
