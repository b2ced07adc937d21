// Attention of packed sequences to themselves, without a cache: encoders. Flash attention (Dao et al. 2022) of 32 queries
// at a time: they are a panel as weights of linear layers are (see panel_matmul.h), and keys are the rows that are
// multiplied with it. Scores lie as (keys, queries), so that their maximum and sum are those of vectors, without any across
// one. They become weights in the same place, again a panel, with which the values are multiplied: (dim, queries). A
// sequence's result does not depend on the others.
//
// Elements are read as words of 32 bits: one of float32, or two of bfloat16.
#pragma once

#include "../panel_matmul.h"

struct VarlenAttention {
    static constexpr const char *NAME = "varlen_attention";
    static constexpr const char *PARAMETERS[] = {"q",      "k",     "v",      "cu_seqlens", "out",    "alibi_slopes",
                                                 "biases", "scale", "window", "softcap",    "causal"};
    static VarlenAttention check(const Tensor &q, const Tensor &k, const Tensor &v, const Tensor &cu_seqlens,
                                 const Tensor &out, const OptionalTensor &alibi_slopes, const OptionalTensor &biases,
                                 float scale, int64_t window, float softcap, int64_t causal) {
        Size tokens("tokens"), heads("heads"), kv_heads("kv_heads"), dim("dim"), offsets("sequences + 1"), width("distances");
        q.is_floating().has_shape(tokens, heads, dim).is_dense(2);
        k.has_dtype({q.dtype}).has_shape(tokens, kv_heads, dim).is_dense(2);
        v.has_dtype({q.dtype}).has_shape(tokens, kv_heads, dim).is_dense(2);
        out.has_dtype({q.dtype}).has_shape(tokens, heads, dim).is_contiguous();
        require(dim > 0 && dim % 2 == 0 && dim <= 1024, "q", "an even head dim of at most 1024 is expected");
        require(kv_heads > 0 && heads % kv_heads == 0, "q", "a multiple of kv_heads is expected as heads");
        cu_seqlens.has_dtype({DType::INT64}).has_shape(offsets).is_contiguous();
        const int64_t *at = cu_seqlens.data<int64_t>();
        require(offsets > 0 && at[0] == 0 && at[offsets - 1] == tokens && std::is_sorted(at, at + offsets), "cu_seqlens",
                "ascending offsets from 0 to the number of tokens are expected");
        if (alibi_slopes) alibi_slopes->has_dtype({DType::FLOAT32}).has_shape(heads).is_contiguous();
        if (biases) biases->has_dtype({DType::FLOAT32}).has_shape(heads, width).is_contiguous();
        require(!biases || width % 2 == 1, "biases", "an odd number of distances is expected");
        require(scale > 0.0f, "scale", "has to be above 0");
        return {q.dtype, q.data(), k.data(), v.data(), out.data(), at, data_or_null<float>(alibi_slopes),
                data_or_null<float>(biases), offsets - 1, tokens, heads, kv_heads, dim, q.strides[0], k.strides[0],
                v.strides[0], biases ? width / 2 : 0, window, scale, softcap, causal != 0};
    }
    void run() const;
    int64_t work() const { return 8 * tokens * heads * dim; }
    int64_t &row_count() { return tokens; }

    DType dtype;
    const void *q, *k, *v;
    void *out;
    const int64_t *cu_seqlens;  // (sequences + 1,); in replays, those past the last sequence are equal to it
    const float *alibi_slopes;  // (heads,) or null
    const float *biases;        // (heads, 2 * reach + 1) by distance, the largest ones also for distances beyond; or null
    int64_t sequences, tokens, heads, kv_heads, dim, q_stride, k_stride, v_stride, reach;
    int64_t window;        // largest distance of a key that a query sees; below 0: all
    float scale, softcap;  // softcap 0: none
    bool causal;
};
REGISTER_OP(VarlenAttention);

