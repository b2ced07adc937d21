// Vectors of 16 numbers of 32 bits, and what instruction sets do with them in different ways. Elsewhere they are used with
// operators, like vectors of the compiler.
#pragma once

// For functions of vectors: a call would pass them through memory. The compiler stops to inline in functions as large as
// unrolled products, and sums that a call takes by reference are then kept in memory as well.
#define INLINE inline __attribute__((always_inline))

typedef uint16_t Halves __attribute__((vector_size(32)));
typedef uint8_t Bytes __attribute__((vector_size(16)));
typedef int8_t Int8s __attribute__((vector_size(16)));

constexpr int LANES = 16;
constexpr int PAIR = 2 * LANES;  // elements of two vectors

#if defined(HAVE_AVX2)

// A vector in two registers. The compiler would keep a vector of its own that has more bytes than a register in memory, and
// copy it there for each operation, which makes kernels three to ten times slower.
template <class Half>
struct Vector {
    typedef std::remove_cvref_t<decltype(Half{}[0])> Element;
    typedef decltype(Half{} == Half{}) HalfMask;
    static constexpr int HALF = LANES / 2;

    Vector() = default;
    constexpr Vector(Half low, Half high) : low(low), high(high) {}
    // 16 elements.
    template <class... Elements>
        requires(sizeof...(Elements) == LANES)
    constexpr Vector(Elements... all) {
        const Element elements[] = {Element(all)...};
        for (int i = 0; i < HALF; i++) low[i] = elements[i], high[i] = elements[HALF + i];
    }
    // The same bits as another type.
    template <class Other>
    INLINE explicit operator Vector<Other>() const {
        return {(Other)low, (Other)high};
    }
    INLINE Element operator[](int lane) const { return lane < HALF ? low[lane] : high[lane - HALF]; }
    INLINE Vector operator-() const { return {-low, -high}; }
    INLINE Vector operator~() const { return {~low, ~high}; }

#define QUIRE_OPERATOR(op) \
    friend INLINE Vector operator op(Vector a, Vector b) { return {a.low op b.low, a.high op b.high}; } \
    friend INLINE Vector operator op(Vector a, Element b) { return {a.low op b, a.high op b}; } \
    friend INLINE Vector operator op(Element a, Vector b) { return {a op b.low, a op b.high}; } \
    template <class Other> \
    INLINE Vector &operator op##=(Other other) { \
        return *this = *this op other; \
    }
    QUIRE_OPERATOR(+)
    QUIRE_OPERATOR(-)
    QUIRE_OPERATOR(*)
    QUIRE_OPERATOR(/)
    QUIRE_OPERATOR(&)
    QUIRE_OPERATOR(|)
    QUIRE_OPERATOR(^)
    QUIRE_OPERATOR(<<)
    QUIRE_OPERATOR(>>)
#undef QUIRE_OPERATOR
#define QUIRE_COMPARISON(op) \
    friend INLINE Vector<HalfMask> operator op(Vector a, Vector b) { return {a.low op b.low, a.high op b.high}; } \
    friend INLINE Vector<HalfMask> operator op(Vector a, Element b) { return {a.low op b, a.high op b}; }
    QUIRE_COMPARISON(==)
    QUIRE_COMPARISON(!=)
    QUIRE_COMPARISON(<)
    QUIRE_COMPARISON(>)
    QUIRE_COMPARISON(<=)
    QUIRE_COMPARISON(>=)
#undef QUIRE_COMPARISON

    Half low, high;
};

typedef float HalfFloats __attribute__((vector_size(32)));
typedef int32_t HalfInts __attribute__((vector_size(32)));
typedef uint32_t HalfWords __attribute__((vector_size(32)));
typedef Vector<HalfFloats> Floats;
typedef Vector<HalfInts> Ints;
typedef Vector<HalfWords> Words;

template <class Type>
INLINE Type load_vector(const void *from) {
    Type x;
    std::memcpy(&x.low, from, sizeof x.low);
    std::memcpy(&x.high, (const char *)from + sizeof x.low, sizeof x.high);
    return x;
}
template <class Half>
INLINE void store_vector(void *to, Vector<Half> x) {
    std::memcpy(to, &x.low, sizeof x.low);
    std::memcpy((char *)to + sizeof x.low, &x.high, sizeof x.high);
}

