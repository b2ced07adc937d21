// The kernels for any processor of the family.
#include "isa.h"

namespace any {
#include "ops.h"
}  // namespace any