constexpr int64_t KEYS = 144;               // at most, that are packed at a time: their scores fit into the first-level cache
constexpr int64_t QUERIES = 16 * PANEL;     // about as many share packed keys
constexpr float LOWEST = -1e30f;            // finite, so that differences to -inf are -inf

inline int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }
// The size of `count` in as few equal parts of at most `limit` as there can be, rounded up to a multiple of `unit`.
inline int64_t equal_part(int64_t count, int64_t limit, int64_t unit) {
    int64_t parts = std::max<int64_t>(1, (count + limit - 1) / limit);
    return round_up((count + parts - 1) / parts, unit);
}

struct StorePanel {
    float *panel;
    void operator()(int row, Floats low, Floats high) const { Float32::store2(panel + row * PANEL, low, high); }
};

// Adds to sums that are scaled first.
struct AddValues {
    float *sums;
    Floats low_factors, high_factors;
    void operator()(int row, Floats low, Floats high) const {
        float *at = sums + row * PANEL;
        Float32::store2(at, Float32::load(at) * low_factors + low, Float32::load(at + LANES) * high_factors + high);
    }
};

// What a thread takes at a time: some queries of one sequence, of the heads that share a head of keys and values.
struct QueryBlock {
    int64_t begin, length;  // the sequence's first token, its tokens
    int64_t kv_head;
    int64_t first, last;  // queries; the first is a multiple of PANEL
};

// 32 queries of a head and what is known of them after some keys. Those past the last query are 0 and of no interest.
struct QueryPanel {
    int64_t head, query;       // the first one
    uint32_t *q;               // (words, 32)
    float *sums;               // (padded dim, 32): of weighted values
    float *tops, *totals;      // (32,): largest score, sum of weights
};

// One thread's buffers, and its work on an item. All sizes are those of the call.
template <class T>
class PackedAttention {
    typedef typename T::Element Element;
    static constexpr int64_t PER_WORD = sizeof(uint32_t) / sizeof(Element);

  public:
    explicit PackedAttention(const VarlenAttention &a)
        : a_(a), words_(a.dim / PER_WORD), padded_dim_(round_up(a.dim, LANES)),
          key_stride_(words_ + DealiasedRows::aliases(words_ * sizeof(uint32_t))), group_(a.heads / a.kv_heads),
          keys_(new uint32_t[KEYS * key_stride_]), values_(new uint32_t[KEYS / PER_WORD * padded_dim_]),
          q_(new uint32_t[group_ * queries(a) * words_]), sums_(new float[group_ * queries(a) * padded_dim_]),
          tops_(new float[group_ * queries(a)]), totals_(new float[group_ * queries(a)]) {}

    // Queries of a head in one item, at most.
    static int64_t queries(const VarlenAttention &a) {
        return std::max<int64_t>(1, QUERIES / PANEL * a.kv_heads / a.heads) * PANEL;
    }

    // next: what this thread does after it, or null. Its first rows are prefetched.
    void attend(const QueryBlock &block, const QueryBlock *next) {
        int64_t kv_head = block.kv_head;
        int64_t panels = (block.last - block.first + PANEL - 1) / PANEL, count = group_ * panels;
        std::fill_n(sums_.get(), count * PANEL * padded_dim_, 0.0f);
        std::fill_n(tops_.get(), count * PANEL, LOWEST);
        std::fill_n(totals_.get(), count * PANEL, 0.0f);
        for (int64_t i = 0; i < count; i++) pack_queries(block, panel_at(block, kv_head, panels, i));
        int64_t begin = first_seen(block.first), end = last_seen(block, block.last - 1);
        int64_t size = keys_at_a_time(block);
        for (int64_t key = begin / size * size; key < end; key += size) {
            int64_t from = std::max(key, begin / PER_WORD * PER_WORD), to = std::min(key + size, end);
            pack_keys(block, kv_head, from, to);
            for (int64_t i = 0; i < count; i++) {
                if (to < end) prefetch_keys(block, to, std::min(to + size, end), i, count);
                else if (next) prefetch_first(*next, i, count);
                attend_panel(block, panel_at(block, kv_head, panels, i), from, to);
            }
        }
        for (int64_t i = 0; i < count; i++) write_panel(block, panel_at(block, kv_head, panels, i));
    }

