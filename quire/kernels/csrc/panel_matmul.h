// Matrix products with bfloat16 weights in panels of 32 outputs: (panels, size_in / 2, 32, 2), so that one load brings the
// weights of two inputs for 16 outputs. Each output is one chain of sums over its inputs for any number of rows: a row's
// result does not depend on what else is in the batch.
#pragma once

#include "parallel.h"
#include "simd.h"
#include "activations.h"

constexpr int64_t PANEL = 2 * LANES;            // outputs
#if defined(HAVE_AVX2)
constexpr int64_t MAX_ROWS = 5;  // whose sums for one vector of outputs fit into registers beside the weights
#else
constexpr int64_t MAX_ROWS = 12;  // whose sums for two vectors do
#endif
constexpr int64_t FEW_ROWS = 4;                 // for which bfloat16 weights are read in order; see Tiling
constexpr int64_t L2_WEIGHT_BYTES = 768 << 10;  // weights that stay in a core's second-level cache
constexpr int64_t READ_AHEAD = 128 << 10;       // bytes of the following weight that a thread prefetches while it waits
constexpr int64_t FETCH_DISTANCE = 64 << 10;    // bytes at most that a thread prefetches ahead to the second-level cache
constexpr int64_t NEAR_DISTANCE = 4 << 10;      // bytes that it prefetches ahead to the first-level cache
constexpr int64_t SMALL_BATCH = 64;             // rows up to which reading the weights dominates
constexpr int64_t ITEMS_PER_THREAD = 48;        // of work, so that all threads end at about the same time
constexpr int64_t CHUNK_TILES = 8;              // of rows, that a chunk has at least

// Panels of a work item: at most `limit`, and fewer if that lets the busiest thread have clearly fewer of all of them.
inline int64_t panels_per_item(int64_t panels, int64_t limit) {
    int64_t threads = pool_threads();
    auto most = [&](int64_t group) { return ((panels + group - 1) / group + threads - 1) / threads * group; };
    int64_t best = limit;
    for (int64_t group = limit - 1; group > 0; group--)
        if (20 * most(group) < 19 * most(best)) best = group;
    return best;
}

// Divides rows and panels: into as few tiles of rows as registers allow, of about the same size. A work item is a group of
// panels, which stays in the cache while the rows of a chunk are multiplied with it. Where groups are few, there are
// several chunks of rows: with three items for each thread, one that the system delays would let the others wait long.
// Threads work on the chunks of a group side by side, so that each of them reads the group once.
//
// With few rows, memory sets the pace, and the processor fetches ahead by itself of what is read in order: those of AMD
// faster than by instructions, those of Intel faster with them. A thread has a range of neighbouring panels then, and while
// it waits for others it prefetches the beginning of the range that it will have of the following weight. Those of Intel
// gain by it in all small batches.
class Tiling {
  public:
    // few_rows: number of rows up to which panels are read in order where prefetches gain nothing, at most max_rows.
    Tiling(int64_t rows, const PanelWeight &weight, int64_t row_bytes, int64_t max_rows, int64_t few_rows,
           const PanelWeight *following = nullptr)
        : tile((rows + tiles_of(rows, max_rows) - 1) / tiles_of(rows, max_rows)), group(panels_of_group(rows, weight)),
          rows_(rows), row_bytes_(row_bytes), tiles_(tiles_of(rows, max_rows)), weight_(weight),
          following_(following ? *following : PanelWeight{}),
          reads_in_order_(rows <= (gains_by_prefetches() ? SMALL_BATCH : few_rows)),
          groups_((weight.panels + group - 1) / group),
          chunks_(std::clamp<int64_t>(ITEMS_PER_THREAD * pool_threads() / groups_, 1, std::max<int64_t>(1, tiles_ / CHUNK_TILES))),
          items_(groups_ * chunks_), ranges_(weight.panels) {}
    const int64_t tile, group;  // rows, panels

