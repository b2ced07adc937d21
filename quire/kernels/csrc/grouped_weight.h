// Weights of 4, 6 or 8 bits whose groups of inputs share a scale, in panels of 32 outputs: a weight is
// (code - offset) * scale + minimum, both times the output's factor, which is a power of two.
//
// A panel is one stretch of memory: scales, minimums if there are any, codes. Codes are unsigned, in steps of 16 inputs. A
// step is four quads of inputs, and a quad is 32 words, whose bytes are the codes of four inputs for an output.
//   8 bits: the quads.
//   4 bits: quads 0 and 1 in the lower and the upper halves of the same bytes, then quads 2 and 3 likewise. With a table
//           its 16 bytes are the codes.
//   6 bits: 32 words whose bytes have the upper two bits of all quads, those of quad q in bits 2q and 2q + 1; then the lower
//           four bits as with 4 bits.
// Scales and minimums are float16 (groups, 32); or integers with a float16 factor for each SUPER inputs behind them:
// (ceil(size_in / SUPER), 32). Integers have 8 bits: (groups, 32), padded to whole lines; or 6, without a sign: of each four
// groups three lie in the lower 6 bits of (3, 32) bytes, and the fourth in the upper 2, its lowest in the first.
#pragma once

#include "int8_rows.h"
#include "panel_matmul.h"

constexpr int64_t STEP = 16;         // inputs whose codes lie together
constexpr int64_t INPUT_GROUP = 32;  // inputs that are quantized with the same scale
constexpr int64_t SUPER = 256;       // inputs whose scales share a factor if they are integers

enum class Codes { FOUR, TABLE, SIX, EIGHT };

INLINE Floats load_float16(const void *from) {
#if defined(HAVE_AVX512)
    return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#elif defined(HAVE_AVX2)
    const __m128i *halves = (const __m128i *)from;
    return {(HalfFloats)_mm256_cvtph_ps(_mm_loadu_si128(halves)), (HalfFloats)_mm256_cvtph_ps(_mm_loadu_si128(halves + 1))};
#else
    Halves x;
    std::memcpy(&x, from, sizeof x);
    Words bits = widen(x);
    Floats magnitude = (Floats)((bits & 0x7fff) << 13) * 0x1p112f;  // neither infinite nor NaN
    return (Floats)((Words)magnitude | (bits & 0x8000) << 16);
#endif
}

// Scales or minimums of a panel.
struct ScaleRows {
    const uint8_t *at;
    const uint8_t *factors;  // of each SUPER inputs; null: `at` is float16
    bool six;                // whether integers have 6 bits
    int shift;               // groups of inputs in SUPER, as power of two
    const float *decoded;    // what products use of them: (groups, 32), or null; see DecodedScales

    // The integers of a group of inputs, for the first or second 16 outputs.
    INLINE Int8s integers(int64_t group, int half) const {
        if (!six) return (Int8s)bytes_at(group, half);
        int64_t row = group / 4 * 3, place = group % 4;
        if (place < 3) return (Int8s)(bytes_at(row + place, half) & 63);
        return (Int8s)(bytes_at(row, half) >> 6 | bytes_at(row + 1, half) >> 6 << 2 | bytes_at(row + 2, half) >> 6 << 4);
    }
    // Those of a group of inputs without their factors.
    template <bool coded>
    INLINE Floats load(int64_t group, int half) const {
        if constexpr (coded) return to_floats(widen(integers(group, half)));
        else return load_float16(at + group * 64 + half * 32);
    }
    INLINE Floats factor(int64_t group, int half) const { return load_float16(factors + (group >> shift) * 64 + half * 32); }
    // Those of a group of inputs, whole.
    INLINE Floats load_scaled(int64_t group, int half) const {
        return factors ? load<true>(group, half) * factor(group, half) : load<false>(group, half);
    }

  private:
    INLINE Bytes bytes_at(int64_t row, int half) const {
        Bytes x;
        std::memcpy(&x, at + row * PANEL + half * LANES, sizeof x);
        return x;
    }
};

struct GroupedPanel {
    const uint8_t *codes;
    ScaleRows scales, minimums;
};

