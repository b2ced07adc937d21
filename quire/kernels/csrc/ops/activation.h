// Activations of all elements.
#pragma once

#include "../activations.h"

struct Activate {
    static constexpr const char *NAME = "activation";
    static constexpr const char *PARAMETERS[] = {"x", "out", "act"};
    static Activate check(const Tensor &x, const Tensor &out, std::string_view act) {
        require(x.is_floating().is_contiguous().dim > 0, "x", "at least one dimension is expected");
        out.has_dtype({x.dtype}).has_shape_of(x).is_contiguous();
        return {x.dtype, x.data(), out.data(), x.shape[0], x.row_elements(), activation_named(act)};
    }
    void run() const;
    int64_t work() const { return rows * size; }
    int64_t &row_count() { return rows; }

    DType dtype;
    const void *x;
    void *out;  // may be x
    int64_t rows, size;
    Activation act;
};
REGISTER_OP(Activate);

template <class T>
void activate(const Activate &a) {
    constexpr int64_t chunk = 64 * LANES;
    const auto *x = (const typename T::Element *)a.x;
    auto *out = (typename T::Element *)a.out;
    int64_t size = a.rows * a.size, chunks = (size + chunk - 1) / chunk;
    parallel_for(chunks, size > SERIAL / 2, [&](int64_t at) {
        int64_t begin = at * chunk, count = std::min(size - begin, chunk);
        activate_rows<T>(a.act, x + begin, out + begin, 1, count, count);
    });
}

inline void Activate::run() const {
    dtype == DType::BFLOAT16 ? activate<BFloat16>(*this) : activate<Float32>(*this);
}
