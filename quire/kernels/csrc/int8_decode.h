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

// `compute_scores` of quantized queries, of 16 keys at a time.
template <int count>
void compute_int8_scores(const AttentionArguments &a, const int8_t (*codes)[MAX_DIM], const QueryPart (*parts)[MAX_DIM / QUERY_PART],
                         PageIterator<int8_t> iterator, int64_t rows, float *scores, Prefetcher<int8_t> *prefetcher) {
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
                Floats sum = broadcast(0.0f);
                for (int64_t part = 0; part < parts_of_group(a.key_dim, at); part++) {
                    const QueryPart &query = parts[g][at / QUERY_PART + part];
                    Ints product = Ints{} + query.start;
                    for (int64_t i = 0; i < QUERY_PART / QUAD; i++)
                        product = dot_add(product, words[part * QUERY_PART / QUAD + i], broadcast_quad(&codes[g][at + part * QUERY_PART + i * QUAD]));
                    sum = fused(to_floats(product), broadcast(query.scale), sum);
                }
                score[g] = fused(sum, Float32::load(key_scales), score[g]);
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
    for (int64_t begin = 0; begin < rows; begin += QUAD) {
        Words values[QUAD];
        const int8_t *row = nullptr;
        for (int64_t i = 0; i < QUAD; i++) {  // weights past the last one are 0
            if (begin + i < rows) row = iterator.next();
            if (prefetcher) prefetcher->step();
            values[i] = load_group(row, at, a.value_dim);
        }
        interleave_bytes(values);
        for (int g = 0; g < count; g++) {
            Words weights = broadcast_quad(codes[g] + begin);
            for (int i = 0; i < 4; i++) sums[g][i] = dot_add(sums[g][i], weights, values[i]);
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
    int64_t rows = chunk.last - chunk.first, end = (rows + LANES - 1) / LANES * LANES;
    alignas(64) int8_t query_codes[count][MAX_DIM];
    QueryPart query_parts[count][MAX_DIM / QUERY_PART];
    for (int g = 0; g < count; g++)
        quantize_query((const uint16_t *)queries[g].q, a.key_dim, a.scale, query_codes[g], query_parts[g]);
    alignas(64) float weights[count * CHUNK], scales[MAX_GROUPS * CHUNK];
    compute_int8_scores<count>(a, query_codes, query_parts, rows_of(a.keys), rows, weights, prefetcher);
    for (int g = 0; g < count; g++) {
        float *scores = weights + g * CHUNK;
        if (a.softcap > 0.0f) scale_scores(scores, 0, end, 1.0f, a.softcap);
        for (int64_t i = 0; i < queries[g].first - chunk.first; i++) scores[i] = -INFINITY;
        for (int64_t i = rows; i < end; i++) scores[i] = -INFINITY;
        *queries[g].total = rough_softmax_weights(scores, 0, end, *queries[g].largest);
    }
    gather_scales(rows_of(a.values), rows, a.value_dim, scales);
    for (int64_t at = 0; at < a.value_dim; at += INT8_GROUP) {
        alignas(64) uint8_t codes[count][CHUNK];
        float code_scales[count];
        for (int g = 0; g < count; g++)
            code_scales[g] = quantize_weights(weights + g * CHUNK, scales + at / INT8_GROUP * CHUNK, 0, end,
                                              queries[g].first - chunk.first, rows, codes[g]);
        accumulate_int8_group<count>(a, codes, code_scales, rows_of(a.values), rows, at, queries, at ? nullptr : prefetcher);
    }
}
