// Linear layers whose weights have 4, 6 or 8 bits and scales of groups of inputs; see ../grouped_weight.h. Inputs are
// quantized to int8, each 32 of a row with a scale of their own, so that products are of integers.
#pragma once

#include "../grouped_weight.h"

// Rows whose sums of integers and of floats fit into registers beside the weights.
#if defined(HAVE_AVX512)
constexpr int64_t MAX_GROUPED_ROWS = 6;
#elif defined(HAVE_AVX2)
constexpr int64_t MAX_GROUPED_ROWS = 4;
#else
constexpr int64_t MAX_GROUPED_ROWS = 2;
#endif

struct GroupedLinear {
    static constexpr const char *NAME = "grouped_linear";
    static constexpr const char *PARAMETERS[] = {"x",     "weight", "factors",    "table",    "order", "bits", "group",
                                                 "offset", "scale_bits", "minimums", "bias", "out", "act"};
    static GroupedLinear check(const Tensor &x, const Tensor &weight, const Tensor &factors, const OptionalTensor &table,
                               const OptionalTensor &order, int64_t bits, int64_t group, int64_t offset,
                               int64_t scale_bits, int64_t minimums, const OptionalTensor &bias, const Tensor &out,
                               std::optional<std::string_view> act) {
        Size rows("rows"), size_in("size_in"), size_out("size_out");
        x.is_floating().has_shape(rows, size_in).is_dense(1);
        out.has_dtype({x.dtype, DType::FLOAT32}).has_shape(rows, size_out).is_dense(1);
        if (bias) bias->has_dtype({DType::FLOAT32}).has_shape(size_out).is_contiguous();
        return {x.dtype, out.dtype, x.data(), data_or_null<float>(bias), out.data(), rows, x.strides[0], out.strides[0],
                GroupedWeight::check(weight, factors, table, order, bits, group, offset, scale_bits, minimums, size_in,
                                     size_out),
                output_activation(act)};
    }
    void run() const;
    int64_t work() const { return weight.size_in * weight.size_out; }
    int64_t &row_count() { return rows; }
    PanelWeight panel_weight() const { return {(const char *)weight.data, (weight.size_out + PANEL - 1) / PANEL, weight.panel_bytes}; }

    DType dtype, out_dtype;
    const void *x;
    const float *bias;  // or null
    void *out;
    int64_t rows, x_stride, out_stride;
    GroupedWeight weight;
    std::optional<Activation> act;
    const PanelWeight *following = nullptr;
};
REGISTER_OP(GroupedLinear);

// INPUT_GROUP inputs of each row of a tile. Rows lie side by side, so that products read one stretch of memory.
template <int rows>
struct InputBlock {
    int32_t quads[INPUT_GROUP / 4][rows];  // the codes of four inputs each
    int32_t starts[2][rows];  // what offsets of weights add to products with each 16 inputs, or the first: with all of them
    float scales[rows];       // NaN if one of the inputs is not finite
};
constexpr int64_t BLOCK_WORDS = sizeof(InputBlock<1>) / sizeof(int32_t);  // of a row

// Where a row of a tile is.
struct InputRow {
    int32_t *words;     // its first one in the tile's first block
    float *group_sums;  // what is to be multiplied with the minimums of the first group
    int64_t rows;       // of the tile: how far its words and sums are apart
};

// Quantizes 32 inputs to `codes`, and sums the integers of each 16. Returns the scale: NaN if an input is not finite.
INLINE float quantize_block(Floats a, Floats b, int8_t *codes, int32_t *sums) {
    float largest = largest_magnitude(a, b);
    if (!std::isfinite(largest)) a = b = broadcast(0.0f);
    bool rounds = largest > 1e-36f && std::isfinite(largest);  // below, 127 / largest may be infinite
    float inverse = rounds ? 127.0f / largest : 0.0f;
    sums[0] = round_to_bytes(a * inverse, codes);
    sums[1] = round_to_bytes(b * inverse, codes + LANES);
    return rounds ? largest / 127.0f : std::isfinite(largest) ? 0.0f : NAN;
}

constexpr bool has_wide_codes(Codes kind) { return kind == Codes::TABLE || kind == Codes::EIGHT; }