  private:
    // Keys that a query sees: [first_seen, last_seen).
    int64_t first_seen(int64_t query) const { return a_.window < 0 ? 0 : std::max<int64_t>(0, query - a_.window); }
    int64_t last_seen(const QueryBlock &block, int64_t query) const {
        int64_t end = a_.causal ? std::min(block.length, query + 1) : block.length;
        return a_.window < 0 ? end : std::min(end, query + a_.window + 1);
    }

    static int64_t keys_at_a_time(const QueryBlock &block) { return equal_part(block.length, KEYS, PER_WORD); }

    // Prefetches one of `parts` parts of some rows, so that they are on their way while something else is computed: a row
    // is far from the next one, which processors do not foresee.
    void prefetch_rows(const Element *row, int64_t stride, int64_t rows, int64_t size, int64_t part, int64_t parts) const {
        for (int64_t i = part * rows / parts; i < (part + 1) * rows / parts; i++)
            for (int64_t at = 0; at < size; at += LINE / int64_t(sizeof *row)) __builtin_prefetch(row + i * stride + at, 0, 2);
    }
    void prefetch_keys(const QueryBlock &block, int64_t from, int64_t to, int64_t part, int64_t parts) const {
        prefetch_rows(key_row(block, block.kv_head, from), a_.k_stride, to - from, a_.dim, part, parts);
        prefetch_rows(value_row(block, block.kv_head, from), a_.v_stride, to - from, a_.dim, part, parts);
    }
    // The queries of a block, and the keys that it reads first.
    void prefetch_first(const QueryBlock &block, int64_t part, int64_t parts) const {
        int64_t from = first_seen(block.first) / PER_WORD * PER_WORD, to = last_seen(block, block.last - 1);
        prefetch_keys(block, from, std::min(to, from + keys_at_a_time(block)), part, parts);
        prefetch_rows((const Element *)a_.q + (block.begin + block.first) * a_.q_stride + block.kv_head * group_ * a_.dim,
                      a_.q_stride, block.last - block.first, group_ * a_.dim, part, parts);
    }

    QueryPanel panel_at(const QueryBlock &block, int64_t kv_head, int64_t panels, int64_t index) const {
        int64_t slot = index * PANEL;
        return {kv_head * group_ + index / panels, block.first + index % panels * PANEL, &q_[slot * words_],
                &sums_[slot * padded_dim_], &tops_[slot], &totals_[slot]};
    }

    void pack_queries(const QueryBlock &block, const QueryPanel &panel) {
        const Element *q = (const Element *)a_.q + (block.begin + panel.query) * a_.q_stride + panel.head * a_.dim;
        int64_t whole = words_ / LANES * LANES;
        for (int64_t half = 0; half < PANEL; half += LANES) {
            uint32_t *out = panel.q + half;
            int64_t count = std::clamp<int64_t>(block.last - panel.query - half, 0, LANES);
            const Element *rows = q + half * a_.q_stride;
            for (int64_t i = 0; i < whole; i += LANES) {
                Words x[LANES] = {};
                for (int64_t at = 0; at < count; at++) x[at] = load_words(rows + at * a_.q_stride + i * PER_WORD);
                transpose(x);
                for (int64_t at = 0; at < LANES; at++) std::memcpy(out + (i + at) * PANEL, &x[at], sizeof *x);
            }
            for (int64_t i = whole; i < words_; i++)
                for (int64_t at = 0; at < LANES; at++) {
                    uint32_t word = 0;
                    if (at < count) std::memcpy(&word, rows + at * a_.q_stride + i * PER_WORD, sizeof word);
                    out[i * PANEL + at] = word;
                }
        }
    }

