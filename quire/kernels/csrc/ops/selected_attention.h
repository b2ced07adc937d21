// Attention of single queries to selected positions of their sequences (DeepSeek V3.2), and their selection by an indexer. A
// query is computed from the positions up to its own: its bits do not depend on how many others a step has.
#pragma once

#include "paged_decode.h"
#include "paged_varlen.h"

// Where tokens are: the block table of the sequence of each, and the positions up to its own.
struct TokenPlaces {
    static TokenPlaces check(const Tensor &block_tables, const OptionalTensor &sequences, const Tensor &seq_lens, Size &tokens) {
        Size count("sequences"), width("blocks");
        block_tables.has_dtype({DType::INT32}).has_shape(count, width).is_dense(1);
        if (sequences) sequences->has_dtype({DType::INT64}).has_shape(tokens).is_contiguous();
        else require(tokens.matches(count), "block_tables", "a table of each token is expected");
        seq_lens.has_dtype({DType::INT64}).has_shape(tokens).is_contiguous();
        return {block_tables.data<int32_t>(), data_or_null<int64_t>(sequences), seq_lens.data<int64_t>(), block_tables.strides[0],
                width};
    }
    const int32_t *table(int64_t token) const { return tables + (sequences ? sequences[token] : token) * stride; }

    const int32_t *tables;
    const int64_t *sequences;  // (tokens,) rows of the tables, or null: each token has its own
    const int64_t *lengths;    // (tokens,)
    int64_t stride, blocks;
};

// The positions with the highest sums over heads of weight * relu(query * key), in ascending order; of equal ones the earlier.
// All positions of a token that has no more.
struct SelectPositions {
    static constexpr const char *NAME = "select_positions";
    static constexpr const char *PARAMETERS[] = {"queries", "weights", "keys", "block_tables", "sequences", "seq_lens", "positions", "first"};
    static SelectPositions check(const Tensor &queries, const Tensor &weights, const Tensor &keys, const Tensor &block_tables,
                                 const OptionalTensor &sequences, const Tensor &seq_lens, const Tensor &positions, int64_t first) {
        Size tokens("tokens"), heads("heads"), dim("dim"), one("heads of keys", 1), blocks("blocks"), block_size("block_size"), top_k("top_k");
        queries.is_floating().has_shape(tokens, heads, dim).is_dense(2);
        weights.has_dtype({DType::FLOAT32}).has_shape(tokens, heads).is_dense(1);
        PagesArgument key(keys, queries.dtype, one, blocks, block_size);
        require(dim > 0 && dim % PAIR == 0 && dim <= MAX_DIM, "queries", "a multiple of 32 and at most 1024 is expected as dim");
        require(first >= 0 && first + dim <= key.dim, "first", "an element with dim elements from it on is expected");
        require(!key.int8 || first % PAIR == 0, "first", "a multiple of 32 is expected, as elements have scales");
        positions.has_dtype({DType::INT32}).has_shape(tokens, top_k).is_contiguous();
        require(top_k > 0, "positions", "at least one of each token is expected");
        auto places = TokenPlaces::check(block_tables, sequences, seq_lens, tokens);
        return {queries.dtype, key.int8, queries.data(), weights.data<float>(), key.pages, places, positions.data<int32_t>(), tokens,
                heads, dim, queries.strides[0], weights.strides[0], block_size, top_k, first};
    }
    void run() const;
    int64_t work() const { return UNLOCKED_WORK; }
    int64_t &row_count() { return tokens; }

    DType dtype;
    bool int8;
    const void *queries;
    const float *weights;
    Pages keys;
    TokenPlaces places;
    int32_t *positions;
    int64_t tokens, heads, dim, query_stride, weight_stride, block_size, top_k, first;
};
REGISTER_OP(SelectPositions);

constexpr int64_t SLICE_SCORES = 4 << 20;  // scores that are kept at a time, if a token has no more
constexpr int64_t GROUP_TOKENS = 8;        // that share each panel of keys
#if defined(HAVE_AVX512)
constexpr int INDEX_HEADS = 8;  // whose sums fit into registers
#else
constexpr int INDEX_HEADS = 4;
#endif

