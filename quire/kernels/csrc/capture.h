// Kernel calls of a thread that are kept, to be replayed for other numbers of rows. See quire/kernels/capture.py.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <vector>

// A weight in panels of the same size.
struct PanelWeight {
    const char *data = nullptr;
    int64_t panels = 0, panel_bytes = 0;
};

class Capture {
  public:
    static constexpr const char *NAME = "quire.kernels._native.Capture";

    // `counts`: number of rows of each row kind while the calls are captured. `runs`: whether they are made as well.
    Capture(std::vector<int64_t> counts, bool runs) : runs(runs), counts_(std::move(counts)) {}
    const bool runs;

    void set_row_kind(size_t kind);
    // Keeps a call, or makes the capture incomplete if its rows are not as many as the present kind has.
    void add(int64_t rows, std::function<void(int64_t)> call);
    // Tells that the next call that is added reads a weight. Returns where the weight will be that is read after it, so that
    // a kernel can prefetch it: without data if there is none. Valid as long as the capture is.
    const PanelWeight *add_weight(const PanelWeight &weight);
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
    std::deque<PanelWeight> weights_ = {{}};  // that calls read, in order, and none
    size_t kind_ = 0;
    bool complete_ = true;
};

extern thread_local Capture *current_capture;  // of this thread, or null
