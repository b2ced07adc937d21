// The kernels, for one instruction set. Included by isa_*.cpp inside a namespace; see kernels/*.py for what they compute.
#pragma once

#include "pieces.h"
#include "simd.h"
#include "rounded.h"

constexpr int64_t SERIAL = 16384;  // numbers below which other threads cost more than they save

// Rows of `dim` numbers, `stride` apart: x / rms(x) * (weight + offset). As Hugging Face's models do, the quotient is
// rounded to the rows' type before it is multiplied, unless there is an offset.
template <class T>
void rms_norm(const RmsNorm &a) {
    typedef typename T::Number Number;
    const Number *weight = (const Number *)a.weight;
    spread(a.rows, a.rows * a.dim > SERIAL, [&](int64_t row) {
        const Number *x = (const Number *)a.x + row * a.stride;
        Number *out = (Number *)a.out + row * a.dim;
        int64_t whole = a.dim / LANES * LANES;
        Floats squares = all(0.0f);
        for (int64_t i = 0; i < whole; i += LANES) {
            Floats v = T::load(x + i);
            squares += v * v;
        }
        float total = sum(squares);
        for (int64_t i = whole; i < a.dim; i++) total += T::get(x[i]) * T::get(x[i]);
        float scale = 1.0f / std::sqrt(total / float(a.dim) + a.eps);
        for (int64_t i = 0; i < whole; i += LANES) {
            Floats v = T::load(x + i) * scale, w = T::load(weight + i);
            if (a.offset == 0.0f) {
                Number rounded[LANES];
                T::store(rounded, v);
                T::store(out + i, T::load(rounded) * w);
            } else {
                T::store(out + i, v * (w + a.offset));
            }
        }
        for (int64_t i = whole; i < a.dim; i++) {
            float v = T::get(x[i]) * scale, w = T::get(weight[i]);
            out[i] = T::put(a.offset == 0.0f ? T::get(T::put(v)) * w : v * (w + a.offset));
        }
    });
}

// Norm, if there are weights, and rotation, if there are angles, of the heads of queries and keys, in place: a token's
// heads lie side by side, first those of the queries. The halves of the first 2 * pairs numbers are the pairs.
template <class T>
void qk_norm_rope(const QKNormRope &a) {
    typedef typename T::Number Number;
    spread(a.tokens, a.tokens * (a.q_heads + a.k_heads) * a.dim > SERIAL, [&](int64_t token) {
        const float *cos = a.cos + token * a.pairs, *sin = a.sin + token * a.pairs;
        for (int64_t head = 0; head < a.q_heads + a.k_heads; head++) {
            Number *x = (Number *)a.x + token * a.stride + head * a.dim;
            const Number *weight = (const Number *)(head < a.q_heads ? a.q_weight : a.k_weight);
            alignas(64) float wide[MOST_DIM];
            Floats squares = all(0.0f);
            for (int64_t i = 0; i < a.dim; i += LANES) {
                Floats v = T::load(x + i);
                squares += v * v;
                Float32::store(wide + i, v);
            }
            if (weight) {
                float scale = 1.0f / std::sqrt(sum(squares) / float(a.dim) + a.eps);
                for (int64_t i = 0; i < a.dim; i += LANES)
                    Float32::store(wide + i, Float32::load(wide + i) * scale * (T::load(weight + i) + a.offset));
            }
            for (int64_t i = 0; i < a.pairs; i += LANES) {
                Floats c = Float32::load(cos + i), s = Float32::load(sin + i);
                Floats first = Float32::load(wide + i), second = Float32::load(wide + a.pairs + i);
                T::store(x + i, first * c - second * s);
                T::store(x + a.pairs + i, second * c + first * s);
            }
            for (int64_t i = 2 * a.pairs; i < a.dim; i += LANES) T::store(x + i, Float32::load(wide + i));
        }
    });
}

// Where a position of one head lies in pages.
template <class Number>
Number *row_of(const Pages &pages, int64_t head, int64_t block, int64_t offset) {
    return (Number *)pages.data + head * pages.head + block * pages.block + offset * pages.row;
}

// Asks for memory that is about to be written.
template <class Number>
void want(const Number *at, int64_t numbers) {
    for (int64_t i = 0; i < numbers; i += LINE / int64_t(sizeof *at)) __builtin_prefetch(at + i, 1);
}

