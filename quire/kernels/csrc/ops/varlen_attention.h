// Attention of packed sequences to themselves, without a cache: encoders. Flash attention (Dao et al. 2022) with keys and
// values in panels as weights of linear layers (see panel_matmul.h), so that scores and outputs are matrix products. A
// sequence's result does not depend on the others.
//
// Rows are read as words of 32 bits: one element of float32 or two of bfloat16.
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

constexpr int64_t KEYS = 128;               // that are packed at a time, as fit into the first-level cache; a multiple of PANEL
constexpr int64_t QUERIES = 42 * MAX_ROWS;  // about as many share packed keys
constexpr int64_t SCORE_STRIDE = KEYS + LANES, WEIGHT_STRIDE = KEYS + PAIR;
constexpr float LOWEST = -1e30f;            // finite, so that differences to -inf are -inf
constexpr float LOG2_E = 1.44269504088896341f;

inline int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

struct StoreScores {
    float *scores;
    void operator()(int row, Floats low, Floats high) const { Float32::store2(scores + row * SCORE_STRIDE, low, high); }
};

// Adds to sums that are scaled first.
struct AddValues {
    float *sums;
    int64_t stride;
    const float *factors;
    void operator()(int row, Floats low, Floats high) const {
        float *at = sums + row * stride;
        Float32::store2(at, Float32::load(at) * factors[row] + low, Float32::load(at + LANES) * factors[row] + high);
    }
};

// What an item has of one sequence: some queries of the heads that share a head of keys and values.
struct QueryBlock {
    int64_t begin, length;  // the sequence's first token, its tokens
    int64_t first, last;    // queries
};

// One thread's buffers, and its work on an item. All sizes are those of the call.
template <class T>
class PackedAttention {
    typedef typename T::Element Element;
    static constexpr int64_t PER_WORD = sizeof(uint32_t) / sizeof(Element);

  public:
    explicit PackedAttention(const VarlenAttention &a)
        : a_(a), copies_(a.q_stride % PER_WORD || DealiasedRows::aliases(a.q_stride * sizeof(Element))), words_(a.dim / PER_WORD), padded_dim_(round_up(a.dim, PANEL)), group_(a.heads / a.kv_heads),
          keys_(new uint32_t[KEYS * words_]), values_(new uint32_t[KEYS / PER_WORD * padded_dim_]),
          q_(new Element[MAX_ROWS * a.dim]), sums_(new float[group_ * queries(a) * padded_dim_]),
          tops_(new float[group_ * queries(a)]), totals_(new float[group_ * queries(a)]) {}

    // Queries of a head in one item.
    static int64_t queries(const VarlenAttention &a) {
        return std::max<int64_t>(1, QUERIES / MAX_ROWS * a.kv_heads / a.heads) * MAX_ROWS;
    }

    void attend(const QueryBlock &block, int64_t kv_head) {
        int64_t count = block.last - block.first;
        std::fill_n(sums_.get(), group_ * count * padded_dim_, 0.0f);
        std::fill_n(tops_.get(), group_ * count, LOWEST);
        std::fill_n(totals_.get(), group_ * count, 0.0f);
        int64_t begin = first_seen(block.first), end = last_seen(block, block.last - 1);
        int64_t tiles = (count + MAX_ROWS - 1) / MAX_ROWS, tile = (count + tiles - 1) / tiles;
        for (int64_t key = begin / KEYS * KEYS; key < end; key += KEYS) {
            int64_t from = std::max(key, begin / PANEL * PANEL), to = std::min(key + KEYS, end);
            for (int64_t panel = from; panel < to; panel += PANEL) pack_panel(block, kv_head, key, panel);
            for (int64_t member = 0; member < group_; member++)
                for (int64_t row = 0; row < count; row += tile)
                    attend_tile(block, kv_head * group_ + member, member * count + row, block.first + row,
                                std::min(tile, count - row), key, from, to);
        }
        for (int64_t row = 0; row < group_ * count; row++) {
            int64_t token = block.begin + block.first + row % count, head = kv_head * group_ + row / count;
            write_row(row, (Element *)a_.out + (token * a_.heads + head) * a_.dim);
        }
    }

  private:
    // Keys that a query sees: [first_seen, last_seen).
    int64_t first_seen(int64_t query) const { return a_.window < 0 ? 0 : std::max<int64_t>(0, query - a_.window); }
    int64_t last_seen(const QueryBlock &block, int64_t query) const {
        int64_t end = a_.causal ? query + 1 : block.length;
        return a_.window < 0 ? end : std::min(end, query + a_.window + 1);
    }

