// Gated activations: act(gate) * up.
#pragma once

enum class Activation { SILU, GELU_TANH, RELU };

struct ActAndMul {
    static constexpr const char *NAME = "act_and_mul";
    static constexpr const char *PARAMETERS[] = {"gate_up", "out", "act"};
    static ActAndMul check(const Tensor &gate_up, const Tensor &out, std::string_view act) {
        gate_up.is_floating().is_contiguous();
        out.has_dtype({gate_up.dtype}).is_contiguous();
        int last = gate_up.dim - 1;
        require(last >= 0 && out.dim == gate_up.dim && gate_up.shape[last] == 2 * out.shape[last] &&
                    gate_up.elements() == 2 * out.elements(),
                "out", "the shape of gate_up with half of its last dimension is expected");
        int64_t size = out.shape[last];
        require(size > 0 && size % LANES == 0, "out", "a last dimension that is a multiple of 16 is expected");
        return {gate_up.dtype, gate_up.data(), out.data(), out.elements() / size, size, activation(act)};
    }
    static Activation activation(std::string_view name) {
        if (name == "silu") return Activation::SILU;
        if (name == "gelu_tanh") return Activation::GELU_TANH;
        require(name == "relu", "act", "silu, gelu_tanh or relu is expected");
        return Activation::RELU;
    }
    void run() const;
    int64_t work() const { return rows * size; }
    int64_t &row_count() { return rows; }

    DType dtype;
    const void *gate_up;  // (rows, 2 * size): gate, then up
    void *out;
    int64_t rows, size;
    Activation act;
};
REGISTER_OP(ActAndMul);

inline Floats activated(Floats x, Activation act) {
    switch (act) {
        case Activation::SILU: return x / (1.0f + vector_exp(-x));
        case Activation::GELU_TANH: return 0.5f * x * (1.0f + vector_tanh(0.7978845608f * (x + 0.044715f * x * x * x)));
        default: return maximum(broadcast(0.0f), x);  // relu; NaN is kept
    }
}

// The activation is rounded to the dtype before it is multiplied.
template <class T>
void act_and_mul(const ActAndMul &a) {
    typedef typename T::Element Element;
    constexpr int64_t chunk = 64 * LANES;
    int64_t chunks = (a.size + chunk - 1) / chunk;
    parallel_for(a.rows * chunks, a.rows * a.size > SERIAL / 2, [&](int64_t at) {
        int64_t row = at / chunks, begin = at % chunks * chunk;
        const Element *gate = (const Element *)a.gate_up + row * 2 * a.size;
        for (int64_t i = begin; i < std::min(a.size, begin + chunk); i += LANES) {
            Element rounded[LANES];
            T::store(rounded, activated(T::load(gate + i), a.act));
            T::store((Element *)a.out + row * a.size + i, T::load(rounded) * T::load(gate + a.size + i));
        }
    });
}

inline void ActAndMul::run() const {
    dtype == DType::BFLOAT16 ? act_and_mul<BFloat16>(*this) : act_and_mul<Float32>(*this);
}
