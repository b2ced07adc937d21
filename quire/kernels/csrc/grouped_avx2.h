// Products of integers with AVX2, in sums of 16 bits as far as these have room: see ops/grouped_linear.h.
#pragma once

// Products of unsigned bytes below 128 with the signed bytes of inputs; sums of two have 16 bits.
INLINE Ints dot_pairs(Ints codes, __m256i inputs) {
    return {(HalfInts)_mm256_maddubs_epi16((__m256i)codes.low, inputs), (HalfInts)_mm256_maddubs_epi16((__m256i)codes.high, inputs)};
}

// The same of signed bytes, whose signs the inputs take over.
INLINE Ints dot_signed_pairs(Ints codes, __m256i inputs) {
    __m256i low = (__m256i)codes.low, high = (__m256i)codes.high;
    return {(HalfInts)_mm256_maddubs_epi16(_mm256_abs_epi8(low), _mm256_sign_epi8(inputs, low)),
            (HalfInts)_mm256_maddubs_epi16(_mm256_abs_epi8(high), _mm256_sign_epi8(inputs, high))};
}

// Sums of numbers of 16 bits.
INLINE Ints add_shorts(Ints a, Ints b) {
    return {(HalfInts)_mm256_add_epi16((__m256i)a.low, (__m256i)b.low), (HalfInts)_mm256_add_epi16((__m256i)a.high, (__m256i)b.high)};
}

// Sums of two neighbours of 16 bits, each times its factor, as numbers of 32 bits.
INLINE Ints dot_shorts(Ints shorts, Ints factors) {
    return {(HalfInts)_mm256_madd_epi16((__m256i)shorts.low, (__m256i)factors.low),
            (HalfInts)_mm256_madd_epi16((__m256i)shorts.high, (__m256i)factors.high)};
}

// Scales that are integers for 16 outputs, each twice as a number of 16 bits.
INLINE Ints load_pairs(const ScaleRows &scales, int64_t group, int half) {
    __m256i bytes = _mm256_broadcastsi128_si256((__m128i)scales.integers(group, half));
    __m256i first = _mm256_setr_epi8(-1, 0, -1, 0, -1, 1, -1, 1, -1, 2, -1, 2, -1, 3, -1, 3,
                                     -1, 4, -1, 4, -1, 5, -1, 5, -1, 6, -1, 6, -1, 7, -1, 7);
    __m256i second = _mm256_setr_epi8(-1, 8, -1, 8, -1, 9, -1, 9, -1, 10, -1, 10, -1, 11, -1, 11,
                                      -1, 12, -1, 12, -1, 13, -1, 13, -1, 14, -1, 14, -1, 15, -1, 15);
    return {(HalfInts)_mm256_srai_epi16(_mm256_shuffle_epi8(bytes, first), 8),
            (HalfInts)_mm256_srai_epi16(_mm256_shuffle_epi8(bytes, second), 8)};
}

// Lets sums grow product by product. The compiler would compute all products first, and keep them in memory.
INLINE void keep_in_registers(Ints &sums) { asm("" : "+x"(sums.low), "+x"(sums.high)); }

// Lets the sums of some outputs be computed before those of others. The compiler would multiply with scales at the end of
// all, and keep what it multiplies in memory.
template <int rows>
INLINE void finish_vectors(TileSums<rows> &sums) {
    if constexpr (rows > 1) asm volatile("" : "+m"(sums));
}

template <Codes kind, int quads, int rows>
template <bool scaled>
INLINE void PartSums<kind, quads, rows>::compute(const uint8_t *codes, int first, const int32_t *inputs, const int32_t *starts,
                                                 Ints table, const ScaleRows &scales, int64_t group, PrefetchStream &prefetch) {
    // Quads whose sums have 16 bits: see `has_short_sums`; of signed bytes 2 * 128 * 127 are below 2^15.
    constexpr int shorts = wide ? 1 : kind == Codes::SIX ? 4 : quads;
    constexpr int together = std::min(shorts, 2);  // quads whose codes are in registers
    const Ints ones = Ints{} + 0x10001;
    Ints short_sums[rows][vectors];
    // The compiler is not to mix the vectors of a panel, or it would keep inputs of both in memory.
    asm("" : "+r"(codes), "+r"(inputs));
#pragma GCC unroll 8
    for (int quad = 0; quad < quads; quad += together) {
        if (first == 0)
            for (int i = 0; i < together; i++)
                if ((quad + i) % 4 < fetches) prefetch.fetch();
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) {
            Ints unpacked[together];
            for (int i = 0; i < together; i++) {
                unpacked[i] = unpack<kind>(codes + (quad + i) / 4 * step_bytes(kind), (quad + i) % 4, first + v, table);
                if (wide) unpacked[i] ^= int32_t(0x80808080);
            }
#pragma GCC unroll 12
            for (int row = 0; row < rows; row++) {
                if (!wide && quad % shorts == 0) short_sums[row][v] = Ints{} + starts[quad / shorts * rows + row];
                for (int i = 0; i < together; i++) {
                    __m256i four = _mm256_set1_epi32(inputs[(quad + i) * rows + row]);
                    Ints products = wide ? dot_signed_pairs(unpacked[i], four) : dot_pairs(unpacked[i], four);
                    short_sums[row][v] = wide ? products : add_shorts(short_sums[row][v], products);
                    keep_in_registers(short_sums[row][v]);
                }
            }
            if ((quad + together) % shorts) continue;
            Ints factors = !scaled ? ones : rows > 1 ? load_decoded<Ints>(scales, group, first + v) : load_pairs(scales, group, first + v);
#pragma GCC unroll 12
            for (int row = 0; row < rows; row++) {
                Ints widened = dot_shorts(short_sums[row][v], factors);
                if (wide && quad == 0) widened += starts[row];
                sums[row][v] = quad < shorts ? widened : sums[row][v] + widened;
                keep_in_registers(sums[row][v]);
            }
        }
    }
}
