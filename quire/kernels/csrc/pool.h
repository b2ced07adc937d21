// Threads that kernels share their work with.
#pragma once

#include <functional>

// How many threads take part in a call of `parallel` at most: those that OpenMP, and so torch, may use here.
int pool_threads();

// Runs body(thread) on this thread, as 0, and on those others that come in time. Whoever comes takes some of the work, and
// what comes too late, because its processor has something else to do, is not waited for: the body has to get everything
// done by itself if it must. No exception may leave it.
void parallel(const std::function<void(int)> &body);
