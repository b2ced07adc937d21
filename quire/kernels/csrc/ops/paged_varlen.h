// Attention of all of a step's queries in one call, in bfloat16: single queries as in paged_decode, longer spans with keys
// and values packed in panels of 32 outputs, so that scores and outputs are matrix products. Every sum has the order that
// paged_decode has: a query's result depends neither on how many other queries there are, nor on which of the two computed it.
#pragma once

#include "../panel_matmul.h"
#include "paged_decode.h"

// Spans are consecutive tokens of one sequence each, at its last positions; those that attend as in paged_decode come
// first.
struct PagedVarlen : AttentionArguments {  // queries and outputs of all tokens, block tables and lengths of all spans
    static constexpr const char *NAME = "paged_varlen";
    static constexpr const char *PARAMETERS[] = {"q",      "keys",  "values",  "out",    "block_tables", "seq_lens",
                                                 "counts", "sinks", "visible", "window", "scale",        "softcap"};
    static PagedVarlen check(const Tensor &q, const Tensor &keys, const Tensor &values, const Tensor &out,
                             const Tensor &block_tables, const Tensor &seq_lens, const Tensor &counts,
                             const OptionalTensor &sinks, const OptionalTensor &visible, int64_t window, float scale,
                             float softcap) {
        Size tokens("tokens"), spans("spans"), size("2 + spans");
        q.has_dtype({DType::BFLOAT16});
        auto arguments = AttentionArguments::check(q, keys, values, out, block_tables, seq_lens, sinks, window, scale,
                                                   softcap, tokens, spans);
        counts.has_dtype({DType::INT64}).has_shape(size).is_contiguous();
        require(size > spans + 1, "counts",
                "the number of single queries, the number of spans and the tokens of each are expected");
        Size bounds("bounds", 2);
        if (visible) visible->has_dtype({DType::INT32}).has_shape(tokens, bounds).is_contiguous();
        return {arguments, tokens, counts.data<int64_t>(), data_or_null<int32_t>(visible)};
    }
    void run() const;
    int64_t work() const { return UNLOCKED_WORK; }
    int64_t &row_count() { return tokens; }

    int64_t tokens;         // not read: `counts` says how many there are
    const int64_t *counts;  // how many spans are single queries, the number of spans, then the tokens of each
    const int32_t *visible;  // (tokens, 2) positions [begin, end) that queries of spans see beside earlier ones, or null
};
REGISTER_OP(PagedVarlen);

// The queries at the last `tokens` positions of one sequence.
struct PagedPrefill {
    const uint16_t *q;
    Pages keys, values;
    uint16_t *out;
    const int32_t *block_table;
    const float *sinks;  // (heads,) or null
    int64_t tokens, length, heads, kv_heads, q_stride, key_dim, value_dim, block_size, window;
    float scale, softcap;
    const int32_t *visible;  // (tokens, 2) or null

    // The first position that a query sees: of those up to its own in its window, and of those that are visible to it.
    int64_t first_of(int64_t row) const {
        int64_t first = window > 0 ? std::max<int64_t>(0, length - tokens + row + 1 - window) : 0;
        return visible ? std::max<int64_t>(0, std::min<int64_t>(first, visible[2 * row])) : first;
    }
    // The position behind the last one that it sees.
    int64_t end_of(int64_t row) const {
        int64_t end = length - tokens + row + 1;
        return visible ? std::min(length, std::max<int64_t>(end, visible[2 * row + 1])) : end;
    }
};

template <class Rows>
const typename Rows::Element *row_of(const PagedPrefill &a, const Pages &pages, int64_t kv_head, int64_t position) {
    return row_at<const typename Rows::Element>(pages, kv_head, a.block_table[position / a.block_size],
                                                position % a.block_size);
}

