// Numbers rounded to 8 bits, row by row, each row with a scale of its own; and rows of pages, which may be of such.
#pragma once

typedef uint8_t Bytes __attribute__((vector_size(16)));

// Rounds a row to 8 bits, 128 above what they are, or with that bit turned (`flip`) as signed ones; gives what one step
// is worth: no number, if one of the row's is none or infinite.
template <class T, uint8_t flip = 0>
float quantise_row(const typename T::Number *x, uint8_t *out, int64_t size) {
    Floats most = all(0.0f), odd = all(0.0f);
    for (int64_t i = 0; i < size; i += LANES) {
        Floats v = T::load(x + i);
        most = larger(most, v < 0.0f ? -v : v);
        odd += v - v;  // 0 unless some number is infinite or none at all
    }
    float largest = most[0];
    for (int i = 1; i < LANES; i++) largest = std::max(largest, most[i]);
    // Not below where 1 / step is infinite; what is so small becomes 0.
    float step = largest > 1e-36f ? largest / 127.0f : 1.0f, steps = 1.0f / step;
    for (int64_t i = 0; i < size; i += LANES) {
        Ints whole = __builtin_convertvector(T::load(x + i) * steps + 128.5f, Ints);  // positive, so cut off is rounded
        Bytes bytes = __builtin_convertvector(whole, Bytes) ^ flip;
        std::memcpy(out + i, &bytes, sizeof bytes);
    }
    return step + sum(odd);
}

// Rows of pages as their numbers lie.
template <class T>
struct PlainRows {
    typedef typename T::Number Number;
    static constexpr int64_t FRONT = 0;  // numbers before the row's own
    static inline float scale(const Number *) { return 1.0f; }
    static inline void load_pair(const Number *row, Floats &a, Floats &b) { T::load_pair(row, a, b); }
    // Queries and results have their numbers in the order of load_pair.
    static inline void take_pair(const typename T::Number *from, Floats &a, Floats &b) { T::load_pair(from, a, b); }
    static inline void give_pair(typename T::Number *to, Floats a, Floats b) { T::store_pair(to, a, b); }
    static inline void write(const typename T::Number *from, Number *row, int64_t dim) {
        std::memcpy(row, from, dim * sizeof *row);
    }
};

// Rows of int8 behind their scale, a float32.
template <class T>
struct RoundedRows {
    typedef int8_t Number;
    static constexpr int64_t FRONT = sizeof(float);
    static inline float scale(const Number *row) {
        float out;
        std::memcpy(&out, row, sizeof out);
        return out;
    }
    static inline Floats load(const Number *from) {
#if defined(HAVE_AVX512)
        return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
#else
        typedef int8_t Small __attribute__((vector_size(16)));
        Small x;
        std::memcpy(&x, from, sizeof x);
        return __builtin_convertvector(__builtin_convertvector(x, Ints), Floats);
#endif
    }
    static inline void load_pair(const Number *row, Floats &a, Floats &b) {
        a = load(row + FRONT), b = load(row + FRONT + LANES);
    }
    static inline void take_pair(const typename T::Number *from, Floats &a, Floats &b) {
        a = T::load(from), b = T::load(from + LANES);
    }
    static inline void give_pair(typename T::Number *to, Floats a, Floats b) {
        T::store(to, a), T::store(to + LANES, b);
    }
    static inline void write(const typename T::Number *from, Number *row, int64_t dim) {
        float step = quantise_row<T, 128>(from, (uint8_t *)row + FRONT, dim);
        std::memcpy(row, &step, sizeof step);
    }
};
