#include "capture.h"

#include <utility>

#include "tensor.h"

thread_local Capture *current_capture;

void Capture::set_row_kind(size_t kind) {
    require(kind < counts_.size(), "kind", "the capture has no count of such rows");
    kind_ = kind;
}

void Capture::add(int64_t rows, std::function<void(int64_t)> call) {
    if (rows == counts_[kind_]) calls_.push_back({std::move(call), kind_});
    else complete_ = false;
}

const PanelWeight *Capture::add_weight(const PanelWeight &weight) {
    weights_.back() = weight;
    return &weights_.emplace_back();
}

void Capture::replay(const std::vector<int64_t> &counts) const {
    for (const Call &call : calls_) call.run(counts[call.kind]);
}