// Packs the keys of 32 positions as a panel of 32 outputs; 0 past the end.
template <class Rows>
void pack_keys(const PagedPrefill &a, int64_t kv_head, int64_t panel, uint16_t *out) {
    uint32_t *words = (uint32_t *)(out + panel * PANEL * a.key_dim);
    int64_t chunks = a.key_dim / PAIR, count = std::min(PANEL, a.length - panel * PANEL);
    const typename Rows::Element *rows[PANEL];
    for (int64_t at = 0; at < count; at++) rows[at] = row_of<Rows>(a, a.keys, kv_head, panel * PANEL + at);
    for (int64_t chunk = 0; chunk < chunks; chunk++)
        for (int64_t half = 0; half < PANEL; half += LANES) {
            Words lanes[LANES];
            for (int64_t i = 0; i < LANES; i++) lanes[i] = half + i < count ? Rows::load_pairs(rows[half + i], chunk * PAIR) : Words{};
            transpose(lanes);
            for (int64_t i = 0; i < LANES; i++)
                std::memcpy(words + (chunk * LANES + i) * PANEL + half, &lanes[i], sizeof *lanes);
        }
}

// Packs the values of 32 positions as 32 inputs of all panels of outputs; 0 past the end.
template <class Rows>
void pack_values(const PagedPrefill &a, int64_t kv_head, int64_t panel, int64_t positions, uint16_t *out) {
    for (int64_t position = panel * PANEL; position < (panel + 1) * PANEL; position += 2) {
        const typename Rows::Element *value[2] = {};
        for (int64_t i = 0; i < 2; i++)
            if (position + i < a.length) value[i] = row_of<Rows>(a, a.values, kv_head, position + i);
        for (int64_t d = 0; d < a.value_dim; d += PANEL) {
            Floats x[2] = {}, y[2] = {};
            for (int64_t i = 0; i < 2; i++)
                if (value[i]) Rows::load_pair(value[i], d, x[i], y[i]);
            Words low = pack_floats(x[0], x[1]), high = pack_floats(y[0], y[1]);
            interleave(low, high);  // they are of even and of odd elements
            uint32_t *words = (uint32_t *)(out + d * positions + position * PANEL);
            std::memcpy(words, &low, sizeof low), std::memcpy(words + LANES, &high, sizeof high);
        }
    }
}

// Products of rows of queries with the keys of a panel, summed as paged_decode does: words a fixed number apart are one
// partial sum, and partial sums are added in pairs, those half as many apart as there are first. They are those of a pass, for
// the panel's keys from the vector `first` on.
template <int rows, int first, int partial_sums>
class PanelScores {
    static constexpr int vectors = vectors_of_a_pass(rows);

  public:
    // q: the words of all rows, (words, rows).
    PanelScores(const uint32_t *q, const uint16_t *panel, int64_t words) : q_(q), panel_((const uint32_t *)panel), words_(words) {}

    // The sum of the partial sums `begin`, `begin` + step, `begin` + 2 * step ...
    template <int step = 1>
    INLINE TileSums<rows> sum(int begin = 0) const {
        if constexpr (step == partial_sums) return partial_sum(begin);
        else {
            TileSums<rows> a = sum<2 * step>(begin), b = sum<2 * step>(begin + step);
#pragma GCC unroll 12
            for (int row = 0; row < rows; row++)
                for (int v = first; v < first + vectors; v++) a.values[row][v] += b.values[row][v];
            return a;
        }
    }

  private:
    INLINE TileSums<rows> partial_sum(int begin) const {
        TileSums<rows> sums;
#pragma GCC unroll 12
        for (int row = 0; row < rows; row++)
            for (int v = first; v < first + vectors; v++) sums.values[row][v] = broadcast(0.0f);
        for (int64_t i = begin; i < words_; i += partial_sums)
            add_word<BFloat16, first>(sums, panel_ + i * PANEL, ColumnWords(q_ + i * rows, rows));
        return sums;
    }

    const uint32_t *q_, *panel_;
    int64_t words_;
};

constexpr int64_t SCORE_ROWS = std::min<int64_t>(6, MAX_ROWS);  // queries whose partial sums fit into registers, but for a few

