// Activations of vectors of floats. NaN is kept.
#pragma once

enum class Activation { SILU, GELU, GELU_TANH, QUICK_GELU, RELU };

// erf(x / sqrt(2)) as an odd polynomial of degree 25, fitted on |x| <= 5 and in powers of (x^2 - 12.5) / 12.5, so that its
// terms do not cancel out; error below 9e-7. Exactly 1 or -1 outside.
inline Floats normal_erf(Floats given) {
    Floats x = minimum(broadcast(5.0f), maximum(broadcast(-5.0f), given));
    Floats t = x * x * 0.08f - 1.0f, p = broadcast(1.242540544e-3f);
    p = p * t - 3.248519963e-3f;
    p = p * t + 3.385756165e-3f;
    p = p * t - 5.320430268e-3f;
    p = p * t + 1.287295949e-2f;
    p = p * t - 2.237054333e-2f;
    p = p * t + 3.278441355e-2f;
    p = p * t - 4.652250931e-2f;
    p = p * t + 6.288763881e-2f;
    p = p * t - 8.088733256e-2f;
    p = p * t + 1.030409038e-1f;
    p = p * t - 1.405925304e-1f;
    p = p * t + 2.827276886e-1f;
    return minimum(broadcast(1.0f), maximum(broadcast(-1.0f), p * x));
}

template <Activation act>
Floats activated(Floats x) {
    if constexpr (act == Activation::SILU) return x / (1.0f + vector_exp(-x));
    if constexpr (act == Activation::GELU) return 0.5f * x * (1.0f + normal_erf(x));
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
