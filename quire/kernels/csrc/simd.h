// Vectors of 16 floats, loaded from and stored as float32 or bfloat16. Compiled once per instruction set, in a namespace of
// its own. Where a comment says that NaN is kept, a NaN in the input is a NaN in the output.
#pragma once

#include "vectors.h"

struct Float32 {
    typedef float Element;
    static INLINE Floats load(const float *from) {
        return load_vector<Floats>(from);
    }
    static INLINE void store(float *to, Floats x) { store_vector(to, x); }
    static INLINE void store2(float *to, Floats a, Floats b) { store(to, a), store(to + LANES, b); }
    static INLINE void load_pair(const float *from, Floats &a, Floats &b) { a = load(from), b = load(from + LANES); }
    static INLINE void store_pair(float *to, Floats a, Floats b) { store(to, a), store(to + LANES, b); }
    static INLINE float to_float(float x) { return x; }
    static INLINE float from_float(float x) { return x; }
};

struct BFloat16 {
    typedef uint16_t Element;
    static INLINE Floats load(const uint16_t *from) {
        Halves x;
        std::memcpy(&x, from, sizeof x);
        return (Floats)(widen(x) << 16);
    }
    // Rounds to nearest, ties to even; NaN is kept.
    static INLINE void store(uint16_t *to, Floats x) {
        Halves out = to_bfloat16(x);
        std::memcpy(to, &out, sizeof out);
    }
    static INLINE void store2(uint16_t *to, Floats a, Floats b) {
#if defined(HAVE_BF16_DOT)
        __m512bh both = _mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
        std::memcpy(to, &both, sizeof both);
#else
        store(to, a), store(to + LANES, b);
#endif
    }
    // Even and odd elements of 32: two operations instead of the four that keeping their order takes.
    static INLINE void load_pair(const uint16_t *from, Floats &even, Floats &odd) {
        Words both = load_vector<Words>(from);
        even = (Floats)(both << 16), odd = (Floats)(both & 0xffff0000);
    }
    static INLINE void store_pair(uint16_t *to, Floats even, Floats odd) {
        store_vector(to, widen(to_bfloat16(even)) | widen(to_bfloat16(odd)) << 16);
    }
    static INLINE Halves to_bfloat16(Floats x) {
#if defined(HAVE_BF16_DOT)  // flushes denormals, below 1.2e-38, to 0
        return (Halves)_mm512_cvtneps_pbh((__m512)x);
#else
        Words bits = (Words)x, nan = (Words)(x != x);
        bits = ((bits + 0x7fff + ((bits >> 16) & 1)) & ~nan) | (nan & 0x7fc00000);
        return narrow(bits >> 16);
#endif
    }
    static INLINE float to_float(uint16_t x) {
        uint32_t bits = uint32_t(x) << 16;
        float out;
        std::memcpy(&out, &bits, sizeof out);
        return out;
    }
    static INLINE uint16_t from_float(float x) {
        if (x != x) return 0x7fc0;
        uint32_t bits;
        std::memcpy(&bits, &x, sizeof bits);
        return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
    }
};

// Words of what is in bfloat16 already: a in the lower halves, b in the upper ones.
INLINE Words pack_floats(Floats a, Floats b) { return (Words)a >> 16 | ((Words)b & 0xffff0000); }

// Words of bfloat16: the rounded elements of a in the lower halves, those of b in the upper ones.
INLINE Words round_pairs(Floats a, Floats b) {
#if defined(HAVE_BF16_DOT)  // in the order of vectors first: two operations instead of four
    typedef uint16_t Elements __attribute__((vector_size(64)));
    return (Words)__builtin_shuffle((Elements)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a),
                                    Elements{0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23,
                                             8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31});
#else
    return widen(BFloat16::to_bfloat16(a)) | widen(BFloat16::to_bfloat16(b)) << 16;
#endif
}

#if defined(HAVE_BF16_DOT)
constexpr bool BF16_DOT = true;  // there is an instruction for dot products of bfloat16 elements

// total[i] + a[2i + 1] * b[2i + 1] + a[2i] * b[2i] for 16 i, in this order, where a and b are 32 bfloat16 elements.
INLINE Floats dot_add(Floats total, Words a, Words b) {
    return (Floats)_mm512_dpbf16_ps((__m512)total, (__m512bh)a, (__m512bh)b);
}
#else
constexpr bool BF16_DOT = false;

INLINE Floats dot_add(Floats total, Words a, Words b) {
    return total + (Floats)(a & 0xffff0000) * (Floats)(b & 0xffff0000) + (Floats)(a << 16) * (Floats)(b << 16);
}
#endif

INLINE Words load_words(const void *from) { return load_vector<Words>(from); }

