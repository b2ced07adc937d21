// Linear recurrence of channels whose decays and inputs have gates (RG-LRU), token by token.
#pragma once

#include "../sequences.h"

struct GatedLinearRecurrence {
    static constexpr const char *NAME = "gated_linear_recurrence";
    static constexpr const char *PARAMETERS[] = {"x", "gates", "rate", "positions", "state", "slots", "cu_seqlens", "out", "block"};
    static GatedLinearRecurrence check(const Tensor &x, const Tensor &gates, const Tensor &rate, const Tensor &positions, const Tensor &state,
                                       const Tensor &slots, const Tensor &cu_seqlens, const Tensor &out, int64_t block) {
        Size tokens("tokens"), channels("channels"), slot_count("slots");
        x.is_floating().has_shape(tokens, channels).is_dense(1);
        Size both("two gates of each channel", 2 * channels);
        gates.has_dtype({DType::FLOAT32}).has_shape(tokens, both).is_dense(1);
        rate.has_dtype({DType::FLOAT32}).has_shape(channels).is_contiguous();
        positions.has_dtype({DType::INT64}).has_shape(tokens).is_contiguous();
        state.has_dtype({DType::FLOAT32}).has_shape(slot_count, channels).is_dense(1);
        out.has_dtype({x.dtype}).has_shape(tokens, channels).is_contiguous();
        require(block > 0 && block % LANES == 0 && channels % block == 0, "block", "a multiple of 16 that divides the channels is expected");
        return {Sequences::check(slots, cu_seqlens, tokens, slot_count), x.dtype, x.data(), out.data(), gates.data<float>(),
                rate.data<float>(), positions.data<int64_t>(), state.data<float>(), tokens, channels, block, x.strides[0],
                gates.strides[0], state.strides[0]};
    }
    void run() const;
    int64_t work() const { return tokens * channels * 32; }  // with three exponentials for each
    int64_t &row_count() { return tokens; }

    Sequences sequences;
    DType dtype;
    const void *x;
    void *out;
    const float *gates, *rate;  // of each block of channels its gates of inputs, then of decays
    const int64_t *positions;
    float *state;  // (slots, channels)
    int64_t tokens, channels, block, x_stride, gate_stride, state_stride;
};
REGISTER_OP(GatedLinearRecurrence);

INLINE Floats vector_sigmoid(Floats x) { return 1.0f / (1.0f + vector_exp(-x)); }

// sqrt(1 - e^x) for x <= 0; near 0 from the series, as the difference would lose digits.
INLINE Floats root_of_rest(Floats x) {
    Floats series = broadcast(1.0f);
    for (float factor : {1.0f / 6, 1.0f / 5, 1.0f / 4, 1.0f / 3, 1.0f / 2}) series = series * x * factor + 1.0f;
    alignas(64) float rest[LANES];
    Float32::store(rest, select(x > -0.25f, -x * series, 1.0f - vector_exp(x)));
    for (int i = 0; i < LANES; i++) rest[i] = std::sqrt(rest[i]);
    return Float32::load(rest);
}

// 16 channels of a sequence.
template <class T>
void gated_linear_recurrence_of(const GatedLinearRecurrence &a, const SequenceTokens &tokens, int64_t channel) {
    typedef typename T::Element Element;
    float *kept = a.state + tokens.slot * a.state_stride + channel;
    const float *gates = a.gates + channel / a.block * 2 * a.block + channel % a.block;
    Floats h = Float32::load(kept), rate = Float32::load(a.rate + channel);
    for (int64_t token = tokens.begin; token < tokens.end; token++) {
        const float *input_gate = gates + token * a.gate_stride;
        Floats log_decay = -rate * vector_sigmoid(Float32::load(input_gate + a.block));
        Floats written = T::load((const Element *)a.x + token * a.x_stride + channel) * vector_sigmoid(Float32::load(input_gate));
        if (a.positions[token] != 0) written *= root_of_rest(2.0f * log_decay);
        h = vector_exp(log_decay) * h + written;
        T::store((Element *)a.out + token * a.channels + channel, h);
    }
    Float32::store(kept, h);
}

template <class T>
void gated_linear_recurrence(const GatedLinearRecurrence &a) {
    int64_t tiles = a.channels / LANES;
    parallel_for(a.sequences.count(a.tokens) * tiles, a.work() > SERIAL, [&](int64_t item) {
        SequenceTokens tokens = a.sequences[item / tiles];
        if (tokens.begin < tokens.end) gated_linear_recurrence_of<T>(a, tokens, item % tiles * LANES);
    });
}

inline void GatedLinearRecurrence::run() const {
    dtype == DType::BFLOAT16 ? gated_linear_recurrence<BFloat16>(*this) : gated_linear_recurrence<Float32>(*this);
}