struct GroupedWeight {
    // The arguments that describe a weight, as Python passes them. table: int8, the codes as bytes. order: the layer's input
    // that each input of the weight belongs to.
    static GroupedWeight check(const Tensor &weight, const Tensor &factors, const OptionalTensor &table,
                               const OptionalTensor &order, int64_t bits, int64_t group, int64_t offset,
                               int64_t scale_bits, int64_t minimums, int64_t size_in, int64_t size_out) {
        require(size_in > 0, "size_in", "at least one input is expected");
        require(bits == 4 || bits == 6 || bits == 8, "bits", "4, 6 or 8 is expected");
        require(!table || bits == 4, "table", "only codes of 4 bits have one");
        require(group == STEP || (group > 0 && group % INPUT_GROUP == 0), "group", "16 or a multiple of 32 is expected");
        require(scale_bits == 16 || (scale_bits == 8 && group <= INPUT_GROUP) ||
                    (scale_bits == 6 && group == INPUT_GROUP && size_in % SUPER == 0),
                "scale_bits", "16, 8 with groups of 16 or 32, or 6 with groups of 32 and a multiple of 256 inputs, is expected");
        int64_t least = bits == 4 && !table ? -1 : bits == 6 ? 32 : -1024, most = bits == 4 && !table ? 16 : bits == 6 ? 32 : 1024;
        require(offset >= least && offset <= most, "offset", "a number that sums of products have room for is expected");
        GroupedWeight w;
        w.kind = table ? Codes::TABLE : bits == 4 ? Codes::FOUR : bits == 6 ? Codes::SIX : Codes::EIGHT;
        w.data = weight.data<uint8_t>(), w.factors = factors.data<float>();
        w.order = data_or_null<int32_t>(order);
        w.size_in = size_in, w.size_out = size_out, w.offset = int32_t(offset);
        w.blocks = (size_in + INPUT_GROUP - 1) / INPUT_GROUP, w.group = group;
        w.groups = (w.blocks * INPUT_GROUP + group - 1) / group;
        w.code_bytes = w.blocks * INPUT_GROUP * PANEL * bits / 8;
        w.scale_shift = group == STEP ? 4 : 3;
        w.group_bytes = PANEL * scale_bits / 8, w.six = scale_bits == 6;
        w.scale_factors = scale_bits == 16 ? 0 : (w.groups * w.group_bytes + LINE - 1) / LINE * LINE;
        w.scale_bytes = scale_bits == 16 ? w.groups * w.group_bytes
                                         : w.scale_factors + (size_in + SUPER - 1) / SUPER * PANEL * 2;
        w.minimums = minimums != 0;
        w.panel_bytes = w.code_bytes + w.scale_bytes * (1 + w.minimums);
        Size panels("panels", (size_out + PANEL - 1) / PANEL), words("words", w.panel_bytes / 4);
        Size padded("panels * 32", panels * PANEL), codes("codes", 16), inputs("size_in", size_in);
        weight.has_dtype({DType::INT32}).has_shape(panels, words).is_contiguous();
        factors.has_dtype({DType::FLOAT32}).has_shape(padded).is_contiguous();
        if (table) table->has_dtype({DType::INT8}).has_shape(codes).is_contiguous();
        if (table) std::memcpy(w.table, table->data(), sizeof w.table);
        if (order) order->has_dtype({DType::INT32}).has_shape(inputs).is_contiguous();
        return w;
    }
    GroupedPanel panel(int64_t index) const {
        const uint8_t *scales = data + index * panel_bytes, *minimums = scales + scale_bytes;
        return {data + (index + 1) * panel_bytes - code_bytes, rows_at(scales), rows_at(minimums)};
    }

    const uint8_t *data;
    const float *factors;
    const int32_t *order;  // or null
    uint8_t table[16] = {};
    int64_t size_in, size_out, blocks, group, groups;  // blocks of INPUT_GROUP inputs
    int64_t code_bytes, scale_bytes, scale_factors, panel_bytes;
    int64_t group_bytes;  // of a panel's scales of a group of inputs, without factors
    int32_t offset;
    int scale_shift;
    bool minimums, six;  // whether there are minimums, and whether scales have 6 bits
    Codes kind;

  private:
    ScaleRows rows_at(const uint8_t *at) const {
        return {at, scale_factors ? at + scale_factors : nullptr, six, scale_shift, nullptr};
    }
};

constexpr int64_t step_bytes(Codes kind) { return kind == Codes::EIGHT ? 512 : kind == Codes::SIX ? 384 : 256; }
constexpr int64_t lower_bits(Codes kind) { return kind == Codes::SIX ? 128 : 0; }  // where those of a step begin

INLINE Ints load_ints(const void *from) { return load_vector<Ints>(from); }

// The bytes of a table of 16 at indices below 16. The table is in each 16 bytes of its vector.
INLINE Ints look_up(Ints table, Ints indices) {
#if defined(HAVE_AVX512)
    return (Ints)_mm512_shuffle_epi8((__m512i)table, (__m512i)indices);
#elif defined(HAVE_AVX2)
    return {(HalfInts)_mm256_shuffle_epi8((__m256i)table.low, (__m256i)indices.low),
            (HalfInts)_mm256_shuffle_epi8((__m256i)table.high, (__m256i)indices.high)};
#else
    Bytes from[4], at[4];
    std::memcpy(from, &table, sizeof from);
    std::memcpy(at, &indices, sizeof at);
    for (int i = 0; i < 4; i++) at[i] = __builtin_shuffle(from[i], at[i]);
    return load_ints(at);
#endif
}

// The codes of a quad for the first or second 16 outputs, as unsigned bytes.
template <Codes kind>
INLINE Ints unpack(const uint8_t *step, int quad, int half, Ints table) {
    if constexpr (kind == Codes::EIGHT) return load_ints(step + quad * 128 + half * 64);
    Words packed = (Words)load_ints(step + lower_bits(kind) + quad / 2 * 128 + half * 64);
    Ints codes = (Ints)(quad % 2 ? packed >> 4 : packed) & 0x0f0f0f0f;
    if constexpr (kind == Codes::TABLE) return look_up(table, codes);
    if constexpr (kind == Codes::SIX) {
        Words upper = (Words)load_ints(step + half * 64);
        upper = quad == 0 ? upper << 4 : quad == 1 ? upper << 2 : quad == 3 ? upper >> 2 : upper;
        codes |= (Ints)(upper & 0x30303030);
    }
    return codes;
}
