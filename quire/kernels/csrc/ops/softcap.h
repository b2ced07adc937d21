// cap * tanh(x / cap), in place.
#pragma once

struct Softcap {
    static constexpr const char *NAME = "softcap";
    static constexpr const char *PARAMETERS[] = {"x", "cap"};
    static Softcap check(const Tensor &x, float cap) {
        Size rows("rows"), dim("dim");
        x.is_floating().has_shape(rows, dim).is_contiguous();
        return {x.dtype, x.data(), rows, dim, cap};
    }
    void run() const;
    int64_t work() const { return rows * dim; }
    int64_t &row_count() { return rows; }

    DType dtype;
    void *x;
    int64_t rows, dim;
    float cap;
};
REGISTER_OP(Softcap);

// Parts of a row are shared among threads: a row of logits is long, and there may be only one.
template <class T>
void softcap(const Softcap &a) {
    typedef typename T::Element Element;
    constexpr int64_t PART = 4096;
    int64_t parts = (a.dim + PART - 1) / PART;
    parallel_for(a.rows * parts, a.work() > SERIAL, [&](int64_t item) {
        int64_t begin = item % parts * PART, count = std::min(PART, a.dim - begin), i = 0;
        Element *x = (Element *)a.x + item / parts * a.dim + begin;
        auto capped = [&](Floats value) { return vector_tanh(value / a.cap) * a.cap; };
        for (; i + LANES <= count; i += LANES) T::store(x + i, capped(T::load(x + i)));
        for (; i < count; i++) x[i] = T::from_float(capped(broadcast(T::to_float(x[i])))[0]);
    });
}

inline void Softcap::run() const { dtype == DType::BFLOAT16 ? softcap<BFloat16>(*this) : softcap<Float32>(*this); }
