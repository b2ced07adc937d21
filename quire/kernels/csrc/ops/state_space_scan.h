// Recurrence of state-space models whose heads have one decay per token (Mamba-2), token by token.
#pragma once

#include "../activations.h"
#include "../sequences.h"
#include "../softplus.h"

struct StateSpaceScan {
    static constexpr const char *NAME = "state_space_scan";
    static constexpr const char *PARAMETERS[] = {"x",     "dt",    "b",          "c",   "rate", "bias", "skip",
                                                 "state", "slots", "cu_seqlens", "out", "gate", "low",  "high"};
    static constexpr int64_t MAX_STATE = 1024;
    static StateSpaceScan check(const Tensor &x, const Tensor &dt, const Tensor &b, const Tensor &c, const Tensor &rate,
                                const Tensor &bias, const Tensor &skip, const Tensor &state, const Tensor &slots,
                                const Tensor &cu_seqlens, const Tensor &out, const OptionalTensor &gate, float low,
                                float high) {
        Size tokens("tokens"), heads("heads"), dim("dim"), groups("groups"), size("size"), slot_count("slots");
        x.is_floating().has_shape(tokens, heads, dim).is_dense(2);
        dt.has_dtype({x.dtype}).has_shape(tokens, heads).is_dense(1);
        b.has_dtype({x.dtype}).has_shape(tokens, groups, size).is_dense(2);
        c.has_dtype({x.dtype}).has_shape(tokens, groups, size).is_dense(2);
        for (const Tensor *of_heads : {&rate, &bias, &skip})
            of_heads->has_dtype({DType::FLOAT32}).has_shape(heads).is_contiguous();
        state.has_dtype({DType::FLOAT32}).has_shape(slot_count, heads, size, dim).is_dense(3);
        out.has_dtype({x.dtype}).has_shape(tokens, heads, dim).is_contiguous();
        if (gate) gate->has_dtype({x.dtype}).has_shape(tokens, heads, dim).is_dense(2);
        require(dim % LANES == 0, "x", "a multiple of 16 elements of a head is expected");
        require(size <= MAX_STATE, "b", "at most 1024 elements of a group are expected");
        require(groups > 0 && heads % groups == 0, "b", "groups of equally many heads are expected");
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
                heads,
                dim,
                groups,
                size,
                x.strides[0],
                dt.strides[0],
                b.strides[0],
                c.strides[0],
                gate ? gate->strides[0] : 0,
                state.strides[0],
                low,
                high};
    }
    void run() const;
    int64_t work() const { return tokens * heads * dim * size; }
    int64_t &row_count() { return tokens; }

    Sequences sequences;
    DType dtype;
    const void *x, *dt, *b, *c, *gate;  // the gate may be null
    void *out;
    const float *rate, *bias, *skip;  // (heads,)
    float *state;                     // (slots, heads, size, dim)
    int64_t tokens, heads, dim, groups, size, x_stride, dt_stride, b_stride, c_stride, gate_stride, state_stride;
    float low, high;  // limits of a time step
};
REGISTER_OP(StateSpaceScan);

// Some elements of a head in one sequence. VECTORS: of 16 of these elements.
template <class T, int VECTORS>
struct HeadTile {
    typedef typename T::Element Element;
    static constexpr int64_t COLUMNS = VECTORS * LANES;
    static constexpr int64_t COPIED = 4;  // tokens from which on the state is worth a copy that lies together

