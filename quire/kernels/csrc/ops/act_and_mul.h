// Gated activations: act(gate) * up.
#pragma once

#include "../activations.h"

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
        return {gate_up.dtype, gate_up.data(), out.data(), out.elements() / size, size, activation_named(act)};
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

// The activation is rounded to the dtype before it is multiplied.
template <class T, Activation act>
void act_and_mul(const ActAndMul &a) {
    typedef typename T::Element Element;
    constexpr int64_t chunk = 64 * LANES;
    int64_t chunks = (a.size + chunk - 1) / chunk;
    parallel_for(a.rows * chunks, a.rows * a.size > SERIAL / 2, [&](int64_t at) {
        int64_t row = at / chunks, begin = at % chunks * chunk;
        const Element *gate = (const Element *)a.gate_up + row * 2 * a.size;
        for (int64_t i = begin; i < std::min(a.size, begin + chunk); i += LANES) {
            Element rounded[LANES];
            T::store(rounded, activated<act, Float32>(T::load(gate + i)));
            T::store((Element *)a.out + row * a.size + i, T::load(rounded) * T::load(gate + a.size + i));
        }
    });
}

inline void ActAndMul::run() const {
    with_activation(act, [&](auto chosen) {
        dtype == DType::BFLOAT16 ? act_and_mul<BFloat16, chosen()>(*this) : act_and_mul<Float32, chosen()>(*this);
    });
}
