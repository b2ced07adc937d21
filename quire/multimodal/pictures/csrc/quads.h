// Resizing with the processor's instruction for products of bytes (AVX-512 VNNI): for each of 16 sums, four bytes without sign
// times four with one are added to it. A weight of 24 bits is three digits of eight bits with a sign, each of which has a sum of
// its own; so the result has the same bits as products of integers.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "vectors.h"
#include "weights.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define HAS_QUADS 1
#include <immintrin.h>
#define VNNI __attribute__((target("avx512f,avx512bw,avx512vl,avx512vnni")))
#define VNNI_INLINE static inline VNNI __attribute__((always_inline))

namespace quads {

constexpr int TAPS = 4;
constexpr int DIGITS = 3;
constexpr int64_t VECTOR = Vectors::ALIGNMENT;
constexpr int64_t PIXELS = TAPS * COLORS;  // bytes of four pixels

inline bool supported() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vnni");
}

// Weights of elements in groups of four: elements that are not used have a weight of 0.
struct GroupedWeights {
    GroupedWeights() = default;
    explicit GroupedWeights(const Weights &weights) : first(weights.first.size()), count(weights.first.size()) {
        for (size_t place = 0; place < first.size(); ++place) {
            int64_t begin = weights.first[place];
            first[place] = begin / TAPS;
            count[place] = (begin + weights.count[place] - 1) / TAPS - first[place] + 1;
            most = std::max(most, count[place]);
        }
        digits.assign(first.size() * size_t(most) * DIGITS * TAPS, 0);
        for (size_t place = 0; place < first.size(); ++place)
            for (int64_t i = 0; i < weights.count[place]; ++i) {
                int64_t element = weights.first[place] + i - first[place] * TAPS;
                int8_t *to = of(int64_t(place)) + (element / TAPS * DIGITS) * TAPS + element % TAPS;
                int32_t value = weights.values[place * size_t(weights.stride) + size_t(i)];
                for (int digit = 0; digit < DIGITS; ++digit) {
                    int8_t low = int8_t(value);
                    to[digit * TAPS] = low;
                    value = (value - low) >> 8;
                }
            }
    }

    int8_t *of(int64_t place) { return &digits[size_t(place * most * DIGITS * TAPS)]; }
    const int8_t *of(int64_t place) const { return &digits[size_t(place * most * DIGITS * TAPS)]; }

    std::vector<int64_t> first, count;
    std::vector<int8_t> digits;
    int64_t most = 0;
};

VNNI_INLINE __m512i four_weights(const int8_t *from) {
    int32_t bytes;
    std::memcpy(&bytes, from, TAPS);
    return _mm512_set1_epi32(bytes);
}

VNNI_INLINE __m512i shifted_sum(const __m512i sums[DIGITS]) {
    __m512i high = _mm512_add_epi32(_mm512_slli_epi32(sums[2], 16), _mm512_slli_epi32(sums[1], 8));
    return _mm512_srai_epi32(_mm512_add_epi32(sums[0], high), WEIGHT_BITS);
}

// Mixes 64 columns of four rows, so that the four bytes of a column are together. `to` has room for four vectors, in which the
// columns have the order of `_mm512_packs_epi32` and `_mm512_packus_epi16`. `rows`: 1 to 4; those up to four are zeros.
VNNI_INLINE void mix_rows(const uint8_t *from, int64_t width, int64_t rows, __mmask64 columns, uint8_t *to) {
    __m512i row[TAPS];
    for (int i = 0; i < TAPS; ++i)
        row[i] = i < rows ? _mm512_maskz_loadu_epi8(columns, from + i * width) : _mm512_setzero_si512();
    __m512i low01 = _mm512_unpacklo_epi8(row[0], row[1]), high01 = _mm512_unpackhi_epi8(row[0], row[1]);
    __m512i low23 = _mm512_unpacklo_epi8(row[2], row[3]), high23 = _mm512_unpackhi_epi8(row[2], row[3]);
    _mm512_store_si512(to, _mm512_unpacklo_epi16(low01, low23));
    _mm512_store_si512(to + VECTOR, _mm512_unpackhi_epi16(low01, low23));
    _mm512_store_si512(to + 2 * VECTOR, _mm512_unpacklo_epi16(high01, high23));
    _mm512_store_si512(to + 3 * VECTOR, _mm512_unpackhi_epi16(high01, high23));
}

VNNI_INLINE __mmask64 columns_from(int64_t column, int64_t width) {
    return width - column >= VECTOR ? ~__mmask64(0) : (__mmask64(1) << (width - column)) - 1;
}