    // Packs the keys and values of 32 positions; 0 past the end of the sequence.
    void pack_panel(const QueryBlock &block, int64_t kv_head, int64_t origin, int64_t panel) {
        const Element *k = (const Element *)a_.k + block.begin * a_.k_stride + kv_head * a_.dim;
        const Element *v = (const Element *)a_.v + block.begin * a_.v_stride + kv_head * a_.dim;
        int64_t whole = words_ / LANES * LANES;
        for (int64_t half = 0; half < PANEL; half += LANES) {
            uint32_t *keys = &keys_[(panel - origin) * words_ + half];
            int64_t count = std::clamp<int64_t>(block.length - panel - half, 0, LANES);
            const Element *rows = k + (panel + half) * a_.k_stride;
            for (int64_t i = 0; i < whole; i += LANES) {
                Words x[LANES] = {};
                for (int64_t at = 0; at < count; at++) x[at] = load_words(rows + at * a_.k_stride + i * PER_WORD);
                transpose(x);
                for (int64_t at = 0; at < LANES; at++) std::memcpy(keys + (i + at) * PANEL, &x[at], sizeof *x);
            }
            for (int64_t i = whole; i < words_; i++)
                for (int64_t at = 0; at < LANES; at++) {
                    uint32_t word = 0;
                    if (at < count) std::memcpy(&word, rows + at * a_.k_stride + i * PER_WORD, sizeof word);
                    keys[i * PANEL + at] = word;
                }
        }
        for (int64_t position = panel; position < panel + PANEL; position += PER_WORD)
            for (int64_t d = 0; d < padded_dim_; d += PANEL)
                pack_values(v, block.length, position, d, &values_[d * (KEYS / PER_WORD) + (position - origin) / PER_WORD * PANEL]);
    }

    // 32 elements of the values of as many positions as a word has elements.
    void pack_values(const Element *v, int64_t length, int64_t position, int64_t d, uint32_t *out) const {
        Element parts[PER_WORD][PANEL];
        const Element *rows[PER_WORD];
        for (int64_t i = 0; i < PER_WORD; i++) {
            rows[i] = v + (position + i) * a_.v_stride + d;
            if (position + i < length && d + PANEL <= a_.dim) continue;
            std::fill_n(parts[i], PANEL, Element(0));
            if (position + i < length) std::memcpy(parts[i], rows[i], (a_.dim - d) * sizeof(Element));
            rows[i] = parts[i];
        }
        if constexpr (PER_WORD == 1) std::memcpy(out, rows[0], PANEL * sizeof *out);
        else
            for (int64_t i = 0; i < PANEL; i += LANES) {
                Words low = (Words)BFloat16::load(rows[0] + i) >> 16, high = (Words)BFloat16::load(rows[1] + i);
                Words both = low | high;
                std::memcpy(out + i, &both, sizeof both);
            }
    }

    // Queries [query, query + rows) of a head attend to the packed keys [from, to). slot: where their state is.
    void attend_tile(const QueryBlock &block, int64_t head, int64_t slot, int64_t query, int64_t rows, int64_t origin,
                     int64_t from, int64_t to) {
        int64_t begin = std::max(from, first_seen(query)) / PANEL * PANEL;
        int64_t end = round_up(std::min(to, last_seen(block, query + rows - 1)), PANEL);
        if (begin >= end) return;
        const Element *q = (const Element *)a_.q + (block.begin + query) * a_.q_stride + head * a_.dim;
        for (int64_t row = 0; copies_ && row < rows; row++)
            std::memcpy(&q_[row * a_.dim], q + row * a_.q_stride, a_.dim * sizeof *q);
        if (copies_) q = q_.get();
        auto score = word_matmul_for<T, NoPrefetch, StoreScores>(rows);
        for (int64_t key = begin; key < end; key += PANEL)
            score((const uint32_t *)q, copies_ ? words_ : a_.q_stride / PER_WORD, &keys_[(key - origin) * words_], words_, {},
                  {scores_ + key - origin});
        bool scaled = a_.softcap > 0.0f || a_.alibi_slopes || a_.biases;
        float scale = scaled ? LOG2_E : a_.scale * LOG2_E;
        alignas(64) float before[LANES] = {}, largest[LANES] = {}, factors[LANES];
        for (int64_t row = 0; row < rows; row++) {
            float *scores = scores_ + row * SCORE_STRIDE - origin;
            int64_t first = first_seen(query + row), last = last_seen(block, query + row);
            if (scaled) scale_scores(scores, begin, end, head, query + row);
            std::fill(scores + begin, scores + std::clamp(first, begin, end), -INFINITY);
            std::fill(scores + std::clamp(last, begin, end), scores + end, -INFINITY);
            before[row] = tops_[slot + row];
            largest[row] = tops_[slot + row] = largest_score(scores, begin, end, before[row]);
        }
        Float32::store(factors, vector_exp2((Float32::load(before) - Float32::load(largest)) * scale));
        for (int64_t row = 0; row < rows; row++) {
            float total = exponentiate(scores_ + row * SCORE_STRIDE - origin, weights_ + row * WEIGHT_STRIDE - origin,
                                       begin, end, scale, largest[row] * scale);
            totals_[slot + row] = totals_[slot + row] * factors[row] + total;
        }
        auto accumulate = word_matmul_for<T, NoPrefetch, AddValues>(rows);
        int64_t word = (begin - origin) / PER_WORD, used = (std::min(end, block.length) - begin + PER_WORD - 1) / PER_WORD;
        for (int64_t d = 0; d < padded_dim_; d += PANEL)
            accumulate((const uint32_t *)weights_ + word, WEIGHT_STRIDE / PER_WORD,
                       &values_[d * (KEYS / PER_WORD) + word * PANEL], used, {}, {&sums_[slot * padded_dim_ + d], padded_dim_, factors});
    }

