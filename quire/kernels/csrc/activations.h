// Activations of vectors of floats. NaN is kept.
#pragma once

#include "normal_tail.h"

enum class Activation { SILU, GELU, GELU_TANH, QUICK_GELU, RELU, RELU2 };

inline Floats gelu(Floats x) {
    Floats positive = maximum(broadcast(0.0f), x), size = minimum(broadcast(7.8f), maximum(x, -x));
    return positive - size * normal_tail(size);
}

// 1 / (1 + 2^x), to be multiplied and rounded to bfloat16: relative error below 2e-4.
inline Floats rough_logistic(Floats x) {
#if defined(HAVE_AVX512)
    return (Floats)_mm512_rcp14_ps((__m512)(1.0f + rough_exp2(x)));
#else
    return 1.0f / (1.0f + vector_exp(0.69314718056f * x));
#endif
}

// The activation of elements that are rounded to T.
template <Activation act, class T>
Floats activated(Floats x) {
    // (1 + tanh y) / 2 = 1 / (1 + e^-2y)
    if constexpr (act == Activation::GELU_TANH && std::is_same_v<T, BFloat16>)
        return x * rough_logistic(x * (-2.3022082f - 0.10294324f * x * x));
    if constexpr (act == Activation::SILU) return x / (1.0f + vector_exp(-x));
    if constexpr (act == Activation::GELU) return gelu(x);
    if constexpr (act == Activation::GELU_TANH)
        return x / (1.0f + vector_exp(x * (-1.5957691216f - 0.0713548163f * x * x)));
    if constexpr (act == Activation::QUICK_GELU) return x / (1.0f + vector_exp(-1.702f * x));
    Floats positive = maximum(broadcast(0.0f), x);
    return act == Activation::RELU2 ? positive * positive : positive;
}

inline Activation activation_named(std::string_view name) {
    if (name == "silu") return Activation::SILU;
    if (name == "gelu") return Activation::GELU;
    if (name == "gelu_tanh") return Activation::GELU_TANH;
    if (name == "quick_gelu") return Activation::QUICK_GELU;
    if (name == "relu2") return Activation::RELU2;
    require(name == "relu", "act", "silu, gelu, gelu_tanh, quick_gelu, relu or relu2 is expected");
    return Activation::RELU;
}

// Calls body(std::integral_constant<Activation, act>), so that loops are compiled for each activation.
template <class Body>
void with_activation(Activation act, Body body) {
    switch (act) {
        case Activation::SILU: return body(std::integral_constant<Activation, Activation::SILU>{});
        case Activation::GELU: return body(std::integral_constant<Activation, Activation::GELU>{});
        case Activation::GELU_TANH: return body(std::integral_constant<Activation, Activation::GELU_TANH>{});
        case Activation::QUICK_GELU: return body(std::integral_constant<Activation, Activation::QUICK_GELU>{});
        case Activation::RELU: return body(std::integral_constant<Activation, Activation::RELU>{});
        case Activation::RELU2: return body(std::integral_constant<Activation, Activation::RELU2>{});
    }
}

// act(x) of rows of `count` elements; `out` may be x.
template <class T>
void activate_rows(Activation act, const typename T::Element *x, typename T::Element *out, int64_t rows, int64_t count,
                   int64_t stride) {
    with_activation(act, [&](auto chosen) {
        for (int64_t row = 0; row < rows; row++) {
            const auto *from = x + row * stride;
            auto *to = out + row * stride;
            int64_t i = 0;
            for (; i + LANES <= count; i += LANES) T::store(to + i, activated<chosen(), T>(T::load(from + i)));
            if (i == count) continue;
            typename T::Element part[LANES] = {};
            std::memcpy(part, from + i, (count - i) * sizeof *part);
            T::store(part, activated<chosen(), T>(T::load(part)));
            std::memcpy(to + i, part, (count - i) * sizeof *part);
        }
    });
}
