// Activations of vectors of floats. NaN is kept.
#pragma once

enum class Activation { SILU, GELU, GELU_TANH, QUICK_GELU, RELU };

// The probability that a normal variable is below -x, for 0 <= x <= 14: erfc(x / sqrt(2)) / 2, relative error below 4e-7.
// erfc(z) = t exp(p(t) - z * z) with t = 1 / (1 + z / 2); p is a polynomial fitted in 2.4 t - 1.4.
inline Floats normal_tail(Floats x) {
    Floats t = 1.0f / (1.0f + 0.3535533906f * x), s = 2.4f * t - 1.4f, p = broadcast(5.48602468e-5f);
    p = p * s + 7.27287902e-5f;
    p = p * s - 5.34320610e-4f;
    p = p * s - 2.25964162e-4f;
    p = p * s + 3.70747674e-3f;
    p = p * s - 1.06340791e-3f;
    p = p * s - 2.94703369e-2f;
    p = p * s + 1.57473061e-2f;
    p = p * s + 5.70307103e-1f;
    p = p * s - 5.58595398e-1f;
    return 0.5f * t * vector_exp(p - 0.5f * x * x);
}

inline Floats gelu(Floats x) {
    Floats positive = maximum(broadcast(0.0f), x), size = minimum(broadcast(14.0f), maximum(x, -x));
    return positive - size * normal_tail(size);
}

template <Activation act>
Floats activated(Floats x) {
    if constexpr (act == Activation::SILU) return x / (1.0f + vector_exp(-x));
    if constexpr (act == Activation::GELU) return gelu(x);
    if constexpr (act == Activation::GELU_TANH)
        return 0.5f * x * (1.0f + vector_tanh(0.7978845608f * (x + 0.044715f * x * x * x)));
    if constexpr (act == Activation::QUICK_GELU) return x / (1.0f + vector_exp(-1.702f * x));
    return maximum(broadcast(0.0f), x);
}

inline Activation activation_named(std::string_view name) {
    if (name == "silu") return Activation::SILU;
    if (name == "gelu") return Activation::GELU;
    if (name == "gelu_tanh") return Activation::GELU_TANH;
    if (name == "quick_gelu") return Activation::QUICK_GELU;
    require(name == "relu", "act", "silu, gelu, gelu_tanh, quick_gelu or relu is expected");
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
    }
}
