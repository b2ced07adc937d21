// Gates of the heads of attention, which its projection of queries makes as well.
#pragma once

// Queries, keys and values out of a projection in which a gate lies behind each query head.
struct WithoutGates {
    static constexpr const char *NAME = "without_gates";
    static constexpr const char *PARAMETERS[] = {"projected", "out", "heads", "dim"};
    static WithoutGates check(const Tensor &projected, const Tensor &out, int64_t heads, int64_t dim) {
        Size rows("rows"), columns("columns"), kept("kept columns");
        projected.is_floating().has_shape(rows, columns).is_dense(1);
        out.has_dtype({projected.dtype}).has_shape(rows, kept).is_contiguous();
        require(heads > 0 && dim > 0 && kept == columns - heads * dim && kept >= heads * dim, "out",
                "all columns but those of gates are expected");
        return {projected.dtype, projected.data(), out.data(), rows, columns, projected.strides[0], heads, dim};
    }
    void run() const;
    int64_t work() const { return rows * columns; }
    int64_t &row_count() { return rows; }

    DType dtype;
    const void *projected;
    void *out;
    int64_t rows, columns, stride, heads, dim;
};
REGISTER_OP(WithoutGates);

inline void WithoutGates::run() const {
    int64_t size = dtype == DType::BFLOAT16 ? 2 : 4, head = dim * size, behind = (columns - 2 * heads * dim) * size;
    parallel_for(rows, work() > SERIAL, [&](int64_t row) {
        const char *from = (const char *)projected + row * stride * size;
        char *to = (char *)out + row * (columns - heads * dim) * size;
        for (int64_t i = 0; i < heads; i++) std::memcpy(to + i * head, from + 2 * i * head, head);
        std::memcpy(to + heads * head, from + 2 * heads * head, behind);
    });
}

// x * sigmoid(gate).
struct SigmoidGate {
    static constexpr const char *NAME = "sigmoid_gate";
    static constexpr const char *PARAMETERS[] = {"x", "gate", "out"};
    static SigmoidGate check(const Tensor &x, const Tensor &gate, const Tensor &out) {
        Size rows("rows"), heads("heads"), dim("dim");
        x.is_floating().has_shape(rows, heads, dim).is_contiguous();
        gate.has_dtype({x.dtype}).has_shape(rows, heads, dim).is_dense(1);
        out.has_dtype({x.dtype}).has_shape(rows, heads, dim).is_contiguous();
        require(dim % LANES == 0, "x", "a multiple of 16 elements of a head is expected");
        return {x.dtype, x.data(), gate.data(), out.data(), rows, heads, dim, gate.strides[0], gate.strides[1]};
    }
    void run() const;
    int64_t work() const { return 8 * rows * heads * dim; }
    int64_t &row_count() { return rows; }

    DType dtype;
    const void *x, *gate;
    void *out;
    int64_t rows, heads, dim, gate_stride, head_stride;
};
REGISTER_OP(SigmoidGate);

template <class T>
void sigmoid_gate(const SigmoidGate &a) {
    typedef typename T::Element Element;
    parallel_for(a.rows, a.work() > SERIAL, [&](int64_t row) {
        for (int64_t head = 0; head < a.heads; head++) {
            int64_t at = (row * a.heads + head) * a.dim;
            const Element *x = (const Element *)a.x + at;
            const Element *gate = (const Element *)a.gate + row * a.gate_stride + head * a.head_stride;
            Element *out = (Element *)a.out + at;
            for (int64_t i = 0; i < a.dim; i += LANES)
                T::store(out + i, T::load(x + i) / (1.0f + vector_exp(-T::load(gate + i))));
        }
    });
}

inline void SigmoidGate::run() const {
    dtype == DType::BFLOAT16 ? sigmoid_gate<BFloat16>(*this) : sigmoid_gate<Float32>(*this);
}
