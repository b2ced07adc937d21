// Attention of many queries of a sequence over pages, in bfloat16: keys and values are laid out as the weights of linear
// layers (see linear.h), of which scores and outputs are then the results. A query's numbers do not depend on how many
// come with it.
#pragma once

// The two inputs of one output as they lie in a panel.
inline uint32_t both(uint16_t first, uint16_t second) { return uint32_t(first) | uint32_t(second) << 16; }

// A row's numbers, in `room` if they have to be computed.
template <class Rows>
const uint16_t *read_row(const PagedPrefill &a, const Pages &pages, int64_t kv_head, int64_t position, int64_t dim,
                         uint16_t *room) {
    typedef const typename Rows::Number Number;
    Number *row = row_of<Number>(pages, kv_head, a.table[position / a.block_size], position % a.block_size);
    if constexpr (Rows::FRONT == 0) return row;
    else {
        float scale = Rows::scale(row);
        for (int64_t i = 0; i < dim; i += PAIR) {
            Floats x, y;
            Rows::load_pair(row + i, x, y);
            Rows::give_pair(room + i, x * scale, y * scale);
        }
        return room;
    }
}

// Keys of 32 positions as a panel of 32 outputs; behind the end they are 0.
template <class Rows>
void pack_keys(const PagedPrefill &a, int64_t kv_head, int64_t panel, uint16_t *out) {
    uint32_t *words = (uint32_t *)(out + panel * PANEL * a.key_dim);
    for (int64_t at = 0; at < PANEL; at++) {
        int64_t position = panel * PANEL + at;
        if (position >= a.length) {
            for (int64_t i = 0; i < a.key_dim / 2; i++) words[i * PANEL + at] = 0;
            continue;
        }
        uint16_t room[MOST_DIM];
        const uint16_t *key = read_row<Rows>(a, a.keys, kv_head, position, a.key_dim, room);
        for (int64_t i = 0; i < a.key_dim / 2; i++) words[i * PANEL + at] = both(key[2 * i], key[2 * i + 1]);
    }
}

// Values of 32 positions as that many inputs of all panels of outputs.
template <class Rows>
void pack_values(const PagedPrefill &a, int64_t kv_head, int64_t panel, int64_t positions, uint16_t *out) {
    uint16_t room[2][MOST_DIM];
    auto value = [&](int64_t position) -> const uint16_t * {
        if (position >= a.length) return nullptr;
        return read_row<Rows>(a, a.values, kv_head, position, a.value_dim, room[position % 2]);
    };
    for (int64_t position = panel * PANEL; position < (panel + 1) * PANEL; position += 2) {
        const uint16_t *first = value(position), *second = value(position + 1);
        for (int64_t d = 0; d < a.value_dim; d += PANEL) {
            uint32_t *words = (uint32_t *)(out + d * positions + position * PANEL);
            for (int64_t i = 0; i < PANEL; i++)
                words[i] = both(first ? first[d + i] : 0, second ? second[d + i] : 0);
        }
    }
}

// Where scores of 32 positions belong.
struct Scores {
    float *scores;
    int64_t stride;
    float scale;
    void operator()(int row, Floats low, Floats high) const {
        Float32::store_both(scores + row * stride, low * scale, high * scale);
    }
};

// Where 32 numbers of outputs belong, still without their rows' share.
struct WeightedValues {
    uint16_t *out;
    int64_t stride;
    const float *shares;
    void operator()(int row, Floats low, Floats high) const {
        BFloat16::store_both(out + row * stride, low * shares[row], high * shares[row]);
    }
};

// Up to MOST_ROWS queries of one head. Rows of scores and of weights lie `stride` apart.
inline void attend_rows(const PagedPrefill &a, int64_t head, int64_t row, int64_t rows, int64_t positions, int64_t stride,
                        const uint16_t *keys, const uint16_t *values, float *scores, uint16_t *weights) {
    int64_t at = a.length - a.tokens + row;
    int64_t begin = a.window > 0 ? std::max<int64_t>(0, at + 1 - a.window) / PANEL * PANEL : 0;
    int64_t end = (at + rows + PANEL - 1) / PANEL * PANEL;
    uint16_t q[MOST_ROWS * MOST_DIM];
    for (int64_t r = 0; r < rows; r++)
        std::memcpy(q + r * a.key_dim, (const uint16_t *)a.q + (row + r) * a.q_stride + head * a.key_dim, a.key_dim * sizeof *q);
    auto score_them = multiply_rows<Scores>(rows);
    for (int64_t position = begin; position < end; position += PANEL) {
        const uint16_t *key = keys + position * a.key_dim;
        score_them(q, a.key_dim, key, a.key_dim, {(const char *)(key + PANEL * a.key_dim), LINE},
                   {scores + position, stride, a.scale});
    }
    float shares[MOST_ROWS];
    for (int64_t r = 0; r < rows; r++) {
        int64_t first = a.window > 0 ? std::max<int64_t>(0, at + r + 1 - a.window) : 0;
        float *own = scores + r * stride, top = a.sinks ? a.sinks[head] : -INFINITY;
        if (a.softcap > 0.0f) scale_scores(own, begin, end, 1.0f, a.softcap);
        for (int64_t i = begin; i < first; i++) own[i] = -INFINITY;
        for (int64_t i = at + r + 1; i < end; i++) own[i] = -INFINITY;
        float total = weigh<BFloat16>(own, weights + r * stride, begin, end, top);
        shares[r] = 1.0f / (a.sinks ? total + std::exp(a.sinks[head] - top) : total);
    }
    auto gather_them = multiply_rows<WeightedValues>(rows);
    uint16_t *out = (uint16_t *)a.out + (row * a.heads + head) * a.value_dim;
    for (int64_t d = 0; d < a.value_dim; d += PANEL) {
        const uint16_t *value = values + d * positions + begin * PANEL;
        gather_them(weights + begin, stride, value, end - begin, {(const char *)(value + PANEL * positions), LINE},
                    {out + d, a.heads * a.value_dim, shares});
    }
}

