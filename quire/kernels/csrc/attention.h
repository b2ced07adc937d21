// Decode attention over pages, which are read once and in place: flash decoding (Dao et al. 2023) with chunks of fixed
// length, so that a sequence's result does not depend on what else is in the batch. Sequences that begin with the same
// blocks attend to them together, as in cascade inference (Ye et al. 2024).
#pragma once

constexpr int64_t TILE = 4;     // queries that share a load

// One head of one token, and where its result beside a chunk belongs.
struct Query {
    const void *q;
    float *largest, *total, *out;
};

// Scores of the positions [first, last) for `count` queries; q is float32, count rows of key_dim. `fetcher` steps
// with each row, unless it is null.
template <class Rows, int count>
void score(const PagedDecode &a, const float *q, const typename Rows::Number *head, const int32_t *table, int64_t first,
           int64_t last, float *scores, Fetcher<typename Rows::Number> *fetcher) {
    Walk<typename Rows::Number> walk(head, a.keys, table, a.block_size, first);
    for (int64_t begin = first; begin < last; begin += LANES) {
        Floats totals[count][LANES];
        alignas(64) float scales[LANES] = {};
        int64_t rows = std::min<int64_t>(LANES, last - begin);
        for (int64_t row = 0; row < rows; row++) {
            const typename Rows::Number *key = walk.next();
            if (fetcher) fetcher->step();
            scales[row] = Rows::scale(key);
            Floats total[count], other[count];
            for (int g = 0; g < count; g++) total[g] = other[g] = all(0.0f);
            for (int64_t i = 0; i < a.key_dim; i += PAIR) {
                Floats k, l;
                Rows::load_pair(key + i, k, l);
                for (int g = 0; g < count; g++) {
                    total[g] += Float32::load(q + g * a.key_dim + i) * k;
                    other[g] += Float32::load(q + g * a.key_dim + i + LANES) * l;
                }
            }
            for (int g = 0; g < count; g++) totals[g][row] = total[g] + other[g];
        }
        for (int g = 0; g < count; g++) {
            for (int64_t row = rows; row < LANES; row++) totals[g][row] = all(0.0f);
            Float32::store(scores + g * CHUNK + begin - first, sums(totals[g]) * Float32::load(scales));
        }
    }
}

// Adds the weighted values of the positions [first, last) for `width` times 32 of their numbers, from `at` on.
template <class Rows, int count, int width>
void gather_part(const PagedDecode &a, const float *weights, const typename Rows::Number *head, const int32_t *table,
                 int64_t first, int64_t last, const Query *queries, int64_t at, Fetcher<typename Rows::Number> *fetcher) {
    Floats total[count][2 * width];
    for (int g = 0; g < count; g++)
        for (int i = 0; i < 2 * width; i++) total[g][i] = all(0.0f);
    Walk<typename Rows::Number> walk(head, a.values, table, a.block_size, first);
    for (int64_t position = first; position < last; position++) {
        const typename Rows::Number *value = walk.next();
        if (fetcher) fetcher->step();
        float scale = Rows::scale(value);
        Floats weight[count];
        for (int g = 0; g < count; g++) weight[g] = all(weights[g * CHUNK + position - first] * scale);
        for (int i = 0; i < width; i++) {
            Floats v, w;
            Rows::load_pair(value + at + i * PAIR, v, w);
            for (int g = 0; g < count; g++) {
                total[g][2 * i] += weight[g] * v;
                total[g][2 * i + 1] += weight[g] * w;
            }
        }
    }
    for (int g = 0; g < count; g++)
        for (int i = 0; i < 2 * width; i++) Float32::store(queries[g].out + at + i * LANES, total[g][i]);
}

// `score` with products of bfloat16 numbers; the queries stay in registers. pairs: key_dim / 32.
template <int count, int pairs>
void score_products(const PagedDecode &a, const Query *queries, const uint16_t *head, const int32_t *table, int64_t first,
                    int64_t last, float *scores, Fetcher<uint16_t> *fetcher) {
    Words query[count][pairs];
    for (int g = 0; g < count; g++)
        for (int i = 0; i < pairs; i++) query[g][i] = load_words((const uint16_t *)queries[g].q + i * PAIR);
    Walk<uint16_t> walk(head, a.keys, table, a.block_size, first);
    for (int64_t begin = first; begin < last; begin += LANES) {
        Floats totals[count][LANES];
        int64_t rows = std::min<int64_t>(LANES, last - begin);
        for (int64_t row = 0; row < rows; row++) {
            const uint16_t *key = walk.next();
            if (fetcher) fetcher->step();
            Floats total[count];
            for (int g = 0; g < count; g++) total[g] = all(0.0f);
            for (int i = 0; i < pairs; i++) {
                Words k = load_words(key + i * PAIR);
                for (int g = 0; g < count; g++) total[g] = add_products(total[g], query[g][i], k);
            }
            for (int g = 0; g < count; g++) totals[g][row] = total[g];
        }
        for (int g = 0; g < count; g++) {
            for (int64_t row = rows; row < LANES; row++) totals[g][row] = all(0.0f);
            Float32::store(scores + g * CHUNK + begin - first, sums(totals[g]));
        }
    }
}

