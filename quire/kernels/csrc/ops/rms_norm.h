// Root mean square norm.
#pragma once

struct RmsNorm {
    static constexpr const char *NAME = "rms_norm";
    static constexpr const char *PARAMETERS[] = {"x", "weight", "out", "eps", "offset"};
    static RmsNorm check(const Tensor &x, const Tensor &weight, const Tensor &out, float eps, float offset) {
        Size rows("rows"), parts("parts"), dim("dim");
        if (x.dim == 3) {
            x.is_floating().has_shape(rows, parts, dim).is_dense(2);
            out.has_dtype({x.dtype}).has_shape(rows, parts, dim).is_dense(2);
        } else {
            parts = Size("parts", 1);
            x.is_floating().has_shape(rows, dim).is_dense(1);
            out.has_dtype({x.dtype}).has_shape(rows, dim).is_dense(1);
        }
        weight.has_dtype({x.dtype}).has_shape(dim).is_contiguous();
        return {x.dtype, x.data(), weight.data(), out.data(), rows, x.strides[0], out.strides[0], parts, dim, eps, offset};
    }
    void run() const;
    int64_t work() const { return rows * parts * dim; }
    int64_t &row_count() { return rows; }

    DType dtype;
    const void *x, *weight;
    void *out;  // may be x
    int64_t rows, x_stride, out_stride, parts, dim;  // a row has one or several parts, which lie together
    float eps, offset;
};
REGISTER_OP(RmsNorm);

// out = x / rms(x) * (weight + offset) for each part of a row. As in Hugging Face's models, the quotient is rounded to the dtype
// before it is multiplied, unless there is an offset.
template <class T>
void rms_norm(const RmsNorm &a) {
    typedef typename T::Element Element;
    const Element *weight = (const Element *)a.weight;
    parallel_for(a.rows * a.parts, a.work() > SERIAL, [&](int64_t at) {
        int64_t row = at / a.parts, begin = at % a.parts * a.dim;
        const Element *x = (const Element *)a.x + row * a.x_stride + begin;
        Element *out = (Element *)a.out + row * a.out_stride + begin;
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
