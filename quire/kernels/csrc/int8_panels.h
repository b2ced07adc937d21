// Attention of spans of queries in bfloat16 to int8 keys and values in panels, with products of integers.
#pragma once

#include "int8_attention.h"

// Sums of the rows of a tile for the two vectors of a panel's outputs.
template <int rows>
struct IntegerSums {
    Ints values[rows][2];
};

// Adds products of the words of rows with those of a panel (words, 32): of signed bytes of rows with unsigned ones of the
// panel if it has keys, else of unsigned bytes of rows with signed ones.
template <bool keys, int rows>
INLINE void add_products(IntegerSums<rows> &sums, RowWords x, const uint32_t *panel, int64_t words, PrefetchStream prefetch) {
    for (int64_t i = 0; i < words; i++, panel += PANEL, x.advance()) {
        prefetch.fetch();
        Words outputs[2] = {load_words(panel), load_words(panel + LANES)};
#pragma GCC unroll 12
        for (int row = 0; row < rows; row++) {
            Words word = broadcast_word(x.at(row));
            for (int v = 0; v < 2; v++)
                sums.values[row][v] = keys ? dot_add(sums.values[row][v], outputs[v], word) : dot_add(sums.values[row][v], word, outputs[v]);
        }
    }
}

// A context's keys and values in panels. Of keys, words have four elements of a position: (positions / 32, dim / 4, 32); of
// values, one element of four positions: (value_dim / 32, positions / 4, 32).
class Int8Panels {
    typedef Int8Rows<BFloat16> Rows;

  public:
    static constexpr int64_t TILE_ROWS = 12;  // whose sums fit into registers

    // With room for so many positions, whole panels.
    Int8Panels(const PagedPrefill &a, int64_t positions)
        : positions_(positions), keys_(new uint32_t[a.kv_heads * positions * a.key_dim / QUAD]),
          values_(new uint32_t[a.kv_heads * positions * a.value_dim / QUAD]),
          key_scales_(new float[a.kv_heads * positions * groups_of(a.key_dim)]),
          value_scales_(new float[a.kv_heads * positions * groups_of(a.value_dim)]) {}

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
            : codes_(new int8_t[tiles * TILE_ROWS * stride(a)]), parts_(new QueryPart[tiles * TILE_ROWS * a.key_dim / QUERY_PART]) {}

        void pack_queries(const PagedPrefill &a, const RowTile &tile, int64_t index) {
            for (int64_t r = 0; r < tile.rows; r++)
                quantize_query(a.q + (tile.row + r) * a.q_stride + tile.head * a.key_dim, a.key_dim, a.scale, codes_of(a, index, r),
                               parts_of(a, index, r));
        }

        void attend_chunk(const PagedPrefill &a, const Int8Panels &panels, int64_t kv_head, const RowTile &tile, int64_t index,
                          const ChunkRange &range, const ChunkResults &results) {
            auto attend = [&]<int... counts>(std::integer_sequence<int, counts...>) {
                (void)((tile.rows == counts + 1 && (attend_rows<counts + 1>(a, panels, kv_head, tile, index, range, results), true)) || ...);
            };
            attend(std::make_integer_sequence<int, int(TILE_ROWS)>{});
        }

      private:
        static int64_t stride(const PagedPrefill &a) { return groups_of(a.key_dim) * INT8_GROUP + LINE; }
        int8_t *codes_of(const PagedPrefill &a, int64_t index, int64_t row) { return &codes_[(index * TILE_ROWS + row) * stride(a)]; }
        QueryPart *parts_of(const PagedPrefill &a, int64_t index, int64_t row) {
            return &parts_[(index * TILE_ROWS + row) * (a.key_dim / QUERY_PART)];
        }

        template <int rows>
        void attend_rows(const PagedPrefill &a, const Int8Panels &panels, int64_t kv_head, const RowTile &tile, int64_t index,
                         const ChunkRange &range, const ChunkResults &results) {
            auto [origin, from, to] = range;
            for (int64_t position = from; position < to; position += PANEL) {
                float *scores = scores_ + position;
                constexpr int first_rows = std::min<int>(rows, SCORE_ROWS), last_rows = rows - first_rows;
                score_panel<first_rows>(a, panels, kv_head, index, 0, origin + position, scores);
                if constexpr (last_rows > 0)
                    score_panel<last_rows>(a, panels, kv_head, index, first_rows, origin + position, scores + first_rows * CHUNK_STRIDE);
            }
            for (int64_t r = 0; r < rows; r++) {
                float *scores = scores_ + r * CHUNK_STRIDE;
                if (a.softcap > 0.0f) scale_scores(scores, from, to, 1.0f, a.softcap);
                hide_scores(a, tile.row + r, range, scores);
                results.totals[r] = rough_softmax_weights(scores, from, to, results.largest[r]);
            }
            const char *keys = (const char *)panels.keys_of(a, kv_head), *values = (const char *)panels.values_of(a, kv_head);
            for (int64_t d = 0; d < a.value_dim; d += PANEL) {
                if (d % INT8_GROUP == 0) quantize_group(a, panels, kv_head, tile, d / INT8_GROUP, range);
                const char *value = values + d * panels.positions_ + (origin + from) * PANEL;
                const char *key = keys + (origin + CHUNK) * a.key_dim + d * CHUNK;  // of the next chunk
                IntegerSums<rows> sums;
#pragma GCC unroll 12
                for (int r = 0; r < rows; r++) sums.values[r][0] = sums.values[r][1] = Ints{};
                add_products<false>(sums, RowWords(weights_ + from, CODES_STRIDE), (const uint32_t *)value, (to - from) / QUAD,
                                    {index % 2 ? key : value + CHUNK * PANEL, 2 * LINE});
#pragma GCC unroll 12
                for (int r = 0; r < rows; r++)
                    Float32::store2(results.out + r * a.value_dim + d, to_floats(sums.values[r][0]) * weight_scales_[r],
                                    to_floats(sums.values[r][1]) * weight_scales_[r]);
            }
        }

