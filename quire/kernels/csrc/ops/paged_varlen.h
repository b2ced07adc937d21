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
    int64_t tokens, length, heads, kv_heads, q_stride, out_stride, key_dim, value_dim, block_size, window;
    float scale, softcap;
    const int32_t *visible;  // (tokens, 2) or null

    // The same of one head of keys and values in pages of Element, and of the heads that share it.
    template <class Element>
    PagedPrefill of_head(int64_t kv_head) const {
        PagedPrefill part = *this;
        part.heads = heads / kv_heads, part.kv_heads = 1;
        int64_t first = kv_head * part.heads;
        part.q += first * key_dim, part.out += first * value_dim;
        part.keys.data = row_at<Element>(keys, kv_head, 0, 0), part.values.data = row_at<Element>(values, kv_head, 0, 0);
        if (sinks) part.sinks += first;
        return part;
    }
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

// Words that two elements of a packed query take: without products of pairs of bfloat16 each is a float, the second one first.
constexpr int64_t QUERY_WORDS = BF16_DOT ? 1 : 2;

// Products of rows of queries with the keys of a panel, summed as paged_decode does: words a fixed number apart are one
// partial sum, and partial sums are added in pairs, those half as many apart as there are first. They are those of a pass, for
// the panel's keys from the vector `first` on.
template <int rows, int first>
class PanelScores {
    static constexpr int vectors = vectors_of_a_pass(rows), partial_sums = PARTIAL_SUMS<BFloat16>;

  public:
    // q: see QUERY_WORDS.
    PanelScores(const uint32_t *q, const uint16_t *panel, int64_t words) : q_(q), panel_((const uint32_t *)panel), words_(words) {}

    INLINE TileSums<rows> sum() const {
        if constexpr (BF16_DOT) return sum_of<1>(0);
        else return sum_in_turns();
    }

  private:
    // The sum of the partial sums `begin`, `begin` + step, `begin` + 2 * step ...
    template <int step>
    INLINE TileSums<rows> sum_of(int begin) const {
        if constexpr (step == partial_sums) return partial_sum(begin);
        else {
            TileSums<rows> a = sum_of<2 * step>(begin), b = sum_of<2 * step>(begin + step);
            add(a, b);
            return a;
        }
    }

    // The same of all: of many partial sums the compiler would make code that the processor's caches have no room for.
    // What waits for its other half is in memory.
    INLINE TileSums<rows> sum_in_turns() const {
        TileSums<rows> waiting[__builtin_ctz(partial_sums) + 1];
        for (int turn = 0; turn < partial_sums; turn++) {
            int begin = 0, level = 0;
            for (int bit = 1; bit < partial_sums; bit *= 2) begin += turn & bit ? partial_sums / (2 * bit) : 0;
            TileSums<rows> sums = partial_sum(begin);
            for (; turn >> level & 1; level++) add(sums, waiting[level]);
            waiting[level] = sums;
        }
        return waiting[std::size(waiting) - 1];
    }

    static INLINE void add(TileSums<rows> &a, const TileSums<rows> &b) {
#pragma GCC unroll 12
        for (int row = 0; row < rows; row++)
            for (int v = first; v < first + vectors; v++) a.values[row][v] += b.values[row][v];
    }

    INLINE TileSums<rows> partial_sum(int begin) const {
        TileSums<rows> sums;
#pragma GCC unroll 12
        for (int row = 0; row < rows; row++)
            for (int v = first; v < first + vectors; v++) sums.values[row][v] = broadcast(0.0f);
        for (int64_t i = begin; i < words_; i += partial_sums) {
            const uint32_t *keys = panel_ + i * PANEL, *q = q_ + i * QUERY_WORDS * rows;
            if constexpr (BF16_DOT) add_word<BFloat16, first>(sums, keys, ColumnWords(q, rows));
            else add_elements(sums, keys, (const float *)q);
        }
        return sums;
    }

    // add_word with elements of queries that are floats already.
    static INLINE void add_elements(TileSums<rows> &sums, const uint32_t *keys, const float *q) {
        for (int element = 1; element >= 0; element--, q += rows) {
            Floats key[vectors];
            for (int v = 0; v < vectors; v++) {
                Words both = load_words(keys + (first + v) * LANES);
                key[v] = (Floats)(element ? both & 0xffff0000 : both << 16);
            }
#pragma GCC unroll 12
            for (int row = 0; row < rows; row++) {
                Floats x = broadcast(q[row]);
                for (int v = 0; v < vectors; v++) sums.values[row][first + v] += key[v] * x;
            }
        }
    }

