// x + y * scale, or y * scale.
#pragma once

struct AddScaled {
    static constexpr const char *NAME = "add_scaled";
    static constexpr const char *PARAMETERS[] = {"x", "y", "out", "scale"};
    static AddScaled check(const OptionalTensor &x, const Tensor &y, const Tensor &out, float scale) {
        require(y.is_floating().is_contiguous().dim > 0, "y", "at least one dimension is expected");
        if (x) x->has_dtype({y.dtype}).has_shape_of(y).is_contiguous();
        out.has_dtype({y.dtype}).has_shape_of(y).is_contiguous();
        return {y.dtype, data_or_null(x), y.data(), out.data(), y.shape[0], y.row_elements(), scale};
    }
    void run() const;
    int64_t work() const { return rows * dim; }
    int64_t &row_count() { return rows; }

    DType dtype;
    const void *x, *y;  // x may be null
    void *out;
    int64_t rows, dim;
    float scale;
};
REGISTER_OP(AddScaled);

// The product is rounded to the dtype before it is added.
template <class T>
void add_scaled(const AddScaled &a) {
    typedef typename T::Element Element;
    const Element *x = (const Element *)a.x, *y = (const Element *)a.y;
    Element *out = (Element *)a.out;
    int64_t size = a.rows * a.dim, vectors = size / LANES;
    parallel_for(vectors, size > SERIAL, [&](int64_t vector) {
        int64_t i = vector * LANES;
        Element scaled[LANES];
        T::store(scaled, T::load(y + i) * a.scale);
        T::store(out + i, x ? T::load(x + i) + T::load(scaled) : T::load(scaled));
    });
    for (int64_t i = vectors * LANES; i < size; i++) {
        Element scaled = T::from_float(T::to_float(y[i]) * a.scale);
        out[i] = x ? T::from_float(T::to_float(x[i]) + T::to_float(scaled)) : scaled;
    }
}

inline void AddScaled::run() const {
    dtype == DType::BFLOAT16 ? add_scaled<BFloat16>(*this) : add_scaled<Float32>(*this);
}
