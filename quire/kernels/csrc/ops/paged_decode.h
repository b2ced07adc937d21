// Decode attention over KV pages, which are read once and in place: flash decoding (Dao et al. 2023) with chunks of fixed
// length, so that a sequence's result does not depend on what else is in the batch. Sequences that begin with the same
// blocks attend to them together, as in cascade inference (Ye et al. 2024). With queries in bfloat16, sums have the order that
// the spans of paged_varlen have as well: a token has the same result however many tokens of its sequence are computed with it.
#pragma once

#include "../attention.h"
#include "../softmax.h"

struct PagedDecode : AttentionArguments {
    static constexpr const char *NAME = "paged_decode";
    static constexpr const char *PARAMETERS[] = {"q",        "keys",  "values", "out",   "block_tables",
                                                 "seq_lens", "sinks", "window", "scale", "softcap"};
    static PagedDecode check(const Tensor &q, const Tensor &keys, const Tensor &values, const Tensor &out,
                             const Tensor &block_tables, const Tensor &seq_lens, const OptionalTensor &sinks,
                             int64_t window, float scale, float softcap) {
        Size sequences("sequences");
        return {AttentionArguments::check(q, keys, values, out, block_tables, seq_lens, sinks, window, scale, softcap,
                                          sequences, sequences)};
    }
    void run() const;
    int64_t work() const { return positions * heads * key_dim; }
    int64_t &row_count() { return sequences; }
};
REGISTER_OP(PagedDecode);

#include "../chunks.h"

constexpr int64_t QUERY_TILE = 4;  // queries that share each load of keys and values

// Whether bfloat16 elements are multiplied without conversion to float32.
template <class T>
constexpr bool USE_BF16_DOT = BF16_DOT && std::is_same_v<T, BFloat16>;

// Partial sums of a product of two rows: each is of the words whose numbers have the same remainder.
template <class T>
constexpr int PARTIAL_SUMS = USE_BF16_DOT<T> ? 4 : LANES;

// x, rounded as in T.
template <class T>
Floats rounded(Floats x) {
    if constexpr (std::is_same_v<T, Float32>) return x;
#if defined(HAVE_BF16_DOT)
    else return (Floats)((Words)_mm512_cvtepu16_epi32((__m256i)T::to_bfloat16(x)) << 16);
#else
    else {
        Halves halves = T::to_bfloat16(x);
        return T::load((const uint16_t *)&halves);
    }
#endif
}

// A query of one head, the first position that it sees, and where its partial result over a chunk goes: the sum of weights and
// weighted values.
struct Query {
    const void *q;
    int64_t first;
    SoftmaxSum *sum;
    float *out;
};

// Scores of `count` queries over positions [first, last). q: float32 (count, key_dim). The prefetcher, which may be null,
// takes one step per row.
template <class Rows, int count>
void compute_scores(const AttentionArguments &a, const float *q, const typename Rows::Element *head,
                    const int32_t *block_table, int64_t first, int64_t last, float *scores,
                    Prefetcher<typename Rows::Element> *prefetcher) {
    PageIterator<typename Rows::Element> iterator(head, a.keys, block_table, a.block_size, first);
    for (int64_t begin = first; begin < last; begin += LANES) {
        Floats totals[count][LANES];
        int64_t rows = std::min<int64_t>(LANES, last - begin);
        for (int64_t row = 0; row < rows; row++) {
            const typename Rows::Element *key = iterator.next();
            if (prefetcher) prefetcher->step();
            Floats total[count];
            for (int g = 0; g < count; g++) total[g] = broadcast(0.0f);
            for (int64_t i = 0; i < a.key_dim; i += PAIR) {
                Floats k, l;
                Rows::load_pair(key, i, k, l);
                for (int g = 0; g < count; g++) {
                    total[g] += Float32::load(q + g * a.key_dim + i + LANES) * l;  // in the order of dot_add
                    total[g] += Float32::load(q + g * a.key_dim + i) * k;
                }
            }
            for (int g = 0; g < count; g++) totals[g][row] = total[g];
        }
        for (int g = 0; g < count; g++) {
            for (int64_t row = rows; row < LANES; row++) totals[g][row] = broadcast(0.0f);
            Float32::store(scores + g * CHUNK + begin - first, horizontal_sums(totals[g]));
        }
    }
}

