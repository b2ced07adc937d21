// Attention to int8 rows with products of integers (VNNI): queries are quantized as rows are, and softmax weights to unsigned
// bytes. Sums of integers are exact in any order, and what is done with them has one order here: single queries and spans
// have the same bits. Included where there is HAVE_INT8_DOT.
#pragma once

constexpr int64_t QUAD = 4;                           // elements whose products one sum takes at once
constexpr int64_t MAX_GROUPS = MAX_DIM / INT8_GROUP;  // of a row
constexpr int64_t QUERY_PART = 16;                    // elements of a query that share a scale: fewer are hardly more exact
constexpr int MAX_SHIFT = 8;                          // of a part, to which the largest element belongs: sums stay below 2^31
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

// Adds the shifted products of a part. The shift is a vector, which is loaded faster than a number gets to where shifts are.
INLINE Ints add_shifted(Ints sums, Ints products, int32_t shift) {
    return sums + (Ints)_mm512_sllv_epi32((__m512i)products, _mm512_set1_epi32(shift));
}

// A query in int8. A part's scale is that of the query times a power of two, so that sums of products are added as integers.
struct QuantizedQuery {
    alignas(64) int8_t codes[MAX_DIM];       // of whole groups, 0 past the end
    int32_t shifts[MAX_DIM / QUERY_PART];    // of each part
    int32_t biases[MAX_GROUPS];              // what sums of a group begin with, as keys are multiplied with 128 more than they are
    float scale;                             // times that of all scores
};

// Quantizes a query of bfloat16. scale: that of all scores.
inline void quantize_query(const uint16_t *q, int64_t dim, float scale, QuantizedQuery &query) {
    float magnitudes[MAX_DIM / QUERY_PART], largest = 0.0f;
    for (int64_t i = 0; i < dim / QUERY_PART; i++) {
        Floats elements = BFloat16::load(q + i * QUERY_PART);
        magnitudes[i] = largest_magnitude(elements, elements);
        if (magnitudes[i] > largest || std::isnan(magnitudes[i])) largest = magnitudes[i];  // NaN stays
    }
    const bool rounds = largest > 1e-32f && std::isfinite(largest);  // below, the inverse of the smallest step may be infinite
    const float step = rounds ? largest / float(127 << MAX_SHIFT) : 0.0f;
    query.scale = std::isfinite(largest) ? step * scale : NAN;
    std::memset(query.codes, 0, groups_of(dim) * INT8_GROUP);
    std::memset(query.biases, 0, sizeof query.biases);
    std::memset(query.shifts, 0, sizeof query.shifts);
    for (int64_t i = 0; rounds && i < dim / QUERY_PART; i++) {
        int32_t shift = 0;
        while (shift < MAX_SHIFT && magnitudes[i] > step * float(127 << shift)) shift++;
        Floats elements = BFloat16::load(q + i * QUERY_PART) * (1.0f / (step * float(1 << shift)));
        query.shifts[i] = shift;
        query.biases[i * QUERY_PART / INT8_GROUP] -= 128 * round_to_bytes(elements, query.codes + i * QUERY_PART) << shift;
    }
}

// a * b + c with one rounding.
INLINE Floats fused(Floats a, Floats b, Floats c) { return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c); }

// Lanes of vectors that are all seen, so that nothing is to be masked.
struct AllLanes {};

// Elements of x in lanes of the mask, and a number elsewhere.
INLINE Floats in_lanes(AllLanes, Floats x, float) { return x; }
INLINE Floats in_lanes(__mmask16 mask, Floats x, float elsewhere) {
    return (Floats)_mm512_mask_mov_ps(_mm512_set1_ps(elsewhere), mask, (__m512)x);
}

// Positions [begin, end) of a chunk, of which a query sees [first, past).
struct VisiblePositions {
    int64_t begin, end, first, past;
    VisiblePositions(int64_t begin, int64_t end, int64_t first, int64_t past)
        : begin(begin), end(end), first(std::clamp(first, begin, end)), past(std::clamp(past, this->first, end)) {}
    // Calls body(position, lanes that are seen) for each 16 of which some are.
    template <class Body>
    INLINE void for_each(Body body) const {
        int64_t i = first & -LANES;
        const int64_t whole = past & -LANES;
        if (i < first) body(i, mask_at(i)), i += LANES;
        for (; i < whole; i += LANES) body(i, AllLanes{});
        if (i < past) body(i, mask_at(i));
    }
    // Calls body(position) for each 16 of which none is.
    template <class Body>
    INLINE void for_each_hidden(Body body) const {
        for (int64_t i = begin; i + LANES <= first; i += LANES) body(i);
        for (int64_t i = (past + LANES - 1) & -LANES; i < end; i += LANES) body(i);
    }

  private:
    __mmask16 mask_at(int64_t i) const {
        auto below = [](int64_t count) { return _bzhi_u32(0xffff, unsigned(std::clamp<int64_t>(count, 0, LANES))); };
        return __mmask16(below(past - i) & ~below(first - i));
    }
};

