// What isa_*.cpp include before they choose an instruction set, as it has to be compiled for any processor.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <poll.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <new>
#include <numeric>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "op.h"
#include "pool.h"