// Adds to the scores of 16 positions what `heads` heads give. panel: (dim, 16) keys.
template <int heads>
INLINE void add_head_scores(const float *q, const float *weights, const float *panel, int64_t dim, Floats &score) {
    Floats sums[heads];
    for (int head = 0; head < heads; head++) sums[head] = broadcast(0.0f);
    for (int64_t d = 0; d < dim; d++) {
        Floats key = Float32::load(panel + d * LANES);
#pragma GCC unroll 8
        for (int head = 0; head < heads; head++) sums[head] += key * broadcast(q[head * dim + d]);
    }
    for (int head = 0; head < heads; head++) score += broadcast(weights[head]) * maximum(broadcast(0.0f), sums[head]);
}

// The scores of the tokens of a step that have more positions than are selected, some tokens at a time.
template <class T, class Rows>
class IndexScores {
  public:
    explicit IndexScores(const SelectPositions &a) : a_(a) {}

    // Scores tokens from `begin` on, as many as there is room for. Returns the one behind the last of them.
    int64_t score(int64_t begin) {
        tokens_.clear(), groups_.clear(), items_.clear();
        int64_t room = 0, end = begin;
        for (; end < a_.tokens; end++) {
            int64_t length = a_.places.lengths[end];
            if (length <= a_.top_k) continue;
            int64_t size = (length + LANES - 1) / LANES * LANES;
            if (!tokens_.empty() && room + size > SLICE_SCORES) break;
            tokens_.push_back({end, room, length});
            room += size;
        }
        if (int64_t(scores_.size()) < room) scores_.resize(room);
        queries_.resize(tokens_.size() * a_.heads * a_.dim);
        divide();
        parallel_for(int64_t(tokens_.size()), true, [&](int64_t i) { unpack_queries(i); });
        WorkItems work(int64_t(items_.size()));
        run_parallel([&](int) { work.for_each([&](int64_t item, int64_t) { score_item(items_[item]); }); });
        return end;
    }

    // Writes the positions of the scored tokens.
    void choose() {
        ranks_.resize(scores_.size());
        parallel_for(int64_t(tokens_.size()), true, [&](int64_t i) { choose(tokens_[i]); });
    }

  private:
    struct Token {
        int64_t index, begin, length;  // among those of the step, of its scores, and its positions
    };
    struct Group {
        int64_t begin, end, length;  // tokens of one sequence, and the most positions that one of them has
    };
    struct Item {
        int64_t group, first, last;  // positions
    };

    void divide() {
        for (int64_t i = 0; i < int64_t(tokens_.size()); i++) {
            const Token &token = tokens_[i];
            bool fits = !groups_.empty() && i - groups_.back().begin < GROUP_TOKENS &&
                        a_.places.table(tokens_[groups_.back().begin].index) == a_.places.table(token.index);
            if (!fits) groups_.push_back({i, i, 0});
            groups_.back().end = i + 1, groups_.back().length = std::max(groups_.back().length, token.length);
        }
        for (int64_t group = 0; group < int64_t(groups_.size()); group++)
            for (int64_t first = 0; first < groups_[group].length; first += CHUNK)
                items_.push_back({group, first, std::min(first + CHUNK, groups_[group].length)});
    }

    // Queries as floats, their elements in the order in which the elements of keys are loaded.
    void unpack_queries(int64_t i) {
        const typename T::Element *from = (const typename T::Element *)a_.queries + tokens_[i].index * a_.query_stride;
        float *to = &queries_[i * a_.heads * a_.dim];
        for (int64_t at = 0; at < a_.heads * a_.dim; at += PAIR) {
            Floats x, y;
            T::load_pair(from + at, x, y);
            Float32::store(to + at, x), Float32::store(to + at + LANES, y);
        }
    }

    void score_item(const Item &item) {
        const Group &group = groups_[item.group];
        typedef typename Rows::Element Element;
        alignas(64) float panel[MAX_DIM * LANES];
        PageIterator<Element> rows(row_at<const Element>(a_.keys, 0, 0, 0), a_.keys, a_.places.table(tokens_[group.begin].index),
                                   a_.block_size, item.first);
        for (int64_t first = item.first; first < item.last; first += LANES) {
            const Element *keys[LANES] = {};
            for (int64_t i = 0; i < std::min<int64_t>(LANES, item.last - first); i++) keys[i] = rows.next();
            pack_panel(keys, panel);
            for (int64_t i = group.begin; i < group.end; i++)
                if (first < tokens_[i].length) Float32::store(&scores_[tokens_[i].begin + first], score_panel(i, panel));
        }
    }

