// See pool.h. OpenMP's own regions wait for all their threads, so one that the system has put aside, for the event loop
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

constexpr std::chrono::microseconds SPIN(100);  // of waiting for the next call before a thread sleeps
constexpr std::chrono::microseconds SHORT(20);  // of waiting for a thread that is about to be done

void rest() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    std::this_thread::yield();
#endif
}

// Waits until a number is no longer what it was, first awake, then asleep.
void await_change(std::atomic<unsigned> &number, unsigned was, std::chrono::microseconds awake) {
    auto until = std::chrono::steady_clock::now() + awake;
    while (number.load() == was) {
        for (int i = 0; i < 64 && number.load() == was; i++) rest();
        if (number.load() == was && std::chrono::steady_clock::now() > until) number.wait(was);
    }
}

// The helpers of one thread. A call is open while its number is odd; who wants to take part says so first and then
// looks again, and who closes it first closes and then waits for those who have said so.
class Pool {
  public:
    ~Pool() {
        ending_ = true;
        calls_ += 2;
        calls_.notify_all();
        for (auto &helper : helpers_) helper.join();
    }

    void run(const std::function<void(int)> &body, int threads) {
        enlist(threads - 1);
        body_ = &body;
        threads_ = threads;
        calls_++;
        calls_.notify_all();
        body(0);
        calls_++;
        for (unsigned busy = busy_; busy != 0; busy = busy_) await_change(busy_, busy, SHORT);
    }

  private:
    void enlist(int wanted) {
        try {
            for (int have = int(helpers_.size()); have < wanted; have++)
                helpers_.emplace_back([this, have] { help(have + 1); });
        } catch (const std::system_error &) {  // the system gives no more threads: fewer do the same
        }
    }

    void help(int thread) {
        for (unsigned seen = 0;;) {
            unsigned call = calls_;
            if (ending_) return;  // looked at behind the number, whose last change comes after it
            if (call % 2 == 1 && call != seen) {
                busy_++;
                if (calls_ == call && thread < threads_) (*body_)(thread);
                busy_--;
                busy_.notify_one();
                seen = call;
            } else {
                await_change(calls_, call, SPIN);
            }
        }
    }

    std::atomic<unsigned> calls_{0}, busy_{0};  // the calls may pass the largest number
    std::atomic<int> threads_{0};
    std::atomic<bool> ending_{false};
    const std::function<void(int)> *body_ = nullptr;
    std::vector<std::thread> helpers_;
};

thread_local std::unique_ptr<Pool> pool;

}  // namespace

int pool_threads() { return omp_get_max_threads(); }

void parallel(const std::function<void(int)> &body) {
    int threads = pool_threads();
    if (threads < 2) return body(0);
    if (!pool) pool = std::make_unique<Pool>();
    pool->run(body, threads);
}
