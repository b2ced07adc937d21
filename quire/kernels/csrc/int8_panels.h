// Attention of spans of queries in bfloat16 to int8 keys and values in panels, with products of integers.
#pragma once

#include "int8_attention.h"

// Sums of the rows of a tile for the two vectors of a panel's outputs.
template <int rows>
struct IntegerSums {
    Ints values[rows][2];
};

// Adds products of the words of rows with those of a panel (words, 32): of signed bytes of rows with unsigned ones of the
// panel if it has keys, else of unsigned bytes of rows with signed ones. Words of a row are `step` apart, rows `stride`.
template <bool keys, int64_t step, int64_t stride, int rows>
INLINE void add_products(IntegerSums<rows> &sums, const uint32_t *x, const uint32_t *panel, int64_t words, PrefetchStream prefetch) {
    for (int64_t i = 0; i < words; i++, panel += PANEL, x += step) {
        prefetch.fetch();
        Words outputs[2] = {load_words(panel), load_words(panel + LANES)};
#pragma GCC unroll 12
        for (int row = 0; row < rows; row++) {
            Words word = broadcast_word(x + row * stride);
            for (int v = 0; v < 2; v++)
                sums.values[row][v] = keys ? dot_add(sums.values[row][v], outputs[v], word) : dot_add(sums.values[row][v], word, outputs[v]);
        }
    }
}

// A context's keys and values in panels. Of keys, words have four elements of a position: (positions / 32, dim / 4, 32); of
// values, one element of four positions, in the order of codes of weights: (value_dim / 32, positions / 4, 32).
class Int8Panels {
    typedef Int8Rows<BFloat16> Rows;

  public:
    typedef int8_t Element;                   // of pages
    static constexpr int64_t TILE_ROWS = 12;  // whose sums fit into registers

    // With room for so many positions, whole panels.
    Int8Panels(const PagedPrefill &a, int64_t positions)
        : positions_(positions), keys_(a.kv_heads * positions * a.key_dim / QUAD), values_(a.kv_heads * positions * a.value_dim / QUAD),
          key_scales_(a.kv_heads * positions * groups_of(a.key_dim)), value_scales_(a.kv_heads * positions * groups_of(a.value_dim)) {}

    void pack(const PagedPrefill &a, int64_t kv_head, int64_t panel) {
        const int8_t *keys[PANEL], *values[PANEL];
        int64_t begin = panel * PANEL, count = std::min(PANEL, a.length - begin);
        for (int64_t i = 0; i < count; i++)
            keys[i] = row_of<Rows>(a, a.keys, kv_head, begin + i), values[i] = row_of<Rows>(a, a.values, kv_head, begin + i);
        pack_scales(keys, count, a.key_dim, key_scales_of(a, kv_head) + begin);
        pack_scales(values, count, a.value_dim, value_scales_of(a, kv_head) + begin);
        pack_keys(keys, count, a.key_dim, keys_of(a, kv_head) + begin * a.key_dim / QUAD);
        pack_values(values, count, a.value_dim, values_of(a, kv_head) + begin / QUAD * PANEL);
    }

    // The quantized queries of a thread's tiles.
    class Tiles {
      public:
        Tiles(const PagedPrefill &a, int64_t tiles)
            : queries_(tiles * groups_of(a.key_dim)), query_scales_(tiles * TILE_ROWS) {}

        void pack_queries(const PagedPrefill &a, const RowTile &tile, int64_t index) {
            for (int64_t r = 0; r < tile.rows; r++) {
                QuantizedQuery query;
                quantize_query(a.q + (tile.row + r) * a.q_stride + tile.head * a.key_dim, a.key_dim, a.scale, query);
                for (int64_t group = 0; group < groups_of(a.key_dim); group++) queries_of(a, index)[group].set(r, query, group);
                query_scales_[index * TILE_ROWS + r] = query.scale;
            }
        }

