// Rows of int8 with scales, and the two formats of KV pages: plain rows and rows of int8.
#pragma once

// The largest magnitude of 32 floats; NaN or infinite if one is.
INLINE float largest_magnitude(Floats a, Floats b) {
    Ints first = (Ints)a & 0x7fffffff, second = (Ints)b & 0x7fffffff;  // as integers they have the order of magnitudes
#if defined(HAVE_AVX512)
    int32_t bits = _mm512_reduce_max_epi32(_mm512_max_epi32((__m512i)first, (__m512i)second));
#elif defined(HAVE_AVX2)
    __m256i wide = _mm256_max_epi32(_mm256_max_epi32((__m256i)first.low, (__m256i)first.high),
                                    _mm256_max_epi32((__m256i)second.low, (__m256i)second.high));
    __m128i most = _mm_max_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
    most = _mm_max_epi32(most, _mm_shuffle_epi32(most, 0x4e));
    int32_t bits = _mm_cvtsi128_si32(_mm_max_epi32(most, _mm_shuffle_epi32(most, 0xb1)));
#else
    first = first > second ? first : second;
    int32_t bits = 0;
    for (int i = 0; i < LANES; i++) bits = std::max(bits, first[i]);
#endif
    float out;
    std::memcpy(&out, &bits, sizeof out);
    return out;
}

// Rounds 16 floats of magnitudes up to 127. Returns the sum of the integers.
INLINE int32_t round_to_bytes(Floats x, int8_t *out) {
#if defined(HAVE_AVX512)
    __m512i integers = _mm512_cvtps_epi32((__m512)x);
    _mm_storeu_si128((__m128i *)out, _mm512_cvtepi32_epi8(integers));
    return _mm512_reduce_add_epi32(integers);
#else
    Ints integers = truncate(x + 128.5f) - 128;  // positive: truncation rounds
    Bytes bytes = lowest_bytes(integers);
    std::memcpy(out, &bytes, sizeof bytes);
#if defined(HAVE_AVX2)
    __m256i both = (__m256i)(integers.low + integers.high);
    __m128i sums = _mm_add_epi32(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1));
    sums = _mm_add_epi32(sums, _mm_shuffle_epi32(sums, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(sums, _mm_shuffle_epi32(sums, 0xb1)));
#else
    int32_t sum = 0;
    for (int i = 0; i < LANES; i++) sum += integers[i];
    return sum;
#endif
#endif
}

// Quantizes elements to int8 with one scale. Returns the scale: NaN if an element is NaN or infinite, 0 if all are 0 or nearly.
template <class T>
float quantize_row(const typename T::Element *x, int8_t *out, int64_t size) {
    Floats largest = broadcast(0.0f), not_finite = broadcast(0.0f);
    for (int64_t i = 0; i < size; i += LANES) {
        Floats v = T::load(x + i);
        largest = maximum(largest, select(v < 0.0f, -v, v));
        not_finite += v - v;  // 0 unless an element is NaN or infinite
    }
    float top = largest[0];
    for (int i = 1; i < LANES; i++) top = std::max(top, largest[i]);
    // Not below where 1 / scale is infinite; smaller elements become 0.
    float scale = top > 1e-36f ? top / 127.0f : 0.0f, inverse = scale > 0.0f ? 1.0f / scale : 0.0f;
    for (int64_t i = 0; i < size; i += LANES) {
        Ints integers = truncate(T::load(x + i) * inverse + 128.5f);  // positive: truncation rounds
        Bytes bytes = lowest_bytes(integers) ^ uint8_t(128);  // 128 less
        std::memcpy(out + i, &bytes, sizeof bytes);
    }
    return scale + horizontal_sum(not_finite);
}

// 16 elements of int8 as floats.
INLINE Floats load_int8(const int8_t *from) {
    Int8s x;
    std::memcpy(&x, from, sizeof x);
    return to_floats(widen(x));
}