// Where scores of 32 positions go, and what they are multiplied with.
struct ScoreRows {
    float *scores;
    int64_t stride;
    float scale;
    void store(int64_t row, Floats low, Floats high) const {
        Float32::store2(scores + row * stride, low * scale, high * scale);
    }
};

// Adds the weighted values of a chunk to 32 elements of outputs, each row by its factor.
struct ValueEpilogue {
    float *out;  // (rows, 32)
    const float *factors;
    void operator()(int row, Floats low, Floats high) const {
        float *to = out + row * PANEL;
        Float32::store2(to, Float32::load(to) + factors[row] * low, Float32::load(to + LANES) + factors[row] * high);
    }
};

// A head's keys and values in panels.
struct PackedHead {
    const uint16_t *keys, *values;
    int64_t positions;  // that the panels have room for
};

// Buffers for up to MAX_ROWS queries: scores and weights, `stride` apart; the largest scores and sums of weights of chunks.
struct RowBuffers {
    float *scores;
    uint16_t *weights;
    int64_t stride;
    float *largest, *totals;  // (chunks, MAX_ROWS)
};

// Scores of up to MAX_ROWS queries of one head with the keys at positions [begin, end), which are those of whole panels.
inline void score_rows(const PagedPrefill &a, int64_t head, int64_t row, int64_t rows, int64_t begin, int64_t end,
                       const PackedHead &packed, const RowBuffers &buffers) {
    alignas(64) uint32_t q[MAX_ROWS * MAX_DIM / 2];  // tiles of SCORE_ROWS rows: (words, rows)
    int64_t words = a.key_dim / 2;
    for (int64_t r = 0; r < rows; r++) {
        const uint16_t *query = a.q + (row + r) * a.q_stride + head * a.key_dim;
        int64_t tile = r / SCORE_ROWS * SCORE_ROWS, tile_rows = std::min(SCORE_ROWS, rows - tile);
        for (int64_t i = 0; i < words; i++) std::memcpy(q + tile * words + i * tile_rows + r - tile, query + 2 * i, sizeof *q);
    }
    for (int64_t position = begin; position < end; position += PANEL)
        for (int64_t r = 0; r < rows; r += SCORE_ROWS) {
            ScoreRows out{buffers.scores + r * buffers.stride + position, buffers.stride, a.scale};
            auto score = [&](auto number) {
                constexpr int count = decltype(number)::value, partial_sums = PARTIAL_SUMS<BFloat16>;
                const uint16_t *keys = packed.keys + position * a.key_dim;
                auto sums = PanelScores<count, 0, partial_sums>(q + r * words, keys, words).sum();
                if constexpr (vectors_of_a_pass(count) == 1) {
                    auto second = PanelScores<count, 1, partial_sums>(q + r * words, keys, words).sum();
                    for (int i = 0; i < count; i++) sums.values[i][1] = second.values[i][1];
                }
                for (int i = 0; i < count; i++) out.store(i, sums.values[i][0], sums.values[i][1]);
            };
            switch (std::min(SCORE_ROWS, rows - r)) {
                case 6: score(std::integral_constant<int, 6>{}); break;
                case 5: score(std::integral_constant<int, 5>{}); break;
                case 4: score(std::integral_constant<int, 4>{}); break;
                case 3: score(std::integral_constant<int, 3>{}); break;
                case 2: score(std::integral_constant<int, 2>{}); break;
                default: score(std::integral_constant<int, 1>{});
            }
        }
}

// Positions [begin, end) in the chunks of paged_decode. Calls body(begin of a chunk, its end, where its MAX_ROWS results are).
template <class Body>
void for_each_chunk(int64_t begin, int64_t end, Body body) {
    for (int64_t chunk = begin / CHUNK, at = 0; chunk * CHUNK < end; chunk++, at += MAX_ROWS)
        body(std::max(begin, chunk * CHUNK), std::min(end, (chunk + 1) * CHUNK), at);
}

