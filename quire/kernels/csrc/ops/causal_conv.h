// Causal convolution of each channel over time, which continues from the last inputs of each sequence.
#pragma once

#include "../activations.h"
#include "../sequences.h"

struct CausalConv {
    static constexpr const char *NAME = "causal_conv";
    static constexpr const char *PARAMETERS[] = {"x",          "weight",     "bias",        "state", "slots",
                                                 "cu_seqlens", "input_gate", "output_gate", "out",   "silu"};
    static constexpr int64_t MAX_WIDTH = 8;
    static CausalConv check(const Tensor &x, const Tensor &weight, const OptionalTensor &bias, const Tensor &state,
                            const Tensor &slots, const Tensor &cu_seqlens, const OptionalTensor &input_gate,
                            const OptionalTensor &output_gate, const Tensor &out, int64_t silu) {
        Size tokens("tokens"), channels("channels"), width("width"), slot_count("slots"), inputs("width - 1");
        x.is_floating().has_shape(tokens, channels).is_dense(1);
        weight.has_dtype({x.dtype}).has_shape(width, channels).is_contiguous();
        require(width >= 2 && width <= MAX_WIDTH, "weight", "a width from 2 to 8 is expected");
        require(channels >= LANES, "x", "at least 16 channels are expected");
        if (bias) bias->has_dtype({x.dtype}).has_shape(channels).is_contiguous();
        state.has_dtype({DType::FLOAT32}).has_shape(slot_count, inputs, channels).is_dense(2);
        require(inputs == width - 1, "state", "an input less than the width is expected");
        for (const OptionalTensor *gate : {&input_gate, &output_gate})
            if (*gate) (*gate)->has_dtype({x.dtype}).has_shape(tokens, channels).is_dense(1);
        out.has_dtype({x.dtype}).has_shape(tokens, channels).is_contiguous();
        return {Sequences::check(slots, cu_seqlens, tokens, slot_count),
                x.dtype,
                x.data(),
                weight.data(),
                data_or_null(bias),
                data_or_null(input_gate),
                data_or_null(output_gate),
                out.data(),
                state.data<float>(),
                tokens,
                channels,
                width,
                x.strides[0],
                input_gate ? input_gate->strides[0] : 0,
                output_gate ? output_gate->strides[0] : 0,
                state.strides[0],
                silu != 0};
    }
    void run() const;
    int64_t work() const { return tokens * channels * width; }
    int64_t &row_count() { return tokens; }

    Sequences sequences;
    DType dtype;
    const void *x, *weight, *bias, *input_gate, *output_gate;  // weight (width, channels); the last three may be null
    void *out;
    float *state;  // (slots, width - 1, channels), the oldest input first
    int64_t tokens, channels, width, x_stride, input_stride, output_stride, state_stride;
    bool silu;
};
REGISTER_OP(CausalConv);

// The convolution of 16 channels, for the width of a model.
template <class T, int64_t WIDTH>
struct ConvLanes {
    typedef typename T::Element Element;
    static constexpr int64_t INPUTS = WIDTH - 1;

    ConvLanes(const CausalConv &a, int64_t slot, int64_t channel)
        : a(a), channel(channel), state(a.state + slot * a.state_stride + channel) {}