// Rows of pages in the dtype T.
template <class T>
struct PlainRows {
    typedef typename T::Element Element;
    // Elements in front of a row's own.
    static constexpr int64_t prefix(int64_t) { return 0; }
    // 32 elements from `at` on: as in T::load_pair, and as they are.
    static INLINE void load_pair(const Element *row, int64_t at, Floats &a, Floats &b) { T::load_pair(row + at, a, b); }
    static INLINE Words load_pairs(const Element *row, int64_t at) { return load_words(row + at); }
    static INLINE void write(const Element *from, Element *row, int64_t dim) { std::memcpy(row, from, dim * sizeof *row); }
};

constexpr int64_t INT8_GROUP = 64;  // elements that share a scale; the last ones of a row may be fewer

// Rows of int8 behind float32 scales, that of the last group first. A row is what plain rows of its elements times their
// scales are, rounded as in T.
template <class T>
struct Int8Rows {
    typedef int8_t Element;
    static constexpr int64_t prefix(int64_t dim) {
        return (dim + INT8_GROUP - 1) / INT8_GROUP * int64_t(sizeof(float));
    }
    // The elements of a row of `width` bytes.
    static constexpr int64_t dim_of(int64_t width) {
        constexpr int64_t whole = INT8_GROUP + int64_t(sizeof(float));
        return width - (width + whole - 1) / whole * int64_t(sizeof(float));
    }
    static INLINE void load_pair(const Element *row, int64_t at, Floats &a, Floats &b) {
        if constexpr (std::is_same_v<T, Float32>) load_floats(row, at, a, b);
#if defined(HAVE_AVX2)
        else {  // even and odd elements, which stay floats: in bfloat16 they would go through memory
            float scale = scale_at(row, at);
            __m256i bytes = _mm256_loadu_si256((const __m256i *)(row + at));
            a = rounded_product(_mm256_srai_epi16(_mm256_slli_epi16(bytes, 8), 8), scale);
            b = rounded_product(_mm256_srai_epi16(bytes, 8), scale);
        }
#else
        else {
            Words both = load_pairs(row, at);
            a = (Floats)(both << 16), b = (Floats)(both & 0xffff0000);
        }
#endif
    }
    static INLINE Words load_pairs(const Element *row, int64_t at) {
        Floats a, b;
        load_floats(row, at, a, b);
        alignas(64) uint16_t elements[PAIR];
        BFloat16::store2(elements, a, b);
        return load_words(elements);
    }
    // from: elements of T.
    static INLINE void write(const typename T::Element *from, Element *row, int64_t dim) {
        for (int64_t at = 0; at < dim; at += INT8_GROUP) {
            float scale = quantize_row<T>(from + at, row + at, std::min(INT8_GROUP, dim - at));
            std::memcpy(row - scale_bytes(at), &scale, sizeof scale);
        }
    }

    // The scale of the group that the element `at` belongs to.
    static INLINE float scale_at(const Element *row, int64_t at) {
        float scale;
        std::memcpy(&scale, row - scale_bytes(at), sizeof scale);
        return scale;
    }

  private:
    // How far a group's scale is in front of a row's elements.
    static constexpr int64_t scale_bytes(int64_t at) { return (at / INT8_GROUP + 1) * int64_t(sizeof(float)); }
#if defined(HAVE_AVX2)
    // 16 elements times the scale, rounded as BFloat16::store does. A NaN is that of the scale, which has room for the carry.
    static INLINE Floats rounded_product(__m256i elements, float scale) {
        Ints integers = {(HalfInts)_mm256_cvtepi16_epi32(_mm256_castsi256_si128(elements)),
                         (HalfInts)_mm256_cvtepi16_epi32(_mm256_extracti128_si256(elements, 1))};
        Words bits = (Words)(to_floats(integers) * scale);
        return (Floats)((bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000);
    }
#endif
    static INLINE void load_floats(const Element *row, int64_t at, Floats &a, Floats &b) {
        float scale = scale_at(row, at);
        a = load_int8(row + at) * scale, b = load_int8(row + at + LANES) * scale;
    }
};