inline float largest_score(const float *scores, const VisiblePositions &positions) {
    Floats largest = broadcast(-INFINITY);
    positions.for_each([&](int64_t i, auto lanes) { largest = maximum(largest, in_lanes(lanes, Float32::load(scores + i), -INFINITY)); });
    return horizontal_max(largest);
}

// Products of softmax weights and scales of values, 0 where a query sees nothing: scales may be anything there.
class WeightProducts {
  public:
    WeightProducts(const VisiblePositions &positions, const float *value_scales, float *products)
        : value_scales_(value_scales), products_(products), largest_(_mm512_setzero_si512()) {
        positions.for_each_hidden([&](int64_t i) { Float32::store(products + i, broadcast(0.0f)); });
    }
    template <class Lanes>
    INLINE void add(int64_t i, Floats weights, Lanes lanes) {
        Floats product = in_lanes(lanes, weights * Float32::load(value_scales_ + i), 0.0f);
        Float32::store(products_ + i, product);
        largest_ = _mm512_max_epu32(largest_, (__m512i)product);
    }
    float largest() const {
        uint32_t bits = _mm512_reduce_max_epu32(largest_);
        float product;
        std::memcpy(&product, &bits, sizeof product);
        return product;
    }

  private:
    const float *value_scales_;
    float *products_;
    __m512i largest_;  // as integers products have the order of numbers, before infinity and NaN
};

// Softmax weights of scores and their products with scales of values.
struct WeighedScores {
    SoftmaxSum sum;
    float largest_product;
};

// score_scale: what scores are still to be multiplied with. Weights are written only if `keep`.
template <bool keep>
INLINE WeighedScores weigh_with_exponent(const float *scores, float score_scale, const float *value_scales, float *weights,
                                         float *products, const VisiblePositions &positions, float exponent) {
    WeightProducts weight_products(positions, value_scales, products);
    Floats factor = broadcast(score_scale * LOG2_E), shift = broadcast(-shift_of(exponent)), total = broadcast(0.0f);
    positions.for_each([&](int64_t i, auto lanes) {
        Floats weight = in_lanes(lanes, rough_exp2(fused(Float32::load(scores + i), factor, shift)), 0.0f);
        total += weight;
        if constexpr (keep) Float32::store(weights + i, weight);
        weight_products.add(i, weight, lanes);
    });
    return {{exponent, horizontal_sum(total)}, weight_products.largest()};
}

// The same with an exponent as softmax_weights has.
template <bool keep>
INLINE WeighedScores weigh_scores(const float *scores, float score_scale, const float *value_scales, float *weights,
                                  float *products, const VisiblePositions &positions) {
    float score = positions.first < positions.past ? scores[positions.first] : -INFINITY;
    auto weighed = weigh_with_exponent<keep>(scores, score_scale, value_scales, weights, products, positions, exponent_of(score * score_scale));
    if (is_fit(weighed.sum.total)) return weighed;
    float exponent = exponent_of(largest_score(scores, positions) * score_scale);
    return weigh_with_exponent<keep>(scores, score_scale, value_scales, weights, products, positions, exponent);
}

// Multiplies softmax weights with scales. Returns the largest product.
inline float multiply_weights(const float *weights, const float *value_scales, float *products, const VisiblePositions &positions) {
    WeightProducts weight_products(positions, value_scales, products);
    positions.for_each([&](int64_t i, auto lanes) { weight_products.add(i, Float32::load(weights + i), lanes); });
    return weight_products.largest();
}

constexpr int64_t CODES = 32;            // that are written together
constexpr int64_t QUADS = CODES / QUAD;  // of these

// The position, of 32, that a byte of a quad of codes is of.
constexpr int64_t position_of_code(int64_t quad, int64_t byte) { return 2 * quad + byte / 2 + byte % 2 * LANES; }

// Quantizes products to unsigned bytes. Returns their scale: NaN if a product is not finite.
INLINE float quantize_products(const float *products, float largest, int64_t begin, int64_t end, uint8_t *codes) {
    constexpr float INTEGERS = 3 << 22;  // added to a number below 2^16, its lower half is the nearest integer
    float inverse = largest > 1e-36f ? 255.0f / largest : 0.0f;  // below it may be infinite
    for (int64_t i = begin; i < end; i += CODES) {
        Words low = (Words)fused(Float32::load(products + i), broadcast(inverse), broadcast(INTEGERS));
        Words high = (Words)fused(Float32::load(products + i + LANES), broadcast(inverse), broadcast(INTEGERS));
        __m512i pairs = _mm512_mask_blend_epi16(0xaaaaaaaa, (__m512i)low, (__m512i)(high << 16));
        _mm256_storeu_si256((__m256i *)(codes + i), _mm512_cvtepi16_epi8(pairs));
    }
    return std::isfinite(largest) ? largest / 255.0f : NAN;
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