// What is subtracted from codes before they are multiplied: with AVX2 those of 8 bits become signed.
constexpr int32_t subtracted([[maybe_unused]] Codes kind) {
#if defined(HAVE_AVX2)
    return has_wide_codes(kind) ? 128 : 0;
#else
    return 0;
#endif
}

// Whether sums of products have 16 bits as long as they are of 16 inputs with codes of 6 bits, or of 32 with codes of 4:
// without offsets they are at most 8 * 32 * 127 and 16 * 16 * 127, as two neighbours have sums of their own. Such sums may
// wrap in between, and start with what offsets add, which are two numbers then.
constexpr bool has_short_sums([[maybe_unused]] Codes kind) {
#if defined(HAVE_AVX2)
    return !has_wide_codes(kind);
#else
    return false;
#endif
}

#if defined(HAVE_AVX2)
// Sums of two neighbours of 16 bits; they wrap.
inline int32_t add_short_pairs(int32_t a, int32_t b) {
    return int32_t(((uint32_t(a) + uint32_t(b)) & 0xffff) | ((uint32_t(a) & 0xffff0000) + (uint32_t(b) & 0xffff0000)));
}

// The sums of the first and of the second two of each four of 16 bytes, times a factor, as numbers of 16 bits.
INLINE int32_t short_starts(const int8_t *codes, int32_t factor) {
    __m128i sums = _mm_maddubs_epi16(_mm_set1_epi8(1), _mm_loadu_si128((const __m128i *)codes));
    sums = _mm_add_epi16(sums, _mm_shuffle_epi32(sums, 0x4e));
    sums = _mm_add_epi16(sums, _mm_shuffle_epi32(sums, 0xb1));
    return _mm_cvtsi128_si32(_mm_mullo_epi16(sums, _mm_set1_epi16(int16_t(factor))));
}
#endif

// Sets what offsets add to products. sums: of each 16 inputs.
inline void set_starts(const GroupedWeight &w, const int32_t *sums, InputBlock<1> &block) {
    bool halves = w.group == STEP;
    int32_t factor = subtracted(w.kind) - w.offset;
#if defined(HAVE_AVX2)
    if (has_short_sums(w.kind)) {
        const auto *codes = (const int8_t *)block.quads;
        int32_t first = short_starts(codes, factor), second = short_starts(codes + STEP, factor);
        block.starts[0][0] = halves || w.kind == Codes::SIX ? first : add_short_pairs(first, second);
        block.starts[1][0] = second;
        return;
    }
#endif
    block.starts[0][0] = factor * (halves ? sums[0] : sums[0] + sums[1]), block.starts[1][0] = factor * sums[1];
}

// Quantizes a row, and sums what is to be multiplied with minimums.
template <class T>
void quantize_inputs(const GroupedWeight &w, const typename T::Element *x, InputRow row) {
    typedef typename T::Element Element;
    bool halves = w.group == STEP;
    int64_t per_group = w.group / INPUT_GROUP, begun = 0, apart = row.rows;
    float *group_sum = row.group_sums, open_sum = 0.0f;
    for (int64_t block = 0; block < w.blocks; block++, row.words += BLOCK_WORDS * apart) {
        const Element *from = x + block * INPUT_GROUP;
        int64_t count = std::min(INPUT_GROUP, w.size_in - block * INPUT_GROUP);
        Element part[INPUT_GROUP];
        if (w.order || count < INPUT_GROUP) {
            for (int64_t i = 0; i < INPUT_GROUP; i++)
                part[i] = i >= count ? Element(0) : w.order ? x[w.order[block * INPUT_GROUP + i]] : from[i];
            from = part;
        }
        InputBlock<1> quantized;
        int32_t sums[2], words[BLOCK_WORDS];
        float scale = quantize_block(T::load(from), T::load(from + LANES), (int8_t *)quantized.quads, sums);
        set_starts(w, sums, quantized);
        quantized.scales[0] = scale;
        std::memcpy(words, &quantized, sizeof words);
        for (int64_t i = 0; i < BLOCK_WORDS; i++) row.words[i * apart] = words[i];
        if (!w.minimums) continue;
        if (halves) {
            group_sum[0] = scale * float(sums[0]), group_sum[apart] = scale * float(sums[1]);
            group_sum += 2 * apart;
        } else {
            open_sum += scale * float(sums[0] + sums[1]);
            if (++begun < per_group && block + 1 < w.blocks) continue;
            *group_sum = open_sum, group_sum += apart;
            begun = 0, open_sum = 0.0f;
        }
    }
}