    // Scores of a query as they are in the softmax: scaled, capped, and with what depends on the distance.
    void scale_scores(float *scores, int64_t begin, int64_t end, int64_t head, int64_t query) const {
        const Floats lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
        for (int64_t key = begin; key < end; key += LANES) {
            Floats x = Float32::load(scores + key) * a_.scale;
            if (a_.softcap > 0.0f) x = a_.softcap * vector_tanh(x / a_.softcap);
            Floats distance = lanes + float(key - query);
            if (a_.alibi_slopes) x -= a_.alibi_slopes[head] * maximum(distance, -distance);
            Float32::store(scores + key, x);
        }
        if (!a_.biases) return;
        const float *biases = a_.biases + head * (2 * a_.reach + 1) + a_.reach;
        for (int64_t key = begin; key < end; key++) scores[key] += biases[std::clamp(key - query, -a_.reach, a_.reach)];
    }

    // The largest of some scores and one more.
    static float largest_score(const float *scores, int64_t begin, int64_t end, float other) {
        Floats largest = broadcast(other);
        for (int64_t i = begin; i < end; i += LANES) largest = maximum(largest, Float32::load(scores + i));
        return horizontal_max(largest);
    }

    // Weights 2^(x * scale - shift) of scores x; returns their sum.
    static float exponentiate(const float *scores, Element *weights, int64_t begin, int64_t end, float scale, float shift) {
        Floats sums = broadcast(0.0f);
        for (int64_t i = begin; i < end; i += LANES) {
            Floats weight = vector_exp2(Float32::load(scores + i) * scale - shift);
            T::store(weights + i, weight);
            sums += weight;
        }
        return horizontal_sum(sums);
    }

    void write_row(int64_t row, Element *out) const {
        const float *sums = &sums_[row * padded_dim_];
        float factor = 1.0f / totals_[row];
        int64_t whole = a_.dim / LANES * LANES;
        for (int64_t i = 0; i < whole; i += LANES) T::store(out + i, Float32::load(sums + i) * factor);
        for (int64_t i = whole; i < a_.dim; i++) out[i] = T::from_float(sums[i] * factor);
    }

    const VarlenAttention &a_;
    bool copies_;  // the queries of a tile; see DealiasedRows
    int64_t words_, padded_dim_, group_;
    std::unique_ptr<uint32_t[]> keys_, values_;
    std::unique_ptr<Element[]> q_;
    std::unique_ptr<float[]> sums_, tops_, totals_;  // of each query of the item
    alignas(64) float scores_[MAX_ROWS * SCORE_STRIDE];
    alignas(64) Element weights_[MAX_ROWS * WEIGHT_STRIDE];
};

template <class T>
void varlen_attention(const VarlenAttention &a) {
    std::vector<QueryBlock> blocks;
    int64_t size = PackedAttention<T>::queries(a), products = 0;
    for (int64_t s = 0; s < a.sequences; s++) {
        int64_t begin = a.cu_seqlens[s], length = a.cu_seqlens[s + 1] - begin;
        products += length * length * a.heads * a.dim;
        for (int64_t first = 0; first < length; first += size)
            blocks.push_back({begin, length, first, std::min(length, first + size)});
    }
    std::stable_sort(blocks.begin(), blocks.end(), [](const QueryBlock &x, const QueryBlock &y) {
        return (x.last - x.first) * x.length > (y.last - y.first) * y.length;  // the longest work first
    });
    int64_t threads = products > 16 * SERIAL ? pool_threads() : 1;
    std::vector<PackedAttention<T>> buffers;
    buffers.reserve(threads);
    for (int64_t i = 0; i < threads; i++) buffers.emplace_back(a);
    WorkItems items(int64_t(blocks.size()) * a.kv_heads);
    auto body = [&](int thread) {
        items.for_each([&](int64_t item, int64_t) { buffers[thread].attend(blocks[item / a.kv_heads], item % a.kv_heads); });
    };
    threads == 1 ? body(0) : run_parallel(body);
}

inline void VarlenAttention::run() const {
    dtype == DType::BFLOAT16 ? varlen_attention<BFloat16>(*this) : varlen_attention<Float32>(*this);
}