    void pack_panel(const typename Rows::Element *const *keys, float *panel) {
        for (int64_t at = 0; at < a_.dim; at += PAIR) {
            Words low[LANES], high[LANES];
            for (int i = 0; i < LANES; i++) {
                Floats x = broadcast(0.0f), y = broadcast(0.0f);
                if (keys[i]) Rows::load_pair(keys[i], a_.first + at, x, y);
                low[i] = (Words)x, high[i] = (Words)y;
            }
            transpose(low), transpose(high);
            for (int i = 0; i < LANES; i++) {
                Float32::store(panel + (at + i) * LANES, (Floats)low[i]);
                Float32::store(panel + (at + LANES + i) * LANES, (Floats)high[i]);
            }
        }
    }

    Floats score_panel(int64_t i, const float *panel) const {
        const float *q = &queries_[i * a_.heads * a_.dim], *weights = a_.weights + tokens_[i].index * a_.weight_stride;
        Floats score = broadcast(0.0f);
        int64_t head = 0;
        for (; head + INDEX_HEADS <= a_.heads; head += INDEX_HEADS)
            add_head_scores<INDEX_HEADS>(q + head * a_.dim, weights + head, panel, a_.dim, score);
        for (; head < a_.heads; head++) add_head_scores<1>(q + head * a_.dim, weights + head, panel, a_.dim, score);
        return score;
    }

    // A number that is greater where the score is, also of NaN, which comparisons of floats would not order.
    static uint32_t rank_of(float score) {
        uint32_t bits;
        std::memcpy(&bits, &score, sizeof bits);
        return bits & 0x80000000 ? ~bits : bits | 0x80000000;
    }

    void choose(const Token &token) {
        const float *scores = &scores_[token.begin];
        uint32_t *ranks = &ranks_[token.begin];
        for (int64_t i = 0; i < token.length; i++) ranks[i] = rank_of(scores[i]);
        std::nth_element(ranks, ranks + a_.top_k - 1, ranks + token.length, std::greater<uint32_t>());
        uint32_t last = ranks[a_.top_k - 1];
        int64_t equal = a_.top_k - std::count_if(ranks, ranks + a_.top_k, [&](uint32_t rank) { return rank > last; });
        int32_t *out = a_.positions + token.index * a_.top_k;
        for (int64_t i = 0; i < token.length; i++) {
            uint32_t rank = rank_of(scores[i]);
            if (rank > last || (rank == last && equal-- > 0)) *out++ = int32_t(i);
        }
    }

    const SelectPositions &a_;
    std::vector<Token> tokens_;
    std::vector<Group> groups_;
    std::vector<Item> items_;
    std::vector<float> scores_, queries_;
    std::vector<uint32_t> ranks_;
};

template <class T, class Rows>
void select_positions(const SelectPositions &a) {
    for (int64_t token = 0; token < a.tokens; token++) {
        int32_t *out = a.positions + token * a.top_k;
        if (a.places.lengths[token] <= a.top_k) std::iota(out, out + a.top_k, 0);
    }
    IndexScores<T, Rows> scores(a);
    for (int64_t begin = 0; begin < a.tokens;) begin = scores.score(begin), scores.choose();
}

inline void SelectPositions::run() const {
    if (dtype == DType::BFLOAT16) int8 ? select_positions<BFloat16, Int8Rows<BFloat16>>(*this) : select_positions<BFloat16, PlainRows<BFloat16>>(*this);
    else int8 ? select_positions<Float32, Int8Rows<Float32>>(*this) : select_positions<Float32, PlainRows<Float32>>(*this);
}

// Attention to the selected positions, of which a token has as many as there are up to its own, at most top_k. Values are
// the first elements of keys. The rows of the selected positions are pages of one row, which the other kernels read.
struct AttendSelected : AttentionArguments {
    static constexpr const char *NAME = "attend_selected";
    static constexpr const char *PARAMETERS[] = {"q", "keys", "values", "out", "block_tables", "sequences", "seq_lens", "positions", "scale"};
    static AttendSelected check(const Tensor &q, const Tensor &keys, const Tensor &values, const Tensor &out, const Tensor &block_tables,
                                const OptionalTensor &sequences, const Tensor &seq_lens, const Tensor &positions, float scale) {
        Size tokens("tokens");
        auto arguments = AttentionArguments::check(q, keys, values, out, positions, seq_lens, std::nullopt, 0, scale, 0.0f, tokens, tokens);
        require(arguments.kv_heads == 1, "keys", "one head is expected");
        require(keys.strides[1] == values.strides[1] && keys.strides[2] == values.strides[2], "values", "a part of the keys is expected");
        require(positions.shape[1] > 0, "positions", "at least one of each token is expected");
        AttendSelected call{arguments, TokenPlaces::check(block_tables, sequences, seq_lens, tokens)};
        // Numbers of rows in units of this many elements are 32 bits wide.
        call.unit = std::gcd(call.keys.block_stride, call.keys.row_stride);
        require(call.unit > 0 && keys.shape[1] * call.keys.block_stride / call.unit < INT32_MAX, "keys", "fewer or more regular pages are expected");
        call.top_k = positions.shape[1];
        return call;
    }
    void run() const;
    int64_t work() const { return UNLOCKED_WORK; }
    int64_t &row_count() { return sequences; }