// Keys and values (tokens, heads, dim) to their slots = block * block_size + offset in pages of some kind of rows.
template <class T, class Rows>
void write_rows(const WritePages &a) {
    typedef typename Rows::Number Number;
    spread(a.tokens, a.tokens * a.heads * (a.key_dim + a.value_dim) > SERIAL, [&](int64_t token) {
        int64_t block = a.slots[token] / a.block_size, offset = a.slots[token] % a.block_size;
        const typename T::Number *key = (const typename T::Number *)a.keys + token * a.key_stride;
        const typename T::Number *value = (const typename T::Number *)a.values + token * a.value_stride;
        for (int64_t head = 0; head < a.heads; head++) {  // all at once, as the writes would wait for each other
            want(row_of<Number>(a.key_pages, head, block, offset), Rows::FRONT + a.key_dim);
            if (a.values) want(row_of<Number>(a.value_pages, head, block, offset), Rows::FRONT + a.value_dim);
        }
        for (int64_t head = 0; head < a.heads; head++) {
            Rows::write(key + head * a.key_dim, row_of<Number>(a.key_pages, head, block, offset), a.key_dim);
            if (a.values)
                Rows::write(value + head * a.value_dim, row_of<Number>(a.value_pages, head, block, offset), a.value_dim);
        }
    });
}

template <class T>
void write_pages(const WritePages &a) {
    a.rounded ? write_rows<T, RoundedRows<T>>(a) : write_rows<T, PlainRows<T>>(a);
}

// x + y * scale, where the product is rounded before the sum; without x, the product.
template <class T>
void add_scaled(const AddScaled &a) {
    typedef typename T::Number Number;
    const Number *x = (const Number *)a.x, *y = (const Number *)a.y;
    Number *out = (Number *)a.out;
    int64_t size = a.rows * a.dim, pieces = size / LANES;
    spread(pieces, size > SERIAL, [&](int64_t piece) {
        int64_t i = piece * LANES;
        Number scaled[LANES];
        T::store(scaled, T::load(y + i) * a.scale);
        T::store(out + i, x ? T::load(x + i) + T::load(scaled) : T::load(scaled));
    });
    for (int64_t i = pieces * LANES; i < size; i++) {
        Number scaled = T::put(T::get(y[i]) * a.scale);
        out[i] = x ? T::put(T::get(x[i]) + T::get(scaled)) : scaled;
    }
}

inline Floats activated(Floats x, int act) {
    switch (act) {
        case SILU: return x / (1.0f + exponential(-x));
        case GELU_TANH: return 0.5f * x * (1.0f + hyperbolic_tangent(0.7978845608f * (x + 0.044715f * x * x * x)));
        default: return larger(all(0.0f), x);  // relu; what is no number stays none
    }
}

// act(gate) * up; each row holds `size` numbers of gate, then of up. The activation is rounded before the product.
template <class T>
void act_and_mul(const ActAndMul &a) {
    typedef typename T::Number Number;
    constexpr int64_t stretch = 64 * LANES;
    int64_t stretches = (a.size + stretch - 1) / stretch;
    spread(a.rows * stretches, a.rows * a.size > SERIAL / 2, [&](int64_t at) {
        int64_t row = at / stretches, begin = at % stretches * stretch;
        const Number *gate = (const Number *)a.x + row * 2 * a.size;
        for (int64_t i = begin; i < std::min(a.size, begin + stretch); i += LANES) {
            Number rounded[LANES];
            T::store(rounded, activated(T::load(gate + i), a.act));
            T::store((Number *)a.out + row * a.size + i, T::load(rounded) * T::load(gate + a.size + i));
        }
    });
}

// Rows of a table, whose words may lie in panels.
inline void take_rows(const TakeRows &a) {
    spread(a.count, a.count * a.words > SERIAL, [&](int64_t i) {
        const uint32_t *from = a.from + a.rows[i] / a.panel * a.stride * a.panel + a.rows[i] % a.panel;
        uint32_t *out = a.out + i * a.words;
        if (a.panel == 1) {
            std::memcpy(out, from, a.words * sizeof *out);
        } else {
            for (int64_t word = 0; word < a.words; word++) {
                __builtin_prefetch(from + (word + 16) * a.panel);
                out[word] = from[word * a.panel];
            }
        }
    });
}

#include "chunks.h"
#include "walk.h"
#include "attention.h"
#include "linear.h"
#include "prefill.h"
#include "quantized.h"
#include "sampling.h"

template <class T>
constexpr Kernels kernels_of() {
    return {rms_norm<T>, qk_norm_rope<T>, add_scaled<T>, act_and_mul<T>, paged_decode<T>, write_pages<T>, paged_varlen,
            linear, quantized_linear<T>, take_rows, apply_token_bitmask, argmax, sample};
}