#if defined(HAVE_AVX512)  // gcc would compare and select; b if one is NaN, as below
INLINE Floats maximum(Floats a, Floats b) { return (Floats)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE Floats minimum(Floats a, Floats b) { return (Floats)_mm512_min_ps((__m512)a, (__m512)b); }
#else
INLINE Floats maximum(Floats a, Floats b) { return select(a > b, a, b); }
INLINE Floats minimum(Floats a, Floats b) { return select(a < b, a, b); }
#endif

// The largest lane; if some are NaN, another one, or NaN.
INLINE float horizontal_max(Floats x) {
#if defined(HAVE_AVX512)
    return _mm512_reduce_max_ps((__m512)x);
#else
    float largest = x[0];
    for (int i = 1; i < LANES; i++) largest = std::max(largest, x[i]);
    return largest;
#endif
}

// The horizontal sum of each of 16 vectors; x is overwritten.
INLINE Floats horizontal_sums(Floats *x) {
    for (int i = 0; i < 8; i++) x[i] = fold_halves<8>(x[i], x[i + 8]);
    for (int i = 0; i < 4; i++) x[i] = fold_halves<4>(x[i], x[i + 4]);
    for (int i = 0; i < 2; i++) x[i] = fold_halves<2>(x[i], x[i + 2]);
    return fold_halves<1>(x[0], x[1]);
}

// Transposes 16 rows of 16 words.
INLINE void transpose(Words *x) {
#pragma GCC unroll 16
    for (int i = 0; i < 8; i++) exchange_halves<8>(x[i], x[i + 8]);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
        if (!(i & 4)) exchange_halves<4>(x[i], x[i + 4]);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
        if (!(i & 2)) exchange_halves<2>(x[i], x[i + 2]);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i += 2) exchange_halves<1>(x[i], x[i + 1]);
}

constexpr float LOG2_E = 1.44269504088896341f;

// e^r for |r| <= ln(2) / 2: the minimax polynomial of Cephes' expf, relative error below 2e-7.
INLINE Floats exp_reduced(Floats r) {
    Floats p = broadcast(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    return p * r * r + r + 1.0f;
}

// e^x as 2^n * e^r; NaN is kept.
INLINE Floats vector_exp(Floats given) {
#if defined(HAVE_AVX512)
    Floats x = minimum(broadcast(88.7f), maximum(broadcast(-104.0f), given));  // keeps NaN
    __m512 n = _mm512_roundscale_ps((__m512)(x * LOG2_E), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    Floats r = x - (Floats)n * 0.693359375f + (Floats)n * 2.12194440e-4f;
    return (Floats)_mm512_scalef_ps((__m512)exp_reduced(r), n);
#else
    Floats x = maximum(minimum(given, broadcast(88.3f)), broadcast(-87.3f));
    Floats n = x * LOG2_E;
    Ints whole = truncate(n + select(n >= 0.0f, broadcast(0.5f), broadcast(-0.5f)));
    n = to_floats(whole);
    Floats r = x - n * 0.693359375f + n * 2.12194440e-4f;
    return select(given == given, exp_reduced(r) * (Floats)((whole + 127) << 23), given);
#endif
}

// 2^x; relative error below 4e-7, but may be 0 where 2^x is below 1e-37, and not infinite where it is above 1e38. NaN is kept.
INLINE Floats vector_exp2(Floats given) {
#if defined(HAVE_AVX512)
    Floats x = maximum(broadcast(-160.0f), given);
    Floats n = (Floats)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    Floats x = select(given < -125.0f, broadcast(-125.0f), select(given > 127.0f, broadcast(127.0f), given));
    Ints whole = truncate(x + 128.5f) - 128;  // of a positive number: truncation rounds
    Floats n = to_floats(whole);
#endif
    Floats r = x - n, p = broadcast(1.32647273e-3f);
    p = p * r + 9.67151299e-3f;
    p = p * r + 5.55073358e-2f;
    p = p * r + 2.40222424e-1f;
    p = p * r + 6.93147004e-1f;
    p = p * r + 1.0f;
#if defined(HAVE_AVX512)
    return (Floats)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    Floats power = select(given == given, p * (Floats)((whole + 127) << 23), given);
    return select(given < -125.0f, broadcast(0.0f), power);
#endif
}

// The same to be rounded to bfloat16: relative error below 1.1e-4.
INLINE Floats rough_exp2(Floats x) {
#if defined(HAVE_AVX512)
    Floats r = (Floats)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF);  // x - floor(x), 0 of infinity; scalef takes floor(x)
    Floats p = broadcast(0.078024522f);
    p = p * r + 0.22606716f;
    p = p * r + 0.69583354f;
    p = p * r + 0.99992522f;
    return (Floats)_mm512_scalef_ps((__m512)p, (__m512)x);
#else
    return vector_exp2(x);
#endif
}

// tanh(x) from e^2x; near 0 from its series, where the quotient would lose digits.
INLINE Floats vector_tanh(Floats x) {
    Floats e = vector_exp(2.0f * minimum(maximum(x, broadcast(-10.0f)), broadcast(10.0f)));
    Floats square = x * x;
    Floats series = x * (1.0f + square * (-0.333333333f + square * (0.133333333f - square * 0.053968254f)));
    return select((square < 0.01f) | (x != x), series, (e - 1.0f) / (e + 1.0f));
}