// `gather_part` with products of bfloat16 numbers, of two positions at a time; behind the last one weights are 0.
template <int count, int width>
void gather_products(const PagedDecode &a, const uint16_t *weights, const uint16_t *head, const int32_t *table,
                     int64_t first, int64_t last, const Query *queries, int64_t at, Fetcher<uint16_t> *fetcher) {
    typedef uint16_t Line __attribute__((vector_size(64)));
    constexpr Line lower = {0, 32, 1, 33, 2, 34, 3, 35, 8, 40, 9, 41, 10, 42, 11, 43,
                            16, 48, 17, 49, 18, 50, 19, 51, 24, 56, 25, 57, 26, 58, 27, 59};
    constexpr Line upper = lower + 4;  // of each eight numbers: as the instruction takes them
    Floats low[count][width], high[count][width];
    for (int g = 0; g < count; g++)
        for (int i = 0; i < width; i++) low[g][i] = high[g][i] = all(0.0f);
    Walk<uint16_t> walk(head, a.values, table, a.block_size, first);
    for (int64_t position = first; position < last; position += 2) {
        const uint16_t *value = walk.next(), *other = position + 1 < last ? walk.next() : value;
        if (fetcher) fetcher->step(), fetcher->step();
        Words weight[count];
        for (int g = 0; g < count; g++) {
            uint32_t both;
            std::memcpy(&both, weights + g * CHUNK + position - first, sizeof both);
            weight[g] = Words{} + both;
        }
        for (int i = 0; i < width; i++) {
            Line v = (Line)load_words(value + at + i * PAIR), w = (Line)load_words(other + at + i * PAIR);
            Words near = (Words)__builtin_shuffle(v, w, lower), far = (Words)__builtin_shuffle(v, w, upper);
            for (int g = 0; g < count; g++) {
                low[g][i] = add_products(low[g][i], near, weight[g]);
                high[g][i] = add_products(high[g][i], far, weight[g]);
            }
        }
    }
    constexpr Ints even = {0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30};
    for (int g = 0; g < count; g++)
        for (int i = 0; i < width; i++)
            Float32::store_pair(queries[g].out + at + i * PAIR, __builtin_shuffle(low[g][i], high[g][i], even),
                                __builtin_shuffle(low[g][i], high[g][i], even + 1));
}

// The same for all their numbers, as many at a time as registers hold.
template <class Rows, int count, class Weight>
void gather(const PagedDecode &a, const Weight *weights, const typename Rows::Number *head, const int32_t *table,
            int64_t first, int64_t last, const Query *queries, Fetcher<typename Rows::Number> *fetcher) {
    constexpr int wide = count > 2 ? 2 : 4;
    auto part = [&](auto width, int64_t at) {
        constexpr int pairs = decltype(width)::value;
        if constexpr (std::is_same_v<Weight, float>)
            gather_part<Rows, count, pairs>(a, weights, head, table, first, last, queries, at, at ? nullptr : fetcher);
        else
            gather_products<count, pairs>(a, weights, head, table, first, last, queries, at, at ? nullptr : fetcher);
    };
    int64_t at = 0;
    for (; at + wide * PAIR <= a.value_dim; at += wide * PAIR) part(std::integral_constant<int, wide>{}, at);
    for (; at < a.value_dim; at += PAIR) part(std::integral_constant<int, 1>{}, at);
}

// What the products of queries and keys mean: scaled, and capped if asked for (softcap > 0).
inline void scale_scores(float *scores, int64_t begin, int64_t end, float scale, float softcap) {
    for (int64_t i = begin; i < end; i += LANES) {
        Floats s = Float32::load(scores + i) * scale;
        Float32::store(scores + i, softcap > 0.0f ? hyperbolic_tangent(s / softcap) * softcap : s);
    }
}

