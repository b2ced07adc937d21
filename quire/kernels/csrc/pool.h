// Threads that kernels share their work with.
#pragma once

#include <cstdint>
#include <functional>

// How many threads take part in a call of `run_parallel` at most: those that OpenMP, and so torch, may use here.
int pool_threads();
void set_pool_threads(int count);  // for calls from this thread

// Runs body(thread) on this thread, as number 0, and on those of its pool's threads that join in time. A thread that is
// late, because its processor is busy, is not waited for, so the body has to do all of the work by itself if no other
// thread joins. The body must not throw. Each calling thread has a pool of its own, which ends with it.
void run_parallel(const std::function<void(int)> &body);

// Lets this thread prefetch memory to its second-level cache while it waits for other threads of its pool, or as one of them
// for the next call: until all is prefetched, or this is called again. The memory need not exist.
void prefetch_while_waiting(const char *at, int64_t bytes);

// For tests: the counter of this thread's pool, which is even between calls and wraps.
unsigned get_pool_calls();
void set_pool_calls(unsigned calls);
