// Products of integers with AVX2, in sums of 16 bits as far as these have room: see ops/grouped_linear.h. There are 16
// registers, so products are of 16 outputs at a time.
#pragma once

// Products of unsigned bytes below 128 with the signed bytes of inputs; sums of two have 16 bits.
inline Ints dot_pairs(Ints codes, __m256i inputs) {
    return {(HalfInts)_mm256_maddubs_epi16((__m256i)codes.low, inputs), (HalfInts)_mm256_maddubs_epi16((__m256i)codes.high, inputs)};
}

// The same of signed bytes, whose signs the inputs take over.
inline Ints dot_signed_pairs(Ints codes, __m256i inputs) {
    __m256i low = (__m256i)codes.low, high = (__m256i)codes.high;
    return {(HalfInts)_mm256_maddubs_epi16(_mm256_abs_epi8(low), _mm256_sign_epi8(inputs, low)),
            (HalfInts)_mm256_maddubs_epi16(_mm256_abs_epi8(high), _mm256_sign_epi8(inputs, high))};
}

// Sums of numbers of 16 bits.
inline Ints add_shorts(Ints a, Ints b) {
    return {(HalfInts)_mm256_add_epi16((__m256i)a.low, (__m256i)b.low), (HalfInts)_mm256_add_epi16((__m256i)a.high, (__m256i)b.high)};
}

// Sums of two neighbours of 16 bits as numbers of 32 bits.
inline Ints widen_pairs(Ints shorts) {
    __m256i ones = _mm256_set1_epi16(1);
    return {(HalfInts)_mm256_madd_epi16((__m256i)shorts.low, ones), (HalfInts)_mm256_madd_epi16((__m256i)shorts.high, ones)};
}

template <Codes kind, int quads, int rows>
void PartSums<kind, quads, rows>::compute(const uint8_t *codes, const int8_t *inputs, int64_t stride, const int32_t *starts,
                                          Ints table, PrefetchStream &prefetch) {
    // Quads whose sums have 16 bits: 2 * 15 * 127 * 8 and 2 * 63 * 127 * 2 are below 2^15.
    constexpr int shorts = wide ? 1 : kind == Codes::SIX ? 2 : quads;
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        Ints *sums = half ? high : low;
        Ints total[rows], short_sums[rows];
#pragma GCC unroll 12
        for (int row = 0; row < rows; row++)
            total[row] = Ints{} + *(const int32_t *)((const char *)starts + row * stride);
#pragma GCC unroll 8
        for (int quad = 0; quad < quads; quad++) {
            Ints unpacked = unpack<kind>(codes + quad / 4 * step_bytes(kind), quad % 4, half, table);
            if (wide) unpacked ^= int32_t(0x80808080);
            if (half == 0 && quad % 4 < fetches) prefetch.fetch();
#pragma GCC unroll 12
            for (int row = 0; row < rows; row++) {
                int64_t at = row * stride + quad * 4;
                __m256i four = _mm256_set1_epi32(load_four(inputs + at));
                Ints products = wide ? dot_signed_pairs(unpacked, four) : dot_pairs(unpacked, four);
                short_sums[row] = quad % shorts ? add_shorts(short_sums[row], products) : products;
                if (quad % shorts == shorts - 1) total[row] += widen_pairs(short_sums[row]);
            }
        }
#pragma GCC unroll 12
        for (int row = 0; row < rows; row++) sums[row] = total[row];
        // The compiler is not to mix the halves, or it would keep products in memory.
        asm volatile("" : "+r"(codes), "+r"(inputs));
    }
}
