// Linear layers with bfloat16 weights in panels, and activations of their outputs.
#pragma once

#include "../panel_matmul.h"

struct Linear {
    static constexpr const char *NAME = "linear";
    static constexpr const char *PARAMETERS[] = {"x", "weight", "bias", "out", "act"};
    static Linear check(const Tensor &x, const Tensor &weight, const OptionalTensor &bias, const Tensor &out,
                        std::optional<std::string_view> act) {
        Size rows("rows"), size_in("size_in"), size_out("size_out"), panel("panel", PANEL);
        x.has_dtype({DType::BFLOAT16}).has_shape(rows, size_in).is_dense(1);
        out.is_floating().has_shape(rows, size_out).is_contiguous();
        Size panels("panels", (size_out + PANEL - 1) / PANEL), pairs("size_in / 2", size_in / 2);
        weight.has_dtype({DType::INT32}).has_shape(panels, pairs, panel).is_contiguous();
        require(size_in % 2 == 0, "x", "an even number of inputs is expected");
        if (bias) bias->has_dtype({DType::FLOAT32}).has_shape(size_out).is_contiguous();
        return {x.data(), weight.data(), data_or_null<float>(bias), out.data(), out.dtype, rows, size_in, size_out,
                x.strides[0], output_activation(act)};
    }
    void run() const;
    int64_t work() const { return size_in * size_out; }
    int64_t &row_count() { return rows; }
    PanelWeight panel_weight() const { return {(const char *)weight, (size_out + PANEL - 1) / PANEL, size_in * PANEL * 2}; }

    const void *x, *weight;  // bfloat16
    const float *bias;       // or null
    void *out;
    DType out_dtype;
    int64_t rows, size_in, size_out, x_stride;
    std::optional<Activation> act;
    const PanelWeight *following = nullptr;
};
REGISTER_OP(Linear);

template <class Out>
void linear(const Linear &a) {
    DealiasedRows x(a.x, a.rows, a.size_in, a.x_stride);
    Tiling tiling(a.rows, a.panel_weight(), x.stride * 2, MAX_ROWS, FEW_ROWS, a.following);
    auto body = [&](int64_t row, int64_t rows, int64_t panel, PrefetchStream prefetch) {
        panel_matmul_for<OutputEpilogue<Out>>(rows)(x.x + row * x.stride, x.stride,
                                                    (const uint16_t *)tiling.panel_at(panel), a.size_in,
                                                    prefetch, OutputEpilogue<Out>(a, row, rows, panel * PANEL));
        activate_tile<Out>(a, row, rows, panel * PANEL);
    };
    run_parallel([&](int thread) { tiling.for_each(thread, [&](int64_t) { return (const char *)x.x; }, body); });
}

inline void Linear::run() const {
    if (rows == 0 || size_out == 0) return;
    out_dtype == DType::FLOAT32 ? linear<Float32>(*this) : linear<BFloat16>(*this);
}