    const char *panel_at(int64_t panel) const { return weight_.data + panel * weight_.panel_bytes; }
    // Calls body(first row, rows, panel, prefetch) for all tiles and panels of what a thread does. x_at(panel): where the
    // first row for it is. The prefetch is of the same panel of the next item, if its group is another: all of it if there
    // is one tile, else one half beside each of the first two tiles. The last panels prefetch the first ones of the
    // following weight. A tile's first panel prefetches the rows of the next tile if there is nothing else to prefetch. If
    // panels are read in order, the next one is prefetched likewise, where prefetches gain.
    template <class Rows, class Body>
    void for_each(int thread, Rows x_at, Body body) {
        if (reads_in_order_) {
            ranges_.for_each(thread, [&](int64_t panel, bool last) {
                const char *ahead = last ? following_range(thread) : ahead_of(panel);
                multiply_in_order(panel, ahead, body);
            });
            // What the last panel has not: memory would stand still while one thread does what comes between.
            if (const char *range = following_range(thread))
                prefetch_while_waiting(range + weight_.panel_bytes, READ_AHEAD);
            return;
        }
        items_.for_each([&](int64_t item, int64_t next) { multiply_item(item, next, x_at, body); });
    }

  private:
    static int64_t tiles_of(int64_t rows, int64_t max_rows) { return (rows + max_rows - 1) / max_rows; }
    static int64_t panels_of_group(int64_t rows, const PanelWeight &weight) {
        int64_t limit = std::clamp<int64_t>(L2_WEIGHT_BYTES / weight.panel_bytes, 1, 4);
        return rows <= SMALL_BATCH ? 1 : panels_per_item(weight.panels, limit);
    }
    // Where a thread begins to read the following weight: null if there is none.
    const char *following_range(int thread) const {
        if (!following_.data) return nullptr;
        return following_.data + WorkRanges::range_start(thread, pool_threads(), following_.panels) * following_.panel_bytes;
    }
    // Where a panel is. Those after the last one are of the following weight, as if its panels had the same size: null if
    // there is none.
    const char *panel_or_following(int64_t panel) const {
        if (panel < weight_.panels) return panel_at(panel);
        return following_.data ? following_.data + (panel - weight_.panels) * weight_.panel_bytes : nullptr;
    }
    // What is prefetched beside a panel that is read in order: null if nothing is.
    const char *ahead_of(int64_t panel) const {
        if (!gains_by_prefetches()) return nullptr;
        return panel_at(panel) + (tiles_ > 1 ? weight_.panel_bytes : std::min(weight_.panel_bytes, FETCH_DISTANCE));
    }
    // Calls body for all tiles of a panel. One half of `ahead` is prefetched beside each of the first two tiles, or all beside
    // the only one. The first tile brings the panel to the first-level cache.
    template <class Body>
    void multiply_in_order(int64_t panel, const char *ahead, Body body) const {
        const char *near = gains_by_prefetches() ? panel_at(panel) + NEAR_DISTANCE : nullptr;
        for (int64_t t = 0; t < tiles_; t++) {
            const char *at = ahead && t < 2 ? ahead + t * weight_.panel_bytes / 2 : nullptr;
            PrefetchStream prefetch{at, tiles_ == 1 ? 2 * LINE : LINE, t == 0 ? near : nullptr};
            body(t * tile, std::min(tile, rows_ - t * tile), panel, prefetch);
        }
    }
    template <class Rows, class Body>
    void multiply_item(int64_t item, int64_t next, Rows x_at, Body body) const {
        int64_t first = item / chunks_ * group, end = std::min(weight_.panels, first + group);
        int64_t skipped = next / chunks_ * group - first;
        int64_t chunk = item % chunks_, begin = chunk * tiles_ / chunks_, after = (chunk + 1) * tiles_ / chunks_;
        for (int64_t t = begin; t < after && t * tile < rows_; t++)
            for (int64_t panel = first; panel < end; panel++) {
                const char *at = panel_at(panel), *then = skipped ? panel_or_following(panel + skipped) : nullptr;
                if (t < begin + 2 && then) at = then + (t - begin) * weight_.panel_bytes / 2;
                else if (panel == first && t + 1 < tiles_) at = x_at(first) + (t + 1) * tile * row_bytes_;
                body(t * tile, std::min(tile, rows_ - t * tile), panel, PrefetchStream{at, tiles_ == 1 ? 2 * LINE : LINE});
            }
    }