// Decoded scales of a group of inputs, for the first or second 16 outputs.
template <class Vector>
INLINE Vector load_decoded(const ScaleRows &scales, int64_t group, int half) {
    return load_vector<Vector>(scales.decoded + group * PANEL + half * LANES);
}

// Products of integers: of the inputs of a part of a block, which is `quads` quads, with the codes for outputs of the panel,
// beginning with those of its vector `first`. With them are the sums that the part starts with.
template <Codes kind, int quads, int rows>
struct PartSums {
#if defined(HAVE_AVX2)  // there are 16 registers
    static constexpr int vectors = rows == 1 ? 2 : 1;  // of 16 outputs, that are multiplied at a time
#else
    static constexpr int vectors = 2;
#endif
    static constexpr bool wide = has_wide_codes(kind);
    static constexpr bool takes_scales = has_short_sums(kind);     // whether sums may be multiplied with scales that are integers
    static constexpr int fetches = step_bytes(kind) / (2 * LINE);  // in a step of four quads

    // inputs: (quads, rows), starts: (1 or 2, rows). If `scaled`, sums are multiplied with scales that are integers.
    template <bool scaled>
    INLINE void compute(const uint8_t *codes, int first, const int32_t *inputs, const int32_t *starts, Ints table,
                        const ScaleRows &scales, int64_t group, PrefetchStream &prefetch);
    Ints sums[rows][vectors];
};

#if defined(HAVE_AVX2)
#include "../grouped_avx2.h"
#else

// Adds the products of four inputs, the signed bytes of x, with the unsigned bytes of `weights` to 16 outputs. Weights are
// below 128 unless `wide`.
template <bool wide>
INLINE Ints dot_bytes(Ints total, Ints weights, int32_t x) {
#if defined(HAVE_INT8_DOT)
    return (Ints)_mm512_dpbusd_epi32((__m512i)total, (__m512i)weights, _mm512_set1_epi32(x));
#elif defined(HAVE_AVX512)  // sums of two products have 16 bits: weights of 8 bits do not fit, their halves do
    __m512i bytes = (__m512i)weights, inputs = _mm512_set1_epi32(x), ones = _mm512_set1_epi16(1);
    if (wide) {
        __m512i top = _mm512_and_si512(bytes, _mm512_set1_epi8(-128));
        total += (Ints)_mm512_madd_epi16(_mm512_maddubs_epi16(top, inputs), ones);
        bytes = _mm512_xor_si512(bytes, top);
    }
    return total + (Ints)_mm512_madd_epi16(_mm512_maddubs_epi16(bytes, inputs), ones);
#elif defined(__SSE2__)  // which has no products of 32 bits: bytes 0 and 2, then 1 and 3, as numbers of 16 bits
    __m128i parts[4], inputs = _mm_set1_epi32(x), low_bytes = _mm_set1_epi16(255);
    __m128i even = _mm_srai_epi16(_mm_slli_epi16(inputs, 8), 8), odd = _mm_srai_epi16(inputs, 8);
    std::memcpy(parts, &weights, sizeof parts);
    for (__m128i &part : parts)
        part = _mm_add_epi32(_mm_madd_epi16(_mm_and_si128(part, low_bytes), even),
                             _mm_madd_epi16(_mm_srli_epi16(part, 8), odd));
    return total + load_ints(parts);
#else
    for (int i = 0; i < 4; i++)
        total += (Ints)((Words)weights >> (8 * i) & 255) * (int32_t(uint32_t(x) << (24 - 8 * i)) >> 24);
    return total;
#endif
}

// Computes a sum before what comes next is loaded. The compiler would load the inputs of all quads first, and keep them in
// memory: products of several rows took twice as long.
INLINE void compute_now([[maybe_unused]] Ints &sum) {
#if defined(HAVE_AVX512)
    asm volatile("" : "+v"(sum) : : "memory");
#endif
}

