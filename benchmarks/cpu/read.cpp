// A plain read of memory by several threads: what `MemoryRead` in limits.py compiles for this processor and calls.
#include <cstdint>
#include <thread>
#include <vector>

// Returns the sum of all words. Each thread reads a stretch of its own in order.
extern "C" uint64_t read_memory(const uint64_t *memory, int64_t words, int threads) {
    std::vector<uint64_t> sums(threads);
    auto read = [&](int64_t thread) {
        uint64_t sum = 0;
        for (int64_t i = thread * words / threads; i < (thread + 1) * words / threads; i++) sum += memory[i];
        sums[thread] = sum;
    };
    std::vector<std::thread> helpers;
    for (int thread = 1; thread < threads; thread++) helpers.emplace_back(read, thread);
    read(0);
    for (auto &helper : helpers) helper.join();
    uint64_t total = 0;
    for (uint64_t sum : sums) total += sum;
    return total;
}