// Attention of up to MAX_ROWS queries of one head: each chunk has softmax weights of its own, as in paged_decode.
inline void attend_rows(const PagedPrefill &a, int64_t head, int64_t row, int64_t rows, const PackedHead &packed,
                        const RowBuffers &buffers) {
    int64_t begin = a.first_of(row), end = a.end_of(row + rows - 1);
    for (int64_t r = 0; a.visible && r < rows; r++)
        begin = std::min(begin, a.first_of(row + r)), end = std::max(end, a.end_of(row + r));
    begin = begin / PANEL * PANEL, end = (end + PANEL - 1) / PANEL * PANEL;
    int64_t chunks = (end - 1) / CHUNK - begin / CHUNK + 1;
    score_rows(a, head, row, rows, begin, end, packed, buffers);
    float totals[MAX_ROWS];
    for (int64_t r = 0; r < rows; r++) {
        int64_t first = a.first_of(row + r), past = a.end_of(row + r);
        float *scores = buffers.scores + r * buffers.stride;
        if (a.softcap > 0.0f) scale_scores(scores, begin, end, 1.0f, a.softcap);
        for (int64_t i = begin; i < first; i++) scores[i] = -INFINITY;
        for (int64_t i = past; i < end; i++) scores[i] = -INFINITY;
        for_each_chunk(begin, end, [&](int64_t from, int64_t to, int64_t chunk) {
            float &largest = buffers.largest[chunk + r] = -INFINITY;
            buffers.totals[chunk + r] =
                softmax_weights<BFloat16>(scores, buffers.weights + r * buffers.stride, from, to, largest);
        });
        totals[r] = merge_factors(buffers.largest + r, buffers.totals + r, chunks, MAX_ROWS, a.sinks ? a.sinks + head : nullptr);
    }
    auto accumulate = panel_matmul_for<ValueEpilogue>(rows);
    for (int64_t d = 0; d < a.value_dim; d += PANEL) {
        alignas(64) float mixed[MAX_ROWS * PANEL] = {};
        for_each_chunk(begin, end, [&](int64_t from, int64_t to, int64_t chunk) {
            const uint16_t *value = packed.values + d * packed.positions + from * PANEL;
            accumulate(buffers.weights + from, buffers.stride, value, to - from,
                       {(const char *)(value + PANEL * packed.positions), LINE}, {mixed, buffers.largest + chunk});
        });
        for (int64_t r = 0; r < rows; r++) {
            uint16_t *out = a.out + ((row + r) * a.heads + head) * a.value_dim + d;
            BFloat16::store2(out, Float32::load(mixed + r * PANEL) / totals[r],
                             Float32::load(mixed + r * PANEL + LANES) / totals[r]);
        }
    }
}

// Keys and values of a sequence in panels, and buffers for scores and weights. Blocks that the next sequence has at the same
// positions are not packed again.
template <class Rows>
class PackedContext {
  public:
    // For sequences of up to `max_positions`. Everything is allocated here, as nothing may throw inside parallel regions.
    PackedContext(const PagedPrefill &a, int64_t max_positions)
        : positions_((max_positions + PANEL - 1) / PANEL * PANEL), stride_(positions_ | PANEL),  // never whole pages
          chunk_rows_((positions_ / CHUNK + 1) * MAX_ROWS),
          keys_(new uint16_t[a.kv_heads * positions_ * a.key_dim]),
          values_(new uint16_t[a.kv_heads * positions_ * a.value_dim]),
          scores_(new float[MAX_ROWS * stride_ * pool_threads()]),
          weights_(new uint16_t[MAX_ROWS * stride_ * pool_threads()]),
          chunks_(new float[2 * chunk_rows_ * pool_threads()]) {}