template <int rows>
INLINE void finish_vectors(TileSums<rows> &) {}

// They are not multiplied with scales.
INLINE Ints load_pairs(const ScaleRows &, int64_t, int) { return Ints{}; }

template <Codes kind, int quads, int rows>
template <bool scaled>
INLINE void PartSums<kind, quads, rows>::compute(const uint8_t *codes, int first, const int32_t *inputs, const int32_t *starts,
                                                 Ints table, const ScaleRows &, int64_t, PrefetchStream &prefetch) {
#pragma GCC unroll 12
    for (int row = 0; row < rows; row++)
        for (int v = 0; v < vectors; v++) sums[row][v] = Ints{} + starts[row];
    for (int step = 0; step < quads / 4; step++, codes += step_bytes(kind)) {
#pragma GCC unroll 4
        for (int quad = 0; quad < 4; quad++, inputs += rows) {
            Ints unpacked[vectors];
            for (int v = 0; v < vectors; v++) unpacked[v] = unpack<kind>(codes, quad, first + v, table);
            if (quad < fetches) prefetch.fetch();
#pragma GCC unroll 12
            for (int row = 0; row < rows; row++)
                for (int v = 0; v < vectors; v++) {
                    sums[row][v] = dot_bytes<wide>(sums[row][v], unpacked[v], inputs[row]);
                    compute_now(sums[row][v]);
                }
        }
    }
}
#endif

// Groups of inputs whose scales share a factor, or all if they have none.
template <bool halves, bool coded>
inline int64_t factor_end(int64_t group, int64_t groups) {
    return coded ? std::min(groups, group + SUPER / (halves ? STEP : INPUT_GROUP)) : groups;
}

// Scales or minimums of a group of inputs without their factors: decoded ones if there are several rows.
template <bool coded, int rows>
INLINE Floats load_scale(const ScaleRows &scales, int64_t group, int half) {
    return rows > 1 ? load_decoded<Floats>(scales, group, half) : scales.load<coded>(group, half);
}

// Reads what lies before a panel's codes at once: scales that were read between codes would end the order in which memory is
// read, and with it what the processor fetches ahead. Decoding them for several rows does the same. Where panels are
// prefetched by instruction, nothing would be prefetched meanwhile.
INLINE void read_lines(const uint8_t *from, const uint8_t *to) {
    for (; from < to; from += LINE) {
        uint32_t word;
        std::memcpy(&word, from, sizeof word);
        asm volatile("" : : "r"(word));
    }
}

// Fetches scales and inputs of the section that begins with a block of inputs to the first-level cache: codes have displaced
// them if rows are long, and what is read from elsewhere ends the order of memory. inputs: those of the section.
template <bool halves, bool coded>
INLINE void fetch_section(const GroupedWeight &w, const ScaleRows &scales, const void *inputs, int64_t block) {
    int64_t first = halves ? 2 * block : block * INPUT_GROUP / w.group;
    int64_t end = std::min(w.groups, halves ? first + SUPER / STEP : (block * INPUT_GROUP + SUPER) / w.group);
    for (int64_t at = first * w.group_bytes; at < end * w.group_bytes; at += LINE) __builtin_prefetch(scales.at + at);
    if (coded && first < w.groups) __builtin_prefetch(scales.factors + (first >> scales.shift) * 64);
    int64_t bytes = std::min(SUPER / INPUT_GROUP, w.blocks - block) * int64_t(sizeof(InputBlock<1>));
    for (int64_t at = 0; at < bytes; at += LINE) __builtin_prefetch((const char *)inputs + at);
}