        // Scores of rows from `row` on with the keys of a panel.
        template <int rows>
        void score_panel(const PagedPrefill &a, const Int8Panels &panels, int64_t kv_head, int64_t index, int64_t row, int64_t position,
                         float *scores) {
            const uint32_t *keys = panels.keys_of(a, kv_head) + position * a.key_dim / QUAD;
            const float *key_scales = panels.key_scales_of(a, kv_head) + position;
            const QueryPart *parts = parts_of(a, index, row);
            for (int64_t at = 0; at < a.key_dim; at += INT8_GROUP, key_scales += panels.positions_) {
                TileSums<rows> sums;
#pragma GCC unroll 12
                for (int r = 0; r < rows; r++) sums.values[r][0] = sums.values[r][1] = broadcast(0.0f);
                for (int64_t end = at + parts_of_group(a.key_dim, at) * QUERY_PART, part = at; part < end; part += QUERY_PART, parts++) {
                    IntegerSums<rows> products;
#pragma GCC unroll 12
                    for (int r = 0; r < rows; r++)
                        products.values[r][0] = products.values[r][1] = Ints{} + parts[r * (a.key_dim / QUERY_PART)].start;
                    add_products<true>(products, RowWords(codes_of(a, index, row) + part, stride(a)), keys + part / QUAD * PANEL,
                                       QUERY_PART / QUAD, {});
#pragma GCC unroll 12
                    for (int r = 0; r < rows; r++)
                        for (int v = 0; v < 2; v++)
                            sums.values[r][v] = fused(to_floats(products.values[r][v]), broadcast(parts[r * (a.key_dim / QUERY_PART)].scale),
                                                      sums.values[r][v]);
                }
#pragma GCC unroll 12
                for (int r = 0; r < rows; r++)
                    for (int v = 0; v < 2; v++) {
                        float *out = scores + r * CHUNK_STRIDE + v * LANES;
                        Floats before = at ? Float32::load(out) : broadcast(0.0f);
                        Float32::store(out, fused(sums.values[r][v], Float32::load(key_scales + v * LANES), before));
                    }
            }
        }

        // Quantizes the weights of a tile's rows for a group of values.
        void quantize_group(const PagedPrefill &a, const Int8Panels &panels, int64_t kv_head, const RowTile &tile, int64_t group,
                            const ChunkRange &range) {
            const float *scales = panels.value_scales_of(a, kv_head) + group * panels.positions_ + range.origin;
            for (int64_t r = 0; r < tile.rows; r++)
                weight_scales_[r] = quantize_weights(scores_ + r * CHUNK_STRIDE, scales, range.from, range.to,
                                                     a.first_of(tile.row + r) - range.origin, a.end_of(tile.row + r) - range.origin,
                                                     weights_ + r * CODES_STRIDE);
        }

        std::unique_ptr<int8_t[]> codes_;
        std::unique_ptr<QueryPart[]> parts_;
        alignas(64) float scores_[TILE_ROWS * CHUNK_STRIDE];  // then weights
        alignas(64) uint8_t weights_[TILE_ROWS * CODES_STRIDE];
        float weight_scales_[TILE_ROWS];
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
            for (int64_t position = 0; position < PANEL; position += QUAD) {
                Words words[QUAD];
                for (int64_t i = 0; i < QUAD; i++)
                    words[i] = position + i < count ? load_group(rows[position + i], at, dim) : Words{};
                interleave_bytes(words);
                interleave_words(words);
                uint32_t *quad = out + at * positions_ / QUAD + position / QUAD * PANEL;  // in the first panel of the group
                for (int64_t i = 0; i < std::min(INT8_GROUP, dim - at) / LANES; i++)
                    std::memcpy(quad + i / 2 * PANEL * positions_ / QUAD + i % 2 * LANES, &words[i], sizeof *words);
            }
    }

    int64_t positions_;
    std::unique_ptr<uint32_t[]> keys_, values_;
    std::unique_ptr<float[]> key_scales_, value_scales_;
};
