// How work is shared among threads, and its data asked for ahead of time.
#pragma once

constexpr int LINE = 64;  // bytes

// What is to be fetched beside some work, in steps of one or two lines; it goes to the second cache. Both steps ask for
// two lines: asking twice costs nothing that can be measured, a kernel of its own for each step twice the code.
struct Ahead {
    const char *at;
    int64_t step;  // bytes
    void fetch() {
        __builtin_prefetch(at, 0, 2);
        __builtin_prefetch(at + LINE, 0, 2);
        at += step;
    }
};

// Pieces of work for the threads of a parallel region. A thread learns of its next piece as it begins one, so that it
// can ask for its data.
class Pieces {
  public:
    explicit Pieces(int64_t count) : count_(count) {}
    template <class Body>
    void each(Body body) {
        for (int64_t piece = claimed_++, next; piece < count_; piece = next) {
            next = claimed_++;
            body(piece, next);
        }
    }

  private:
    int64_t count_;
    std::atomic<int64_t> claimed_{0};
};

// Calls body(i) for all i below `count`, on several threads if that is worth it.
template <class Body>
void spread(int64_t count, bool worth, Body body) {
    int64_t stretches = worth ? std::min<int64_t>(count, 8 * pool_threads()) : 1;
    auto run = [&](int64_t stretch) {
        for (int64_t i = stretch * count / stretches; i < (stretch + 1) * count / stretches; i++) body(i);
    };
    if (stretches == 1) return run(0);
    Pieces pieces(stretches);
    parallel([&](int) { pieces.each([&](int64_t piece, int64_t) { run(piece); }); });
}
