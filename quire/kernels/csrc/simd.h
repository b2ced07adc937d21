// Sixteen floats at a time, from and to float32 and bfloat16. Compiled once per instruction set, in a namespace of its own.
#pragma once

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));

constexpr int LANES = 16;
constexpr int PAIR = 2 * LANES;  // numbers in two vectors

struct Float32 {
    typedef float Number;
    static inline Floats load(const float *from) {
        Floats x;
        std::memcpy(&x, from, sizeof x);
        return x;
    }
    static inline void store(float *to, Floats x) { std::memcpy(to, &x, sizeof x); }
    static inline void store_both(float *to, Floats a, Floats b) { store(to, a), store(to + LANES, b); }
    static inline void load_pair(const float *from, Floats &a, Floats &b) { a = load(from), b = load(from + LANES); }
    static inline void store_pair(float *to, Floats a, Floats b) { store(to, a), store(to + LANES, b); }
    static inline float get(float x) { return x; }
    static inline float put(float x) { return x; }
};

struct BFloat16 {
    typedef uint16_t Number;
    static inline Floats load(const uint16_t *from) {
#if defined(HAVE_AVX512)  // gcc converts vectors of this size in two steps
        return (Floats)(Words)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from)), 16);
#else
        Halves x;
        std::memcpy(&x, from, sizeof x);
        return (Floats)(__builtin_convertvector(x, Words) << 16);
#endif
    }
    // Rounds to the nearest, ties to even; what is no number stays none.
    static inline void store(uint16_t *to, Floats x) {
        Halves out = narrow(x);
        std::memcpy(to, &out, sizeof out);
    }
    static inline void store_both(uint16_t *to, Floats a, Floats b) {
#if defined(HAVE_BFLOAT16_PRODUCTS)
        __m512bh both = _mm512_cvtne2ps_pbh((__m512)b, (__m512)a);
        std::memcpy(to, &both, sizeof both);
#else
        store(to, a), store(to + LANES, b);
#endif
    }
    // 32 numbers, those at even places and those at odd ones: two operations instead of the four that order takes.
    static inline void load_pair(const uint16_t *from, Floats &even, Floats &odd) {
        Words both;
        std::memcpy(&both, from, sizeof both);
        even = (Floats)(both << 16), odd = (Floats)(both & 0xffff0000);
    }
    static inline void store_pair(uint16_t *to, Floats even, Floats odd) {
        Words both = __builtin_convertvector(narrow(even), Words) | __builtin_convertvector(narrow(odd), Words) << 16;
        std::memcpy(to, &both, sizeof both);
    }
    static inline Halves narrow(Floats x) {
#if defined(HAVE_BFLOAT16_PRODUCTS)  // which takes numbers below 1.2e-38 for 0
        return (Halves)_mm512_cvtneps_pbh((__m512)x);
#else
        Words bits = (Words)x, none = (Words)(x != x);
        bits = ((bits + 0x7fff + ((bits >> 16) & 1)) & ~none) | (none & 0x7fc00000);
        return __builtin_convertvector(bits >> 16, Halves);
#endif
    }
    static inline float get(uint16_t x) {
        uint32_t bits = uint32_t(x) << 16;
        float out;
        std::memcpy(&out, &bits, sizeof out);
        return out;
    }
    static inline uint16_t put(float x) {
        if (x != x) return 0x7fc0;
        uint32_t bits;
        std::memcpy(&bits, &x, sizeof bits);
        return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
    }
};

inline Floats all(float x) {
    return Floats{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x};
}

#if defined(HAVE_BFLOAT16_PRODUCTS)
constexpr bool PRODUCTS = true;  // of bfloat16 numbers

// Adds the products of 32 numbers, those of neighbours to the same sum.
inline Floats add_products(Floats total, Words a, Words b) {
    return (Floats)_mm512_dpbf16_ps((__m512)total, (__m512bh)a, (__m512bh)b);
}
#else
constexpr bool PRODUCTS = false;

inline Floats add_products(Floats total, Words a, Words b) {
    return total + (Floats)(a << 16) * (Floats)(b << 16) + (Floats)(a & 0xffff0000) * (Floats)(b & 0xffff0000);
}
#endif