    int64_t rows_, row_bytes_, tiles_;
    PanelWeight weight_, following_;
    bool reads_in_order_;
    int64_t groups_, chunks_;  // of panels, of rows
    WorkItems items_;
    WorkRanges ranges_;
};

// Adds the products of two inputs, the halves of x, to 16 outputs.
INLINE Floats dot_add(Floats total, Words weights, uint32_t x) { return dot_add(total, weights, Words{} + x); }

// The words of up to 12 rows at the same inputs. Three pointers and two distances stay in registers; of a pointer for each
// row the compiler would keep some elsewhere, and fetch them in every turn of the loop.
class RowWords {
  public:
    // stride: bytes between rows.
    RowWords(const void *x, int64_t stride)
        : first_((const char *)x), second_(first_ + 4 * stride), third_(second_ + 4 * stride), stride_(stride), thrice_(3 * stride) {}
    const uint32_t *at(int row) const {
        const char *base = row < 4 ? first_ : row < 8 ? second_ : third_;
        return (const uint32_t *)(base + (row % 4 == 3 ? thrice_ : row % 4 * stride_));
    }
    void advance() {
        first_ += sizeof(uint32_t), second_ += sizeof(uint32_t), third_ += sizeof(uint32_t);
        // The compiler is not to know what they have in common.
        asm volatile("" : "+r"(first_), "+r"(second_), "+r"(third_), "+r"(stride_), "+r"(thrice_));
    }

  private:
    const char *first_, *second_, *third_;
    int64_t stride_, thrice_;
};

// The same of rows whose words at the same inputs lie together.
class ColumnWords {
  public:
    // stride: words between inputs.
    ColumnWords(const uint32_t *x, int64_t stride) : at_(x), stride_(stride) {}
    const uint32_t *at(int row) const { return at_ + row; }
    void advance() { at_ += stride_; }

  private:
    const uint32_t *at_;
    int64_t stride_;
};

// Sums of the rows of a tile for the two vectors of a panel's outputs.
template <int rows>
struct TileSums {
    Floats values[rows][2];
};

// Vectors of outputs whose sums are computed in one pass over a tile's inputs.
constexpr int vectors_of_a_pass([[maybe_unused]] int rows) {
#if defined(HAVE_AVX2)
    return rows > 2 ? 1 : 2;
#else
    return 2;
#endif
}

// A word in all lanes. `at` need not be aligned, nor point to words.
INLINE Words broadcast_word(const uint32_t *at) {
#if defined(HAVE_AVX2)  // what comes next is done with vectors: the compiler would do it before, and then copy a register
    typedef uint32_t __attribute__((may_alias)) Word;
    HalfWords x;
    asm volatile("vpbroadcastd %1, %0" : "=x"(x) : "m"(*(const Word *)at));
    return {x, x};
#else
    uint32_t word;
    std::memcpy(&word, at, sizeof word);
    return Words{} + word;
#endif
}