        void attend_chunk(const PagedPrefill &a, const Int8Panels &panels, int64_t kv_head, const RowTile &tile, int64_t index,
                          const ChunkRange &range, const TileResults &results) {
            auto attend = [&]<int... counts>(std::integer_sequence<int, counts...>) {
                (void)((tile.rows == counts + 1 && (attend_rows<counts + 1>(a, panels, kv_head, tile, index, range, results), true)) || ...);
            };
            attend(std::make_integer_sequence<int, int(TILE_ROWS)>{});
        }

      private:
        // A group of the queries of a tile, those of all rows side by side.
        struct QueryColumns {
            uint32_t words[INT8_GROUP / QUAD][TILE_ROWS];
            int32_t shifts[INT8_GROUP / QUERY_PART][TILE_ROWS], biases[TILE_ROWS];
            void set(int64_t row, const QuantizedQuery &query, int64_t group) {
                const int8_t *codes = query.codes + group * INT8_GROUP;
                const int32_t *parts = query.shifts + group * INT8_GROUP / QUERY_PART;
                for (int64_t i = 0; i < INT8_GROUP / QUAD; i++) std::memcpy(&words[i][row], codes + i * QUAD, QUAD);
                for (int64_t i = 0; i < INT8_GROUP / QUERY_PART; i++) shifts[i][row] = parts[i];
                biases[row] = query.biases[group];
            }
        };
        QueryColumns *queries_of(const PagedPrefill &a, int64_t index) { return &queries_[index * groups_of(a.key_dim)]; }

        template <int rows>
        void attend_rows(const PagedPrefill &a, const Int8Panels &panels, int64_t kv_head, const RowTile &tile, int64_t index,
                         const ChunkRange &range, const TileResults &results) {
            auto [origin, from, to] = range;
            for (int64_t position = from; position < to; position += PANEL) {
                float *scores = scores_ + position;
                constexpr int first_rows = std::min<int>(rows, SCORE_ROWS), last_rows = rows - first_rows;
                score_panel<first_rows>(a, panels, kv_head, index, 0, origin + position, scores);
                if constexpr (last_rows > 0)
                    score_panel<last_rows>(a, panels, kv_head, index, first_rows, origin + position, scores + first_rows * CHUNK_STRIDE);
            }
            MergeFactors factors[rows];
            a.value_dim > INT8_GROUP ? weigh<rows, true>(a, panels, kv_head, tile, index, range, results.sums, factors)
                                     : weigh<rows, false>(a, panels, kv_head, tile, index, range, results.sums, factors);
            const char *keys = (const char *)panels.keys_of(a, kv_head), *values = (const char *)panels.values_of(a, kv_head);
            for (int64_t d = 0; d < a.value_dim; d += PANEL) {
                if (d > 0 && d % INT8_GROUP == 0) multiply_group<rows>(a, panels, kv_head, tile, d / INT8_GROUP, range);
                const char *value = values + d * panels.positions_ + (origin + from) * PANEL;
                const char *key = keys + (origin + CHUNK) * a.key_dim + d * CHUNK;  // of the next chunk
                IntegerSums<rows> sums;
#pragma GCC unroll 12
                for (int r = 0; r < rows; r++) sums.values[r][0] = sums.values[r][1] = Ints{};
                add_products<false, 1, CODES_STRIDE / QUAD>(sums, (const uint32_t *)(codes_ + from), (const uint32_t *)value, (to - from) / QUAD,
                                    {index % 2 ? key : value + CHUNK * PANEL, 2 * LINE});
#pragma GCC unroll 12
                for (int r = 0; r < rows; r++)
                    add_weighted(results.out + r * a.value_dim + d, factors[r], to_floats(sums.values[r][0]) * code_scales_[r],
                                 to_floats(sums.values[r][1]) * code_scales_[r]);
            }
        }