// Scores to weights e^(score - top), where top becomes the largest score if it is smaller; gives the weights' sum.
template <class T>
float weigh(const float *scores, typename T::Number *weights, int64_t begin, int64_t end, float &top) {
    Floats most = all(top), total = all(0.0f);
    for (int64_t i = begin; i < end; i += LANES) most = larger(most, Float32::load(scores + i));
    for (int i = 0; i < LANES; i++) top = std::max(top, most[i]);
    float shift = top == -INFINITY ? 0.0f : top;  // where nothing counts, all weights are 0
    for (int64_t i = begin; i < end; i += LANES) {
        Floats weight = power_of_two((Float32::load(scores + i) - shift) * 1.44269504088896341f);
        T::store(weights + i, weight);
        total += weight;
    }
    return sum(total);
}

// Whether bfloat16 numbers are multiplied as they lie.
template <class T, class Rows>
constexpr bool AS_THEY_LIE = PRODUCTS && std::is_same_v<T, BFloat16> && std::is_same_v<Rows, PlainRows<T>>;

// Scores of a chunk for `count` queries.
template <class T, class Rows, int count>
void score_chunk(const PagedDecode &a, const Query *queries, const typename Rows::Number *keys, const int32_t *table,
                 int64_t first, int64_t last, float *scores, Fetcher<typename Rows::Number> *fetcher) {
    if constexpr (AS_THEY_LIE<T, Rows>) {
        switch (a.key_dim / PAIR) {
            case 1: return score_products<count, 1>(a, queries, keys, table, first, last, scores, fetcher);
            case 2: return score_products<count, 2>(a, queries, keys, table, first, last, scores, fetcher);
            case 4: return score_products<count, 4>(a, queries, keys, table, first, last, scores, fetcher);
        }
    }
    alignas(64) float wide[count * MOST_DIM];
    for (int g = 0; g < count; g++)
        for (int64_t i = 0; i < a.key_dim; i += PAIR) {
            Floats x, y;
            Rows::take_pair((const typename T::Number *)queries[g].q + i, x, y);
            Float32::store_pair(wide + g * a.key_dim + i, x, y);
        }
    score<Rows, count>(a, wide, keys, table, first, last, scores, fetcher);
}

// `count` queries of one key head beside a chunk.
template <class T, class Rows, int count>
void attend_chunk(const PagedDecode &a, const Chunk &chunk, int64_t kv_head, const Query *queries,
                  Fetcher<typename Rows::Number> *fetcher) {
    typedef typename Rows::Number Number;
    typedef typename std::conditional<AS_THEY_LIE<T, Rows>, T, Float32>::type Weight;
    const int32_t *table = a.tables + chunk.sequence * a.table_stride;
    alignas(64) float scores[count * CHUNK];
    alignas(64) typename Weight::Number weights[count * CHUNK];
    score_chunk<T, Rows, count>(a, queries, row_of<const Number>(a.keys, kv_head, 0, 0), table, chunk.first, chunk.last,
                                scores, fetcher);
    int64_t length = chunk.last - chunk.first, end = (length + LANES - 1) / LANES * LANES;
    for (int g = 0; g < count; g++) {
        float *own = scores + g * CHUNK;
        scale_scores(own, 0, end, a.scale, a.softcap);
        for (int64_t i = length; i < end; i++) own[i] = -INFINITY;
        *queries[g].largest = -INFINITY;
        *queries[g].total = weigh<Weight>(own, weights + g * CHUNK, 0, end, *queries[g].largest);
    }
    gather<Rows, count>(a, weights, row_of<const Number>(a.values, kv_head, 0, 0), table, chunk.first, chunk.last,
                        queries, fetcher);
}

// A chunk's rows for one key head, to be fetched.
template <class Rows>
void add_rows(Fetcher<typename Rows::Number> &fetcher, const PagedDecode &a, const Chunk &chunk, int64_t kv_head) {
    const int32_t *table = a.tables + chunk.sequence * a.table_stride;
    for (auto [pages, dim] : {std::pair(&a.keys, a.key_dim), std::pair(&a.values, a.value_dim)})
        fetcher.add({row_of<const typename Rows::Number>(*pages, kv_head, 0, 0), *pages, table, a.block_size, chunk.first},
                    chunk.last - chunk.first, Rows::FRONT + dim);
}

