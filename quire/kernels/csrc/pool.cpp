// See pool.h. OpenMP's own regions wait for all their threads, so one that the system has descheduled, for the event loop
// or another program, stops the others; a step has a hundred regions.
#include "pool.h"

#include <omp.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <system_error>
#include <thread>
#include <vector>

namespace {

constexpr std::chrono::microseconds IDLE_SPIN(100);  // spinning for the next call before a thread sleeps
constexpr std::chrono::microseconds JOIN_SPIN(20);   // spinning for a thread that is about to be done

void cpu_relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    std::this_thread::yield();
#endif
}

// What this thread prefetches while it waits.
thread_local struct {
    const char *at = nullptr, *end = nullptr;
} ahead;

// Waits until `value` differs from `old`: prefetches and spins for a while, then sleeps.
void await_change(std::atomic<unsigned> &value, unsigned old, std::chrono::microseconds spin) {
    auto until = std::chrono::steady_clock::now() + spin;
    while (value.load() == old) {
        for (; ahead.at < ahead.end && value.load() == old; ahead.at += 64) __builtin_prefetch(ahead.at, 0, 2);
        for (int i = 0; i < 64 && value.load() == old; i++) cpu_relax();
        if (value.load() == old && std::chrono::steady_clock::now() > until) value.wait(old);
    }
}

// The helper threads of one calling thread. A call is open while `calls_` is odd. A helper first adds itself to `busy_`
// and then checks that the call is still open; the caller first closes the call and then waits for `busy_` to be 0.
//
// `calls_` may wrap: 2^32 is even, so odd still means open, and numbers are only compared for equality. A helper that
// mistakes a call for one that it has seen 2^32 changes before leaves its work to the others.
class Pool {
  public:
    ~Pool() {
        ending_ = true;
        calls_ += 2;
        calls_.notify_all();
        for (auto &helper : helpers_) helper.join();
    }

    void run(const std::function<void(int)> &body, int threads) {
        start_helpers(threads - 1);
        body_ = &body;
        threads_ = threads;
        calls_++;
        calls_.notify_all();
        body(0);
        calls_++;
        for (unsigned busy = busy_; busy != 0; busy = busy_) await_change(busy_, busy, JOIN_SPIN);
    }

    unsigned calls() const { return calls_; }
    void set_calls(unsigned calls) { calls_ = calls, calls_.notify_all(); }

  private:
    void start_helpers(int count) {
        try {
            for (int have = int(helpers_.size()); have < count; have++)
                helpers_.emplace_back([this, have] { help(have + 1); });
        } catch (const std::system_error &) {  // no more threads: fewer do the same
        }
    }

    void help(int thread) {
        for (unsigned seen = 0;;) {
            unsigned call = calls_;
            if (ending_) return;  // read after `calls_`, which is changed after `ending_`
            if (call % 2 == 1 && call != seen) {
                busy_++;
                if (calls_ == call && thread < threads_) (*body_)(thread);
                busy_--;
                busy_.notify_one();
                seen = call;
            } else {
                await_change(calls_, call, IDLE_SPIN);
            }
        }
    }

    std::atomic<unsigned> calls_{0}, busy_{0};
    std::atomic<int> threads_{0};
    std::atomic<bool> ending_{false};
    const std::function<void(int)> *body_ = nullptr;
    std::vector<std::thread> helpers_;
};

Pool &own_pool() {
    thread_local Pool pool;  // ends, and joins its helpers, when its thread does
    return pool;
}

}  // namespace

void prefetch_while_waiting(const char *at, int64_t bytes) { ahead = {at, at + bytes}; }

int pool_threads() { return omp_get_max_threads(); }
void set_pool_threads(int count) { omp_set_num_threads(count); }

void run_parallel(const std::function<void(int)> &body) {
    int threads = pool_threads();
    if (threads < 2) return body(0);
    own_pool().run(body, threads);
}

unsigned get_pool_calls() { return own_pool().calls(); }
void set_pool_calls(unsigned calls) { own_pool().set_calls(calls); }