// The weighted sum of the values at positions [first, last), of `width` * 32 of their elements from `at` on, in the order of
// accumulate_part_bf16: of two positions the second comes first. Weights are rounded as in T.
template <class T, class Rows, int count, int width>
void accumulate_part(const AttentionArguments &a, const float *weights, const typename Rows::Element *head,
                     const int32_t *block_table, int64_t first, int64_t last, const Query *queries, int64_t at,
                     Prefetcher<typename Rows::Element> *prefetcher) {
    Floats total[count][2 * width];
    for (int g = 0; g < count; g++)
        for (int i = 0; i < 2 * width; i++) total[g][i] = broadcast(0.0f);
    PageIterator<typename Rows::Element> iterator(head, a.values, block_table, a.block_size, first);
    auto add = [&](const typename Rows::Element *value, int64_t position) {
        Floats weight[count];
        for (int g = 0; g < count; g++) weight[g] = rounded<T>(broadcast(weights[g * CHUNK + position - first]));
        for (int i = 0; i < width; i++) {
            Floats v, w;
            Rows::load_pair(value, at + i * PAIR, v, w);
            for (int g = 0; g < count; g++) {
                total[g][2 * i] += weight[g] * v;
                total[g][2 * i + 1] += weight[g] * w;
            }
        }
    };
    for (int64_t position = first; position < last; position += 2) {
        const typename Rows::Element *value = iterator.next(), *second = position + 1 < last ? iterator.next() : nullptr;
        if (prefetcher) prefetcher->step(), prefetcher->step();
        if (second) add(second, position + 1);
        add(value, position);
    }
    for (int g = 0; g < count; g++)
        for (int i = 0; i < 2 * width; i++) Float32::store(queries[g].out + at + i * LANES, total[g][i]);
}

#if defined(HAVE_INT8_DOT)
// The words of four rows, four at a time: x[i] has the words 4i to 4i + 3 of each row.
inline void interleave_words(Words *x) {
    __m512i a = (__m512i)x[0], b = (__m512i)x[1], c = (__m512i)x[2], d = (__m512i)x[3];
    __m512i near = _mm512_shuffle_i32x4(a, b, 0x44), far = _mm512_shuffle_i32x4(a, b, 0xee);
    __m512i other_near = _mm512_shuffle_i32x4(c, d, 0x44), other_far = _mm512_shuffle_i32x4(c, d, 0xee);
    x[0] = (Words)_mm512_shuffle_i32x4(near, other_near, 0x88), x[1] = (Words)_mm512_shuffle_i32x4(near, other_near, 0xdd);
    x[2] = (Words)_mm512_shuffle_i32x4(far, other_far, 0x88), x[3] = (Words)_mm512_shuffle_i32x4(far, other_far, 0xdd);
}
#endif

#if defined(HAVE_BF16_DOT)
// `compute_scores` with dot products of bfloat16 elements, of four keys at a time.
template <class Rows, int count>
void compute_scores_bf16(const AttentionArguments &a, const Query *queries, const typename Rows::Element *head,
                         const int32_t *block_table, int64_t first, int64_t last, float *scores,
                         Prefetcher<typename Rows::Element> *prefetcher) {
    typedef typename Rows::Element Element;
    PageIterator<Element> iterator(head, a.keys, block_table, a.block_size, first);
    for (int64_t begin = first; begin < last; begin += LANES) {
        const Element *keys[LANES];
        for (int64_t row = 0; row < LANES; row++) {
            keys[row] = begin + row < last ? iterator.next() : keys[row - 1];
            if (prefetcher && begin + row < last) prefetcher->step();
        }
        Floats totals[count][4];
        for (int part = 0; part < 4; part++) {  // whose sums the folds below put into lanes 0, 4, 8, 12 and the next
            const Element *const *key = keys + (part == 1 ? 2 : part == 2 ? 1 : part);
            Floats total[count];
            for (int g = 0; g < count; g++) total[g] = broadcast(0.0f);
            for (int64_t i = 0; i < a.key_dim; i += PAIR) {
                Words k[4] = {Rows::load_pairs(key[0], i), Rows::load_pairs(key[4], i), Rows::load_pairs(key[8], i),
                              Rows::load_pairs(key[12], i)};
                interleave_words(k);
                for (int j = 0; j < 4; j++)
                    for (int g = 0; g < count; g++) {
                        const uint16_t *q = (const uint16_t *)queries[g].q + i + 8 * j;
                        total[g] = dot_add(total[g], (Words)_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)q)), k[j]);
                    }
            }
            for (int g = 0; g < count; g++) totals[g][part] = total[g];
        }
        for (int g = 0; g < count; g++) {
            Floats *x = totals[g];
            Float32::store(scores + g * CHUNK + begin - first,
                           fold_halves<1>(fold_halves<2>(x[0], x[1]), fold_halves<2>(x[2], x[3])));
        }
    }
}
#endif

