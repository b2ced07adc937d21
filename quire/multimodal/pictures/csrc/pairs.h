// Resizing with AVX2's products of pairs: two words times two words are added to each of eight sums. A weight is two digits of 12
// bits, each of which has a sum of its own; so the result has the same bits as products of integers. Sums fit into registers,
// which those of 16 numbers do not: GCC keeps vectors that are wider than a register in memory.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

#include "weights.h"

#if defined(__x86_64__) && defined(__GNUC__)
#define HAS_PAIRS 1
#include <immintrin.h>
#define AVX2 __attribute__((target("avx2")))
#define AVX2_INLINE static inline AVX2 __attribute__((always_inline))

namespace pairs {

constexpr int TAPS = 2;
constexpr int DIGITS = 2;
constexpr int DIGIT_BITS = 12;
constexpr int64_t VECTOR = 32;
constexpr int64_t ROWS = 16;                    // that are resized together
constexpr int64_t PIXELS = 4;                   // of each row that are mixed together
constexpr int64_t MIXED = COLORS * 2 * VECTOR;  // bytes of two pixels of each row, as words
constexpr int64_t LOADED = 16;                  // bytes that are read for PIXELS

inline bool supported() { return __builtin_cpu_supports("avx2"); }

// Weights of elements in groups of two: elements that are not used have a weight of 0.
struct PairedWeights {
    PairedWeights() = default;
    // `aligned`: groups begin at even elements, and `first` counts groups; otherwise with the first element of a sum.
    PairedWeights(const Weights &weights, bool aligned) : first(weights.first), count(weights.count.size()) {
        most = weights.stride / TAPS + 1;
        digits.assign(first.size() * size_t(most) * DIGITS * TAPS, 0);
        for (size_t place = 0; place < first.size(); ++place) {
            int64_t before = aligned ? first[place] % TAPS : 0;
            count[place] = (before + weights.count[place] + TAPS - 1) / TAPS;
            if (aligned) first[place] /= TAPS;
            int16_t *to = &digits[place * size_t(most) * DIGITS * TAPS];
            for (int64_t i = 0; i < weights.count[place]; ++i) {
                int64_t element = before + i;
                int32_t value = weights.values[place * size_t(weights.stride) + size_t(i)];
                int16_t *pair = to + element / TAPS * DIGITS * TAPS + element % TAPS;
                pair[0] = int16_t(value & ((1 << DIGIT_BITS) - 1));
                pair[TAPS] = int16_t(value >> DIGIT_BITS);
            }
        }
    }

    const int16_t *of(int64_t place) const { return &digits[size_t(place * most * DIGITS * TAPS)]; }

    std::vector<int64_t> first, count;  // of each place
    std::vector<int16_t> digits;        // of each place, pair, and digit: of both elements
    int64_t most = 0;                   // groups of a place
};

// Sums of eight places or columns, for each digit of weights.
struct Sums {
    __m256i low, high;
};

AVX2_INLINE Sums half() { return {_mm256_set1_epi32(HALF), _mm256_setzero_si256()}; }

AVX2_INLINE __m256i load(const uint8_t *from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i *>(from)); }

AVX2_INLINE void store(uint8_t *to, __m256i vector) { _mm256_storeu_si256(reinterpret_cast<__m256i *>(to), vector); }

AVX2_INLINE __m256i two_weights(const int16_t *from) {
    int32_t words;
    std::memcpy(&words, from, sizeof words);
    return _mm256_set1_epi32(words);
}

AVX2_INLINE void add(Sums &sums, __m256i words, __m256i low, __m256i high) {
    sums.low = _mm256_add_epi32(sums.low, _mm256_madd_epi16(words, low));
    sums.high = _mm256_add_epi32(sums.high, _mm256_madd_epi16(words, high));
}

AVX2_INLINE __m256i shifted(Sums sums) {
    return _mm256_srai_epi32(_mm256_add_epi32(sums.low, _mm256_slli_epi32(sums.high, DIGIT_BITS)), WEIGHT_BITS);
}

// Resizes the columns of bytes: each element of the result is a row of `width` bytes, which are at least a vector.
AVX2 inline void resize_columns(const uint8_t *from, uint8_t *to, int64_t width, const Weights &weights) {
    const PairedWeights paired(weights, false);
    const __m256i zero = _mm256_setzero_si256();
    for (int64_t place = 0; place < weights.size(); ++place) {
        const uint8_t *rows = from + weights.first[size_t(place)] * width;
        int64_t elements = weights.count[size_t(place)], groups = paired.count[size_t(place)];
        for (int64_t column = 0; column < width; column += VECTOR) {
            int64_t start = std::min(column, width - VECTOR);
            const int16_t *digits = paired.of(place);
            Sums sums[4] = {half(), half(), half(), half()};
            for (int64_t i = 0; i < groups; ++i, digits += DIGITS * TAPS) {
                const uint8_t *row = rows + i * TAPS * width + start;
                __m256i first = load(row), second = load(i * TAPS + 1 < elements ? row + width : row);
                __m256i low = two_weights(digits), high = two_weights(digits + TAPS);
                __m256i left = _mm256_unpacklo_epi8(first, second), right = _mm256_unpackhi_epi8(first, second);
                add(sums[0], _mm256_unpacklo_epi8(left, zero), low, high);
                add(sums[1], _mm256_unpackhi_epi8(left, zero), low, high);
                add(sums[2], _mm256_unpacklo_epi8(right, zero), low, high);
                add(sums[3], _mm256_unpackhi_epi8(right, zero), low, high);
            }
            __m256i left = _mm256_packs_epi32(shifted(sums[0]), shifted(sums[1]));
            __m256i right = _mm256_packs_epi32(shifted(sums[2]), shifted(sums[3]));
            store(to + place * width + start, _mm256_packus_epi16(left, right));
        }
    }
}