        // Scores of rows from `row` on with the keys of a panel.
        template <int rows>
        void score_panel(const PagedPrefill &a, const Int8Panels &panels, int64_t kv_head, int64_t index, int64_t row, int64_t position,
                         float *scores) {
            const uint32_t *keys = panels.keys_of(a, kv_head) + position * a.key_dim / QUAD;
            const float *key_scales = panels.key_scales_of(a, kv_head) + position;
            const QueryColumns *queries = queries_of(a, index);
            for (int64_t at = 0; at < a.key_dim; at += INT8_GROUP, key_scales += panels.positions_, queries++) {
                IntegerSums<rows> sums;
#pragma GCC unroll 12
                for (int r = 0; r < rows; r++) sums.values[r][0] = sums.values[r][1] = Ints{} + queries->biases[row + r];
                const uint32_t *words = &queries->words[0][row];
                const int32_t *shifts = &queries->shifts[0][row];
                for (int64_t part = 0; part < parts_of_group(a.key_dim, at); part++) {
                    IntegerSums<rows> products;
#pragma GCC unroll 12
                    for (int r = 0; r < rows; r++) products.values[r][0] = products.values[r][1] = Ints{};
                    add_products<true, TILE_ROWS, 1>(products, words, keys, QUERY_PART / QUAD, {});
#pragma GCC unroll 12
                    for (int r = 0; r < rows; r++)
                        for (int v = 0; v < 2; v++) sums.values[r][v] = add_shifted(sums.values[r][v], products.values[r][v], shifts[r]);
                    words += QUERY_PART / QUAD * TILE_ROWS, shifts += TILE_ROWS, keys += QUERY_PART / QUAD * PANEL;
                }
#pragma GCC unroll 12
                for (int r = 0; r < rows; r++)
                    for (int v = 0; v < 2; v++) {
                        float *out = scores + r * CHUNK_STRIDE + v * LANES;
                        Floats before = at ? Float32::load(out) : broadcast(0.0f);
                        Float32::store(out, fused(to_floats(sums.values[r][v]), Float32::load(key_scales + v * LANES), before));
                    }
            }
        }

        // What a row sees of a chunk. all: whether each row of its tile sees all of it, so that nothing is to be found out.
        static VisiblePositions visible(const PagedPrefill &a, int64_t row, const ChunkRange &range, bool all) {
            if (all) return {range.from, range.to, range.from, range.to};
            return {range.from, range.to, a.first_of(row) - range.origin, a.end_of(row) - range.origin};
        }
        static bool all_see(const PagedPrefill &a, const RowTile &tile, const ChunkRange &range) {
            return !a.visible && a.first_of(tile.row + tile.rows - 1) <= range.origin + range.from && a.end_of(tile.row) >= range.origin + range.to;
        }

        // Quantizes the softmax weights of a tile's rows for the first group of values. The rows take turns in both passes: a
        // largest product takes long to get from a vector, and the processor goes on with the next row meanwhile.
        template <int rows, bool keep>
        void weigh(const PagedPrefill &a, const Int8Panels &panels, int64_t kv_head, const RowTile &tile, int64_t index,
                   const ChunkRange &range, SoftmaxSum *sums, MergeFactors *factors) {
            const float *scales = panels.value_scales_of(a, kv_head) + range.origin;
            const bool all = all_see(a, tile, range);
            float largest[rows];
            for (int r = 0; r < rows; r++) {
                const int64_t at = r * CHUNK_STRIDE;
                float scale = query_scales_[index * TILE_ROWS + r];
                if (a.softcap > 0.0f) scale_scores(scores_ + at, range.from, range.to, scale, a.softcap), scale = 1.0f;
                auto weighed = weigh_scores<keep>(scores_ + at, scale, scales, weights_ + at, products_ + at, visible(a, tile.row + r, range, all));
                factors[r] = merge(sums[r], weighed.sum), largest[r] = weighed.largest_product;
            }
            quantize<rows>(largest, range);
        }

