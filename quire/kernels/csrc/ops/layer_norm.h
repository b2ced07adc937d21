// Layer norm, of a sum if there is a residual.
#pragma once

constexpr int64_t MAX_NORM_DIM = 16384;

struct LayerNorm {
    static constexpr const char *NAME = "layer_norm";
    static constexpr const char *PARAMETERS[] = {"x", "residual", "weight", "bias", "out", "eps"};
    static LayerNorm check(const Tensor &x, const OptionalTensor &residual, const Tensor &weight, const OptionalTensor &bias,
                           const Tensor &out, float eps) {
        Size rows("rows"), dim("dim");
        x.is_floating().has_shape(rows, dim).is_dense(1);
        require(dim > 0 && dim <= MAX_NORM_DIM, "x", "rows of 1 to 16384 elements are expected");
        if (residual) residual->has_dtype({x.dtype}).has_shape(rows, dim).is_dense(1);
        weight.has_dtype({x.dtype}).has_shape(dim).is_contiguous();
        if (bias) bias->has_dtype({x.dtype}).has_shape(dim).is_contiguous();
        out.has_dtype({x.dtype}).has_shape(rows, dim).is_contiguous();
        return {x.dtype, x.data(), data_or_null(residual), weight.data(), data_or_null(bias), out.data(), rows, x.strides[0],
                residual ? residual->strides[0] : 0, dim, eps};
    }
    void run() const;
    int64_t work() const { return rows * dim; }
    int64_t &row_count() { return rows; }

    DType dtype;
    const void *x, *residual, *weight, *bias;  // residual and bias may be null
    void *out;                                 // may be x or the residual
    int64_t rows, x_stride, residual_stride, dim;
    float eps;
};
REGISTER_OP(LayerNorm);

// (v - mean) / sqrt(variance + eps) * weight + bias for each row v of float32 sums. The variance is that of the differences
// to the mean.
template <class T>
void normalize_row(const float *v, const typename T::Element *weight, const typename T::Element *bias,
                   typename T::Element *out, int64_t dim, float eps) {
    int64_t whole = dim / LANES * LANES;
    Floats sums = broadcast(0.0f), squares = broadcast(0.0f);
    for (int64_t i = 0; i < whole; i += LANES) sums += Float32::load(v + i);
    float total = horizontal_sum(sums);
    for (int64_t i = whole; i < dim; i++) total += v[i];
    float mean = total / float(dim);
    for (int64_t i = 0; i < whole; i += LANES) {
        Floats difference = Float32::load(v + i) - mean;
        squares += difference * difference;
    }
    total = horizontal_sum(squares);
    for (int64_t i = whole; i < dim; i++) total += (v[i] - mean) * (v[i] - mean);
    float scale = 1.0f / std::sqrt(total / float(dim) + eps);
    for (int64_t i = 0; i < whole; i += LANES) {
        Floats normed = (Float32::load(v + i) - mean) * scale * T::load(weight + i);
        T::store(out + i, bias ? normed + T::load(bias + i) : normed);
    }
    for (int64_t i = whole; i < dim; i++) {
        float normed = (v[i] - mean) * scale * T::to_float(weight[i]);
        out[i] = T::from_float(bias ? normed + T::to_float(bias[i]) : normed);
    }
}

template <class T>
void layer_norm(const LayerNorm &a) {
    typedef typename T::Element Element;
    parallel_for(a.rows, a.rows * a.dim > SERIAL, [&](int64_t row) {
        const Element *x = (const Element *)a.x + row * a.x_stride;
        const Element *residual = a.residual ? (const Element *)a.residual + row * a.residual_stride : nullptr;
        int64_t whole = a.dim / LANES * LANES;
        alignas(64) float sums[MAX_NORM_DIM];
        for (int64_t i = 0; i < whole; i += LANES)
            Float32::store(sums + i, residual ? T::load(x + i) + T::load(residual + i) : T::load(x + i));
        for (int64_t i = whole; i < a.dim; i++)
            sums[i] = residual ? T::to_float(x[i]) + T::to_float(residual[i]) : T::to_float(x[i]);
        normalize_row<T>(sums, (const Element *)a.weight, (const Element *)a.bias, (Element *)a.out + row * a.dim, a.dim,
                         a.eps);
    });
}

inline void LayerNorm::run() const {
    dtype == DType::BFLOAT16 ? layer_norm<BFloat16>(*this) : layer_norm<Float32>(*this);
}