AVX2_INLINE __m256i load_two(const uint8_t *low, const uint8_t *high) {
    __m128i first = _mm_loadu_si128(reinterpret_cast<const __m128i *>(low));
    return _mm256_inserti128_si256(_mm256_castsi128_si256(first), _mm_loadu_si128(reinterpret_cast<const __m128i *>(high)), 1);
}

// Mixes four pixels of each of 16 rows: for each two pixels and each colour two vectors, with the two bytes of a row together as
// words. They have rows 0 to 3 and 8 to 11, and 4 to 7 and 12 to 15, so that packed sums have the order of rows.
AVX2_INLINE void mix_pixels(const uint8_t *from, int64_t width, uint8_t *to) {
    const __m256i by_color = _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 3, 1, 4, 2, 5, -1, -1, 6, 9, 7, 10, 8, 11, -1, -1));
    __m256i rows[8];
    for (int i = 0; i < 8; ++i)
        rows[i] = _mm256_shuffle_epi8(load_two(from + i * width, from + (i + 8) * width), by_color);
    const __m256i zero = _mm256_setzero_si256();
    for (int two = 0; two < 2; ++two) {  // the first two pixels are in the lower halves of rows, the others in the higher ones
        __m256i pairs[4], fours[2][2];
        for (int i = 0; i < 4; ++i)
            pairs[i] = two ? _mm256_unpackhi_epi16(rows[2 * i], rows[2 * i + 1])
                           : _mm256_unpacklo_epi16(rows[2 * i], rows[2 * i + 1]);
        for (int i = 0; i < 2; ++i) {
            fours[i][0] = _mm256_unpacklo_epi32(pairs[2 * i], pairs[2 * i + 1]);
            fours[i][1] = _mm256_unpackhi_epi32(pairs[2 * i], pairs[2 * i + 1]);
        }
        const __m256i colors[COLORS] = {_mm256_unpacklo_epi64(fours[0][0], fours[1][0]),
                                        _mm256_unpackhi_epi64(fours[0][0], fours[1][0]),
                                        _mm256_unpacklo_epi64(fours[0][1], fours[1][1])};
        for (int color = 0; color < COLORS; ++color) {
            uint8_t *vectors = to + two * MIXED + 2 * color * VECTOR;
            store(vectors, _mm256_unpacklo_epi8(colors[color], zero));
            store(vectors + VECTOR, _mm256_unpackhi_epi8(colors[color], zero));
        }
    }
}

// Bytes of rows of `pixels` pixels, mixed.
inline int64_t mixed_size(int64_t pixels) { return (pixels + PIXELS - 1) / PIXELS * (PIXELS / TAPS) * MIXED; }

// Mixes 16 rows of `before` pixels. Behind their ends nothing is read.
AVX2_INLINE void mix_rows(const uint8_t *from, int64_t before, uint8_t *mixed) {
    int64_t width = before * COLORS, start = 0;
    for (; start + LOADED <= width; start += PIXELS * COLORS, mixed += PIXELS / TAPS * MIXED)
        mix_pixels(from + start, width, mixed);
    for (; start < width; start += PIXELS * COLORS, mixed += PIXELS / TAPS * MIXED) {
        uint8_t ends[ROWS * LOADED] = {};
        for (int64_t row = 0; row < ROWS; ++row)
            std::memcpy(ends + row * LOADED, from + row * width + start, size_t(width - start));
        mix_pixels(ends, LOADED, mixed);
    }
}

// Resizes 16 rows of `before` pixels to vectors of 16 bytes, one of each row. `weights` are aligned; `mixed` has room for
// `mixed_size` bytes.
AVX2 inline void resize_rows(const uint8_t *from, uint8_t *to, int64_t before, const PairedWeights &weights,
                             uint8_t *mixed) {
    mix_rows(from, before, mixed);
    for (int64_t place = 0; place < int64_t(weights.first.size()); ++place) {
        const uint8_t *pixels = mixed + weights.first[size_t(place)] * MIXED;
        const int16_t *digits = weights.of(place), *end = digits + weights.count[size_t(place)] * DIGITS * TAPS;
        Sums sums[COLORS][2] = {{half(), half()}, {half(), half()}, {half(), half()}};
        for (; digits < end; digits += DIGITS * TAPS, pixels += MIXED) {
            __m256i low = two_weights(digits), high = two_weights(digits + TAPS);
            for (int color = 0; color < COLORS; ++color) {
                add(sums[color][0], load(pixels + 2 * color * VECTOR), low, high);
                add(sums[color][1], load(pixels + (2 * color + 1) * VECTOR), low, high);
            }
        }
        for (int color = 0; color < COLORS; ++color) {
            __m256i words = _mm256_packs_epi32(shifted(sums[color][0]), shifted(sums[color][1]));
            __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
            _mm_storeu_si128(reinterpret_cast<__m128i *>(to + (place * COLORS + color) * ROWS), bytes);
        }
    }
}

}  // namespace pairs
#endif