INLINE Floats broadcast(float x) { return {(HalfFloats)_mm256_set1_ps(x), (HalfFloats)_mm256_set1_ps(x)}; }
template <class Half>
INLINE Vector<Half> select(Ints mask, Vector<Half> a, Vector<Half> b) {
    return {mask.low ? a.low : b.low, mask.high ? a.high : b.high};
}
// Whether a mask has a lane with bits set.
INLINE bool any(Ints mask) {
    HalfInts both = mask.low | mask.high;
    return !_mm256_testz_si256((__m256i)both, (__m256i)both);
}
INLINE Floats to_floats(Ints x) {
    return {__builtin_convertvector(x.low, HalfFloats), __builtin_convertvector(x.high, HalfFloats)};
}
INLINE Ints truncate(Floats x) {
    return {__builtin_convertvector(x.low, HalfInts), __builtin_convertvector(x.high, HalfInts)};
}
INLINE Words widen(Halves x) {
    return {(HalfWords)_mm256_cvtepu16_epi32(_mm256_castsi256_si128((__m256i)x)),
            (HalfWords)_mm256_cvtepu16_epi32(_mm256_extracti128_si256((__m256i)x, 1))};
}
INLINE Ints widen(Int8s x) {
    return {(HalfInts)_mm256_cvtepi8_epi32((__m128i)x), (HalfInts)_mm256_cvtepi8_epi32(_mm_unpackhi_epi64((__m128i)x, (__m128i)x))};
}
// Words below 2^16.
INLINE Halves narrow(Words x) {
    return (Halves)_mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)x.low, (__m256i)x.high), 0xd8);
}
INLINE Bytes lowest_bytes(Ints x) {
    __m256i halves = (__m256i)narrow((Words)x & 255);
    return (Bytes)_mm_packus_epi16(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
}

INLINE float horizontal_sum(Floats vector) {
    HalfFloats x = vector.low + vector.high;
    x += __builtin_shuffle(x, HalfInts{4, 5, 6, 7, 0, 1, 2, 3});
    x += __builtin_shuffle(x, HalfInts{2, 3, 0, 1, 6, 7, 4, 5});
    return x[0] + x[1];
}

// See below.
template <int STEP>
INLINE Floats fold_halves(Floats a, Floats b) {
    if constexpr (STEP == Floats::HALF) return {a.low + a.high, b.low + b.high};
    else {
        constexpr HalfInts lanes = {0, 1, 2, 3, 4, 5, 6, 7};
        constexpr HalfInts low = (lanes & ~STEP) | (((lanes & STEP) != 0) & Floats::HALF);
        return {__builtin_shuffle(a.low, b.low, low) + __builtin_shuffle(a.low, b.low, low | STEP),
                __builtin_shuffle(a.high, b.high, low) + __builtin_shuffle(a.high, b.high, low | STEP)};
    }
}
template <int STEP>
INLINE void exchange_halves(Words &a, Words &b) {
    if constexpr (STEP == Words::HALF) std::swap(a.high, b.low);
    else {
        constexpr HalfInts lanes = {0, 1, 2, 3, 4, 5, 6, 7};
        constexpr HalfInts first = (lanes & ~STEP) | (((lanes & STEP) != 0) & Words::HALF);
        Words x = {__builtin_shuffle(a.low, b.low, first), __builtin_shuffle(a.high, b.high, first)};
        b = {__builtin_shuffle(a.low, b.low, first | STEP), __builtin_shuffle(a.high, b.high, first | STEP)};
        a = x;
    }
}
INLINE void interleave(Words &a, Words &b) {
    constexpr HalfInts first = {0, 8, 1, 9, 2, 10, 3, 11};
    Words x = {__builtin_shuffle(a.low, b.low, first), __builtin_shuffle(a.low, b.low, first + 4)};
    b = {__builtin_shuffle(a.high, b.high, first), __builtin_shuffle(a.high, b.high, first + 4)};
    a = x;
}

#else

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));

template <class Type>
INLINE Type load_vector(const void *from) {
    Type x;
    std::memcpy(&x, from, sizeof x);
    return x;
}
template <class Type>
INLINE void store_vector(void *to, Type x) {
    std::memcpy(to, &x, sizeof x);
}

INLINE Floats broadcast(float x) {
    return Floats{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x};
}
// Elements of a where the mask has all bits set, and of b where it is 0.
template <class Type>
INLINE Type select(Ints mask, Type a, Type b) {
    return mask ? a : b;
}
INLINE bool any(Ints mask) {
#if defined(HAVE_AVX512)
    return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#else
    int32_t bits = 0;
    for (int i = 0; i < LANES; i++) bits |= mask[i];
    return bits != 0;
#endif
}
INLINE Floats to_floats(Ints x) { return __builtin_convertvector(x, Floats); }
INLINE Ints truncate(Floats x) { return __builtin_convertvector(x, Ints); }
INLINE Words widen(Halves x) {
#if defined(HAVE_AVX512)  // gcc converts vectors of this size in two steps
    return (Words)_mm512_cvtepu16_epi32((__m256i)x);
#else
    return __builtin_convertvector(x, Words);
#endif
}
INLINE Ints widen(Int8s x) {
#if defined(HAVE_AVX512)
    return (Ints)_mm512_cvtepi8_epi32((__m128i)x);
#else
    return __builtin_convertvector(x, Ints);
#endif
}
// Words below 2^16.
INLINE Halves narrow(Words x) { return __builtin_convertvector(x, Halves); }
INLINE Bytes lowest_bytes(Ints x) { return __builtin_convertvector(x, Bytes); }

INLINE float horizontal_sum(Floats x) {
    x += __builtin_shuffle(x, Ints{8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7});
    x += __builtin_shuffle(x, Ints{4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11});
    x += __builtin_shuffle(x, Ints{2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13});
    return x[0] + x[1];
}

// Adds the halves of each group of `2 * STEP` lanes: the sums of a are in the lower half of the group, those of b in the
// upper half.
template <int STEP>
INLINE Floats fold_halves(Floats a, Floats b) {
    Ints lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    Ints upper = (lanes & STEP) != 0;  // all bits set in lanes whose result comes from b
    Ints low = (lanes & ~STEP) | (upper & LANES);
    return __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, low | STEP);
}

// Exchanges the upper half of a and the lower half of b in each group of `2 * STEP` lanes.
template <int STEP>
INLINE void exchange_halves(Words &a, Words &b) {
    Ints lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    Ints upper = (lanes & STEP) != 0;  // all bits set in lanes that come from b
    Ints first = (lanes & ~STEP) | (upper & LANES);
    Words low = __builtin_shuffle(a, b, first);
    b = __builtin_shuffle(a, b, first | STEP);
    a = low;
}

// Words of a and b in turns: the first 16 of them, and the last ones.
INLINE void interleave(Words &a, Words &b) {
    constexpr Ints first = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
    Words low = __builtin_shuffle(a, b, first);
    b = __builtin_shuffle(a, b, first + 8);
    a = low;
}

#endif