inline Words load_words(const void *from) {
    Words x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

inline float sum(Floats x) {
    x += __builtin_shuffle(x, Ints{8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7});
    x += __builtin_shuffle(x, Ints{4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11});
    x += __builtin_shuffle(x, Ints{2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13});
    return x[0] + x[1];
}

// Halves of two vectors beside each other, added: the one's sums in the lower half of each `2 * STEP` lanes, the
// other's in the upper.
template <int STEP>
inline Floats folded(Floats a, Floats b) {
    Ints lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    Ints upper = (lanes & STEP) != 0;  // all bits set where the result is b's
    Ints low = (lanes & ~STEP) | (upper & LANES);
    return __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, low | STEP);
}

// The sums of sixteen vectors; x is overwritten.
inline Floats sums(Floats *x) {
    for (int i = 0; i < 8; i++) x[i] = folded<8>(x[i], x[i + 8]);
    for (int i = 0; i < 4; i++) x[i] = folded<4>(x[i], x[i + 4]);
    for (int i = 0; i < 2; i++) x[i] = folded<2>(x[i], x[i + 2]);
    return folded<1>(x[0], x[1]);
}

// a - b, byte by byte.
inline Ints less(Ints a, Ints b) {
    typedef int8_t Small __attribute__((vector_size(64)));
    return (Ints)((Small)a - (Small)b);
}

#if defined(HAVE_AVX512)  // gcc compares and selects; b, if one of them is no number, as there
inline Floats larger(Floats a, Floats b) { return (Floats)_mm512_max_ps((__m512)a, (__m512)b); }
inline Floats smaller(Floats a, Floats b) { return (Floats)_mm512_min_ps((__m512)a, (__m512)b); }
#else
inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }
inline Floats smaller(Floats a, Floats b) { return a < b ? a : b; }
#endif

// e^r for |r| <= ln(2) / 2 by the minimax polynomial of Cephes' expf; relative error below 2e-7.
inline Floats small_exponential(Floats r) {
    Floats p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    return p * r * r + r + 1.0f;
}

// e^x as 2^n * e^r.
inline Floats exponential(Floats given) {
#if defined(HAVE_AVX512)
    Floats x = smaller(all(88.7f), larger(all(-104.0f), given));  // what is no number stays none
    __m512 n = _mm512_roundscale_ps((__m512)(x * 1.44269504088896341f), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    Floats r = x - (Floats)n * 0.693359375f + (Floats)n * 2.12194440e-4f;
    return (Floats)_mm512_scalef_ps((__m512)small_exponential(r), n);
#else
    Floats x = larger(smaller(given, all(88.3f)), all(-87.3f));
    Floats n = x * 1.44269504088896341f;
    Ints whole = __builtin_convertvector(n + (n >= 0.0f ? all(0.5f) : all(-0.5f)), Ints);
    n = __builtin_convertvector(whole, Floats);
    Floats r = x - n * 0.693359375f + n * 2.12194440e-4f;
    return given == given ? small_exponential(r) * (Floats)((whole + 127) << 23) : given;
#endif
}

// 2^x for x that are not above 0; relative error below 4e-7, but may be 0 where 2^x is below 1e-37. What is no number
// stays none.
inline Floats power_of_two(Floats given) {
#if defined(HAVE_AVX512)
    Floats x = larger(all(-160.0f), given);
    Floats n = (Floats)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    Floats x = given < -125.0f ? all(-125.0f) : given;
    Ints whole = __builtin_convertvector(x - 0.5f, Ints);
    Floats n = __builtin_convertvector(whole, Floats);
#endif
    Floats r = x - n, p = all(1.32647273e-3f);
    p = p * r + 9.67151299e-3f;
    p = p * r + 5.55073358e-2f;
    p = p * r + 2.40222424e-1f;
    p = p * r + 6.93147004e-1f;
    p = p * r + 1.0f;
#if defined(HAVE_AVX512)
    return (Floats)_mm512_scalef_ps((__m512)p, (__m512)n);
#else
    return given < -125.0f ? all(0.0f) : given == given ? p * (Floats)((whole + 127) << 23) : given;
#endif
}

// tanh by e^2x; near 0 by its series, where the quotient would lose digits.
inline Floats hyperbolic_tangent(Floats x) {
    Floats e = exponential(2.0f * smaller(larger(x, all(-10.0f)), all(10.0f)));
    Floats square = x * x;
    Floats series = x * (1.0f + square * (-0.333333333f + square * (0.133333333f - square * 0.053968254f)));
    return square < 0.01f || x != x ? series : (e - 1.0f) / (e + 1.0f);
}