// `accumulate_part` with dot products of bfloat16 elements, two positions at a time. Weights past the last one are 0.
template <class Rows, int count, int width>
void accumulate_part_bf16(const AttentionArguments &a, const uint16_t *weights, const typename Rows::Element *head,
                          const int32_t *block_table, int64_t first, int64_t last, const Query *queries, int64_t at,
                          Prefetcher<typename Rows::Element> *prefetcher) {
    typedef typename Rows::Element Element;
    typedef uint16_t Line __attribute__((vector_size(64)));
    constexpr Line lower = {0, 32, 1, 33, 2, 34, 3, 35, 8, 40, 9, 41, 10, 42, 11, 43,
                            16, 48, 17, 49, 18, 50, 19, 51, 24, 56, 25, 57, 26, 58, 27, 59};
    constexpr Line upper = lower + 4;  // for each eight elements, in the order of the unpack instructions
    Floats low[count][width], high[count][width];
    for (int g = 0; g < count; g++)
        for (int i = 0; i < width; i++) low[g][i] = high[g][i] = broadcast(0.0f);
    PageIterator<Element> iterator(head, a.values, block_table, a.block_size, first);
    for (int64_t position = first; position < last; position += 2) {
        const Element *value = iterator.next(), *other = position + 1 < last ? iterator.next() : value;
        if (prefetcher) prefetcher->step(), prefetcher->step();
        Words weight[count];
        for (int g = 0; g < count; g++) {
            uint32_t both;
            std::memcpy(&both, weights + g * CHUNK + position - first, sizeof both);
            weight[g] = Words{} + both;
        }
        for (int i = 0; i < width; i++) {
            Line v = (Line)Rows::load_pairs(value, at + i * PAIR), w = (Line)Rows::load_pairs(other, at + i * PAIR);
            Words near = (Words)__builtin_shuffle(v, w, lower), far = (Words)__builtin_shuffle(v, w, upper);
            for (int g = 0; g < count; g++) {
                low[g][i] = dot_add(low[g][i], near, weight[g]);
                high[g][i] = dot_add(high[g][i], far, weight[g]);
            }
        }
    }
    constexpr Ints even = {0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30};
    for (int g = 0; g < count; g++)
        for (int i = 0; i < width; i++)
            Float32::store_pair(queries[g].out + at + i * PAIR, __builtin_shuffle(low[g][i], high[g][i], even),
                                __builtin_shuffle(low[g][i], high[g][i], even + 1));
}

// The weighted sum of values over all value_dim elements, as many at a time as fit into registers.
template <class T, class Rows, int count, class Weight>
void accumulate_values(const AttentionArguments &a, const Weight *weights, const typename Rows::Element *head,
                       const int32_t *block_table, int64_t first, int64_t last, const Query *queries,
                       Prefetcher<typename Rows::Element> *prefetcher) {
    constexpr int max_width = count > 2 ? 2 : 4;
    auto part = [&](auto pairs, int64_t at) {
        constexpr int width = decltype(pairs)::value;
        Prefetcher<typename Rows::Element> *own = at ? nullptr : prefetcher;
        if constexpr (std::is_same_v<Weight, float>)
            accumulate_part<T, Rows, count, width>(a, weights, head, block_table, first, last, queries, at, own);
        else
            accumulate_part_bf16<Rows, count, width>(a, weights, head, block_table, first, last, queries, at, own);
    };
    int64_t at = 0;
    for (; at + max_width * PAIR <= a.value_dim; at += max_width * PAIR)
        part(std::integral_constant<int, max_width>{}, at);
    for (; at < a.value_dim; at += PAIR) part(std::integral_constant<int, 1>{}, at);
}

// Scales scores, and soft-caps them if softcap > 0.
inline void scale_scores(float *scores, int64_t begin, int64_t end, float scale, float softcap) {
    for (int64_t i = begin; i < end; i += LANES) {
        Floats s = Float32::load(scores + i) * scale;
        Float32::store(scores + i, softcap > 0.0f ? vector_tanh(s / softcap) * softcap : s);
    }
}