    // Time steps and decays of up to 16 tokens.
    INLINE void load_steps(int64_t token, int64_t count) {
        for (int64_t i = 0; i < LANES; i++)
            steps[i] = i < count ? T::to_float(((const Element *)a.dt)[(token + i) * a.dt_stride + head]) : 0.0f;
        Floats step = vector_softplus(Float32::load(steps) + a.bias[head]);
        step = minimum(maximum(step, broadcast(a.low)), broadcast(a.high));
        Float32::store(steps, step);
        Float32::store(decays, vector_exp(step * -std::abs(a.rate[head])));
    }
    // A token's vector of the head's group, in float32.
    INLINE const float *load_group(const void *from, int64_t token, int64_t stride, float *memory) const {
        const Element *values = (const Element *)from + token * stride + head / (a.heads / a.groups) * a.size;
        if constexpr (std::is_same_v<T, Float32>) return values;
        else {
            int64_t i = 0;
            for (; i + LANES <= a.size; i += LANES) Float32::store(memory + i, T::load(values + i));
            for (; i < a.size; i++) memory[i] = T::to_float(values[i]);
            return memory;
        }
    }
    INLINE void run_token(int64_t token, float step, float decay, float *rows, int64_t stride) const {
        alignas(64) float b_memory[StateSpaceScan::MAX_STATE], c_memory[StateSpaceScan::MAX_STATE];
        const float *b = load_group(a.b, token, a.b_stride, b_memory), *c = load_group(a.c, token, a.c_stride, c_memory);
        const Element *x = (const Element *)a.x + token * a.x_stride + head * a.dim + column;
        Floats added[VECTORS], total[VECTORS], factor = broadcast(decay);
        for (int v = 0; v < VECTORS; v++) added[v] = T::load(x + v * LANES) * step, total[v] = broadcast(0.0f);
        for (int64_t n = 0; n < a.size; n++, rows += stride) {
            Floats weight = broadcast(b[n]), read = broadcast(c[n]);
            for (int v = 0; v < VECTORS; v++) {
                Floats row = Float32::load(rows + v * LANES) * factor + added[v] * weight;
                Float32::store(rows + v * LANES, row);
                total[v] += row * read;
            }
        }
        Element *out = (Element *)a.out + (token * a.heads + head) * a.dim + column;
        const Element *gate = a.gate ? (const Element *)a.gate + token * a.gate_stride + head * a.dim + column : nullptr;
        for (int v = 0; v < VECTORS; v++) {
            Floats y = total[v] + T::load(x + v * LANES) * a.skip[head];
            if (gate) y *= activated<Activation::SILU, Float32>(T::load(gate + v * LANES));
            T::store(out + v * LANES, y);
        }
    }
    void run(const SequenceTokens &tokens, float *copy) {
        float *kept = a.state + tokens.slot * a.state_stride + head * a.size * a.dim + column, *rows = kept;
        int64_t stride = a.dim;
        bool copied = tokens.end - tokens.begin >= COPIED;
        if (copied) {
            rows = copy, stride = COLUMNS;
            for (int64_t n = 0; n < a.size; n++) std::memcpy(rows + n * stride, kept + n * a.dim, COLUMNS * sizeof *rows);
        }
        for (int64_t first = tokens.begin; first < tokens.end; first += LANES) {
            int64_t count = std::min<int64_t>(LANES, tokens.end - first);
            load_steps(first, count);
            for (int64_t i = 0; i < count; i++) run_token(first + i, steps[i], decays[i], rows, stride);
        }
        if (copied)
            for (int64_t n = 0; n < a.size; n++) std::memcpy(kept + n * a.dim, rows + n * stride, COLUMNS * sizeof *rows);
    }

    const StateSpaceScan &a;
    int64_t head, column;
    alignas(64) float steps[LANES], decays[LANES];
};

template <class T, int VECTORS>
void state_space_scan(const StateSpaceScan &a) {
    typedef HeadTile<T, VECTORS> Tile;
    int64_t tiles = a.dim / Tile::COLUMNS;
    parallel_for(a.sequences.count(a.tokens) * a.heads * tiles, a.work() > SERIAL, [&](int64_t item) {
        SequenceTokens tokens = a.sequences[item / tiles / a.heads];
        alignas(64) float copy[StateSpaceScan::MAX_STATE * Tile::COLUMNS];
        Tile{a, item / tiles % a.heads, item % tiles * Tile::COLUMNS}.run(tokens, copy);
    });
}

template <class T>
void state_space_scan_of(const StateSpaceScan &a) {
    a.dim % (2 * LANES) ? state_space_scan<T, 1>(a) : state_space_scan<T, 2>(a);
}

inline void StateSpaceScan::run() const {
    dtype == DType::BFLOAT16 ? state_space_scan_of<BFloat16>(*this) : state_space_scan_of<Float32>(*this);
}
