// Rows of int8 with one scale per row, and the two formats of KV pages: plain rows and rows of int8.
#pragma once

typedef uint8_t Bytes __attribute__((vector_size(16)));

// Quantizes a row to int8. Returns the scale: NaN if an element is NaN or infinite.
template <class T>
float quantize_row(const typename T::Element *x, int8_t *out, int64_t size) {
    Floats largest = broadcast(0.0f), not_finite = broadcast(0.0f);
    for (int64_t i = 0; i < size; i += LANES) {
        Floats v = T::load(x + i);
        largest = maximum(largest, v < 0.0f ? -v : v);
        not_finite += v - v;  // 0 unless an element is NaN or infinite
    }
    float top = largest[0];
    for (int i = 1; i < LANES; i++) top = std::max(top, largest[i]);
    // Not below where 1 / scale is infinite; smaller elements become 0.
    float scale = top > 1e-36f ? top / 127.0f : 1.0f, inverse = 1.0f / scale;
    for (int64_t i = 0; i < size; i += LANES) {
        Ints integers = __builtin_convertvector(T::load(x + i) * inverse + 128.5f, Ints);  // positive: truncation rounds
        Bytes bytes = __builtin_convertvector(integers, Bytes) ^ uint8_t(128);  // 128 less
        std::memcpy(out + i, &bytes, sizeof bytes);
    }
    return scale + horizontal_sum(not_finite);
}

// Rows of pages in the dtype T.
template <class T>
struct PlainRows {
    typedef typename T::Element Element;
    static constexpr int64_t PREFIX = 0;  // elements in front of a row's own
    static inline float scale(const Element *) { return 1.0f; }
    // 32 elements: those of the lower and of the upper halves of words.
    static inline void load_pair(const Element *row, Floats &a, Floats &b) { T::load_pair(row, a, b); }
    static inline Words load_pairs(const Element *row) { return load_words(row); }
    // Queries and outputs are read and written in the element order of load_pair.
    static inline void load_query_pair(const typename T::Element *from, Floats &a, Floats &b) { T::load_pair(from, a, b); }
    static inline void store_output_pair(typename T::Element *to, Floats a, Floats b) { T::store_pair(to, a, b); }
    static inline void write(const typename T::Element *from, Element *row, int64_t dim) {
        std::memcpy(row, from, dim * sizeof *row);
    }
};

// Rows of int8, each behind its float32 scale. Elements are loaded as the integers that they are, which bfloat16 has all of:
// the scale is applied to sums of products.
template <class T>
struct Int8Rows {
    typedef int8_t Element;
    static constexpr int64_t PREFIX = sizeof(float);
    static inline float scale(const Element *row) {
        float out;
        std::memcpy(&out, row, sizeof out);
        return out;
    }
    static inline Floats load(const Element *from) {
#if defined(HAVE_AVX512)
        return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
#else
        typedef int8_t Int8s __attribute__((vector_size(16)));
        Int8s x;
        std::memcpy(&x, from, sizeof x);
        return __builtin_convertvector(__builtin_convertvector(x, Ints), Floats);
#endif
    }
    static inline void load_pair(const Element *row, Floats &a, Floats &b) {
        a = load(row + PREFIX), b = load(row + PREFIX + LANES);
    }
    static inline Words load_pairs(const Element *row) { return pack_floats(load(row + PREFIX), load(row + PREFIX + LANES)); }
    static inline void load_query_pair(const typename T::Element *from, Floats &a, Floats &b) {
        a = T::load(from), b = T::load(from + LANES);
    }
    static inline void store_output_pair(typename T::Element *to, Floats a, Floats b) {
        T::store(to, a), T::store(to + LANES, b);
    }
    static inline void write(const typename T::Element *from, Element *row, int64_t dim) {
        float scale = quantize_row<T>(from, row + PREFIX, dim);
        std::memcpy(row, &scale, sizeof scale);
    }
};