// Scores of `count` queries over a chunk.
template <class T, class Rows, int count>
void score_chunk(const AttentionArguments &a, const Query *queries, const typename Rows::Element *keys,
                 const int32_t *block_table, int64_t first, int64_t last, float *scores,
                 Prefetcher<typename Rows::Element> *prefetcher) {
#if defined(HAVE_BF16_DOT)
    if constexpr (USE_BF16_DOT<T>)
        return compute_scores_bf16<Rows, count>(a, queries, keys, block_table, first, last, scores, prefetcher);
#endif
    alignas(64) float q[count * MAX_DIM];
    for (int g = 0; g < count; g++)
        for (int64_t i = 0; i < a.key_dim; i += PAIR) {
            Floats x, y;
            T::load_pair((const typename T::Element *)queries[g].q + i, x, y);
            Float32::store_pair(q + g * a.key_dim + i, x, y);
        }
    compute_scores<Rows, count>(a, q, keys, block_table, first, last, scores, prefetcher);
}

#if defined(HAVE_INT8_DOT)
#include "../int8_decode.h"
#endif

// Attention of `count` queries of one KV head over a chunk.
template <class T, class Rows, int count>
void attend_chunk(const AttentionArguments &a, const Chunk &chunk, int64_t kv_head, const Query *queries,
                  Prefetcher<typename Rows::Element> *prefetcher) {
#if defined(HAVE_INT8_DOT)
    if constexpr (std::is_same_v<Rows, Int8Rows<BFloat16>>) return attend_int8_chunk<count>(a, chunk, kv_head, queries, prefetcher);
#endif
    typedef typename Rows::Element Element;
    const int32_t *block_table = a.block_tables + chunk.sequence * a.table_stride;
    alignas(64) float scores[count * CHUNK];
    typedef typename std::conditional<USE_BF16_DOT<T>, T, Float32>::type Weight;
    alignas(64) typename Weight::Element weights[count * CHUNK];
    score_chunk<T, Rows, count>(a, queries, row_at<const Element>(a.keys, kv_head, 0, 0), block_table, chunk.first,
                                chunk.last, scores, prefetcher);
    int64_t length = chunk.last - chunk.first, end = (length + LANES - 1) / LANES * LANES;
    for (int g = 0; g < count; g++) {
        float *own = scores + g * CHUNK;
        scale_scores(own, 0, end, a.scale, a.softcap);
        for (int64_t i = 0; i < queries[g].first - chunk.first; i++) own[i] = -INFINITY;
        for (int64_t i = length; i < end; i++) own[i] = -INFINITY;
        *queries[g].sum = softmax_weights<T>(own, weights + g * CHUNK, 0, end, queries[g].first - chunk.first);
    }
    accumulate_values<T, Rows, count>(a, weights, row_at<const Element>(a.values, kv_head, 0, 0), block_table, chunk.first,
                                   chunk.last, queries, prefetcher);
}

// Adds a chunk's rows of one KV head to what is prefetched.
template <class Rows>
void prefetch_chunk(Prefetcher<typename Rows::Element> &prefetcher, const AttentionArguments &a, const Chunk &chunk,
                    int64_t kv_head) {
    const int32_t *block_table = a.block_tables + chunk.sequence * a.table_stride;
    for (auto [pages, dim] : {std::pair(&a.keys, a.key_dim), std::pair(&a.values, a.value_dim)})
        prefetcher.add({row_at<const typename Rows::Element>(*pages, kv_head, 0, 0), *pages, block_table, a.block_size,
                        chunk.first},
                       chunk.last - chunk.first, dim, Rows::prefix(dim));
}

// Results over chunks, one for each pair of chunk and sequence, and each head.
struct PartialResults {
    PartialResults(int64_t parts, int64_t heads, int64_t dim)
        : sums(parts * heads), out(new float[parts * heads * dim]) {}
    std::vector<SoftmaxSum> sums;
    std::unique_ptr<float[]> out;
};

