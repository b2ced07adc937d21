// Attention to int8 rows with products of integers (VNNI): queries are quantized as rows are, and softmax weights to unsigned
// bytes. Sums of integers are exact in any order, and what is done with them has one order here: single queries and spans
// have the same bits. Included where there is HAVE_INT8_DOT.
#pragma once

constexpr int64_t QUAD = 4;                           // elements whose products one sum takes at once
constexpr int64_t MAX_GROUPS = MAX_DIM / INT8_GROUP;  // of a row
constexpr int64_t QUERY_PART = 16;                    // elements of a query that share a scale: fewer are hardly more exact
constexpr int64_t CODES_STRIDE = CHUNK + LINE;        // bytes between rows of weights: never whole pages

inline int64_t groups_of(int64_t dim) { return (dim + INT8_GROUP - 1) / INT8_GROUP; }
// Parts of a query that have the keys' scale of the group from the element `at` on.
inline int64_t parts_of_group(int64_t dim, int64_t at) { return std::min(INT8_GROUP, dim - at) / QUERY_PART; }

// Adds products of four neighbouring bytes to each of 16 sums.
INLINE Ints dot_add(Ints sums, Words bytes, Words signed_bytes) {
    return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)bytes, (__m512i)signed_bytes);
}

// The bytes of a group of a row from the element `at` on, 0 past the row's end.
INLINE Words load_group(const int8_t *row, int64_t at, int64_t dim) {
    return (Words)_mm512_maskz_loadu_epi8(_bzhi_u64(~0ull, unsigned(std::min(INT8_GROUP, dim - at))), row + at);
}

// Four bytes in all lanes.
INLINE Words broadcast_quad(const void *bytes) {
    uint32_t word;
    std::memcpy(&word, bytes, sizeof word);
    return Words{} + word;
}

// Keys are multiplied as unsigned bytes, 128 more than they are.
INLINE Words to_unsigned(Words bytes) { return bytes ^ 0x80808080; }

// A part of a quantized query: its scale, times that of all scores, and what products of its codes with unsigned keys start with.
struct QueryPart {
    float scale;
    int32_t start;
};

// Quantizes a query of bfloat16. codes: those of whole groups, 0 past the end.
inline void quantize_query(const uint16_t *q, int64_t dim, float scale, int8_t *codes, QueryPart *parts) {
    std::memset(codes, 0, groups_of(dim) * INT8_GROUP);
    for (int64_t at = 0; at < dim; at += QUERY_PART, parts++) {
        parts->scale = quantize_row<BFloat16>(q + at, codes + at, QUERY_PART) * scale;
        parts->start = 0;
        for (int64_t i = at; i < at + QUERY_PART; i++) parts->start -= 128 * codes[i];
    }
}

// a * b + c with one rounding.
INLINE Floats fused(Floats a, Floats b, Floats c) { return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }

// The positions of 16 that are in [first, past), as bits.
INLINE __mmask16 lanes_between(int64_t first, int64_t past) {
    auto below = [](int64_t count) { return _bzhi_u32(0xffff, unsigned(std::clamp<int64_t>(count, 0, LANES))); };
    return __mmask16(below(past) & ~below(first));
}

// Softmax weights in place of scores; see softmax_weights.
inline float rough_softmax_weights(float *scores, int64_t begin, int64_t end, float &top) {
    constexpr float LOG2_E = 1.44269504088896341f;
    Floats largest = broadcast(-INFINITY), total = broadcast(0.0f);
    for (int64_t i = begin; i < end; i += LANES) largest = maximum(largest, Float32::load(scores + i));
    top = _mm512_reduce_max_ps((__m512)largest);
    Floats shift = broadcast(top == -INFINITY ? 0.0f : -top * LOG2_E);  // if all scores are -inf, all weights are 0
    for (int64_t i = begin; i < end; i += LANES) {
        Floats weight = rough_exp2(fused(Float32::load(scores + i), broadcast(LOG2_E), shift));
        Float32::store(scores + i, weight);
        total += weight;
    }
    return horizontal_sum(total);
}

// Quantizes weights times scales of values to `codes`, for positions of [begin, end) in [first, past); 0 for others, whose
// scales may be anything. Returns the scale of the codes: NaN if a product is not finite.
inline float quantize_weights(const float *weights, const float *scales, int64_t begin, int64_t end, int64_t first,
                              int64_t past, uint8_t *codes) {
    alignas(64) float products[CHUNK];
    __m512i largest = _mm512_setzero_si512();  // as integers products have the order of numbers, before infinity and NaN
    for (int64_t i = begin; i < end; i += LANES) {
        Floats product = Float32::load(weights + i) * Float32::load(scales + i);
        if (i < first || i + LANES > past) product = (Floats)_mm512_maskz_mov_ps(lanes_between(first - i, past - i), (__m512)product);
        Float32::store(products + i, product);
        largest = _mm512_max_epu32(largest, (__m512i)product);
    }
    uint32_t bits = _mm512_reduce_max_epu32(largest);
    float top;
    std::memcpy(&top, &bits, sizeof top);
    float inverse = top > 1e-36f ? 255.0f / top : 0.0f;  // below it may be infinite
    for (int64_t i = begin; i < end; i += LANES) {
        __m512i integers = _mm512_cvtps_epi32((__m512)(Float32::load(products + i) * inverse));
        _mm_storeu_si128((__m128i *)(codes + i), _mm512_cvtepi32_epi8(integers));
    }
    return std::isfinite(top) ? top / 255.0f : NAN;
}

// Interleaves the bytes of four rows: words of a byte of each. Quarter i of rows[j] has the words 16i + 4j to 16i + 4j + 3, so
// that interleave_words puts all in order.
INLINE void interleave_bytes(Words *rows) {
    __m512i a = (__m512i)rows[0], b = (__m512i)rows[1], c = (__m512i)rows[2], d = (__m512i)rows[3];
    __m512i low = _mm512_unpacklo_epi8(a, b), high = _mm512_unpackhi_epi8(a, b);
    __m512i other_low = _mm512_unpacklo_epi8(c, d), other_high = _mm512_unpackhi_epi8(c, d);
    rows[0] = (Words)_mm512_unpacklo_epi16(low, other_low), rows[1] = (Words)_mm512_unpackhi_epi16(low, other_low);
    rows[2] = (Words)_mm512_unpacklo_epi16(high, other_high), rows[3] = (Words)_mm512_unpackhi_epi16(high, other_high);
}