    // Packs keys as they are, and the values of as many positions as a word has elements together; 0 past the end of the
    // sequence.
    void pack_keys(const QueryBlock &block, int64_t kv_head, int64_t from, int64_t to) {
        const Element *k = key_row(block, kv_head, 0), *v = value_row(block, kv_head, 0);
        for (int64_t key = from; key < to; key++)
            std::memcpy(&keys_[(key - from) * key_stride_], k + key * a_.k_stride, a_.dim * sizeof *k);
        for (int64_t key = from; key < to; key += PER_WORD) {
            uint32_t *out = &values_[(key - from) / PER_WORD * padded_dim_];
            const Element *row = v + key * a_.v_stride;
            if constexpr (PER_WORD == 1) std::memcpy(out, row, a_.dim * sizeof *row);
            else pair_values(row, key + 1 < block.length ? row + a_.v_stride : nullptr, out);
        }
    }

    // Words of the elements of two positions; of the second, if it is null, they are 0.
    void pair_values(const uint16_t *first, const uint16_t *second, uint32_t *out) const {
        int64_t whole = a_.dim / LANES * LANES;
        for (int64_t d = 0; d < whole; d += LANES) {
            Words both = (Words)BFloat16::load(first + d) >> 16;
            if (second) both |= (Words)BFloat16::load(second + d);
            std::memcpy(out + d, &both, sizeof both);
        }
        for (int64_t d = whole; d < a_.dim; d++) out[d] = first[d] | (second ? uint32_t(second[d]) << 16 : 0);
    }

    const Element *key_row(const QueryBlock &block, int64_t kv_head, int64_t key) const {
        return (const Element *)a_.k + (block.begin + key) * a_.k_stride + kv_head * a_.dim;
    }
    const Element *value_row(const QueryBlock &block, int64_t kv_head, int64_t key) const {
        return (const Element *)a_.v + (block.begin + key) * a_.v_stride + kv_head * a_.dim;
    }

    // Queries attend to those of the packed keys [from, to) that one of them sees.
    void attend_panel(const QueryBlock &block, const QueryPanel &panel, int64_t from, int64_t to) {
        int64_t last = std::min(block.last, panel.query + PANEL) - 1;
        int64_t begin = std::max(from, first_seen(panel.query) / PER_WORD * PER_WORD);
        int64_t end = std::min(to, last_seen(block, last));
        if (begin >= end) return;
        for (int64_t key = begin, tile = equal_part(end - begin, MAX_ROWS, 1); key < end; key += tile) {
            RowWords keys(&keys_[(key - from) * key_stride_], key_stride_ * int64_t(sizeof(uint32_t)));
            word_matmul_for<T, RowWords, NoPrefetch, StorePanel>(std::min(tile, end - key))(
                keys, panel.q, words_, {}, {scores_ + (key - begin) * PANEL});
        }
        bool scaled = a_.softcap > 0.0f || a_.alibi_slopes || a_.biases;
        float scale = scaled ? LOG2_E : a_.scale * LOG2_E;
        if (scaled) scale_scores(panel, begin, end);
        if (a_.causal || a_.window >= 0) hide_scores(panel, begin, end);
        Floats low_factors, high_factors;
        raise_tops(panel.tops, end - begin, scale, low_factors, high_factors);
        for (int64_t lane = 0; lane < PANEL; lane += LANES)
            exponentiate(panel.tops + lane, panel.totals + lane, scores_ + lane, end - begin, scale,
                         lane ? high_factors : low_factors);
        int64_t first_word = (begin - from) / PER_WORD, used = (end - begin + PER_WORD - 1) / PER_WORD;
        for (int64_t d = 0, tile = equal_part(a_.dim, MAX_ROWS, 1); d < a_.dim; d += tile) {
            ColumnWords values(&values_[first_word * padded_dim_ + d], padded_dim_);
            word_matmul_for<T, ColumnWords, NoPrefetch, AddValues>(std::min(tile, a_.dim - d))(
                values, (const uint32_t *)scores_, used, {}, {panel.sums + d * PANEL, low_factors, high_factors});
        }
    }