// Adds the products of a word of inputs of each row with its weights, for a pass's outputs from the vector `first` on. A word
// is one float32 or two bfloat16 elements.
template <class T, int first, int rows, class Inputs>
INLINE void add_word(TileSums<rows> &sums, const void *weights, const Inputs &inputs) {
    constexpr int vectors = vectors_of_a_pass(rows);
    Words words[vectors];
    for (int v = 0; v < vectors; v++) words[v] = load_words((const char *)weights + (first + v) * sizeof(Words));
    auto add = [&](auto multiplied) __attribute__((always_inline)) {
#pragma GCC unroll 12
        for (int row = 0; row < rows; row++) {
            Words x = broadcast_word(inputs.at(row));
            for (int v = 0; v < vectors; v++)
                sums.values[row][first + v] = multiplied(sums.values[row][first + v], words[v], x);
        }
    };
    if constexpr (std::is_same_v<T, Float32>)
        add([](Floats total, Words weight, Words x) { return total + (Floats)weight * (Floats)x; });
    else if constexpr (BF16_DOT)
        add([](Floats total, Words weight, Words x) { return dot_add(total, weight, x); });
    else {  // as dot_add does, one element of all rows after the other: registers have room for the weights of one
        add([](Floats total, Words weight, Words x) { return total + (Floats)(weight & 0xffff0000) * (Floats)(x & 0xffff0000); });
        add([](Floats total, Words weight, Words x) { return total + (Floats)(weight << 16) * (Floats)(x << 16); });
    }
}

struct NoPrefetch {
    void fetch() {}
};

// Products of `rows` rows with one panel of words (words, 32). Passes each row's 32 sums to epilogue(row, first 16, second
// 16). Loops over rows are unrolled early, else the compiler keeps the sums in memory because of the prefetches.
template <class T, int rows, class Inputs, class Prefetch, class Epilogue>
void word_matmul(Inputs inputs, const uint32_t *panel, int64_t words, Prefetch prefetch, const Epilogue &epilogue) {
    TileSums<rows> sums;
    auto pass = [&](auto number) __attribute__((always_inline)) {
        constexpr int first = decltype(number)::value;
#pragma GCC unroll 12
        for (int row = 0; row < rows; row++)
            for (int v = first; v < first + vectors_of_a_pass(rows); v++) sums.values[row][v] = broadcast(0.0f);
        Inputs at = inputs;
        for (int64_t i = 0; i < words; i++, at.advance()) {
            if (first == 0) prefetch.fetch();
            add_word<T, first>(sums, panel + i * PANEL, at);
        }
    };
    pass(std::integral_constant<int, 0>{});
    if constexpr (vectors_of_a_pass(rows) == 1) pass(std::integral_constant<int, 1>{});
#pragma GCC unroll 12
    for (int row = 0; row < rows; row++) epilogue(row, sums.values[row][0], sums.values[row][1]);
}

// The same of a panel of bfloat16 (size_in / 2, 32, 2).
template <int rows, class Epilogue>
void panel_matmul(const uint16_t *x, int64_t stride, const uint16_t *panel, int64_t size_in, PrefetchStream prefetch,
                  const Epilogue &epilogue) {
    word_matmul<BFloat16, rows>(RowWords(x, stride * int64_t(sizeof *x)), (const uint32_t *)panel, size_in / 2, prefetch,
                                epilogue);
}

template <class Epilogue>
using PanelMatmul = void(const uint16_t *, int64_t, const uint16_t *, int64_t, PrefetchStream, const Epilogue &);

template <class Epilogue, int... rows>
PanelMatmul<Epilogue> *panel_matmul_for(int64_t count, std::integer_sequence<int, rows...>) {
    static PanelMatmul<Epilogue> *const functions[] = {panel_matmul<rows + 1, Epilogue>...};
    return functions[count - 1];
}

// panel_matmul for a number of rows that is known at run time.
template <class Epilogue>
PanelMatmul<Epilogue> *panel_matmul_for(int64_t rows) {
    return panel_matmul_for<Epilogue>(rows, std::make_integer_sequence<int, int(MAX_ROWS)>{});
}

template <class Inputs, class Prefetch, class Epilogue>
using WordMatmul = void(Inputs, const uint32_t *, int64_t, Prefetch, const Epilogue &);

