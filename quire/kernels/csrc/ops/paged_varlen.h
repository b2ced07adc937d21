// Attention of all of a step's queries in one call, in bfloat16: single queries as in paged_decode, longer spans with keys
// and values packed as weights of linear layers (see panel_matmul.h), so that scores and outputs are matrix products.
// A query's result does not depend on how many other queries there are.
#pragma once

#include "../panel_matmul.h"
#include "paged_decode.h"

// Spans are consecutive tokens of one sequence each, at its last positions; those that attend as in paged_decode come
// first.
struct PagedVarlen : AttentionArguments {  // queries and outputs of all tokens, block tables and lengths of all spans
    static constexpr const char *NAME = "paged_varlen";
    static constexpr const char *PARAMETERS[] = {"q",      "keys",  "values", "out",    "block_tables", "seq_lens",
                                                 "counts", "sinks", "window", "scale", "softcap"};
    static PagedVarlen check(const Tensor &q, const Tensor &keys, const Tensor &values, const Tensor &out,
                             const Tensor &block_tables, const Tensor &seq_lens, const Tensor &counts,
                             const OptionalTensor &sinks, int64_t window, float scale, float softcap) {
        Size tokens("tokens"), spans("spans"), size("2 + spans");
        q.has_dtype({DType::BFLOAT16});
        auto arguments = AttentionArguments::check(q, keys, values, out, block_tables, seq_lens, sinks, window, scale,
                                                   softcap, tokens, spans);
        counts.has_dtype({DType::INT64}).has_shape(size).is_contiguous();
        require(size > spans + 1, "counts",
                "the number of single queries, the number of spans and the tokens of each are expected");
        return {arguments, tokens, counts.data<int64_t>()};
    }
    void run() const;
    int64_t work() const { return UNLOCKED_WORK; }
    int64_t &row_count() { return tokens; }

    int64_t tokens;         // not read: `counts` says how many there are
    const int64_t *counts;  // how many spans are single queries, the number of spans, then the tokens of each
};
REGISTER_OP(PagedVarlen);

// The queries at the last `tokens` positions of one sequence.
struct PagedPrefill {
    bool int8;  // pages
    const uint16_t *q;
    Pages keys, values;
    uint16_t *out;
    const int32_t *block_table;
    const float *sinks;  // (heads,) or null
    int64_t tokens, length, heads, kv_heads, q_stride, key_dim, value_dim, block_size, window;
    float scale, softcap;
};

// Two inputs' weights as they are in a panel.
inline uint32_t pack_pair(uint16_t first, uint16_t second) { return uint32_t(first) | uint32_t(second) << 16; }

// One row as bfloat16: in its page, or converted into `buffer`.
template <class Rows>
const uint16_t *read_row(const PagedPrefill &a, const Pages &pages, int64_t kv_head, int64_t position, int64_t dim,
                         uint16_t *buffer) {
    typedef const typename Rows::Element Element;
    Element *row = row_at<Element>(pages, kv_head, a.block_table[position / a.block_size], position % a.block_size);
    if constexpr (Rows::PREFIX == 0) return row;
    else {
        float scale = Rows::scale(row);
        for (int64_t i = 0; i < dim; i += PAIR) {
            Floats x, y;
            Rows::load_pair(row + i, x, y);
            Rows::store_output_pair(buffer + i, x * scale, y * scale);
        }
        return buffer;
    }
}

// Packs the keys of 32 positions as a panel of 32 outputs; 0 past the end.
template <class Rows>
void pack_keys(const PagedPrefill &a, int64_t kv_head, int64_t panel, uint16_t *out) {
    uint32_t *words = (uint32_t *)(out + panel * PANEL * a.key_dim);
    for (int64_t at = 0; at < PANEL; at++) {
        int64_t position = panel * PANEL + at;
        if (position >= a.length) {
            for (int64_t i = 0; i < a.key_dim / 2; i++) words[i * PANEL + at] = 0;
            continue;
        }
        uint16_t buffer[MAX_DIM];
        const uint16_t *key = read_row<Rows>(a, a.keys, kv_head, position, a.key_dim, buffer);
        for (int64_t i = 0; i < a.key_dim / 2; i++) words[i * PANEL + at] = pack_pair(key[2 * i], key[2 * i + 1]);
    }
}

// Packs the values of 32 positions as 32 inputs of all panels of outputs; 0 past the end.
template <class Rows>
void pack_values(const PagedPrefill &a, int64_t kv_head, int64_t panel, int64_t positions, uint16_t *out) {
    uint16_t buffers[2][MAX_DIM];
    auto value = [&](int64_t position) -> const uint16_t * {
        if (position >= a.length) return nullptr;
        return read_row<Rows>(a, a.values, kv_head, position, a.value_dim, buffers[position % 2]);
    };
    for (int64_t position = panel * PANEL; position < (panel + 1) * PANEL; position += 2) {
        const uint16_t *first = value(position), *second = value(position + 1);
        for (int64_t d = 0; d < a.value_dim; d += PANEL) {
            uint32_t *words = (uint32_t *)(out + d * positions + position * PANEL);
            for (int64_t i = 0; i < PANEL; i++)
                words[i] = pack_pair(first ? first[d + i] : 0, second ? second[d + i] : 0);
        }
    }
}

// Scales scores of 32 positions and stores them.
struct ScoreEpilogue {
    float *scores;
    int64_t stride;
    float scale;
    void operator()(int row, Floats low, Floats high) const {
        Float32::store2(scores + row * stride, low * scale, high * scale);
    }
};

