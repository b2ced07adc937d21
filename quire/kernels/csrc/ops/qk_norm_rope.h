// Norm and rotary embedding of the heads of queries and keys, in place.
#pragma once

#include "../pages.h"

struct QKNormRope {
    static constexpr const char *NAME = "qk_norm_rope";
    static constexpr const char *PARAMETERS[] = {"x",       "cos",     "sin", "q_weight", "k_weight",
                                                 "q_heads", "k_heads", "eps", "offset", "interleaved"};
    static QKNormRope check(const Tensor &x, const OptionalTensor &cos, const OptionalTensor &sin,
                            const OptionalTensor &q_weight, const OptionalTensor &k_weight, int64_t q_heads,
                            int64_t k_heads, float eps, float offset, int64_t interleaved) {
        Size tokens("tokens"), heads("heads"), dim("dim"), pairs("pairs");
        x.is_floating().has_shape(tokens, heads, dim).is_dense(1);
        require(dim >= LANES && dim <= MAX_DIM && (dim % LANES == 0 || !q_weight), "x",
                "a head dim from 16 to 1024 is expected, with norms a multiple of 16");
        require(q_heads >= 0 && k_heads >= 0 && q_heads + k_heads <= heads, "q_heads, k_heads",
                "at most the heads of x are expected");
        require_same_presence(cos, sin, "cos, sin");
        require_same_presence(q_weight, k_weight, "q_weight, k_weight");
        for (const OptionalTensor *one : {&cos, &sin})
            if (*one) (*one)->has_dtype({DType::FLOAT32}).has_shape(tokens, pairs).is_contiguous();
        for (const OptionalTensor *one : {&q_weight, &k_weight})
            if (*one) (*one)->has_dtype({x.dtype}).has_shape(dim).is_contiguous();
        int64_t used = cos ? int64_t(pairs) : 0;
        require(2 * used <= dim, "cos", "pairs, at most half of the head dim, are expected");
        return {x.dtype, x.data(), data_or_null<float>(cos), data_or_null<float>(sin), data_or_null(q_weight),
                data_or_null(k_weight), tokens, q_heads, k_heads, dim, x.strides[0], x.strides[1], used, eps, offset, interleaved != 0};
    }
    void run() const;
    int64_t work() const { return tokens * (q_heads + k_heads) * dim; }
    int64_t &row_count() { return tokens; }

    DType dtype;
    void *x;
    const float *cos, *sin;           // (tokens, pairs); pairs may be 0
    const void *q_weight, *k_weight;  // (dim,) or null
    int64_t tokens, q_heads, k_heads, dim, token_stride, head_stride, pairs;
    float eps, offset;
    bool interleaved;
};
REGISTER_OP(QKNormRope);

// A token's heads of queries are before those of keys. Element i of the first 2 * pairs elements of a head is rotated
// together with element i + pairs, or element 2i together with 2i + 1: the results are those of i and i + pairs. Where a number is no multiple of 16, the last 16 overlap with those before.
template <class T>
void qk_norm_rope(const QKNormRope &a) {
    typedef typename T::Element Element;
    parallel_for(a.tokens, a.tokens * (a.q_heads + a.k_heads) * a.dim > SERIAL, [&](int64_t token) {
        const float *cos = a.cos + token * a.pairs, *sin = a.sin + token * a.pairs;
        for (int64_t head = 0; head < a.q_heads + a.k_heads; head++) {
            Element *x = (Element *)a.x + token * a.token_stride + head * a.head_stride;
            const Element *weight = (const Element *)(head < a.q_heads ? a.q_weight : a.k_weight);
            alignas(64) float values[MAX_DIM];
            Floats squares = broadcast(0.0f);
            for (int64_t i = 0; i < a.dim; i += LANES) {
                int64_t at = std::min(i, a.dim - LANES);
                Floats v = T::load(x + at);
                squares += v * v;
                Float32::store(values + at, v);
            }
            if (weight) {
                float scale = 1.0f / std::sqrt(horizontal_sum(squares) / float(a.dim) + a.eps);
                for (int64_t i = 0; i < a.dim; i += LANES)
                    Float32::store(values + i, Float32::load(values + i) * scale * (T::load(weight + i) + a.offset));
            }
            if (a.interleaved) {
                alignas(64) float second[MAX_DIM / 2];
                for (int64_t i = 0; i < a.pairs; i++) second[i] = values[2 * i + 1], values[i] = values[2 * i];
                std::memcpy(values + a.pairs, second, a.pairs * sizeof *second);
            }
            if (weight)  // before the others, with which the last 16 may overlap
                for (int64_t i = 2 * a.pairs; i < a.dim; i += LANES) {
                    int64_t at = std::min(i, a.dim - LANES);
                    T::store(x + at, Float32::load(values + at));
                }
            for (int64_t i = 0; i < a.pairs && a.pairs < LANES; i++) {
                float first = values[i], second = values[a.pairs + i];
                x[i] = T::from_float(first * cos[i] - second * sin[i]);
                x[a.pairs + i] = T::from_float(second * cos[i] + first * sin[i]);
            }
            for (int64_t i = 0; i < a.pairs && a.pairs >= LANES; i += LANES) {
                int64_t at = std::min(i, a.pairs - LANES);
                Floats c = Float32::load(cos + at), s = Float32::load(sin + at);
                Floats first = Float32::load(values + at), second = Float32::load(values + a.pairs + at);
                T::store(x + at, first * c - second * s);
                T::store(x + a.pairs + at, second * c + first * s);
            }
        }
    });
}

inline void QKNormRope::run() const {
    dtype == DType::BFLOAT16 ? qk_norm_rope<BFloat16>(*this) : qk_norm_rope<Float32>(*this);
}