    const uint32_t *q_, *panel_;
    int64_t words_;
};

constexpr int64_t CHUNK_STRIDE = CHUNK + LANES;  // elements between rows: never whole pages
#if defined(HAVE_AVX2)
constexpr int64_t BF16_TILE_ROWS = 4;  // queries of a tile; a fifth one's sums would leave registers when they are added
#else
constexpr int64_t BF16_TILE_ROWS = MAX_ROWS;
#endif
constexpr int64_t SCORE_ROWS = std::min<int64_t>(6, BF16_TILE_ROWS);  // queries whose partial sums fit into registers, but for a few

// Where scores of 32 positions go, and what they are multiplied with.
struct ScoreRows {
    float *scores;
    float scale;
    void store(int64_t row, Floats low, Floats high) const {
        Float32::store2(scores + row * CHUNK_STRIDE, low * scale, high * scale);
    }
};

// Where 32 elements of the weighted values of a chunk go, those of rows `stride` apart.
struct ValueEpilogue {
    float *out;
    int64_t stride;
    const MergeFactors *factors;  // of each row
    void operator()(int row, Floats low, Floats high) const { add_weighted(out + row * stride, factors[row], low, high); }
};

// Up to `most` queries of one head, and the positions of whole panels that they see.
struct RowTile {
    int64_t head, row, rows, begin, end;
    RowTile(const PagedPrefill &a, int64_t head, int64_t row, int64_t most)
        : head(head), row(row), rows(std::min(most, a.tokens - row)), begin(a.first_of(row)), end(a.end_of(row + rows - 1)) {
        for (int64_t r = 0; a.visible && r < rows; r++)
            begin = std::min(begin, a.first_of(row + r)), end = std::max(end, a.end_of(row + r));
        begin = begin / PANEL * PANEL, end = (end + PANEL - 1) / PANEL * PANEL;
    }
    int64_t first_chunk() const { return begin / CHUNK; }
    int64_t last_chunk() const { return (end - 1) / CHUNK; }
};

// Positions [origin + from, origin + to) of a chunk, whole panels.
struct ChunkRange {
    int64_t origin, from, to;
};

// What the queries of a tile have found in earlier chunks: sums of weights, and weighted values (rows, value_dim).
struct TileResults {
    SoftmaxSum *sums;
    float *out;
};

// Hides the scores of a row of a tile that it does not see.
inline void hide_scores(const PagedPrefill &a, int64_t row, const ChunkRange &range, float *scores) {
    int64_t first = a.first_of(row) - range.origin, past = a.end_of(row) - range.origin;
    for (int64_t i = range.from; i < std::min(first, range.to); i++) scores[i] = -INFINITY;
    for (int64_t i = std::max(range.from, past); i < range.to; i++) scores[i] = -INFINITY;
}

// A context's keys and values in panels of bfloat16, and attention to them with products of bfloat16.
template <class Rows>
class FloatPanels {
  public:
    typedef typename Rows::Element Element;  // of pages
    static constexpr int64_t TILE_ROWS = BF16_TILE_ROWS;

    // With room for so many positions, whole panels.
    FloatPanels(const PagedPrefill &a, int64_t positions)
        : positions_(positions), keys_(a.kv_heads * positions * a.key_dim), values_(a.kv_heads * positions * a.value_dim) {}

    void pack(const PagedPrefill &a, int64_t kv_head, int64_t panel) {
        pack_keys<Rows>(a, kv_head, panel, keys_of(a, kv_head));
        pack_values<Rows>(a, kv_head, panel, positions_, values_of(a, kv_head));
    }

    // The queries of a thread's tiles.
    class Tiles {
      public:
        Tiles(const PagedPrefill &a, int64_t tiles) : q_(new uint32_t[tiles * TILE_ROWS * a.key_dim / 2 * QUERY_WORDS]) {}

        void pack_queries(const PagedPrefill &a, const RowTile &tile, int64_t index) {
            int64_t words = a.key_dim / 2;
            for (int64_t r = 0; r < tile.rows; r++) {
                const uint16_t *query = a.q + (tile.row + r) * a.q_stride + tile.head * a.key_dim;
                int64_t part = r / SCORE_ROWS * SCORE_ROWS, part_rows = std::min(SCORE_ROWS, tile.rows - part);
                uint32_t *out = q_of(a, index) + part * words * QUERY_WORDS + r - part;
                for (int64_t i = 0; i < words; i++, out += QUERY_WORDS * part_rows) {
                    uint32_t word;
                    std::memcpy(&word, query + 2 * i, sizeof word);
                    if constexpr (BF16_DOT) *out = word;
                    else *out = word & 0xffff0000, out[part_rows] = word << 16;
                }
            }
        }

