// Root mean square norm.
#pragma once

struct RmsNorm {
    static constexpr const char *NAME = "rms_norm";
    static constexpr const char *PARAMETERS[] = {"x", "weight", "out", "eps", "offset"};
    static RmsNorm check(const Tensor &x, const Tensor &weight, const Tensor &out, float eps, float offset) {
        Size rows("rows"), dim("dim");
        x.is_floating().has_shape(rows, dim).is_dense(1);
        weight.has_dtype({x.dtype}).has_shape(dim).is_contiguous();
        out.has_dtype({x.dtype}).has_shape(rows, dim).is_contiguous();
        return {x.dtype, x.data(), weight.data(), out.data(), rows, x.strides[0], dim, eps, offset};
    }
    void run() const;
    int64_t work() const { return rows * dim; }
    int64_t &row_count() { return rows; }

    DType dtype;
    const void *x, *weight;
    void *out;
    int64_t rows, x_stride, dim;
    float eps, offset;
};
REGISTER_OP(RmsNorm);

// out = x / rms(x) * (weight + offset) for each row. As in Hugging Face's models, the quotient is rounded to the dtype
// before it is multiplied, unless there is an offset.
template <class T>
void rms_norm(const RmsNorm &a) {
    typedef typename T::Element Element;
    const Element *weight = (const Element *)a.weight;
    parallel_for(a.rows, a.rows * a.dim > SERIAL, [&](int64_t row) {
        const Element *x = (const Element *)a.x + row * a.x_stride;
        Element *out = (Element *)a.out + row * a.dim;
        int64_t whole = a.dim / LANES * LANES;
        Floats squares = broadcast(0.0f);
        for (int64_t i = 0; i < whole; i += LANES) {
            Floats v = T::load(x + i);
            squares += v * v;
        }
        float total = horizontal_sum(squares);
        for (int64_t i = whole; i < a.dim; i++) total += T::to_float(x[i]) * T::to_float(x[i]);
        float scale = 1.0f / std::sqrt(total / float(a.dim) + a.eps);
        for (int64_t i = 0; i < whole; i += LANES) {
            Floats v = T::load(x + i) * scale, w = T::load(weight + i);
            if (a.offset == 0.0f) {
                Element rounded[LANES];
                T::store(rounded, v);
                T::store(out + i, T::load(rounded) * w);
            } else {
                T::store(out + i, v * (w + a.offset));
            }
        }
        for (int64_t i = whole; i < a.dim; i++) {
            float v = T::to_float(x[i]) * scale, w = T::to_float(weight[i]);
            out[i] = T::from_float(a.offset == 0.0f ? T::to_float(T::from_float(v)) * w : v * (w + a.offset));
        }
    });
}

inline void RmsNorm::run() const {
    dtype == DType::BFLOAT16 ? rms_norm<BFloat16>(*this) : rms_norm<Float32>(*this);
}
