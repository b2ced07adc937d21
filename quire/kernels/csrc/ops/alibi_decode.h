// Decode attention whose scores lose a part of the distance (ALiBi), in the chunks and the order of sums of paged_decode.
#pragma once

#include "paged_decode.h"

struct AlibiDecode : AttentionArguments {
    static constexpr const char *NAME = "alibi_decode";
    static constexpr const char *PARAMETERS[] = {"q", "keys", "values", "out", "block_tables", "seq_lens", "slopes", "window", "scale"};
    static AlibiDecode check(const Tensor &q, const Tensor &keys, const Tensor &values, const Tensor &out, const Tensor &block_tables,
                             const Tensor &seq_lens, const Tensor &slopes, int64_t window, float scale) {
        Size sequences("sequences");
        auto arguments = AttentionArguments::check(q, keys, values, out, block_tables, seq_lens, std::nullopt, window, scale, 0.0f,
                                                   sequences, sequences);
        Size heads("heads", arguments.heads);
        slopes.has_dtype({DType::FLOAT32}).has_shape(heads).is_contiguous();
        return {arguments, slopes.data<float>()};
    }
    void run() const;
    int64_t work() const { return positions * heads * key_dim; }
    int64_t &row_count() { return sequences; }

    const float *slopes;  // (heads,)
};
REGISTER_OP(AlibiDecode);

// Attention of one head of a sequence over a chunk.
template <class T, class Rows>
void attend_with_alibi(const AlibiDecode &a, const Chunk &chunk, int64_t sequence, int64_t head, const Query &query) {
    typedef typename Rows::Element Element;
    typedef typename std::conditional<USE_BF16_DOT<T>, T, Float32>::type Weight;
    const int32_t *block_table = a.block_tables + chunk.sequence * a.table_stride;
    int64_t kv_head = head / (a.heads / a.kv_heads), length = chunk.last - chunk.first, end = (length + LANES - 1) / LANES * LANES;
    alignas(64) float scores[CHUNK];
    alignas(64) typename Weight::Element weights[CHUNK];
    score_chunk<T, Rows, 1>(a, &query, row_at<const Element>(a.keys, kv_head, 0, 0), block_table, chunk.first, chunk.last, scores,
                            nullptr);
    const Floats lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int64_t i = 0; i < end; i += LANES) {
        Floats distance = float(a.seq_lens[sequence] - 1 - chunk.first - i) - lanes;
        Float32::store(scores + i, Float32::load(scores + i) * a.scale - distance * a.slopes[head]);
    }
    for (int64_t i = 0; i < query.first - chunk.first; i++) scores[i] = -INFINITY;
    for (int64_t i = length; i < end; i++) scores[i] = -INFINITY;
    *query.sum = softmax_weights<T>(scores, weights, 0, end, query.first - chunk.first);
    accumulate_values<T, Rows, 1>(a, weights, row_at<const Element>(a.values, kv_head, 0, 0), block_table, chunk.first, chunk.last,
                                  &query, nullptr);
}

template <class T, class Rows>
void alibi_decode(const AlibiDecode &a) {
    Chunks chunks(a);
    PartialResults results(int64_t(chunks.results.size()), a.heads, a.value_dim);
    parallel_for(int64_t(chunks.list.size()) * a.heads, true, [&](int64_t item) {
        const Chunk &chunk = chunks.list[item / a.heads];
        int64_t head = item % a.heads;
        for (int64_t part = chunk.begin; part < chunk.end; part++) {
            int64_t sequence = chunks.sequences[part], at = chunks.results[part] * a.heads + head;
            const typename T::Element *q = (const typename T::Element *)a.q + sequence * a.q_stride + head * a.key_dim;
            attend_with_alibi<T, Rows>(a, chunk, sequence, head,
                                       {q, first_visible(a, sequence), &results.sums[at], &results.out[at * a.value_dim]});
        }
    });
    parallel_for(a.sequences * a.heads, a.sequences * a.heads * a.value_dim > SERIAL, [&](int64_t at) {
        merge_chunks<T>(a, chunks, at / a.heads, at % a.heads, results);
    });
}

inline void AlibiDecode::run() const {
    if (sequences == 0) return;
    if (dtype == DType::BFLOAT16) int8 ? alibi_decode<BFloat16, Int8Rows<BFloat16>>(*this) : alibi_decode<BFloat16, PlainRows<BFloat16>>(*this);
    else int8 ? alibi_decode<Float32, Int8Rows<Float32>>(*this) : alibi_decode<Float32, PlainRows<Float32>>(*this);
}
