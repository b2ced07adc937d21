// Root mean square norm of groups of elements, with a gate before or behind it.
#pragma once

#include "../activations.h"

struct GatedRmsNorm {
    static constexpr const char *NAME = "gated_rms_norm";
    static constexpr const char *PARAMETERS[] = {"x", "gate", "weight", "out", "group", "eps", "gate_first", "sigmoid"};
    static constexpr int64_t MAX_GROUP = 32768;
    static GatedRmsNorm check(const Tensor &x, const Tensor &gate, const Tensor &weight, const Tensor &out, int64_t group,
                              float eps, int64_t gate_first, int64_t sigmoid) {
        Size rows("rows"), dim("dim");
        x.is_floating().has_shape(rows, dim).is_dense(1);
        gate.has_dtype({x.dtype}).has_shape(rows, dim).is_dense(1);
        weight.has_dtype({x.dtype}).has_shape(dim).is_contiguous();
        out.has_dtype({x.dtype}).has_shape(rows, dim).is_contiguous();
        require(group > 0 && group % LANES == 0 && group <= MAX_GROUP && dim % group == 0, "group",
                "a multiple of 16 up to 32768 that divides the elements is expected");
        return {x.dtype, x.data(), gate.data(), weight.data(), out.data(), rows, dim, group, x.strides[0], gate.strides[0],
                eps, gate_first != 0, sigmoid != 0};
    }
    void run() const;
    int64_t work() const { return 8 * rows * dim; }
    int64_t &row_count() { return rows; }

    DType dtype;
    const void *x, *gate, *weight;
    void *out;
    int64_t rows, dim, group, x_stride, gate_stride;
    float eps;
    bool gate_first, sigmoid;
};
REGISTER_OP(GatedRmsNorm);

// The quotient is rounded to the dtype before it is multiplied with the weight, as in Hugging Face's models.
template <class T>
void gated_rms_norm(const GatedRmsNorm &a) {
    typedef typename T::Element Element;
    int64_t groups = a.dim / a.group;
    parallel_for(a.rows * groups, a.work() > SERIAL, [&](int64_t item) {
        int64_t row = item / groups, begin = item % groups * a.group;
        const Element *x = (const Element *)a.x + row * a.x_stride + begin;
        const Element *gate = (const Element *)a.gate + row * a.gate_stride + begin;
        const Element *weight = (const Element *)a.weight + begin;
        Element *out = (Element *)a.out + row * a.dim + begin;
        alignas(64) float values[GatedRmsNorm::MAX_GROUP];
        Floats squares = broadcast(0.0f);
        for (int64_t i = 0; i < a.group; i += LANES) {
            Floats value = T::load(x + i);
            if (a.gate_first) value *= activated<Activation::SILU, Float32>(T::load(gate + i));
            squares += value * value;
            Float32::store(values + i, value);
        }
        float scale = 1.0f / std::sqrt(horizontal_sum(squares) / float(a.group) + a.eps);
        for (int64_t i = 0; i < a.group; i += LANES) {
            Element rounded[LANES];
            T::store(rounded, Float32::load(values + i) * scale);
            Floats value = T::load(rounded) * T::load(weight + i);
            if (!a.gate_first) {
                Floats logits = T::load(gate + i);
                value *= a.sigmoid ? 1.0f / (1.0f + vector_exp(-logits)) : activated<Activation::SILU, Float32>(logits);
            }
            T::store(out + i, value);
        }
    });
}

inline void GatedRmsNorm::run() const {
    dtype == DType::BFLOAT16 ? gated_rms_norm<BFloat16>(*this) : gated_rms_norm<Float32>(*this);
}