// Keys and values of a sequence in panels, and room for what attention needs beside them. Of the next sequence only that
// is packed which does not lie in the same blocks at the same positions.
template <class Rows>
class PackedWeight {
  public:
    // For sequences of up to so many positions.
    PackedWeight(const PagedPrefill &a, int64_t most_positions)
        : positions_((most_positions + PANEL - 1) / PANEL * PANEL), stride_(positions_ | PANEL),  // never whole pages
          keys_(new uint16_t[a.kv_heads * positions_ * a.key_dim]), values_(new uint16_t[a.kv_heads * positions_ * a.value_dim]),
          scores_(new float[MOST_ROWS * stride_ * pool_threads()]), weights_(new uint16_t[MOST_ROWS * stride_ * pool_threads()]) {}

    // Nothing is allocated inside parallel regions, out of which no exception may come.
    void attend(const PagedPrefill &a) {
        pack(a);
        int64_t tiles = (a.tokens + MOST_ROWS - 1) / MOST_ROWS, group = a.heads / a.kv_heads, room = MOST_ROWS * stride_;
        Pieces pieces(a.heads * tiles);
        parallel([&](int thread) {
            pieces.each([&](int64_t at, int64_t) {
                int64_t head = at / tiles, row = (tiles - 1 - at % tiles) * MOST_ROWS;  // the longest first
                attend_rows(a, head, row, std::min(MOST_ROWS, a.tokens - row), positions_, stride_,
                            &keys_[head / group * positions_ * a.key_dim], &values_[head / group * positions_ * a.value_dim],
                            &scores_[room * thread], &weights_[room * thread]);
            });
        });
    }

  private:
    void pack(const PagedPrefill &a) {
        int64_t panels = (a.length + PANEL - 1) / PANEL;
        int64_t first = a.window > 0 ? std::max<int64_t>(0, a.length - a.tokens + 1 - a.window) / PANEL : 0;
        int64_t begin = known_from_ <= first ? std::max(first, known_of(a)) : first;
        spread(a.kv_heads * (panels - begin), true, [&](int64_t at) {
            int64_t kv_head = at / (panels - begin), panel = begin + at % (panels - begin);
            pack_keys<Rows>(a, kv_head, panel, &keys_[kv_head * positions_ * a.key_dim]);
            pack_values<Rows>(a, kv_head, panel, positions_, &values_[kv_head * positions_ * a.value_dim]);
        });
        table_ = a.table, length_ = a.length, known_from_ = first;
    }
    // Up to which panel those of the sequence before are this one's too.
    int64_t known_of(const PagedPrefill &a) const {
        int64_t both = std::min(length_, a.length), block = 0;
        while (block * a.block_size < both && a.table[block] == table_[block]) block++;
        return std::min(both, block * a.block_size) / PANEL;
    }

    int64_t positions_, stride_;
    std::unique_ptr<uint16_t[]> keys_, values_;
    std::unique_ptr<float[]> scores_;
    std::unique_ptr<uint16_t[]> weights_;
    const int32_t *table_ = nullptr;          // of the sequence that is packed
    int64_t length_ = 0, known_from_ = 0;     // its positions, and its first panel
};

// The longer ones of some spans, which begin at a row of the queries. Each has all threads.
template <class Rows>
void prefill_spans(const PagedDecode &all, const int64_t *tokens, int64_t begin, int64_t end) {
    auto span = [&](int64_t i, int64_t row) -> PagedPrefill {
        return {(const uint16_t *)all.q + row * all.q_stride, all.keys, all.values,
                (uint16_t *)all.out + row * all.heads * all.value_dim, all.tables + i * all.table_stride, all.sinks, tokens[i],
                all.lengths[i], all.heads, all.kv_heads, all.q_stride, all.key_dim, all.value_dim, all.block_size, all.window,
                all.scale, all.softcap, all.rounded};
    };
    PackedWeight<Rows> panels(span(begin, begin), *std::max_element(all.lengths + begin, all.lengths + end));
    for (int64_t i = begin, row = begin; i < end; row += tokens[i++]) panels.attend(span(i, row));
}

inline void paged_varlen(const PagedVarlen &a) {
    const int64_t spans = a.counts[0], *tokens = a.counts + 1;
    PagedDecode all = a.all;
    all.sequences = std::find_if(tokens, tokens + spans, [](int64_t count) { return count > 1; }) - tokens;
    paged_decode<BFloat16>(all);
    if (all.sequences == spans) return;
    a.all.rounded ? prefill_spans<RoundedRows<BFloat16>>(all, tokens, all.sequences, spans)
                  : prefill_spans<PlainRows<BFloat16>>(all, tokens, all.sequences, spans);
}
