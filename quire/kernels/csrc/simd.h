// Sixteen floats at a time, from and to float32 and bfloat16. Compiled once per instruction set, in a namespace of its own.
#pragma once

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));

constexpr int LANES = 16;

struct Float32 {
    typedef float Number;
    static inline Floats load(const float *from) {
        Floats x;
        std::memcpy(&x, from, sizeof x);
        return x;
    }
    static inline void store(float *to, Floats x) { std::memcpy(to, &x, sizeof x); }
    static inline float get(float x) { return x; }
    static inline float put(float x) { return x; }
};

struct BFloat16 {
    typedef uint16_t Number;
    static inline Floats load(const uint16_t *from) {
        Halves x;
        std::memcpy(&x, from, sizeof x);
        return (Floats)(__builtin_convertvector(x, Words) << 16);
    }
    // Rounds to the nearest, ties to even; what is no number stays none.
    static inline void store(uint16_t *to, Floats x) {
        Words bits = (Words)x;
        Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
        Words none = (Words)(x != x);
        Halves out = __builtin_convertvector((rounded & ~none) | (none & 0x7fc0), Halves);
        std::memcpy(to, &out, sizeof out);
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

inline float sum(Floats x) {
    x += __builtin_shuffle(x, Ints{8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7});
    x += __builtin_shuffle(x, Ints{4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11});
    x += __builtin_shuffle(x, Ints{2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13});
    return x[0] + x[1];
}

inline Floats larger(Floats a, Floats b) { return a > b ? a : b; }
inline Floats smaller(Floats a, Floats b) { return a < b ? a : b; }

// e^x as 2^n * e^r with |r| <= ln(2) / 2, by the minimax polynomial of Cephes' expf; relative error below 2e-7.
inline Floats exponential(Floats x) {
    x = larger(smaller(x, all(88.3f)), all(-87.3f));
    Floats n = x * 1.44269504088896341f;
    Ints whole = __builtin_convertvector(n + (n >= 0.0f ? all(0.5f) : all(-0.5f)), Ints);
    n = __builtin_convertvector(whole, Floats);
    Floats r = x - n * 0.693359375f + n * 2.12194440e-4f;
    Floats p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * (Floats)((whole + 127) << 23);
}

// tanh by e^2x; near 0 by its series, where the quotient would lose digits.
inline Floats hyperbolic_tangent(Floats x) {
    Floats e = exponential(2.0f * smaller(larger(x, all(-10.0f)), all(10.0f)));
    Floats square = x * x;
    Floats series = x * (1.0f + square * (-0.333333333f + square * (0.133333333f - square * 0.053968254f)));
    return square < 0.01f ? series : (e - 1.0f) / (e + 1.0f);
}