// The results of chunks, one for each place and head.
struct Results {
    Results(int64_t places, int64_t heads, int64_t dim)
        : largest(places * heads), total(places * heads), out(new float[places * heads * dim]) {}
    std::vector<float> largest, total;
    std::unique_ptr<float[]> out;
};

// All queries of one key head beside a chunk, some at a time.
template <class T, class Rows>
void attend_all(const PagedDecode &a, const Chunks &chunks, const Chunk &chunk, int64_t kv_head, Results &results,
                Fetcher<typename Rows::Number> &fetcher) {
    int64_t group = a.heads / a.kv_heads, count = (chunk.end - chunk.begin) * group;
    for (int64_t begin = 0; begin < count; begin += TILE) {
        Query queries[TILE];
        int64_t here = std::min(TILE, count - begin);
        for (int64_t i = 0; i < here; i++) {
            int64_t part = chunk.begin + (begin + i) / group, head = kv_head * group + (begin + i) % group;
            int64_t at = chunks.places[part] * a.heads + head;
            queries[i] = {(const typename T::Number *)a.q + chunks.sequences[part] * a.q_stride + head * a.key_dim,
                          &results.largest[at], &results.total[at], &results.out[at * a.value_dim]};
        }
        auto attend = [&](auto number) {
            attend_chunk<T, Rows, decltype(number)::value>(a, chunk, kv_head, queries, begin ? nullptr : &fetcher);
        };
        switch (here) {
            case 4: attend(std::integral_constant<int, 4>{}); break;
            case 3: attend(std::integral_constant<int, 3>{}); break;
            case 2: attend(std::integral_constant<int, 2>{}); break;
            default: attend(std::integral_constant<int, 1>{});
        }
    }
}

// One head of a sequence: its chunks' results together.
template <class T, class Rows>
void join_chunks(const PagedDecode &a, const Chunks &chunks, int64_t sequence, int64_t head, Results &results) {
    int64_t begin = chunks.begins[sequence], end = chunks.begins[sequence + 1];
    float top = a.sinks ? a.sinks[head] : -INFINITY;
    for (int64_t c = begin; c < end; c++) top = std::max(top, results.largest[c * a.heads + head]);
    float share = a.sinks ? std::exp(a.sinks[head] - top) : 0.0f;
    for (int64_t c = begin; c < end; c++) {
        float &factor = results.largest[c * a.heads + head];  // from here on, what the chunk's largest score stands for
        factor = std::exp(factor - top);
        share += factor * results.total[c * a.heads + head];
    }
    typename T::Number *out = (typename T::Number *)a.out + (sequence * a.heads + head) * a.value_dim;
    for (int64_t d = 0; d < a.value_dim; d += PAIR) {
        Floats mixed = all(0.0f), other = all(0.0f);
        for (int64_t c = begin; c < end; c++) {
            const float *part = &results.out[(c * a.heads + head) * a.value_dim + d];
            mixed += results.largest[c * a.heads + head] * Float32::load(part);
            other += results.largest[c * a.heads + head] * Float32::load(part + LANES);
        }
        Rows::give_pair(out + d, mixed / share, other / share);
    }
}

template <class T, class Rows>
void decode(const PagedDecode &a) {
    Chunks chunks(a);
    Results results(int64_t(chunks.places.size()), a.heads, a.value_dim);
    int64_t pieces = int64_t(chunks.list.size()) * a.kv_heads;
    Pieces shared(pieces);
    parallel([&](int) {
        Fetcher<typename Rows::Number> fetcher;
        bool begun = false;
        auto add = [&](int64_t piece) {
            if (piece < pieces) add_rows<Rows>(fetcher, a, chunks.list[piece / a.kv_heads], piece % a.kv_heads);
        };
        shared.each([&](int64_t piece, int64_t next) {
            if (!begun) add(piece);
            add(next);
            for (int64_t row = 0; !begun && row < AHEAD; row += a.key_dim * sizeof(typename Rows::Number)) fetcher.step();
            begun = true;
            attend_all<T, Rows>(a, chunks, chunks.list[piece / a.kv_heads], piece % a.kv_heads, results, fetcher);
        });
    });
    spread(a.sequences * a.heads, a.sequences * a.heads * a.value_dim > SERIAL, [&](int64_t at) {
        join_chunks<T, Rows>(a, chunks, at / a.heads, at % a.heads, results);
    });
}

template <class T>
void paged_decode(const PagedDecode &a) {
    if (a.sequences == 0) return;
    a.rounded ? decode<T, RoundedRows<T>>(a) : decode<T, PlainRows<T>>(a);
}