// Normalizes 32 elements of outputs by their rows' factors and stores them.
struct ValueEpilogue {
    uint16_t *out;
    int64_t stride;
    const float *factors;
    void operator()(int row, Floats low, Floats high) const {
        BFloat16::store2(out + row * stride, low * factors[row], high * factors[row]);
    }
};

// Attention of up to MAX_ROWS queries of one head. stride: of rows of scores and of weights.
inline void attend_rows(const PagedPrefill &a, int64_t head, int64_t row, int64_t rows, int64_t positions, int64_t stride,
                        const uint16_t *keys, const uint16_t *values, float *scores, uint16_t *weights) {
    int64_t at = a.length - a.tokens + row;
    int64_t begin = a.window > 0 ? std::max<int64_t>(0, at + 1 - a.window) / PANEL * PANEL : 0;
    int64_t end = (at + rows + PANEL - 1) / PANEL * PANEL;
    uint16_t q[MAX_ROWS * MAX_DIM];
    for (int64_t r = 0; r < rows; r++)
        std::memcpy(q + r * a.key_dim, a.q + (row + r) * a.q_stride + head * a.key_dim, a.key_dim * sizeof *q);
    auto score = panel_matmul_for<ScoreEpilogue>(rows);
    for (int64_t position = begin; position < end; position += PANEL) {
        const uint16_t *key = keys + position * a.key_dim;
        score(q, a.key_dim, key, a.key_dim, {(const char *)(key + PANEL * a.key_dim), LINE},
              {scores + position, stride, a.scale});
    }
    float factors[MAX_ROWS];
    for (int64_t r = 0; r < rows; r++) {
        int64_t first = a.window > 0 ? std::max<int64_t>(0, at + r + 1 - a.window) : 0;
        float *own = scores + r * stride, top = a.sinks ? a.sinks[head] : -INFINITY;
        if (a.softcap > 0.0f) scale_scores(own, begin, end, 1.0f, a.softcap);
        for (int64_t i = begin; i < first; i++) own[i] = -INFINITY;
        for (int64_t i = at + r + 1; i < end; i++) own[i] = -INFINITY;
        float total = softmax_weights<BFloat16>(own, weights + r * stride, begin, end, top);
        factors[r] = 1.0f / (a.sinks ? total + std::exp(a.sinks[head] - top) : total);
    }
    auto accumulate = panel_matmul_for<ValueEpilogue>(rows);
    uint16_t *out = a.out + (row * a.heads + head) * a.value_dim;
    for (int64_t d = 0; d < a.value_dim; d += PANEL) {
        const uint16_t *value = values + d * positions + begin * PANEL;
        accumulate(weights + begin, stride, value, end - begin, {(const char *)(value + PANEL * positions), LINE},
                   {out + d, a.heads * a.value_dim, factors});
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
          keys_(new uint16_t[a.kv_heads * positions_ * a.key_dim]),
          values_(new uint16_t[a.kv_heads * positions_ * a.value_dim]),
          scores_(new float[MAX_ROWS * stride_ * pool_threads()]),
          weights_(new uint16_t[MAX_ROWS * stride_ * pool_threads()]) {}

    void attend(const PagedPrefill &a) {
        pack(a);
        int64_t tiles = (a.tokens + MAX_ROWS - 1) / MAX_ROWS, group = a.heads / a.kv_heads, buffer = MAX_ROWS * stride_;
        WorkItems items(a.heads * tiles);
        run_parallel([&](int thread) {
            items.for_each([&](int64_t item, int64_t) {
                int64_t head = item / tiles, row = (tiles - 1 - item % tiles) * MAX_ROWS;  // the longest first
                attend_rows(a, head, row, std::min(MAX_ROWS, a.tokens - row), positions_, stride_,
                            &keys_[head / group * positions_ * a.key_dim], &values_[head / group * positions_ * a.value_dim],
                            &scores_[buffer * thread], &weights_[buffer * thread]);
            });
        });
    }

  private:
    void pack(const PagedPrefill &a) {
        int64_t panels = (a.length + PANEL - 1) / PANEL;
        int64_t first = a.window > 0 ? std::max<int64_t>(0, a.length - a.tokens + 1 - a.window) / PANEL : 0;
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

    int64_t positions_, stride_;
    std::unique_ptr<uint16_t[]> keys_, values_;
    std::unique_ptr<float[]> scores_;
    std::unique_ptr<uint16_t[]> weights_;
    const int32_t *block_table_ = nullptr;  // of the packed sequence
    int64_t length_ = 0, first_ = 0;        // its positions and its first packed panel
};

// Spans [begin, end), which begin at row `begin` of the queries, one after the other on all threads.
template <class Rows>
void prefill_spans(const AttentionArguments &a, const int64_t *tokens, int64_t begin, int64_t end) {
    auto span = [&](int64_t i, int64_t row) -> PagedPrefill {
        return {a.int8, (const uint16_t *)a.q + row * a.q_stride, a.keys, a.values,
                (uint16_t *)a.out + row * a.heads * a.value_dim, a.block_tables + i * a.table_stride, a.sinks, tokens[i],
                a.seq_lens[i], a.heads, a.kv_heads, a.q_stride, a.key_dim, a.value_dim, a.block_size, a.window, a.scale,
                a.softcap};
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
    int8 ? prefill_spans<Int8Rows<BFloat16>>(*this, span_tokens, single.sequences, spans)
         : prefill_spans<PlainRows<BFloat16>>(*this, span_tokens, single.sequences, spans);
}
