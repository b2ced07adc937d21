// y = x W^T + b for bfloat16 weights in panels of 32 outputs: (panels, size_in / 2, 32, 2), so that one load brings two
// inputs' weights for 16 outputs. Each output is one chain of sums over its inputs whatever the number of rows is: a
// row's numbers do not depend on what else is in the batch.
#pragma once

constexpr int64_t PANEL = 2 * LANES;     // outputs
constexpr int64_t MOST_ROWS = 12;        // whose sums fit into registers beside the weights
constexpr int64_t NEAR = 768 << 10;      // bytes of weights that stay in a core's second cache
constexpr int64_t FEW_ROWS = 64;         // up to which reading the weights is what takes long

// How rows and panels are divided: as few tiles of rows as registers allow, of like sizes; a piece is some panels, which
// stay near while all rows are multiplied with them.
struct Division {
    int64_t rows, panels, packed_bytes, row_bytes, tiles, tile, group, pieces;
    Division(int64_t rows, int64_t size_out, int64_t packed_bytes, int64_t row_bytes, int64_t most_rows)
        : rows(rows), panels((size_out + PANEL - 1) / PANEL), packed_bytes(packed_bytes), row_bytes(row_bytes),
          tiles((rows + most_rows - 1) / most_rows), tile((rows + tiles - 1) / tiles),
          group(rows <= FEW_ROWS ? 1 : std::max<int64_t>(1, std::min<int64_t>(4, NEAR / packed_bytes))),
          pieces((panels + group - 1) / group) {}
    // Calls body(first row, rows, panel, ahead) for all of a piece. What lies ahead is to be fetched on the way: the same
    // panel of the next piece, all of it if rows come in one tile, else one half beside each of the first two; where none is
    // to be fetched, beside a tile's first panel, the next tile's rows.
    template <class Body>
    void each(int64_t piece, int64_t next, const char *x, const char *weight, Body body) const {
        int64_t first = piece * group, end = std::min(panels, first + group);
        for (int64_t t = 0; t * tile < rows; t++)
            for (int64_t panel = first; panel < end; panel++) {
                int64_t then = panel + (next - piece) * group;
                const char *ahead = weight + panel * packed_bytes;
                if (t < 2 && then < panels) ahead = weight + then * packed_bytes + t * packed_bytes / 2;
                else if (panel == first && t + 1 < tiles) ahead = x + (t + 1) * tile * row_bytes;
                body(t * tile, std::min(tile, rows - t * tile), panel, Ahead{ahead, tiles == 1 ? 2 * LINE : LINE});
            }
    }
};

// Adds two inputs' products to 16 outputs; x is the two inputs.
inline Floats add_products(Floats total, Words weights, uint32_t x) { return add_products(total, weights, Words{} + x); }

// Gives each row's 32 sums to put(row, first 16, others), while they are in registers. Loops over rows are unrolled early,
// else the compiler keeps the sums in memory because of the prefetches.
template <int rows, class Put>
void multiply(const uint16_t *x, int64_t stride, const uint16_t *panel, int64_t size_in, Ahead ahead, const Put &put) {
    Floats low[rows], high[rows];
#pragma GCC unroll 12
    for (int row = 0; row < rows; row++) low[row] = high[row] = all(0.0f);
    for (int64_t i = 0; i < size_in; i += 2) {
        Words first = load_words(panel + i * PANEL), second = load_words(panel + i * PANEL + PAIR);
        ahead.fetch();
#pragma GCC unroll 12
        for (int row = 0; row < rows; row++) {
            uint32_t both;
            std::memcpy(&both, x + row * stride + i, sizeof both);
            low[row] = add_products(low[row], first, both);
            high[row] = add_products(high[row], second, both);
        }
    }
#pragma GCC unroll 12
    for (int row = 0; row < rows; row++) put(row, low[row], high[row]);
}

template <class Put>
using Multiply = void(const uint16_t *, int64_t, const uint16_t *, int64_t, Ahead, const Put &);

template <class Put, int... rows>
Multiply<Put> *multiply_rows(int64_t count, std::integer_sequence<int, rows...>) {
    static Multiply<Put> *const all_counts[] = {multiply<rows + 1, Put>...};
    return all_counts[count - 1];
}

// The one for so many rows.
template <class Put>
Multiply<Put> *multiply_rows(int64_t count) {
    return multiply_rows<Put>(count, std::make_integer_sequence<int, int(MOST_ROWS)>{});
}

// Takes 32 outputs of some rows to where they belong, those that there are.
template <class T>
class Outputs {
  public:
    template <class Call>
    Outputs(const Call &a, int64_t row, int64_t rows, int64_t output)
        : out_((Number *)a.out + row * a.size_out + output), stride_(a.size_out),
          here_(std::min<int64_t>(PANEL, a.size_out - output)) {
        if (a.bias) std::memcpy(bias_, a.bias + output, here_ * sizeof(float));
        for (int64_t r = 0; r < rows; r++)  // all at once, as one store after the other would wait for its line
            for (int64_t i = 0; i < here_; i += LINE / sizeof(Number)) __builtin_prefetch(out_ + r * stride_ + i, 1);
    }
    void operator()(int row, Floats low, Floats high) const {
        low += Float32::load(bias_), high += Float32::load(bias_ + LANES);
        Number *out = out_ + row * stride_;
        if (here_ == PANEL) return T::store_both(out, low, high);
        Number part[PANEL];
        T::store_both(part, low, high);
        std::memcpy(out, part, here_ * sizeof *part);
    }

  private:
    typedef typename T::Number Number;
    Number *out_;
    int64_t stride_, here_;
    alignas(64) float bias_[PANEL] = {};
};

// Rows of bfloat16 numbers as they lie, or a copy: where they are whole pages apart, all of a tile's want the same few
// lines of the nearest cache.
class NearRows {
  public:
    NearRows(const void *x, int64_t rows, int64_t size, int64_t stride) : x((const uint16_t *)x), stride(stride) {
        if (rows == 1 || !clashing(2 * stride)) return;
        this->stride = (size + LINE) | LINE;
        copy_.reset(new uint16_t[rows * this->stride]);
        spread(rows, rows * size > SERIAL, [&](int64_t row) {
            std::memcpy(&copy_[row * this->stride], this->x + row * stride, size * sizeof *this->x);
        });
        this->x = copy_.get();
    }
    static bool clashing(int64_t bytes) { return bytes % 4096 == 0; }
    const uint16_t *x;
    int64_t stride;

  private:
    std::unique_ptr<uint16_t[]> copy_;
};

template <class T>
void linear_to(const Linear &a) {
    NearRows near(a.x, a.rows, a.size_in, a.x_stride);
    Division division(a.rows, a.size_out, a.size_in * PANEL * 2, near.stride * 2, MOST_ROWS);
    Pieces pieces(division.pieces);
    const char *weight = (const char *)a.weight;
    auto some = [&](int64_t piece, int64_t next) {
        division.each(piece, next, (const char *)near.x, weight, [&](int64_t row, int64_t rows, int64_t panel, Ahead ahead) {
            multiply_rows<Outputs<T>>(rows)(near.x + row * near.stride, near.stride,
                                            (const uint16_t *)(weight + panel * division.packed_bytes), a.size_in, ahead,
                                            Outputs<T>(a, row, rows, panel * PANEL));
        });
    };
    parallel([&](int) { pieces.each(some); });
}

inline void linear(const Linear &a) {
    if (a.rows == 0) return;
    a.wide ? linear_to<Float32>(a) : linear_to<BFloat16>(a);
}
