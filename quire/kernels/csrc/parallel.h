// Work shared among the threads of the pool, and prefetches of its data.
#pragma once

constexpr int LINE = 64;  // bytes of a cache line
constexpr int64_t SERIAL = 16384;  // elements below which other threads cost more than they save

// Memory that is prefetched to the second-level cache while other work is done, `step` bytes at a time. Each call
// prefetches two lines even if the step is one: a second prefetch of a line costs nothing that can be measured.
struct PrefetchStream {
    const char *at;  // null: nothing is prefetched
    int64_t step;    // bytes, one or two lines
    void fetch() {
        if (!at) return;
        __builtin_prefetch(at, 0, 2);
        __builtin_prefetch(at + LINE, 0, 2);
        at += step;
    }
};

template <class Element>
void prefetch_for_write(const Element *at, int64_t elements) {
    for (int64_t i = 0; i < elements; i += LINE / int64_t(sizeof *at)) __builtin_prefetch(at + i, 1);
}

// Work items that the threads of a parallel region claim one by one. A thread knows its next item when it begins one, so
// that it can prefetch its data.
class WorkItems {
  public:
    explicit WorkItems(int64_t count) : count_(count) {}
    // Calls body(item, next item) until no item is left.
    template <class Body>
    void for_each(Body body) {
        for (int64_t item = claimed_++, next; item < count_; item = next) {
            next = claimed_++;
            body(item, next);
        }
    }

  private:
    int64_t count_;
    std::atomic<int64_t> claimed_{0};
};

// Calls body(i) for all i below `count`, on several threads if `parallel`.
template <class Body>
void parallel_for(int64_t count, bool parallel, Body body) {
    int64_t ranges = parallel ? std::min<int64_t>(count, 8 * pool_threads()) : 1;
    auto run = [&](int64_t range) {
        for (int64_t i = range * count / ranges; i < (range + 1) * count / ranges; i++) body(i);
    };
    if (ranges == 1) return run(0);
    WorkItems items(ranges);
    run_parallel([&](int) { items.for_each([&](int64_t range, int64_t) { run(range); }); });
}