        void attend_chunk(const PagedPrefill &a, const FloatPanels &panels, int64_t kv_head, const RowTile &tile, int64_t index,
                          const ChunkRange &range, const TileResults &results) {
            auto [origin, from, to] = range;
            const uint16_t *keys = panels.keys_of(a, kv_head), *values = panels.values_of(a, kv_head);
            score(a, tile, q_of(a, index), keys + origin * a.key_dim, from, to);
            MergeFactors factors[TILE_ROWS];
            for (int64_t r = 0; r < tile.rows; r++) {
                float *scores = scores_ + r * CHUNK_STRIDE;
                if (a.softcap > 0.0f) scale_scores(scores, from, to, 1.0f, a.softcap);
                hide_scores(a, tile.row + r, range, scores);
                factors[r] = merge(results.sums[r], softmax_weights<BFloat16>(scores, weights_ + r * CHUNK_STRIDE, from, to,
                                                                              a.first_of(tile.row + r) - origin));
            }
            auto accumulate = panel_matmul_for<ValueEpilogue>(tile.rows);
            for (int64_t d = 0; d < a.value_dim; d += PANEL) {
                const uint16_t *value = values + d * panels.positions_ + (origin + from) * PANEL;
                const uint16_t *key = keys + (origin + CHUNK) * a.key_dim + d * CHUNK;  // of the next chunk
                accumulate(weights_ + from, CHUNK_STRIDE, value, to - from,
                           {(const char *)(index % 2 ? key : value + CHUNK * PANEL), 2 * LINE}, {results.out + d, a.value_dim, factors});
            }
        }

      private:
        // The words of a tile's queries in parts of SCORE_ROWS rows: (words, rows), or (words, 2, rows); see QUERY_WORDS.
        uint32_t *q_of(const PagedPrefill &a, int64_t index) { return &q_[index * TILE_ROWS * a.key_dim / 2 * QUERY_WORDS]; }

        // Scores of a tile's queries with keys, of positions [from, to) of a chunk.
        void score(const PagedPrefill &a, const RowTile &tile, const uint32_t *q, const uint16_t *keys, int64_t from, int64_t to) {
            int64_t words = a.key_dim / 2;
            for (int64_t position = from; position < to; position += PANEL)
                for (int64_t r = 0; r < tile.rows; r += SCORE_ROWS) {
                    ScoreRows out{scores_ + r * CHUNK_STRIDE + position, a.scale};
                    auto score = [&](auto number) {
                        constexpr int count = decltype(number)::value;
                        const uint32_t *part = q + r * words * QUERY_WORDS;
                        const uint16_t *panel = keys + position * a.key_dim;
                        auto sums = PanelScores<count, 0>(part, panel, words).sum();
                        if constexpr (vectors_of_a_pass(count) == 1) {
                            auto second = PanelScores<count, 1>(part, panel, words).sum();
                            for (int i = 0; i < count; i++) sums.values[i][1] = second.values[i][1];
                        }
                        for (int i = 0; i < count; i++) out.store(i, sums.values[i][0], sums.values[i][1]);
                    };
                    switch (std::min(SCORE_ROWS, tile.rows - r)) {
                        case 6: score(std::integral_constant<int, 6>{}); break;
                        case 5: score(std::integral_constant<int, 5>{}); break;
                        case 4: score(std::integral_constant<int, 4>{}); break;
                        case 3: score(std::integral_constant<int, 3>{}); break;
                        case 2: score(std::integral_constant<int, 2>{}); break;
                        default: score(std::integral_constant<int, 1>{});
                    }
                }
        }

        std::unique_ptr<uint32_t[]> q_;
        alignas(64) float scores_[TILE_ROWS * CHUNK_STRIDE];
        alignas(64) uint16_t weights_[TILE_ROWS * CHUNK_STRIDE];
    };

  private:
    uint16_t *keys_of(const PagedPrefill &a, int64_t kv_head) const { return &keys_[kv_head * positions_ * a.key_dim]; }
    uint16_t *values_of(const PagedPrefill &a, int64_t kv_head) const { return &values_[kv_head * positions_ * a.value_dim]; }

    int64_t positions_;
    LineArray<uint16_t> keys_, values_;
};