// Resizes the columns of bytes, from `before` rows of `width` bytes. Groups of four rows are mixed when they are first needed.
VNNI inline void resize_columns(const uint8_t *from, uint8_t *to, int64_t width, int64_t before, const GroupedWeights &weights) {
    int64_t blocks = (width + VECTOR - 1) / VECTOR, bytes = blocks * TAPS * VECTOR, mixed_groups = 0;
    Vectors memory(weights.most * bytes);
    uint8_t *ring = memory.data();
    for (int64_t place = 0; place < int64_t(weights.first.size()); ++place) {
        int64_t first = weights.first[size_t(place)], count = weights.count[size_t(place)];
        for (mixed_groups = std::max(mixed_groups, first); mixed_groups < first + count; ++mixed_groups) {
            int64_t row = mixed_groups * TAPS;
            uint8_t *group = ring + mixed_groups % weights.most * bytes;
            for (int64_t block = 0; block < blocks; ++block)
                mix_rows(from + row * width + block * VECTOR, width, std::min<int64_t>(TAPS, before - row),
                         columns_from(block * VECTOR, width), group + block * TAPS * VECTOR);
        }
        const int8_t *digits = weights.of(place);
        for (int64_t block = 0; block < blocks; ++block) {
            __m512i sums[TAPS][DIGITS];
            for (int part = 0; part < TAPS; ++part)
                for (int digit = 0; digit < DIGITS; ++digit) sums[part][digit] = _mm512_set1_epi32(digit ? 0 : HALF);
            for (int64_t i = 0; i < count; ++i) {
                const uint8_t *group = ring + (first + i) % weights.most * bytes + block * TAPS * VECTOR;
                for (int part = 0; part < TAPS; ++part) {
                    __m512i mixed = _mm512_load_si512(group + part * VECTOR);
                    for (int digit = 0; digit < DIGITS; ++digit)
                        sums[part][digit] = _mm512_dpbusd_epi32(sums[part][digit], mixed,
                                                                four_weights(digits + (i * DIGITS + digit) * TAPS));
                }
            }
            __m512i low = _mm512_packs_epi32(shifted_sum(sums[0]), shifted_sum(sums[1]));
            __m512i high = _mm512_packs_epi32(shifted_sum(sums[2]), shifted_sum(sums[3]));
            _mm512_mask_storeu_epi8(to + place * width + block * VECTOR, columns_from(block * VECTOR, width),
                                    _mm512_packus_epi16(low, high));
        }
    }
}

// Four pixels of each of 16 rows: a vector for each colour, with the four bytes of a row together.
VNNI_INLINE void mix_pixels(const uint8_t *from, int64_t width, __mmask16 bytes, uint8_t *to) {
    const __m512i by_color = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 3, 6, 9, 1, 4, 7, 10, 2, 5, 8, 11, -1, -1, -1, -1));
    __m512i rows[4];
    for (int i = 0; i < 4; ++i) {
        __m512i four = _mm512_castsi128_si512(_mm_maskz_loadu_epi8(bytes, from + i * width));
        four = _mm512_inserti32x4(four, _mm_maskz_loadu_epi8(bytes, from + (i + 4) * width), 1);
        four = _mm512_inserti32x4(four, _mm_maskz_loadu_epi8(bytes, from + (i + 8) * width), 2);
        four = _mm512_inserti32x4(four, _mm_maskz_loadu_epi8(bytes, from + (i + 12) * width), 3);
        rows[i] = _mm512_shuffle_epi8(four, by_color);
    }
    __m512i low01 = _mm512_unpacklo_epi32(rows[0], rows[1]), low23 = _mm512_unpacklo_epi32(rows[2], rows[3]);
    __m512i high01 = _mm512_unpackhi_epi32(rows[0], rows[1]), high23 = _mm512_unpackhi_epi32(rows[2], rows[3]);
    _mm512_store_si512(to, _mm512_unpacklo_epi64(low01, low23));
    _mm512_store_si512(to + VECTOR, _mm512_unpackhi_epi64(low01, low23));
    _mm512_store_si512(to + 2 * VECTOR, _mm512_unpacklo_epi64(high01, high23));
}

// Bytes of rows of `pixels` pixels, mixed.
inline int64_t mixed_size(int64_t pixels) { return (pixels + TAPS - 1) / TAPS * COLORS * VECTOR; }

// Resizes 16 rows of `before` pixels to vectors of 16 bytes, one of each row. `mixed` has room for `mixed_size` bytes.
VNNI inline void resize_rows(const uint8_t *from, uint8_t *to, int64_t before, const GroupedWeights &weights, uint8_t *mixed) {
    int64_t width = before * COLORS;
    for (int64_t start = 0; start < width; start += PIXELS) {
        int64_t bytes = std::min(PIXELS, width - start);
        mix_pixels(from + start, width, __mmask16((1 << bytes) - 1), mixed + start / PIXELS * COLORS * VECTOR);
    }
    for (int64_t place = 0; place < int64_t(weights.first.size()); ++place) {
        const uint8_t *pixels = mixed + weights.first[size_t(place)] * COLORS * VECTOR;
        const int8_t *digits = weights.of(place);
        __m512i sums[COLORS][DIGITS];
        for (int color = 0; color < COLORS; ++color)
            for (int digit = 0; digit < DIGITS; ++digit) sums[color][digit] = _mm512_set1_epi32(digit ? 0 : HALF);
        for (int64_t i = 0; i < weights.count[size_t(place)]; ++i)
            for (int digit = 0; digit < DIGITS; ++digit) {
                __m512i factors = four_weights(digits + (i * DIGITS + digit) * TAPS);
                for (int color = 0; color < COLORS; ++color)
                    sums[color][digit] = _mm512_dpbusd_epi32(
                        sums[color][digit], _mm512_load_si512(pixels + (i * COLORS + color) * VECTOR), factors);
            }
        for (int color = 0; color < COLORS; ++color) {
            __m512i rounded = _mm512_max_epi32(shifted_sum(sums[color]), _mm512_setzero_si512());
            _mm_storeu_si128(reinterpret_cast<__m128i *>(to + (place * COLORS + color) * 16), _mm512_cvtusepi32_epi8(rounded));
        }
    }
}

}  // namespace quads
#endif