// Adds minimums times sums of inputs (groups, rows), for the panel's outputs of some vectors, the first of which is `first`.
template <bool halves, bool coded, int rows, int vectors>
INLINE void add_minimums(const GroupedWeight &w, ScaleRows minimums, const float *sums, int first, PrefetchStream &prefetch,
                         TileSums<rows> &totals) {
    int64_t group_bytes = w.scale_bytes / w.groups, unfetched = 0;
    for (int64_t group = 0; group < w.groups;) {
        Floats products[rows][vectors], factors[vectors];
        for (int v = 0; v < vectors; v++) factors[v] = coded ? minimums.factor(group, first + v) : broadcast(1.0f);
#pragma GCC unroll 12
        for (int row = 0; row < rows; row++)
            for (int v = 0; v < vectors; v++) products[row][v] = broadcast(0.0f);
        for (int64_t end = factor_end<halves, coded>(group, w.groups); group < end; group++, sums += rows) {
            if (first == 0 && (unfetched += group_bytes) >= 2 * LINE) prefetch.fetch(), unfetched -= 2 * LINE;
#pragma GCC unroll 2
            for (int v = 0; v < vectors; v++) {
                Floats minimum = load_scale<coded, rows>(minimums, group, first + v);
#pragma GCC unroll 12
                for (int row = 0; row < rows; row++) products[row][v] += minimum * broadcast(sums[row]);
            }
        }
#pragma GCC unroll 12
        for (int row = 0; row < rows; row++)
            for (int v = 0; v < vectors; v++) {
                Floats &total = totals.values[row][first + v];
                total = coded ? total + products[row][v] * factors[v] : products[row][v];
            }
    }
}

// Products of a tile's rows with one panel: (rows, 32) floats. `sums`: (groups, rows), for minimums. Each output is one chain
// of sums, over minimums and then over inputs. With `halves` each 16 inputs have a scale; if scales are `coded` they are
// integers, and products with SUPER inputs are a chain of their own, which is multiplied with their factor. Loops over rows are
// unrolled early; see panel_matmul.
template <Codes kind, bool halves, bool coded, int rows>
void grouped_matmul(const GroupedWeight &w, const int32_t *words, const float *sums, const GroupedPanel &panel,
                    PrefetchStream prefetch, float *out) {
    constexpr int quads = halves ? 4 : 8;
    typedef PartSums<kind, quads, rows> Products;
    constexpr bool scaled = coded && Products::takes_scales;  // as integers
    TileSums<rows> totals;
#pragma GCC unroll 12
    for (int row = 0; row < rows; row++) totals.values[row][0] = totals.values[row][1] = broadcast(0.0f);
    if (rows == 1 && !gains_by_prefetches()) read_lines(panel.scales.at, panel.codes);
    for (int first = 0; first < 2 && w.minimums; first += Products::vectors)
        add_minimums<halves, coded, rows, Products::vectors>(w, panel.minimums, sums, first, prefetch, totals);
    Ints table{};
    if constexpr (kind == Codes::TABLE)
        for (int i = 0; i < 4; i++) std::memcpy((uint8_t *)&table + 16 * i, w.table, sizeof w.table);
    ScaleRows scales = panel.scales;
    const uint8_t *codes = panel.codes;
    if (prefetch.near) prefetch.near = (const char *)codes + NEAR_DISTANCE;  // scales in front of codes are not read in order
    const auto *x = (const InputBlock<rows> *)words;
    int64_t per_group = halves ? 1 : w.group / INPUT_GROUP, group = 0, begun = 0;
    int64_t block_scale_bytes = w.scale_bytes / w.blocks, unfetched = 0;
    // Adds the products with a block of inputs.
    auto add_block = [&](TileSums<rows> &into) __attribute__((always_inline)) {
        for (int part = 0; part < 8 / quads; part++) {
#pragma GCC unroll 2
            for (int first = 0; first < 2; first += Products::vectors) {
                Products products;
                products.template compute<scaled>(codes, first, x->quads[part * quads], x->starts[part], table, scales, group, prefetch);
#pragma GCC unroll 2
                for (int v = 0; v < Products::vectors; v++) {
                    Floats scale = scaled ? broadcast(1.0f) : load_scale<coded, rows>(scales, group, first + v);
#pragma GCC unroll 12
                    for (int row = 0; row < rows; row++) {
                        Floats factor = broadcast(x->scales[row]);
                        into.values[row][first + v] += to_floats(products.sums[row][v]) * (scaled ? factor : scale * factor);
                    }
                }
                finish_vectors(into);
            }
            codes += quads / 4 * step_bytes(kind);
            if (++begun == per_group) group++, begun = 0;
        }
        unfetched += block_scale_bytes, x++;
        if (unfetched >= 2 * LINE) prefetch.fetch(), unfetched -= 2 * LINE;
    };
    bool displaces = rows == 1 && w.panel_bytes > L1_BYTES / 2;
    int64_t section = coded || displaces ? SUPER / INPUT_GROUP : w.blocks;
    for (int64_t block = 0; block < w.blocks;) {
        int64_t end = std::min(w.blocks, block + section), first_group = group;
        if (displaces) fetch_section<halves, coded>(w, scales, x + section, end);
        if constexpr (!coded) {
            for (; block < end; block++) add_block(totals);
        } else {
            TileSums<rows> chain;
#pragma GCC unroll 12
            for (int row = 0; row < rows; row++) chain.values[row][0] = chain.values[row][1] = broadcast(0.0f);
            for (; block < end; block++) add_block(chain);
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) {
                Floats factor = scales.factor(first_group, half);
#pragma GCC unroll 12
                for (int row = 0; row < rows; row++) totals.values[row][half] += chain.values[row][half] * factor;
            }
        }
    }