    void attend(const PagedPrefill &a) {
        pack(a);
        int64_t tiles = (a.tokens + MAX_ROWS - 1) / MAX_ROWS, group = a.heads / a.kv_heads, buffer = MAX_ROWS * stride_;
        WorkItems items(a.heads * tiles);
        run_parallel([&](int thread) {
            float *largest = &chunks_[2 * chunk_rows_ * thread];
            RowBuffers buffers{&scores_[buffer * thread], &weights_[buffer * thread], stride_, largest, largest + chunk_rows_};
            items.for_each([&](int64_t item, int64_t) {
                int64_t head = item / tiles, row = (tiles - 1 - item % tiles) * MAX_ROWS;  // the longest first
                attend_rows(a, head, row, std::min(MAX_ROWS, a.tokens - row), head_of(a, head / group), buffers);
            });
        });
    }

  private:
    PackedHead head_of(const PagedPrefill &a, int64_t kv_head) const {
        return {&keys_[kv_head * positions_ * a.key_dim], &values_[kv_head * positions_ * a.value_dim],
                positions_};
    }
    void pack(const PagedPrefill &a) {
        int64_t panels = (a.length + PANEL - 1) / PANEL;
        int64_t first = a.first_of(0);
        for (int64_t row = 1; a.visible && row < a.tokens; row++) first = std::min(first, a.first_of(row));
        first /= PANEL;
        int64_t begin = first_ <= first ? std::max(first, shared_panels(a)) : first;
        parallel_for(a.kv_heads * (panels - begin), true, [&](int64_t at) {
            int64_t kv_head = at / (panels - begin), panel = begin + at % (panels - begin);
            pack_keys<Rows>(a, kv_head, panel, &keys_[kv_head * positions_ * a.key_dim]);
            pack_values<Rows>(a, kv_head, panel, positions_, &values_[kv_head * positions_ * a.value_dim]);
        });
        block_table_ = a.block_table, length_ = a.length, first_ = first;
    }
    // Panels from the beginning whose blocks are those of the packed sequence.
    int64_t shared_panels(const PagedPrefill &a) const {
        int64_t length = std::min(length_, a.length), block = 0;
        while (block * a.block_size < length && a.block_table[block] == block_table_[block]) block++;
        return std::min(length, block * a.block_size) / PANEL;
    }

    int64_t positions_, stride_, chunk_rows_;
    std::unique_ptr<uint16_t[]> keys_, values_;
    std::unique_ptr<float[]> scores_;
    std::unique_ptr<uint16_t[]> weights_;
    std::unique_ptr<float[]> chunks_;
    const int32_t *block_table_ = nullptr;  // of the packed sequence
    int64_t length_ = 0, first_ = 0;        // its positions and its first packed panel
};

// Spans [begin, end), which begin at row `begin` of the queries, one after the other on all threads.
template <class Rows>
void prefill_spans(const AttentionArguments &a, const int64_t *tokens, const int32_t *visible, int64_t begin, int64_t end) {
    auto span = [&](int64_t i, int64_t row) -> PagedPrefill {
        return {(const uint16_t *)a.q + row * a.q_stride, a.keys, a.values,
                (uint16_t *)a.out + row * a.heads * a.value_dim, a.block_tables + i * a.table_stride, a.sinks, tokens[i],
                a.seq_lens[i], a.heads, a.kv_heads, a.q_stride, a.key_dim, a.value_dim, a.block_size, a.window, a.scale,
                a.softcap, visible ? visible + 2 * row : nullptr};
    };
    PackedContext<Rows> context(span(begin, begin), *std::max_element(a.seq_lens + begin, a.seq_lens + end));
    for (int64_t i = begin, row = begin; i < end; row += tokens[i++]) context.attend(span(i, row));
}

inline void PagedVarlen::run() const {
    const int64_t spans = counts[1], *span_tokens = counts + 2;
    AttentionArguments single = *this;
    single.sequences = counts[0];
    paged_decode<BFloat16>(single);
    if (single.sequences == spans) return;
    int8 ? prefill_spans<Int8Rows<BFloat16>>(*this, span_tokens, visible, single.sequences, spans)
         : prefill_spans<PlainRows<BFloat16>>(*this, span_tokens, visible, single.sequences, spans);
}