    // Scores of [begin, end) as they are in the softmax: scaled, capped, and with what depends on the distance.
    void scale_scores(const QueryPanel &panel, int64_t begin, int64_t end) {
        const Floats lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        const float *biases = a_.biases ? a_.biases + panel.head * (2 * a_.reach + 1) + a_.reach : nullptr;
        for (int64_t key = begin; key < end; key++)
            for (int64_t lane = 0; lane < PANEL; lane += LANES) {
                float *scores = scores_ + (key - begin) * PANEL + lane;
                int64_t ahead = key - panel.query - lane;  // of the first of these queries
                Floats x = Float32::load(scores) * a_.scale;
                if (a_.softcap > 0.0f) x = a_.softcap * vector_tanh(x / a_.softcap);
                Floats distance = float(ahead) - lanes;
                if (a_.alibi_slopes) x -= a_.alibi_slopes[panel.head] * maximum(distance, -distance);
                Float32::store(scores, x);
                for (int64_t i = 0; biases && i < LANES; i++) scores[i] += biases[std::clamp(ahead - i, -a_.reach, a_.reach)];
            }
    }

    // Makes scores of [begin, end) -inf where a query does not see the key.
    void hide_scores(const QueryPanel &panel, int64_t begin, int64_t end) {
        const Ints lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        int64_t limit = PANEL;  // of numbers below, that 32 bits have room for
        for (int64_t key = begin; key < end; key++) {
            int64_t first = 0, last = limit;  // queries that see it, from the panel's first one
            if (a_.causal) first = key - panel.query;
            if (a_.window >= 0) first = std::max(first, key - a_.window - panel.query), last = key + a_.window - panel.query;
            if (first <= 0 && last >= PANEL - 1) continue;
            int32_t low = int32_t(std::clamp(first, -limit, limit)), high = int32_t(std::clamp(last, -limit, limit));
            for (int64_t lane = 0; lane < PANEL; lane += LANES) {
                float *scores = scores_ + (key - begin) * PANEL + lane;
                Ints query = lanes + int32_t(lane), seen = (query >= low) & (query <= high);
                Float32::store(scores, select(seen, Float32::load(scores), broadcast(-INFINITY)));
            }
        }
    }

    // Includes some more keys in the largest scores. Factors: what sums of weights are to be multiplied with for that.
    void raise_tops(float *tops, int64_t keys, float scale, Floats &low_factors, Floats &high_factors) const {
        Floats low = Float32::load(tops), high = Float32::load(tops + LANES), low_before = low, high_before = high;
        for (int64_t key = 0; key < keys; key++) {
            low = maximum(low, Float32::load(scores_ + key * PANEL));
            high = maximum(high, Float32::load(scores_ + key * PANEL + LANES));
        }
        low_factors = vector_exp2((low_before - low) * scale), high_factors = vector_exp2((high_before - high) * scale);
        Float32::store2(tops, low, high);
    }

    // Puts weights in the place of the scores of 16 queries, and adds them to sums that are multiplied with factors first.
    static void exponentiate(const float *tops, float *totals, float *scores, int64_t keys, float scale, Floats factors) {
        Floats shift = Float32::load(tops) * scale, total = broadcast(0.0f);
        auto weight = [&](int64_t key) {
            Floats x = Float32::load(scores + key * PANEL) * scale - shift;
            return PER_WORD == 1 ? vector_exp2(x) : rough_exp2(x);
        };
        for (int64_t key = 0; key < keys; key += PER_WORD) {
            Floats first = weight(key), second = PER_WORD == 2 && key + 1 < keys ? weight(key + 1) : broadcast(0.0f);
            total += first + second;
            Float32::store(scores + key / PER_WORD * PANEL, PER_WORD == 1 ? first : (Floats)round_pairs(first, second));
        }
        Float32::store(totals, Float32::load(totals) * factors + total);
    }

