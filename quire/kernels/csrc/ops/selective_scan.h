// Recurrence of state-space models whose channels have decays of their own (Mamba), token by token.
#pragma once

#include "../activations.h"
#include "../sequences.h"
#include "../softplus.h"

struct SelectiveScan {
    static constexpr const char *NAME = "selective_scan";
    static constexpr const char *PARAMETERS[] = {"x",    "dt",    "b",     "c",          "rate", "bias",
                                                 "skip", "state", "slots", "cu_seqlens", "out",  "gate"};
    static constexpr int64_t MAX_STATE = 256;
    static SelectiveScan check(const Tensor &x, const Tensor &dt, const Tensor &b, const Tensor &c, const Tensor &rate,
                               const Tensor &bias, const Tensor &skip, const Tensor &state, const Tensor &slots,
                               const Tensor &cu_seqlens, const Tensor &out, const OptionalTensor &gate) {
        Size tokens("tokens"), channels("channels"), size("size"), slot_count("slots");
        x.is_floating().has_shape(tokens, channels).is_dense(1);
        dt.has_dtype({x.dtype}).has_shape(tokens, channels).is_dense(1);
        b.has_dtype({x.dtype}).has_shape(tokens, size).is_dense(1);
        c.has_dtype({x.dtype}).has_shape(tokens, size).is_dense(1);
        rate.has_dtype({DType::FLOAT32}).has_shape(size, channels).is_contiguous();
        for (const Tensor *of_channels : {&bias, &skip})
            of_channels->has_dtype({DType::FLOAT32}).has_shape(channels).is_contiguous();
        state.has_dtype({DType::FLOAT32}).has_shape(slot_count, size, channels).is_dense(2);
        out.has_dtype({x.dtype}).has_shape(tokens, channels).is_contiguous();
        if (gate) gate->has_dtype({x.dtype}).has_shape(tokens, channels).is_dense(1);
        require(channels % LANES == 0, "x", "a multiple of 16 channels is expected");
        require(size <= MAX_STATE, "b", "at most 256 elements of a token are expected");
        return {Sequences::check(slots, cu_seqlens, tokens, slot_count),
                x.dtype,
                x.data(),
                dt.data(),
                b.data(),
                c.data(),
                data_or_null(gate),
                out.data(),
                rate.data<float>(),
                bias.data<float>(),
                skip.data<float>(),
                state.data<float>(),
                tokens,
                channels,
                size,
                x.strides[0],
                dt.strides[0],
                b.strides[0],
                c.strides[0],
                gate ? gate->strides[0] : 0,
                state.strides[0]};
    }
    void run() const;
    int64_t work() const { return tokens * channels * size * 8; }  // with an exponential for each element
    int64_t &row_count() { return tokens; }

    Sequences sequences;
    DType dtype;
    const void *x, *dt, *b, *c, *gate;  // the gate may be null
    void *out;
    const float *rate, *bias, *skip;  // (size, channels), (channels,), (channels,)
    float *state;                     // (slots, size, channels)
    int64_t tokens, channels, size, x_stride, dt_stride, b_stride, c_stride, gate_stride, state_stride;
};
REGISTER_OP(SelectiveScan);

// 16 channels of a sequence; their state and rates are copied to lie together.
template <class T>
void selective_scan_of(const SelectiveScan &a, const SequenceTokens &tokens, int64_t channel) {
    typedef typename T::Element Element;
    auto at = [&](const void *from, int64_t token, int64_t stride) { return (const Element *)from + token * stride; };
    alignas(64) float rows[SelectiveScan::MAX_STATE * LANES], rates[SelectiveScan::MAX_STATE * LANES];
    float *kept = a.state + tokens.slot * a.state_stride + channel;
    for (int64_t n = 0; n < a.size; n++) {
        Float32::store(rows + n * LANES, Float32::load(kept + n * a.channels));
        Floats rate = Float32::load(a.rate + n * a.channels + channel);
        Float32::store(rates + n * LANES, minimum(rate, -rate));
    }
    Floats bias = Float32::load(a.bias + channel), skip = Float32::load(a.skip + channel);
    for (int64_t token = tokens.begin; token < tokens.end; token++) {
        Floats x = T::load(at(a.x, token, a.x_stride) + channel);
        Floats step = vector_softplus(T::load(at(a.dt, token, a.dt_stride) + channel) + bias);
        Floats added = step * x, total = broadcast(0.0f);
        const Element *b = at(a.b, token, a.b_stride), *c = at(a.c, token, a.c_stride);
        for (int64_t n = 0; n < a.size; n++) {
            Floats decay = vector_exp(step * Float32::load(rates + n * LANES));
            Floats row = Float32::load(rows + n * LANES) * decay + added * T::to_float(b[n]);
            Float32::store(rows + n * LANES, row);
            total += row * T::to_float(c[n]);
        }
        total += x * skip;
        if (a.gate) total *= activated<Activation::SILU, Float32>(T::load(at(a.gate, token, a.gate_stride) + channel));
        T::store((Element *)a.out + token * a.channels + channel, total);
    }
    for (int64_t n = 0; n < a.size; n++) Float32::store(kept + n * a.channels, Float32::load(rows + n * LANES));
}

template <class T>
void selective_scan(const SelectiveScan &a) {
    int64_t tiles = a.channels / LANES;
    parallel_for(a.sequences.count(a.tokens) * tiles, a.work() > SERIAL, [&](int64_t item) {
        SequenceTokens tokens = a.sequences[item / tiles];
        if (tokens.begin < tokens.end) selective_scan_of<T>(a, tokens, item % tiles * LANES);
    });
}

inline void SelectiveScan::run() const {
    dtype == DType::BFLOAT16 ? selective_scan<BFloat16>(*this) : selective_scan<Float32>(*this);
}