#pragma GCC unroll 12
    for (int row = 0; row < rows; row++) Float32::store2(out + row * PANEL, totals.values[row][0], totals.values[row][1]);
}

typedef void GroupedMatmul(const GroupedWeight &, const int32_t *, const float *, const GroupedPanel &, PrefetchStream, float *);

template <Codes kind, bool halves, bool coded, int... rows>
GroupedMatmul *grouped_matmul_for(int64_t count, std::integer_sequence<int, rows...>) {
    static GroupedMatmul *const functions[] = {grouped_matmul<kind, halves, coded, rows + 1>...};
    return functions[count - 1];
}

template <Codes kind, bool halves>
GroupedMatmul *grouped_matmul_for(bool coded, int64_t rows) {
    auto counts = std::make_integer_sequence<int, int(MAX_GROUPED_ROWS)>{};
    return coded ? grouped_matmul_for<kind, halves, true>(rows, counts) : grouped_matmul_for<kind, halves, false>(rows, counts);
}

template <Codes kind>
GroupedMatmul *grouped_matmul_for(const GroupedWeight &w, int64_t rows) {
    bool coded = w.scale_factors != 0;
    return w.group == STEP ? grouped_matmul_for<kind, true>(coded, rows) : grouped_matmul_for<kind, false>(coded, rows);
}

// grouped_matmul for a weight and a number of rows that are known at run time.
inline GroupedMatmul *grouped_matmul_for(const GroupedWeight &w, int64_t rows) {
    switch (w.kind) {
        case Codes::FOUR: return grouped_matmul_for<Codes::FOUR>(w, rows);
        case Codes::TABLE: return grouped_matmul_for<Codes::TABLE>(w, rows);
        case Codes::SIX: return grouped_matmul_for<Codes::SIX>(w, rows);
        case Codes::EIGHT: return grouped_matmul_for<Codes::EIGHT>(w, rows);
    }
    return nullptr;
}

// Scales and minimums of the panels of a work item as products of several rows use them; its tiles of rows share them.
class DecodedScales {
  public:
    DecodedScales(const GroupedWeight &w, int64_t panels)
        : w_(w), size_(w.groups * PANEL), decoded_(panels, -1), vectors_(new float[panels * size_ * (1 + w.minimums)]) {}
    GroupedPanel panel(int64_t index) {
        int64_t place = index % int64_t(decoded_.size());
        GroupedPanel panel = w_.panel(index);
        float *scales = &vectors_[place * size_ * (1 + w_.minimums)];
        if (std::exchange(decoded_[place], index) != index) {
            if (panel.scales.factors && has_short_sums(w_.kind))
                decode(scales, [&](int64_t group, int half) { return (Floats)load_pairs(panel.scales, group, half); });
            else
                decode(scales, panel.scales);
            if (w_.minimums) decode(scales + size_, panel.minimums);
        }
        panel.scales.decoded = scales, panel.minimums.decoded = scales + size_;
        return panel;
    }