template <class T, class Inputs, class Prefetch, class Epilogue, int... rows>
WordMatmul<Inputs, Prefetch, Epilogue> *word_matmul_for(int64_t count, std::integer_sequence<int, rows...>) {
    static WordMatmul<Inputs, Prefetch, Epilogue> *const functions[] = {word_matmul<T, rows + 1, Inputs, Prefetch, Epilogue>...};
    return functions[count - 1];
}

// word_matmul for a number of rows that is known at run time.
template <class T, class Inputs, class Prefetch, class Epilogue>
WordMatmul<Inputs, Prefetch, Epilogue> *word_matmul_for(int64_t rows) {
    return word_matmul_for<T, Inputs, Prefetch, Epilogue>(rows, std::make_integer_sequence<int, int(MAX_ROWS)>{});
}

// Adds the bias and stores 32 outputs of some rows, or as many of them as there are.
template <class T>
class OutputEpilogue {
  public:
    typedef typename T::Element Element;
    // Rows of up to 32 outputs, `stride` elements apart, without a bias.
    OutputEpilogue(Element *out, int64_t stride, int64_t rows, int64_t outputs)
        : out_(out), stride_(stride), count_(std::min<int64_t>(PANEL, outputs)) {
        for (int64_t r = 0; r < rows; r++)  // all of them first: one store after the other would miss
            prefetch_for_write(out_ + r * stride_, count_);
    }
    // Call: Linear.
    template <class Call>
    OutputEpilogue(const Call &a, int64_t row, int64_t rows, int64_t output)
        : OutputEpilogue((Element *)a.out + row * a.size_out + output, a.size_out, rows, a.size_out - output) {
        if (a.bias) std::memcpy(bias_, a.bias + output, count_ * sizeof(float));
    }
    INLINE void operator()(int row, Floats low, Floats high) const {
        low += Float32::load(bias_), high += Float32::load(bias_ + LANES);
        Element *out = out_ + row * stride_;
        if (count_ == PANEL) return T::store2(out, low, high);
        Element part[PANEL];
        T::store2(part, low, high);
        std::memcpy(out, part, count_ * sizeof *part);
    }

  private:
    Element *out_;
    int64_t stride_, count_;
    alignas(64) float bias_[PANEL] = {};
};

// The activation of a tile of outputs, if there is one: they are still in the first-level cache.
template <class T, class Call>
void activate_tile(const Call &a, int64_t row, int64_t rows, int64_t output) {
    if (!a.act) return;
    auto *out = (typename T::Element *)a.out + row * a.size_out + output;
    activate_rows<T>(*a.act, out, out, rows, std::min<int64_t>(PANEL, a.size_out - output), a.size_out);
}

// The activation that a linear layer applies to its outputs, if any.
inline std::optional<Activation> output_activation(std::optional<std::string_view> act) {
    return act ? std::optional(activation_named(*act)) : std::nullopt;
}

// Rows of bfloat16 inputs. They are copied if their stride is a multiple of a page of memory, as all rows of a tile would
// then compete for the same few lines of the first-level cache.
class DealiasedRows {
  public:
    DealiasedRows(const void *x, int64_t rows, int64_t size, int64_t stride) : x((const uint16_t *)x), stride(stride) {
        if (rows == 1 || !aliases(2 * stride)) return;
        this->stride = (size + LINE) | LINE;
        copy_.reset(new uint16_t[rows * this->stride]);
        parallel_for(rows, rows * size > SERIAL, [&](int64_t row) {
            std::memcpy(&copy_[row * this->stride], this->x + row * stride, size * sizeof *this->x);
        });
        this->x = copy_.get();
    }
    static bool aliases(int64_t bytes) { return bytes % 4096 == 0; }
    const uint16_t *x;
    int64_t stride;

  private:
    std::unique_ptr<uint16_t[]> copy_;
};
