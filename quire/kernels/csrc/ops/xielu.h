// xIELU, an activation with learned numbers (Huang and Schlag 2024).
#pragma once

struct Xielu {
    static constexpr const char *NAME = "xielu";
    static constexpr const char *PARAMETERS[] = {"x", "out", "positive", "negative", "beta", "eps"};
    static Xielu check(const Tensor &x, const Tensor &out, float positive, float negative, float beta, float eps) {
        Size rows("rows"), dim("dim");
        x.is_floating().has_shape(rows, dim).is_contiguous();
        out.has_dtype({x.dtype}).has_shape(rows, dim).is_contiguous();
        require(dim % LANES == 0, "x", "a multiple of 16 elements is expected");
        return {x.dtype, x.data(), out.data(), rows, dim, positive, negative, beta, eps};
    }
    void run() const;
    int64_t work() const { return 8 * rows * dim; }
    int64_t &row_count() { return rows; }

    DType dtype;
    const void *x;
    void *out;
    int64_t rows, dim;
    float positive, negative, beta, eps;
};
REGISTER_OP(Xielu);

// e^x - 1 for x <= 0. Near 0 it is a power series, as the difference would have few bits.
INLINE Floats exp_minus_one(Floats x) {
    Floats p = broadcast(1.0f / 40320.0f);
    for (float factor : {1.0f / 5040.0f, 1.0f / 720.0f, 1.0f / 120.0f, 1.0f / 24.0f, 1.0f / 6.0f, 0.5f, 1.0f}) p = p * x + factor;
    return select(x > -0.5f, p * x, vector_exp(x) - 1.0f);
}

template <class T>
void xielu(const Xielu &a) {
    typedef typename T::Element Element;
    parallel_for(a.rows, a.work() > SERIAL, [&](int64_t row) {
        for (int64_t i = row * a.dim; i < (row + 1) * a.dim; i += LANES) {
            Floats x = T::load((const Element *)a.x + i);
            Floats curve = select(x > 0.0f, x * x * a.positive, (exp_minus_one(minimum(broadcast(a.eps), x)) - x) * a.negative);
            T::store((Element *)a.out + i, curve + x * a.beta);
        }
    });
}

inline void Xielu::run() const {
    dtype == DType::BFLOAT16 ? xielu<BFloat16>(*this) : xielu<Float32>(*this);
}