    // An input, rounded as a tensor would be if there is a gate.
    INLINE Floats input(int64_t token) const {
        Floats value = T::load((const Element *)a.x + token * a.x_stride + channel);
        if (!a.input_gate) return value;
        Element rounded[LANES];
        T::store(rounded, value * T::load((const Element *)a.input_gate + token * a.input_stride + channel));
        return T::load(rounded);
    }
    // The input of token begin + i, from the state if i is negative.
    INLINE Floats earlier(int64_t begin, int64_t i) const {
        return i < 0 ? Float32::load(state + (INPUTS + i) * a.channels) : input(begin + i);
    }
    // Results of tokens [first, last) of a sequence that begins at `begin`.
    void convolve(int64_t begin, int64_t first, int64_t last) const {
        Floats weights[WIDTH], inputs[WIDTH];
        for (int64_t i = 0; i < WIDTH; i++) weights[i] = T::load((const Element *)a.weight + i * a.channels + channel);
        for (int64_t i = 0; i < INPUTS; i++) inputs[i + 1] = earlier(begin, first - begin - INPUTS + i);
        Floats bias = a.bias ? T::load((const Element *)a.bias + channel) : broadcast(0.0f);
        for (int64_t token = first; token < last; token++) {
            for (int64_t i = 0; i < INPUTS; i++) inputs[i] = inputs[i + 1];
            inputs[INPUTS] = input(token);
            Floats sum = bias;
            for (int64_t i = 0; i < WIDTH; i++) sum += inputs[i] * weights[i];
            if (a.silu) sum = activated<Activation::SILU, Float32>(sum);
            if (a.output_gate) sum *= T::load((const Element *)a.output_gate + token * a.output_stride + channel);
            T::store((Element *)a.out + token * a.channels + channel, sum);
        }
    }
    void keep(int64_t begin, int64_t end) const {
        Floats inputs[INPUTS];
        for (int64_t i = 0; i < INPUTS; i++) inputs[i] = earlier(begin, end - begin - INPUTS + i);
        for (int64_t i = 0; i < INPUTS; i++) Float32::store(state + i * a.channels, inputs[i]);
    }

    const CausalConv &a;
    int64_t channel;
    float *state;
};

template <class T, int64_t WIDTH>
void causal_conv(const CausalConv &a) {
    constexpr int64_t TOKENS = 32;  // of a work item
    // Lanes of the last channels may overlap with those before, of which the state must be read before it is changed.
    auto lanes = [&](int64_t slot, int64_t i) { return ConvLanes<T, WIDTH>(a, slot, std::min(i, a.channels - LANES)); };
    std::vector<std::pair<int64_t, int64_t>> items;  // index and first token
    for (int64_t i = 0, count = a.sequences.count(a.tokens); i < count; i++)
        for (int64_t first = a.sequences[i].begin; first < a.sequences[i].end; first += TOKENS) items.push_back({i, first});
    bool parallel = a.tokens * a.channels > SERIAL;
    parallel_for(int64_t(items.size()), parallel, [&](int64_t item) {
        auto [index, first] = items[item];
        SequenceTokens tokens = a.sequences[index];
        for (int64_t i = 0; i < a.channels; i += LANES)
            lanes(tokens.slot, i).convolve(tokens.begin, first, std::min(first + TOKENS, tokens.end));
    });
    parallel_for(a.sequences.count(a.tokens), parallel, [&](int64_t index) {
        SequenceTokens tokens = a.sequences[index];
        if (tokens.begin == tokens.end) return;
        int64_t whole = a.channels / LANES * LANES;
        ConvLanes<T, WIDTH> last = lanes(tokens.slot, a.channels - LANES);
        Floats kept[WIDTH - 1];
        for (int64_t i = 0; i < WIDTH - 1; i++) kept[i] = last.earlier(tokens.begin, tokens.end - tokens.begin - (WIDTH - 1) + i);
        for (int64_t i = 0; i < whole; i += LANES) lanes(tokens.slot, i).keep(tokens.begin, tokens.end);
        for (int64_t i = 0; i < WIDTH - 1; i++) Float32::store(last.state + i * a.channels, kept[i]);
    });
}

template <class T>
void causal_conv_of_width(const CausalConv &a) {
    switch (a.width) {
        case 2: return causal_conv<T, 2>(a);
        case 3: return causal_conv<T, 3>(a);
        case 4: return causal_conv<T, 4>(a);
        case 5: return causal_conv<T, 5>(a);
        case 6: return causal_conv<T, 6>(a);
        case 7: return causal_conv<T, 7>(a);
        case 8: return causal_conv<T, 8>(a);
    }
}

inline void CausalConv::run() const {
    dtype == DType::BFLOAT16 ? causal_conv_of_width<BFloat16>(*this) : causal_conv_of_width<Float32>(*this);
}