// Attention of all queries of one KV head over a chunk, QUERY_TILE at a time.
template <class T, class Rows>
void attend_queries(const AttentionArguments &a, const Chunks &chunks, const Chunk &chunk, int64_t kv_head,
                    PartialResults &results, Prefetcher<typename Rows::Element> &prefetcher) {
    int64_t group = a.heads / a.kv_heads, count = (chunk.end - chunk.begin) * group;
    for (int64_t begin = 0; begin < count; begin += QUERY_TILE) {
        Query queries[QUERY_TILE];
        int64_t here = std::min(QUERY_TILE, count - begin);
        for (int64_t i = 0; i < here; i++) {
            int64_t part = chunk.begin + (begin + i) / group, head = kv_head * group + (begin + i) % group;
            int64_t at = chunks.results[part] * a.heads + head;
            int64_t sequence = chunks.sequences[part];
            queries[i] = {(const typename T::Element *)a.q + sequence * a.q_stride + head * a.key_dim,
                          first_visible(a, sequence), &results.sums[at], &results.out[at * a.value_dim]};
        }
        auto attend = [&](auto number) {
            attend_chunk<T, Rows, decltype(number)::value>(a, chunk, kv_head, queries, begin ? nullptr : &prefetcher);
        };
        switch (here) {
            case 4: attend(std::integral_constant<int, 4>{}); break;
            case 3: attend(std::integral_constant<int, 3>{}); break;
            case 2: attend(std::integral_constant<int, 2>{}); break;
            default: attend(std::integral_constant<int, 1>{});
        }
    }
}

// Adds a chunk's weighted values to those of earlier chunks. Products with powers of two are exact: the sums are the same whether
// the compiler fuses them or not.
INLINE void add_weighted(float *out, MergeFactors factors, Floats low, Floats high) {
    Float32::store2(out, Float32::load(out) * factors.earlier + low * factors.chunk,
                    Float32::load(out + LANES) * factors.earlier + high * factors.chunk);
}

// Combines the partial results of one head of a sequence.
template <class T>
void merge_chunks(const AttentionArguments &a, const Chunks &chunks, int64_t sequence, int64_t head, const PartialResults &results) {
    alignas(64) float mixed[MAX_DIM];
    std::fill_n(mixed, a.value_dim, 0.0f);
    SoftmaxSum sum = first_sum(a.sinks ? a.sinks + head : nullptr);
    for (int64_t c = chunks.offsets[sequence]; c < chunks.offsets[sequence + 1]; c++) {
        int64_t at = c * a.heads + head;
        MergeFactors factors = merge(sum, results.sums[at]);
        const float *part = &results.out[at * a.value_dim];
        for (int64_t d = 0; d < a.value_dim; d += PAIR) add_weighted(mixed + d, factors, Float32::load(part + d), Float32::load(part + d + LANES));
    }
    typename T::Element *out = (typename T::Element *)a.out + (sequence * a.heads + head) * a.value_dim;
    for (int64_t d = 0; d < a.value_dim; d += PAIR)
        T::store_pair(out + d, Float32::load(mixed + d) / sum.total, Float32::load(mixed + d + LANES) / sum.total);
}

template <class T, class Rows>
void decode(const AttentionArguments &a) {
    Chunks chunks(a);
    PartialResults results(int64_t(chunks.results.size()), a.heads, a.value_dim);
    int64_t items = int64_t(chunks.list.size()) * a.kv_heads;
    WorkItems work(items);
    run_parallel([&](int) {
        Prefetcher<typename Rows::Element> prefetcher;
        bool begun = false;
        auto add = [&](int64_t item) {
            if (item < items) prefetch_chunk<Rows>(prefetcher, a, chunks.list[item / a.kv_heads], item % a.kv_heads);
        };
        work.for_each([&](int64_t item, int64_t next) {
            if (!begun) add(item);
            add(next);
            constexpr int64_t size = sizeof(typename Rows::Element);
            for (int64_t byte = 0; !begun && byte < PREFETCH_BYTES; byte += a.key_dim * size) prefetcher.step();
            begun = true;
            attend_queries<T, Rows>(a, chunks, chunks.list[item / a.kv_heads], item % a.kv_heads, results, prefetcher);
        });
    });
    parallel_for(a.sequences * a.heads, a.sequences * a.heads * a.value_dim > SERIAL, [&](int64_t at) {
        merge_chunks<T>(a, chunks, at / a.heads, at % a.heads, results);
    });
}

template <class T>
void paged_decode(const AttentionArguments &a) {
    if (a.sequences == 0) return;
    a.int8 ? decode<T, Int8Rows<T>>(a) : decode<T, PlainRows<T>>(a);
}

inline void PagedDecode::run() const {
    dtype == DType::BFLOAT16 ? paged_decode<BFloat16>(*this) : paged_decode<Float32>(*this);
}