  private:
    void decode(float *out, const ScaleRows &rows) const {
        if (rows.factors) decode(out, [&](int64_t group, int half) { return rows.load<true>(group, half); });
        else decode(out, [&](int64_t group, int half) { return rows.load<false>(group, half); });
    }
    template <class Load>
    void decode(float *out, Load load) const {
        for (int64_t group = 0; group < w_.groups; group++, out += PANEL) Float32::store2(out, load(group, 0), load(group, 1));
    }
    const GroupedWeight &w_;
    int64_t size_;                  // numbers that the scales of a panel are
    std::vector<int64_t> decoded_;  // panels
    std::unique_ptr<float[]> vectors_;
};

// Multiplies with the factors of outputs, then does as OutputEpilogue, and activates.
template <class T>
void write_outputs(const GroupedLinear &a, const OutputEpilogue<T> &outputs, const float *products, int64_t row,
                   int64_t rows, int64_t output) {
    alignas(64) float bias[PANEL] = {};
    int64_t count = std::min(PANEL, a.weight.size_out - output);
    if (a.bias) std::memcpy(bias, a.bias + output, count * sizeof *bias);
    const float *factors = a.weight.factors + output;
    Floats low_factor = Float32::load(factors), high_factor = Float32::load(factors + LANES);
    Floats low_bias = Float32::load(bias), high_bias = Float32::load(bias + LANES);
    for (int64_t r = 0; r < rows; r++)
        outputs(int(r), Float32::load(products + r * PANEL) * low_factor + low_bias,
                Float32::load(products + r * PANEL + LANES) * high_factor + high_bias);
    if (!a.act) return;
    auto *out = (typename T::Element *)a.out + row * a.out_stride + output;
    activate_rows<T>(*a.act, out, out, rows, count, a.out_stride);
}

template <class T, class Out>
void grouped_linear(const GroupedLinear &a) {
    const GroupedWeight &w = a.weight;
    int64_t row_words = w.blocks * BLOCK_WORDS, row_sums = w.minimums ? w.groups : 0;
    Tiling tiling(a.rows, a.panel_weight(), row_words * int64_t(sizeof(int32_t)), MAX_GROUPED_ROWS, 1, a.following);
    std::unique_ptr<int32_t[]> x(new int32_t[a.rows * row_words]);
    std::unique_ptr<float[]> sums(new float[a.rows * row_sums]);
    parallel_for(a.rows, a.rows * w.size_in > SERIAL, [&](int64_t row) {
        int64_t first = row / tiling.tile * tiling.tile, tile_rows = std::min(tiling.tile, a.rows - first);
        const auto *from = (const typename T::Element *)a.x + row * a.x_stride;
        quantize_inputs<T>(w, from, {&x[first * row_words + row - first], &sums[first * row_sums] + row - first, tile_rows});
    });
    run_parallel([&](int thread) {
        std::optional<DecodedScales> decoded;
        if (tiling.tile > 1) decoded.emplace(w, tiling.group);
        auto body = [&](int64_t row, int64_t rows, int64_t index, PrefetchStream prefetch) {
            auto *out = (typename Out::Element *)a.out + row * a.out_stride + index * PANEL;
            OutputEpilogue<Out> outputs(out, a.out_stride, rows, w.size_out - index * PANEL);
            for (int64_t at = 0; at < PANEL; at += LINE / int64_t(sizeof(float))) __builtin_prefetch(w.factors + index * PANEL + at);
            alignas(64) float products[MAX_GROUPED_ROWS * PANEL];
            GroupedPanel panel = rows > 1 ? decoded->panel(index) : w.panel(index);
            grouped_matmul_for(w, rows)(w, &x[row * row_words], &sums[row * row_sums], panel, prefetch, products);
            write_outputs<Out>(a, outputs, products, row, rows, index * PANEL);
        };
        tiling.for_each(thread, [&](int64_t) { return (const char *)x.get(); }, body);
    });
}

template <class T>
void grouped_linear(const GroupedLinear &a) {
    a.out_dtype == DType::FLOAT32 ? grouped_linear<T, Float32>(a) : grouped_linear<T, T>(a);
}

inline void GroupedLinear::run() const {
    if (rows == 0 || weight.size_out == 0) return;
    dtype == DType::BFLOAT16 ? grouped_linear<BFloat16>(*this) : grouped_linear<Float32>(*this);
}
