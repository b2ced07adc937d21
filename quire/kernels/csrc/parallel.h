// Work shared among the threads of the pool, and prefetches of its data.
#pragma once

constexpr int LINE = 64;  // bytes of a cache line
constexpr int64_t L1_BYTES = 32 << 10;  // of a core's first-level cache, about
constexpr int64_t SERIAL = 16384;  // elements below which other threads cost more than they save

// Whether products that read memory in order are faster if they prefetch it by instruction. A core of Intel (Emerald Rapids)
// reads 10 GB/s beside products of 4 bits, and 15 to 16 of 16 with prefetches; one of AMD (Zen 4) reads 24 with them and 33
// without.
inline bool gains_by_prefetches() {
#if defined(__x86_64__)
    return __builtin_cpu_is("intel");
#else
    return false;
#endif
}

// Memory that is prefetched to the second-level cache while other work is done, `step` bytes at a time. Each call
// prefetches two lines even if the step is one: a second prefetch of a line costs nothing that can be measured.
struct PrefetchStream {
    const char *at;  // null: nothing is prefetched
    int64_t step;    // bytes, one or two lines
    const char *near = nullptr;  // what is read soon, of which each call prefetches two lines to the first-level cache; or null
    void fetch() {
        if (!at) return;
        __builtin_prefetch(at, 0, 2);
        __builtin_prefetch(at + LINE, 0, 2);
        at += step;
        if (!near) return;
        __builtin_prefetch(near);
        __builtin_prefetch(near + LINE);
        near += 2 * LINE;
    }
};

// Elements from the beginning of a cache line on, not initialized. Vectors that cross lines take twice as long to load.
template <class Element>
class LineArray {
  public:
    explicit LineArray(int64_t size) : elements_((Element *)::operator new(size * sizeof(Element), std::align_val_t(LINE))) {}
    Element &operator[](int64_t i) const { return elements_.get()[i]; }

  private:
    struct Delete {
        void operator()(Element *elements) const { ::operator delete(elements, std::align_val_t(LINE)); }
    };
    std::unique_ptr<Element, Delete> elements_;
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

// Work items in ranges, one for each thread, which takes those of its range in order and then helps with the others. So what
// a thread reads is in order, and threads rarely write to the same line: it takes long to go from core to core.
class WorkRanges {
  public:
    explicit WorkRanges(int64_t count) : ranges_(pool_threads()) {
        int64_t threads = int64_t(ranges_.size());
        for (int64_t i = 0; i < threads; i++) {
            ranges_[i].next = range_start(i, threads, count);
            ranges_[i].end = range_start(i + 1, threads, count);
        }
    }
    // The first item of a thread's range.
    static int64_t range_start(int64_t thread, int64_t threads, int64_t count) { return thread * count / threads; }
    // Calls body(item, whether it is the last one of the thread's own range) until no item is left.
    template <class Body>
    void for_each(int thread, Body body) {
        size_t threads = ranges_.size();
        for (size_t i = 0; i < threads; i++) {
            Range &range = ranges_[(thread + i) % threads];
            for (int64_t item; (item = range.next++) < range.end;) body(item, i == 0 && item + 1 == range.end);
        }
    }

  private:
    struct alignas(LINE) Range {
        std::atomic<int64_t> next;
        int64_t end;
    };
    std::vector<Range> ranges_;
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
