// Attention of single queries in bfloat16 to pages of int8, read in place, with products of integers.
#pragma once

#include "int8_attention.h"

// Scales of the rows of a chunk, of each group: (groups, CHUNK).
inline void gather_scales(PageIterator<int8_t> rows, int64_t count, int64_t dim, float *scales) {
    int64_t groups = groups_of(dim);
    for (int64_t i = 0; i < count; i++) {
        const int8_t *row = rows.next();
        for (int64_t group = 0; group < groups; group++)
            scales[group * CHUNK + i] = Int8Rows<BFloat16>::scale_at(row, group * INT8_GROUP);
    }
}

// `compute_scores` of quantized queries, of 16 keys at a time, without the scales of queries.
template <int count>
void compute_int8_scores(const AttentionArguments &a, const QuantizedQuery *queries, PageIterator<int8_t> iterator, int64_t rows, float *scores, Prefetcher<int8_t> *prefetcher) {
    for (int64_t begin = 0; begin < rows; begin += LANES) {
        const int8_t *keys[LANES];
        for (int64_t row = 0; row < LANES; row++) {
            keys[row] = begin + row < rows ? iterator.next() : keys[row - 1];
            if (prefetcher && begin + row < rows) prefetcher->step();
        }
        Floats score[count];
        for (int g = 0; g < count; g++) score[g] = broadcast(0.0f);
        for (int64_t at = 0; at < a.key_dim; at += INT8_GROUP) {
            Words words[LANES];  // four elements of each key
            alignas(64) float key_scales[LANES];
            for (int row = 0; row < LANES; row++) {
                words[row] = to_unsigned(load_group(keys[row], at, a.key_dim));
                key_scales[row] = Int8Rows<BFloat16>::scale_at(keys[row], at);
            }
            transpose(words);
            for (int g = 0; g < count; g++) {
                const QuantizedQuery &query = queries[g];
                Ints sum = Ints{} + query.biases[at / INT8_GROUP];
                for (int64_t part = 0; part < parts_of_group(a.key_dim, at); part++) {
                    Ints product = Ints{};
                    for (int64_t i = 0; i < QUERY_PART / QUAD; i++)
                        product = dot_add(product, words[part * QUERY_PART / QUAD + i], broadcast_quad(query.codes + at + part * QUERY_PART + i * QUAD));
                    sum = add_shifted(sum, product, query.shifts[at / QUERY_PART + part]);
                }
                score[g] = fused(to_floats(sum), Float32::load(key_scales), score[g]);
            }
        }
        for (int g = 0; g < count; g++) Float32::store(scores + g * CHUNK + begin, score[g]);
    }
}

// The sums of a group of values weighted with `codes`, times scales of these.
template <int count>
void accumulate_int8_group(const AttentionArguments &a, const uint8_t (*codes)[CHUNK], const float *code_scales,
                           PageIterator<int8_t> iterator, int64_t rows, int64_t at, const Query *queries,
                           Prefetcher<int8_t> *prefetcher) {
    Ints sums[count][4];
    for (int g = 0; g < count; g++)
        for (int i = 0; i < 4; i++) sums[g][i] = Ints{};
    for (int64_t begin = 0; begin < rows; begin += CODES) {
        const int8_t *values[CODES];
        for (int64_t i = 0; i < CODES; i++) values[i] = begin + i < rows ? iterator.next() : values[i - 1];  // weights past the last one are 0
        for (int64_t quad = 0; quad < std::min(QUADS, (rows - begin + 1) / 2); quad++) {
            Words words[QUAD];
            for (int64_t i = 0; i < QUAD; i++) {
                words[i] = load_group(values[position_of_code(quad, i)], at, a.value_dim);
                if (prefetcher) prefetcher->step();
            }
            interleave_bytes(words);
            for (int g = 0; g < count; g++) {
                Words weights = broadcast_quad(codes[g] + begin + quad * QUAD);
                for (int i = 0; i < 4; i++) sums[g][i] = dot_add(sums[g][i], weights, words[i]);
            }
        }
    }
    constexpr Ints even = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
    for (int g = 0; g < count; g++) {
        Words words[4];
        for (int i = 0; i < 4; i++) words[i] = (Words)sums[g][i];
        interleave_words(words);
        for (int64_t i = 0; at + i * PAIR < std::min(at + INT8_GROUP, a.value_dim); i++) {
            Floats low = to_floats((Ints)words[2 * i]) * code_scales[g], high = to_floats((Ints)words[2 * i + 1]) * code_scales[g];
            Float32::store2(queries[g].out + at + i * PAIR, __builtin_shuffle(low, high, even),
                            __builtin_shuffle(low, high, even + 1));  // as BFloat16::store_pair takes them
        }
    }
}

// attend_chunk with products of integers.
template <int count>
void attend_int8_chunk(const AttentionArguments &a, const Chunk &chunk, int64_t kv_head, const Query *queries,
                       Prefetcher<int8_t> *prefetcher) {
    const int32_t *block_table = a.block_tables + chunk.sequence * a.table_stride;
    auto rows_of = [&](const Pages &pages) {
        return PageIterator<int8_t>(row_at<const int8_t>(pages, kv_head, 0, 0), pages, block_table, a.block_size, chunk.first);
    };
    int64_t rows = chunk.last - chunk.first, end = (rows + CODES - 1) / CODES * CODES;
    QuantizedQuery quantized[count];
    for (int g = 0; g < count; g++) quantize_query((const uint16_t *)queries[g].q, a.key_dim, a.scale, quantized[g]);
    alignas(64) float scores[count][CHUNK], weights[count][CHUNK], products[count][CHUNK], scales[MAX_GROUPS * CHUNK];
    compute_int8_scores<count>(a, quantized, rows_of(a.keys), rows, scores[0], prefetcher);
    gather_scales(rows_of(a.values), rows, a.value_dim, scales);
    auto visible = [&](int g) { return VisiblePositions(0, end, queries[g].first - chunk.first, rows); };
    float largest[count];
    for (int g = 0; g < count; g++) {
        float scale = quantized[g].scale;
        if (a.softcap > 0.0f) scale_scores(scores[g], 0, end, scale, a.softcap), scale = 1.0f;
        auto weighed = weigh_scores<true>(scores[g], scale, scales, weights[g], products[g], visible(g));
        *queries[g].sum = weighed.sum, largest[g] = weighed.largest_product;
    }
    for (int64_t at = 0; at < a.value_dim; at += INT8_GROUP) {
        alignas(64) uint8_t codes[count][CHUNK];
        float code_scales[count];
        for (int g = 0; g < count; g++) {
            if (at > 0) largest[g] = multiply_weights(weights[g], scales + at / INT8_GROUP * CHUNK, products[g], visible(g));
            code_scales[g] = quantize_products(products[g], largest[g], 0, end, codes[g]);
        }
        accumulate_int8_group<count>(a, codes, code_scales, rows_of(a.values), rows, at, queries, at ? nullptr : prefetcher);
    }
}