    // The rows of a token's positions. Returns how many there are.
    int64_t rows_of(int64_t token, int32_t *rows) const {
        const int32_t *table = places.table(token), *selected = block_tables + token * table_stride;
        int64_t count = std::min(seq_lens[token], top_k), of_block = keys.block_stride / unit, of_row = keys.row_stride / unit;
        for (int64_t i = 0; i < count; i++)
            rows[i] = int32_t(table[selected[i] / block_size] * of_block + selected[i] % block_size * of_row);
        return count;
    }
    // Pages of one row.
    Pages rows_from(const Pages &pages) const { return {pages.data, pages.head_stride, unit, pages.row_stride}; }

    TokenPlaces places;
    int64_t unit = 1, top_k = 0;
};
REGISTER_OP(AttendSelected);

constexpr int64_t SLICE_RESULTS = 8 << 20;  // elements of partial results that are kept at a time, if a token has no more
constexpr int64_t FEW_HEADS = 4;            // that do not pay for packed keys

// All heads of a token are queries that see the same positions.
template <class Panels>
void attend_in_panels(const AttendSelected &a) {
    std::vector<int32_t> rows[2] = {std::vector<int32_t>(a.top_k), std::vector<int32_t>(a.top_k)}, visible(2 * a.heads, 0);
    auto heads_of = [&](int64_t token, const int32_t *table, int64_t count) -> PagedPrefill {
        return {(const uint16_t *)a.q + token * a.q_stride, a.rows_from(a.keys), a.rows_from(a.values),
                (uint16_t *)a.out + token * a.heads * a.value_dim, table, nullptr, a.heads, count, 1, 1, a.key_dim, a.value_dim,
                a.key_dim, a.value_dim, 1, 0, a.scale, 0.0f, visible.data()};
    };
    PackedContext<Panels> context(heads_of(0, rows[0].data(), 0), a.top_k, pool_threads());
    for (int64_t token = 0; token < a.sequences; token++) {
        std::vector<int32_t> &table = rows[token % 2];  // those of the token before say which panels are packed already
        int64_t count = a.rows_of(token, table.data());
        for (int64_t head = 0; head < a.heads; head++) visible[2 * head + 1] = int32_t(count);
        context.attend(heads_of(token, table.data(), count));
    }
}

// Tokens are sequences of their own.
template <class T>
void attend_as_sequences(const AttendSelected &a) {
    int64_t chunks = (a.top_k + CHUNK - 1) / CHUNK;
    int64_t slice = std::clamp<int64_t>(SLICE_RESULTS / (chunks * a.heads * a.value_dim), 1, a.sequences);
    std::vector<int32_t> rows(slice * a.top_k);
    std::vector<int64_t> counts(slice);
    for (int64_t begin = 0; begin < a.sequences; begin += slice) {
        AttentionArguments part = a;
        part.sequences = std::min(slice, a.sequences - begin);
        for (int64_t i = 0; i < part.sequences; i++) counts[i] = a.rows_of(begin + i, &rows[i * a.top_k]);
        part.q = (const typename T::Element *)a.q + begin * a.q_stride;
        part.out = (typename T::Element *)a.out + begin * a.heads * a.value_dim;
        part.keys = a.rows_from(a.keys), part.values = a.rows_from(a.values);
        part.block_tables = rows.data(), part.table_stride = a.top_k, part.seq_lens = counts.data(), part.block_size = 1;
        paged_decode<T>(part);
    }
}

inline void AttendSelected::run() const {
    if (sequences == 0) return;
    if (dtype == DType::FLOAT32) attend_as_sequences<Float32>(*this);
    else if (heads <= FEW_HEADS) attend_as_sequences<BFloat16>(*this);
    else int8 ? attend_in_panels<Int8Panels>(*this) : attend_in_panels<FloatPanels<PlainRows<BFloat16>>>(*this);
}
