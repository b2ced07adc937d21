// Products of elements, with each other or with a number, and of rows with the sigmoid of a number each.
#pragma once

struct Multiply {
    static constexpr const char *NAME = "multiply";
    static constexpr const char *PARAMETERS[] = {"x", "y", "out", "scale"};
    static Multiply check(const Tensor &x, const OptionalTensor &y, const Tensor &out, float scale) {
        Size rows("rows"), dim("dim");
        x.is_floating().has_shape(rows, dim).is_dense(1);
        out.has_dtype({x.dtype}).has_shape(rows, dim).is_dense(1);
        bool is_vector = y && y->dim == 1;
        if (is_vector) y->has_dtype({DType::FLOAT32}).has_shape(dim).is_contiguous();
        else if (y) y->has_dtype({x.dtype}).has_shape(rows, dim).is_dense(1);
        return {x.dtype, y ? y->dtype : x.dtype, x.data(), data_or_null(y), out.data(), rows, dim, x.strides[0],
                y && !is_vector ? y->strides[0] : 0, out.strides[0], scale};
    }
    void run() const;
    int64_t work() const { return rows * dim; }
    int64_t &row_count() { return rows; }

    DType dtype, y_dtype;
    const void *x, *y;  // y: as x, or a float32 number for each column, or null
    void *out;          // may be x
    int64_t rows, dim, x_stride, y_stride, out_stride;
    float scale;  // the factor if there is no y
};
REGISTER_OP(Multiply);

template <class T, class Factor>
void multiply(const Multiply &a) {
    typedef typename T::Element Element;
    parallel_for(a.rows, a.work() > SERIAL, [&](int64_t row) {
        const Element *x = (const Element *)a.x + row * a.x_stride;
        const auto *y = (const typename Factor::Element *)a.y + row * a.y_stride;
        Element *out = (Element *)a.out + row * a.out_stride;
        int64_t i = 0;
        for (; i + LANES <= a.dim; i += LANES)
            T::store(out + i, T::load(x + i) * (a.y ? Factor::load(y + i) : broadcast(a.scale)));
        for (; i < a.dim; i++) out[i] = T::from_float(T::to_float(x[i]) * (a.y ? Factor::to_float(y[i]) : a.scale));
    });
}

inline void Multiply::run() const {
    if (dtype == DType::FLOAT32) return multiply<Float32, Float32>(*this);
    y_dtype == DType::FLOAT32 ? multiply<BFloat16, Float32>(*this) : multiply<BFloat16, BFloat16>(*this);
}

// x * sigmoid(logit) of each row. The sigmoid is rounded to the dtype.
struct GateRows {
    static constexpr const char *NAME = "gate_rows";
    static constexpr const char *PARAMETERS[] = {"x", "logits", "out"};
    static GateRows check(const Tensor &x, const Tensor &logits, const Tensor &out) {
        Size rows("rows"), dim("dim"), one("columns", 1);
        x.is_floating().has_shape(rows, dim).is_contiguous();
        logits.has_dtype({DType::FLOAT32}).has_shape(rows, one).is_contiguous();
        out.has_dtype({x.dtype}).has_shape(rows, dim).is_contiguous();
        return {x.dtype, x.data(), logits.data<float>(), out.data(), rows, dim};
    }
    void run() const;
    int64_t work() const { return rows * dim; }
    int64_t &row_count() { return rows; }

    DType dtype;
    const void *x;
    const float *logits;
    void *out;
    int64_t rows, dim;
};
REGISTER_OP(GateRows);

template <class T>
void gate_rows(const GateRows &a) {
    typedef typename T::Element Element;
    parallel_for(a.rows, a.work() > SERIAL, [&](int64_t row) {
        float gate = T::to_float(T::from_float((1.0f / (1.0f + vector_exp(broadcast(-a.logits[row]))))[0]));
        const Element *x = (const Element *)a.x + row * a.dim;
        Element *out = (Element *)a.out + row * a.dim;
        int64_t i = 0;
        for (; i + LANES <= a.dim; i += LANES) T::store(out + i, T::load(x + i) * gate);
        for (; i < a.dim; i++) out[i] = T::from_float(T::to_float(x[i]) * gate);
    });
}

inline void GateRows::run() const {
    dtype == DType::BFLOAT16 ? gate_rows<BFloat16>(*this) : gate_rows<Float32>(*this);
}

// Multiplies each row with a number, which is rounded to the dtype. In place.
struct MultiplyRows {
    static constexpr const char *NAME = "multiply_rows";
    static constexpr const char *PARAMETERS[] = {"x", "factors"};
    static MultiplyRows check(const Tensor &x, const Tensor &factors) {
        Size rows("rows"), dim("dim"), one("columns", 1);
        x.is_floating().has_shape(rows, dim).is_dense(1);
        factors.has_dtype({DType::FLOAT32}).has_shape(rows, one).is_contiguous();
        return {x.dtype, x.data(), factors.data<float>(), rows, dim, x.strides[0]};
    }
    void run() const;
    int64_t work() const { return rows * dim; }
    int64_t &row_count() { return rows; }

    DType dtype;
    void *x;
    const float *factors;
    int64_t rows, dim, stride;
};
REGISTER_OP(MultiplyRows);

template <class T>
void multiply_rows(const MultiplyRows &a) {
    typedef typename T::Element Element;
    parallel_for(a.rows, a.work() > SERIAL, [&](int64_t row) {
        float factor = T::to_float(T::from_float(a.factors[row]));
        Element *x = (Element *)a.x + row * a.stride;
        int64_t i = 0;
        for (; i + LANES <= a.dim; i += LANES) T::store(x + i, T::load(x + i) * factor);
        for (; i < a.dim; i++) x[i] = T::from_float(T::to_float(x[i]) * factor);
    });
}

inline void MultiplyRows::run() const {
    dtype == DType::BFLOAT16 ? multiply_rows<BFloat16>(*this) : multiply_rows<Float32>(*this);
}
