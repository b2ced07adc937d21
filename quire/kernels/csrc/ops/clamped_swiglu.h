// The gated activation of gpt-oss: (clamp(up) + 1) * gate * sigmoid(alpha * gate), with gate clamped from above.
#pragma once

struct ClampedSwiglu {
    static constexpr const char *NAME = "clamped_swiglu";
    static constexpr const char *PARAMETERS[] = {"gate_up", "out", "alpha", "limit"};
    static ClampedSwiglu check(const Tensor &gate_up, const Tensor &out, float alpha, float limit) {
        Size rows("rows"), size("size");
        out.is_floating().has_shape(rows, size).is_contiguous();
        Size both("2 * size", 2 * size);
        gate_up.has_dtype({out.dtype}).has_shape(rows, both).is_contiguous();
        require(size % LANES == 0, "out", "a last dimension that is a multiple of 16 is expected");
        return {out.dtype, gate_up.data(), out.data(), rows, size, alpha, limit};
    }
    void run() const;
    int64_t work() const { return 8 * rows * size; }
    int64_t &row_count() { return rows; }

    DType dtype;
    const void *gate_up;  // (rows, 2 * size): gate, then up
    void *out;
    int64_t rows, size;
    float alpha, limit;
};
REGISTER_OP(ClampedSwiglu);

template <class T>
void clamped_swiglu(const ClampedSwiglu &a) {
    typedef typename T::Element Element;
    Floats limit = broadcast(a.limit);
    parallel_for(a.rows, a.work() > SERIAL, [&](int64_t row) {
        const Element *gates = (const Element *)a.gate_up + row * 2 * a.size;
        for (int64_t i = 0; i < a.size; i += LANES) {
            Floats gate = minimum(limit, T::load(gates + i)), up = maximum(-limit, minimum(limit, T::load(gates + a.size + i)));
            T::store((Element *)a.out + row * a.size + i, (up + 1.0f) * (gate / (1.0f + vector_exp(gate * -a.alpha))));
        }
    });
}

inline void ClampedSwiglu::run() const {
    dtype == DType::BFLOAT16 ? clamped_swiglu<BFloat16>(*this) : clamped_swiglu<Float32>(*this);
}