constexpr int64_t ITEM_TILES = 16;        // at most
constexpr int64_t ITEMS_OF_A_THREAD = 4;  // at least, if there are so many tiles

// One thread's work on the tiles of an item: heads that share keys and values attend to a chunk of them while it is in the
// second-level cache. Each chunk has softmax weights of its own, as in paged_decode.
template <class Panels>
class TileAttention {
  public:
    explicit TileAttention(const PagedPrefill &a)
        : queries_(a, ITEM_TILES), sums_(ITEM_TILES * TILE_ROWS), out_(ITEM_TILES * TILE_ROWS * a.value_dim) {
        tiles_.reserve(ITEM_TILES);
    }

    // Tiles [first, last) of a head of keys and values: those of all its heads follow each other.
    void attend(const PagedPrefill &a, int64_t kv_head, int64_t first, int64_t last, const Panels &panels) {
        int64_t group = a.heads / a.kv_heads, first_chunk = INT64_MAX, last_chunk = 0;
        tiles_.clear();
        std::fill_n(&out_[0], (last - first) * TILE_ROWS * a.value_dim, 0.0f);
        for (int64_t i = first; i < last; i++) {
            const RowTile &tile = tiles_.emplace_back(a, kv_head * group + i % group, i / group * TILE_ROWS, TILE_ROWS);
            queries_.pack_queries(a, tile, i - first);
            std::fill_n(&sums_[(i - first) * TILE_ROWS], tile.rows, first_sum(a.sinks ? a.sinks + tile.head : nullptr));
            first_chunk = std::min(first_chunk, tile.first_chunk()), last_chunk = std::max(last_chunk, tile.last_chunk());
        }
        for (int64_t chunk = first_chunk; chunk <= last_chunk; chunk++)
            for (int64_t i = 0; i < last - first; i++) attend_chunk(a, panels, kv_head, i, chunk);
        for (int64_t i = 0; i < last - first; i++) write_outputs(a, i);
    }

  private:
    static constexpr int64_t TILE_ROWS = Panels::TILE_ROWS;

    void attend_chunk(const PagedPrefill &a, const Panels &panels, int64_t kv_head, int64_t index, int64_t chunk) {
        const RowTile &tile = tiles_[index];
        int64_t origin = chunk * CHUNK, from = std::max(tile.begin, origin) - origin, to = std::min(tile.end - origin, CHUNK);
        if (from >= to) return;
        queries_.attend_chunk(a, panels, kv_head, tile, index, {origin, from, to},
                              {&sums_[index * TILE_ROWS], &out_[index * TILE_ROWS * a.value_dim]});
    }

    void write_outputs(const PagedPrefill &a, int64_t index) {
        const RowTile &tile = tiles_[index];
        for (int64_t r = 0; r < tile.rows; r++) {
            float total = sums_[index * TILE_ROWS + r].total;
            const float *row = &out_[(index * TILE_ROWS + r) * a.value_dim];
            uint16_t *out = a.out + (tile.row + r) * a.out_stride + tile.head * a.value_dim;
            for (int64_t d = 0; d < a.value_dim; d += PANEL)
                BFloat16::store2(out + d, Float32::load(row + d) / total, Float32::load(row + d + LANES) / total);
        }
    }

    std::vector<RowTile> tiles_;
    typename Panels::Tiles queries_;
    std::vector<SoftmaxSum> sums_;  // (tiles, rows)
    LineArray<float> out_;          // (tiles, rows, value_dim)
};

// Keys and values of a sequence in panels. Blocks that the next sequence has at the same positions are not packed again.
template <class Panels>
class PackedContext {
  public:
    // For sequences of up to `max_positions`. Everything is allocated here, as nothing may throw inside parallel regions.
    PackedContext(const PagedPrefill &a, int64_t max_positions, int threads) : panels_(a, (max_positions + PANEL - 1) / PANEL * PANEL) {
        threads_.reserve(threads);
        while (threads-- > 0) threads_.emplace_back(a);
    }