        // The same with softmax weights for another group of values.
        template <int rows>
        void multiply_group(const PagedPrefill &a, const Int8Panels &panels, int64_t kv_head, const RowTile &tile, int64_t group,
                            const ChunkRange &range) {
            const float *scales = panels.value_scales_of(a, kv_head) + group * panels.positions_ + range.origin;
            const bool all = all_see(a, tile, range);
            float largest[rows];
            for (int r = 0; r < rows; r++)
                largest[r] = multiply_weights(weights_ + r * CHUNK_STRIDE, scales, products_ + r * CHUNK_STRIDE, visible(a, tile.row + r, range, all));
            quantize<rows>(largest, range);
        }

        template <int rows>
        void quantize(const float *largest, const ChunkRange &range) {
            for (int r = 0; r < rows; r++)
                code_scales_[r] = quantize_products(products_ + r * CHUNK_STRIDE, largest[r], range.from, range.to,
                                                    codes_ + r * CODES_STRIDE);
        }

        LineArray<QueryColumns> queries_;  // (tiles, groups)
        std::vector<float> query_scales_;  // (tiles, rows)
        alignas(64) float scores_[TILE_ROWS * CHUNK_STRIDE], weights_[TILE_ROWS * CHUNK_STRIDE], products_[TILE_ROWS * CHUNK_STRIDE];
        alignas(64) uint8_t codes_[TILE_ROWS * CODES_STRIDE];  // of weights
        float code_scales_[TILE_ROWS];
    };

  private:
    uint32_t *keys_of(const PagedPrefill &a, int64_t kv_head) const { return &keys_[kv_head * positions_ * a.key_dim / QUAD]; }
    uint32_t *values_of(const PagedPrefill &a, int64_t kv_head) const { return &values_[kv_head * positions_ * a.value_dim / QUAD]; }
    // (groups, positions)
    float *key_scales_of(const PagedPrefill &a, int64_t kv_head) const { return &key_scales_[kv_head * positions_ * groups_of(a.key_dim)]; }
    float *value_scales_of(const PagedPrefill &a, int64_t kv_head) const {
        return &value_scales_[kv_head * positions_ * groups_of(a.value_dim)];
    }

    // Past the end scales and elements are 0.
    void pack_scales(const int8_t *const *rows, int64_t count, int64_t dim, float *out) const {
        for (int64_t group = 0; group < groups_of(dim); group++, out += positions_)
            for (int64_t i = 0; i < PANEL; i++) out[i] = i < count ? Rows::scale_at(rows[i], group * INT8_GROUP) : 0.0f;
    }
    static void pack_keys(const int8_t *const *rows, int64_t count, int64_t dim, uint32_t *out) {
        for (int64_t at = 0; at < dim; at += INT8_GROUP, out += INT8_GROUP / QUAD * PANEL)
            for (int64_t half = 0; half < PANEL; half += LANES) {
                Words words[LANES];
                for (int64_t i = 0; i < LANES; i++)
                    words[i] = half + i < count ? to_unsigned(load_group(rows[half + i], at, dim)) : Words{};
                transpose(words);
                for (int64_t i = 0; i < std::min(INT8_GROUP, dim - at) / QUAD; i++) std::memcpy(out + i * PANEL + half, &words[i], sizeof *words);
            }
    }
    void pack_values(const int8_t *const *rows, int64_t count, int64_t dim, uint32_t *out) const {
        for (int64_t at = 0; at < dim; at += INT8_GROUP)
            for (int64_t quad = 0; quad < QUADS; quad++) {
                Words words[QUAD];
                for (int64_t i = 0; i < QUAD; i++) {
                    int64_t row = position_of_code(quad, i);
                    words[i] = row < count ? load_group(rows[row], at, dim) : Words{};
                }
                interleave_bytes(words);
                interleave_words(words);
                uint32_t *to = out + at * positions_ / QUAD + quad * PANEL;  // in the first panel of the group
                for (int64_t i = 0; i < std::min(INT8_GROUP, dim - at) / LANES; i++)
                    std::memcpy(to + i / 2 * PANEL * positions_ / QUAD + i % 2 * LANES, &words[i], sizeof *words);
            }
    }

    int64_t positions_;
    LineArray<uint32_t> keys_, values_;
    LineArray<float> key_scales_, value_scales_;
};
