// Products of the rows of each head with the head's own weight, float32 or bfloat16, in panels of 32 outputs. As in linear
// layers each output is one chain of sums over its inputs, so that a row's result does not depend on other rows.
#pragma once

#include "../panel_matmul.h"

struct HeadLinear {
    static constexpr const char *NAME = "head_linear";
    static constexpr const char *PARAMETERS[] = {"x", "weight", "out"};
    // weight: 32-bit words of one float32 or two bfloat16 elements, the last one of an output with 0 where there is none.
    static HeadLinear check(const Tensor &x, const Tensor &weight, const Tensor &out) {
        Size rows("rows"), heads("heads"), size_in("size_in"), size_out("size_out"), panel("panel", PANEL);
        x.is_floating().has_shape(rows, heads, size_in).is_dense(1);
        out.has_dtype({x.dtype}).has_shape(rows, heads, size_out).is_dense(1);
        require(size_in > 0, "x", "at least one input is expected");
        int64_t elements = sizeof(uint32_t) / x.item_size;
        Size panels("panels", (size_out + PANEL - 1) / PANEL), words("words", (size_in + elements - 1) / elements);
        weight.has_dtype({DType::INT32}).has_shape(heads, panels, words, panel).is_contiguous();
        return {x.dtype, x.data(), weight.data<uint32_t>(), out.data(), rows, heads, size_in, size_out,
                panels, words, x.strides[0], x.strides[1], out.strides[0], out.strides[1]};
    }
    void run() const;
    int64_t work() const { return heads * size_in * size_out; }
    int64_t &row_count() { return rows; }

    DType dtype;
    const void *x;
    const uint32_t *weight;
    void *out;
    int64_t rows, heads, size_in, size_out, panels, words;  // panels of a head, words of an output
    int64_t x_stride, x_head, out_stride, out_head;
};
REGISTER_OP(HeadLinear);

// The rows of one head in a tile, as words. They are copied if they are no whole words, or if all would compete for the same
// lines of the first-level cache; see DealiasedRows.
template <class T>
class HeadRows {
    typedef typename T::Element Element;
    static constexpr int64_t PER_WORD = sizeof(uint32_t) / sizeof(Element);

  public:
    explicit HeadRows(const HeadLinear &a)
        : a_(a), copies_(uintptr_t(a.x) % sizeof(uint32_t) || a.x_stride % PER_WORD || a.x_head % PER_WORD ||
                         a.size_in % PER_WORD || (a.rows > 1 && DealiasedRows::aliases(a.x_stride * sizeof(Element)))),
          stride_(copies_ ? ((a.words + LANES - 1) / LANES | 1) * LANES : a.x_stride / PER_WORD) {
        if (copies_) copy_.reset(new uint32_t[MAX_ROWS * stride_]());
    }
    int64_t stride() const { return stride_; }
    const uint32_t *at(int64_t row, int64_t rows, int64_t head) {
        const Element *from = (const Element *)a_.x + row * a_.x_stride + head * a_.x_head;
        if (!copies_) return (const uint32_t *)from;
        if (from != copied_)
            for (int64_t r = 0; r < rows; r++)
                std::memcpy(&copy_[r * stride_], from + r * a_.x_stride, a_.size_in * sizeof *from);
        copied_ = from;
        return copy_.get();
    }

  private:
    const HeadLinear &a_;
    bool copies_;
    int64_t stride_;  // words
    std::unique_ptr<uint32_t[]> copy_;
    const Element *copied_ = nullptr;
};

template <class T>
void head_linear(const HeadLinear &a) {
    typedef typename T::Element Element;
    int64_t panel_words = a.words * PANEL;
    PanelWeight weight{(const char *)a.weight, a.heads * a.panels, panel_words * int64_t(sizeof(uint32_t))};
    Tiling tiling(a.rows, weight, a.x_stride * sizeof(Element), MAX_ROWS, FEW_ROWS);
    std::vector<HeadRows<T>> buffers;
    for (int threads = pool_threads(); threads > 0; threads--) buffers.emplace_back(a);
    run_parallel([&](int thread) {
        HeadRows<T> &x = buffers[thread];
        auto body = [&](int64_t row, int64_t rows, int64_t index, PrefetchStream prefetch) {
            int64_t head = index / a.panels, output = index % a.panels * PANEL;
            Element *out = (Element *)a.out + row * a.out_stride + head * a.out_head + output;
            word_matmul_for<T, RowWords, PrefetchStream, OutputEpilogue<T>>(rows)(
                RowWords(x.at(row, rows, head), x.stride() * int64_t(sizeof(uint32_t))), a.weight + index * panel_words,
                a.words, prefetch, OutputEpilogue<T>(out, a.out_stride, rows, a.size_out - output));
        };
        auto x_at = [&](int64_t index) { return (const char *)((const Element *)a.x + index / a.panels * a.x_head); };
        tiling.for_each(thread, x_at, body);
    });
}

inline void HeadLinear::run() const {
    if (rows == 0 || heads == 0 || size_out == 0) return;
    dtype == DType::BFLOAT16 ? head_linear<BFloat16>(*this) : head_linear<Float32>(*this);
}
