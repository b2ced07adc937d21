// Kernel calls of a thread that are kept, to be replayed for other numbers of rows. See quire/kernels/capture.py.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

class Capture {
  public:
    // `counts`: number of rows of each row kind while the calls are captured.
    explicit Capture(std::vector<int64_t> counts) : counts_(std::move(counts)) {}

    void set_row_kind(size_t kind);
    // Keeps a call, or makes the capture incomplete if its rows are not as many as the present kind has.
    void add(int64_t rows, std::function<void(int64_t)> call);
    void set_incomplete() { complete_ = false; }
    bool complete() const { return complete_; }
    size_t kinds() const { return counts_.size(); }
    void replay(const std::vector<int64_t> &counts) const;

  private:
    struct Call {
        std::function<void(int64_t)> run;
        size_t kind;
    };
    std::vector<int64_t> counts_;
    std::vector<Call> calls_;
    size_t kind_ = 0;
    bool complete_ = true;
};

extern thread_local Capture *current_capture;  // of this thread, or null