    void attend(const PagedPrefill &a) {
        pack(a);
        const int64_t threads = int64_t(threads_.size());
        int64_t group = a.heads / a.kv_heads, tiles = (a.tokens + Panels::TILE_ROWS - 1) / Panels::TILE_ROWS * group;
        int64_t size = std::clamp<int64_t>(tiles * a.kv_heads / (ITEMS_OF_A_THREAD * threads), 1, ITEM_TILES);
        int64_t parts = (tiles + size - 1) / size;
        auto attend_item = [&](int thread, int64_t item) {
            int64_t kv_head = item % a.kv_heads, part = parts - 1 - item / a.kv_heads;  // the longest first
            threads_[thread].attend(a, kv_head, part * size, std::min(tiles, (part + 1) * size), panels_);
        };
        if (threads == 1) {
            for (int64_t item = 0; item < a.kv_heads * parts; item++) attend_item(0, item);
            return;
        }
        WorkItems items(a.kv_heads * parts);
        run_parallel([&](int thread) { items.for_each([&](int64_t item, int64_t) { attend_item(thread, item); }); });
    }
    // Forgets what is packed: that of another head follows.
    void clear() { length_ = 0; }

  private:
    void pack(const PagedPrefill &a) {
        int64_t panels = (a.length + PANEL - 1) / PANEL;
        int64_t first = a.first_of(0);
        for (int64_t row = 1; a.visible && row < a.tokens; row++) first = std::min(first, a.first_of(row));
        first /= PANEL;
        int64_t begin = first_ <= first ? std::max(first, shared_panels(a)) : first;
        parallel_for(a.kv_heads * (panels - begin), threads_.size() > 1, [&](int64_t at) {
            panels_.pack(a, at / (panels - begin), begin + at % (panels - begin));
        });
        block_table_ = a.block_table, length_ = a.length, first_ = first;
    }
    // Panels from the beginning whose blocks are those of the packed sequence.
    int64_t shared_panels(const PagedPrefill &a) const {
        int64_t length = std::min(length_, a.length), block = 0;
        while (block * a.block_size < length && a.block_table[block] == block_table_[block]) block++;
        return std::min(length, block * a.block_size) / PANEL;
    }

    Panels panels_;
    std::vector<TileAttention<Panels>> threads_;
    const int32_t *block_table_ = nullptr;  // of the packed sequence
    int64_t length_ = 0, first_ = 0;        // its positions and its first packed panel
};

#if defined(HAVE_INT8_DOT)
#include "../int8_panels.h"
#else
typedef FloatPanels<Int8Rows<BFloat16>> Int8Panels;
#endif

// Spans [begin, end), which begin at row `begin` of the queries. Where each thread has several heads of keys and values, it
// packs them one after the other: what it packed is still in its caches when it reads it. Else all threads share each span.
template <class Panels>
void prefill_spans(const AttentionArguments &a, const int64_t *tokens, const int32_t *visible, int64_t begin, int64_t end) {
    auto span = [&](int64_t i, int64_t row) -> PagedPrefill {
        return {(const uint16_t *)a.q + row * a.q_stride, a.keys, a.values,
                (uint16_t *)a.out + row * a.heads * a.value_dim, a.block_tables + i * a.table_stride, a.sinks, tokens[i],
                a.seq_lens[i], a.heads, a.kv_heads, a.q_stride, a.heads * a.value_dim, a.key_dim, a.value_dim, a.block_size, a.window, a.scale,
                a.softcap, visible ? visible + 2 * row : nullptr};
    };
    const int64_t longest = *std::max_element(a.seq_lens + begin, a.seq_lens + end);
    const int threads = pool_threads();
    if (a.kv_heads % threads != 0 || a.kv_heads == threads) {
        PackedContext<Panels> context(span(begin, begin), longest, threads);
        for (int64_t i = begin, row = begin; i < end; row += tokens[i++]) context.attend(span(i, row));
        return;
    }
    typedef typename Panels::Element Element;
    std::vector<PackedContext<Panels>> contexts;
    contexts.reserve(threads);
    while (int(contexts.size()) < threads) contexts.emplace_back(span(begin, begin).template of_head<Element>(0), longest, 1);
    WorkItems heads(a.kv_heads);
    run_parallel([&](int thread) {
        heads.for_each([&](int64_t kv_head, int64_t) {
            contexts[thread].clear();
            for (int64_t i = begin, row = begin; i < end; row += tokens[i++])
                contexts[thread].attend(span(i, row).template of_head<Element>(kv_head));
        });
    });
}

inline void PagedVarlen::run() const {
    const int64_t spans = counts[1], *span_tokens = counts + 2;
    AttentionArguments single = *this;
    single.sequences = counts[0];
    paged_decode<BFloat16>(single);
    if (single.sequences == spans) return;
    int8 ? prefill_spans<Int8Panels>(*this, span_tokens, visible, single.sequences, spans)
         : prefill_spans<FloatPanels<PlainRows<BFloat16>>>(*this, span_tokens, visible, single.sequences, spans);
}
