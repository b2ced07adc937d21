// Attention of many queries of one sequence over pages, in bfloat16: keys and values are laid out as the weights of linear
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

template <class Rows>
void prefill(const PagedPrefill &a) {
    int64_t panels = (a.length + PANEL - 1) / PANEL, positions = panels * PANEL, group = a.heads / a.kv_heads;
    int64_t tiles = (a.tokens + MOST_ROWS - 1) / MOST_ROWS;
    // Nothing is allocated inside the parallel region, out of which no exception may come.
    std::unique_ptr<uint16_t[]> keys(new uint16_t[a.kv_heads * positions * a.key_dim]);
    std::unique_ptr<uint16_t[]> values(new uint16_t[a.kv_heads * positions * a.value_dim]);
    int64_t stride = positions | PANEL, room = MOST_ROWS * stride;  // never whole pages
    std::unique_ptr<float[]> all_scores(new float[room * pool_threads()]);
    std::unique_ptr<uint16_t[]> all_weights(new uint16_t[room * pool_threads()]);
    int64_t hidden = a.window > 0 ? std::max<int64_t>(0, a.length - a.tokens + 1 - a.window) / PANEL : 0;
    spread(a.kv_heads * (panels - hidden), true, [&](int64_t at) {
        int64_t kv_head = at / (panels - hidden), panel = hidden + at % (panels - hidden);
        pack_keys<Rows>(a, kv_head, panel, &keys[kv_head * positions * a.key_dim]);
        pack_values<Rows>(a, kv_head, panel, positions, &values[kv_head * positions * a.value_dim]);
    });
    Pieces pieces(a.heads * tiles);
    parallel([&](int thread) {
        pieces.each([&](int64_t at, int64_t) {
            int64_t head = at / tiles, row = (tiles - 1 - at % tiles) * MOST_ROWS;  // the longest first
            attend_rows(a, head, row, std::min(MOST_ROWS, a.tokens - row), positions, stride,
                        &keys[head / group * positions * a.key_dim], &values[head / group * positions * a.value_dim],
                        &all_scores[room * thread], &all_weights[room * thread]);
        });
    });
}

inline void paged_prefill(const PagedPrefill &a) {
    a.rounded ? prefill<RoundedRows<BFloat16>>(a) : prefill<PlainRows<BFloat16>>(a);
}

// Spans one after the other, so that each has all threads and panels of its own keys.
inline void paged_spans(const PagedSpans &a) {
    const int64_t spans = a.counts[0], *tokens = a.counts + 1;
    PagedDecode single = a.all;
    single.sequences = std::find_if(tokens, tokens + spans, [](int64_t count) { return count > 1; }) - tokens;
    paged_decode<BFloat16>(single);
    int64_t row = single.sequences;
    for (int64_t i = single.sequences; i < spans; row += tokens[i++])
        paged_prefill({(const uint16_t *)single.q + row * single.q_stride, single.keys, single.values,
                       (uint16_t *)single.out + row * single.heads * single.value_dim, single.tables + i * single.table_stride,
                       single.sinks, tokens[i], single.lengths[i], single.heads, single.kv_heads, single.q_stride,
                       single.key_dim, single.value_dim, single.block_size, single.window, single.scale, single.softcap,
                       single.rounded});
}
