// Products of integers with AVX2, in sums of 16 bits as far as these have room: see ops/grouped_linear.h. There are 16
// registers, so products are of 16 outputs at a time.
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

// Sums of two neighbours of 16 bits as numbers of 32 bits.
INLINE Ints widen_pairs(Ints shorts) {
    __m256i ones = _mm256_set1_epi16(1);
    return {(HalfInts)_mm256_madd_epi16((__m256i)shorts.low, ones), (HalfInts)_mm256_madd_epi16((__m256i)shorts.high, ones)};
}

// Lets sums grow product by product. The compiler would compute all products first, and keep them in memory.
INLINE void keep_in_registers(Ints &sums) { asm("" : "+x"(sums.low), "+x"(sums.high)); }

template <Codes kind, int quads, int rows>
INLINE void PartSums<kind, quads, rows>::compute(const uint8_t *codes, int first, const int32_t *inputs,
                                                 const int32_t *starts, Ints table, PrefetchStream &prefetch) {
    // Quads whose sums have 16 bits: 2 * 15 * 127 * 8 and 2 * 63 * 127 * 2 are below 2^15.
    constexpr int shorts = wide ? 1 : kind == Codes::SIX ? 2 : quads;
    constexpr int together = std::min(shorts, 2);  // quads whose codes are in registers
    Ints short_sums[rows];
    // The compiler is not to mix the vectors of a panel, or it would keep inputs of both in memory.
    asm("" : "+r"(codes), "+r"(inputs));
#pragma GCC unroll 8
    for (int quad = 0; quad < quads; quad += together) {
        Ints unpacked[together];
        for (int i = 0; i < together; i++) {
            unpacked[i] = unpack<kind>(codes + (quad + i) / 4 * step_bytes(kind), (quad + i) % 4, first, table);
            if (wide) unpacked[i] ^= int32_t(0x80808080);
            if (first == 0 && (quad + i) % 4 < fetches) prefetch.fetch();
        }
#pragma GCC unroll 12
        for (int row = 0; row < rows; row++) {
            for (int i = 0; i < together; i++) {
                __m256i four = _mm256_set1_epi32(inputs[(quad + i) * rows + row]);
                Ints products = wide ? dot_signed_pairs(unpacked[i], four) : dot_pairs(unpacked[i], four);
                short_sums[row] = (quad + i) % shorts ? add_shorts(short_sums[row], products) : products;
                keep_in_registers(short_sums[row]);
            }
            if ((quad + together) % shorts) continue;
            Ints widened = widen_pairs(short_sums[row]);
            sums[row][0] = quad < shorts ? widened + starts[row] : sums[row][0] + widened;
            if (shorts < quads) keep_in_registers(sums[row][0]);
        }
    }
}