    void write_panel(const QueryBlock &block, const QueryPanel &panel) const {
        for (int64_t half = 0; half < PANEL; half += LANES) {
            int64_t query = panel.query + half, count = std::min<int64_t>(LANES, block.last - query);
            Floats factors = 1.0f / Float32::load(panel.totals + half);
            Element *out = (Element *)a_.out + ((block.begin + query) * a_.heads + panel.head) * a_.dim;
            for (int64_t d = 0; d < a_.dim; d += LANES) {
                Words x[LANES];
                for (int64_t i = 0; i < LANES; i++) x[i] = (Words)(Float32::load(panel.sums + (d + i) * PANEL + half) * factors);
                transpose(x);
                for (int64_t i = 0; i < count; i++) store_part(out + i * a_.heads * a_.dim + d, (Floats)x[i], a_.dim - d);
            }
        }
    }

    // Stores 16 elements, or as many as there are.
    static void store_part(Element *out, Floats x, int64_t count) {
        if (count >= LANES) return T::store(out, x);
        Element part[LANES];
        T::store(part, x);
        std::memcpy(out, part, count * sizeof *part);
    }

    const VarlenAttention &a_;
    int64_t words_, padded_dim_, key_stride_, group_;
    std::unique_ptr<uint32_t[]> keys_, values_, q_;  // keys (keys, words), values (keys / elements of a word, padded dim)
    std::unique_ptr<float[]> sums_, tops_, totals_;  // of all panels of the item
    alignas(64) float scores_[KEYS * PANEL];         // (keys, 32), and then weights
};

// The work of a call, the longest sequences first. Blocks have at most `size` queries; the last ones have fewer, so that all
// threads end at about the same time.
inline std::vector<QueryBlock> query_blocks(const VarlenAttention &a, int64_t size, int64_t threads) {
    std::vector<QueryBlock> sequences, blocks;
    int64_t left = 0;  // products of a panel of queries with a key
    for (int64_t s = 0; s < a.sequences; s++) {
        int64_t begin = a.cu_seqlens[s], length = a.cu_seqlens[s + 1] - begin;
        if (length > 0) sequences.push_back({begin, length, 0, 0, length});
        left += (length + PANEL - 1) / PANEL * length * a.kv_heads;
    }
    std::stable_sort(sequences.begin(), sequences.end(),
                     [](const QueryBlock &x, const QueryBlock &y) { return x.length > y.length; });
    for (QueryBlock block : sequences) {
        int64_t part = equal_part(block.length, size, PANEL) / PANEL;
        for (block.kv_head = 0; block.kv_head < a.kv_heads; block.kv_head++)
            for (block.first = 0; block.first < block.length; block.first = block.last) {
                int64_t panels = threads == 1 ? part : std::clamp<int64_t>(left / (2 * threads * block.length), 1, part);
                block.last = std::min(block.length, block.first + panels * PANEL);
                blocks.push_back(block);
                left -= panels * block.length;
            }
    }
    return blocks;
}

template <class T>
void varlen_attention(const VarlenAttention &a) {
    int64_t products = 0;
    for (int64_t s = 0; s < a.sequences; s++) {
        int64_t length = a.cu_seqlens[s + 1] - a.cu_seqlens[s];
        products += length * length * a.heads * a.dim;
    }
    int64_t threads = products > 16 * SERIAL ? pool_threads() : 1;
    std::vector<QueryBlock> blocks = query_blocks(a, PackedAttention<T>::queries(a), threads);
    std::vector<PackedAttention<T>> buffers;
    buffers.reserve(threads);
    for (int64_t i = 0; i < threads; i++) buffers.emplace_back(a);
    WorkItems items(blocks.size());
    auto body = [&](int thread) {
        items.for_each([&](int64_t item, int64_t next) {
            buffers[thread].attend(blocks[item], next < int64_t(blocks.size()) ? &blocks[next] : nullptr);
        });
    };
    threads == 1 ? body(0) : run_parallel(body);
}

inline void VarlenAttention::run() const {
    dtype == DType::BFLOAT16 ? varlen_attention<BFloat16>(*this) : varlen_attention<Float32>(*this);
}
