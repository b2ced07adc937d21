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
    int64_t rows, panels, panel_bytes, tiles, tile, group, pieces;
    Division(int64_t rows, int64_t size_out, int64_t panel_bytes, int64_t most_rows)
        : rows(rows), panels((size_out + PANEL - 1) / PANEL), panel_bytes(panel_bytes),
          tiles((rows + most_rows - 1) / most_rows), tile((rows + tiles - 1) / tiles),
          group(rows <= FEW_ROWS ? 1 : std::max<int64_t>(1, std::min<int64_t>(4, NEAR / panel_bytes))),
          pieces((panels + group - 1) / group) {}
    // Calls body(first row, rows, panel, ahead) for all of a piece. What lies ahead is to be fetched on the way: the same
    // panel of the next piece, all of it if rows come in one tile, else one half beside each of the first two.
    template <class Body>
    void each(int64_t piece, int64_t next, const char *weight, Body body) const {
        for (int64_t t = 0; t * tile < rows; t++)
            for (int64_t panel = piece * group; panel < std::min(panels, (piece + 1) * group); panel++) {
                int64_t then = panel + (next - piece) * group;
                const char *ahead = then < panels && t < 2 ? weight + then * panel_bytes + t * panel_bytes / 2
                                                          : weight + panel * panel_bytes;
                body(t * tile, std::min(tile, rows - t * tile), panel, ahead);
            }
    }
};

// Adds two inputs' products to 16 outputs; x is the two inputs.
inline Floats add_products(Floats total, Words weights, uint32_t x) { return add_products(total, weights, Words{} + x); }

// Loops over rows are unrolled early, else the compiler keeps the sums in memory because of the prefetches.
template <int rows, int lines>
void multiply(const uint16_t *x, int64_t stride, const uint16_t *panel, int64_t size_in, const char *ahead,
              Floats (*total)[2]) {
    Floats low[rows], high[rows];
#pragma GCC unroll 12
    for (int row = 0; row < rows; row++) low[row] = high[row] = all(0.0f);
    for (int64_t i = 0; i < size_in; i += 2) {
        Words first, second;
        std::memcpy(&first, panel + i * PANEL, sizeof first);
        std::memcpy(&second, panel + i * PANEL + PAIR, sizeof second);
        ahead = fetch<lines>(ahead);
#pragma GCC unroll 12
        for (int row = 0; row < rows; row++) {
            uint32_t both;
            std::memcpy(&both, x + row * stride + i, sizeof both);
            low[row] = add_products(low[row], first, both);
            high[row] = add_products(high[row], second, both);
        }
    }
#pragma GCC unroll 12
    for (int row = 0; row < rows; row++) total[row][0] = low[row], total[row][1] = high[row];
}

typedef void Multiply(const uint16_t *, int64_t, const uint16_t *, int64_t, const char *, Floats (*)[2]);

template <int... rows>
inline Multiply *multiply_rows(int64_t count, bool alone, std::integer_sequence<int, rows...>) {
    static Multiply *const one_tile[] = {multiply<rows + 1, 2>...}, *const tiles[] = {multiply<rows + 1, 1>...};
    return (alone ? one_tile : tiles)[count - 1];
}

// The one for so many rows; `alone`: of rows that come in one tile.
inline Multiply *multiply_rows(int64_t count, bool alone) {
    return multiply_rows(count, alone, std::make_integer_sequence<int, int(MOST_ROWS)>{});
}

// Writes 32 outputs of some rows, those that there are.
template <class T, class Call>
void put_panel(const Call &a, Floats (*total)[2], int64_t row, int64_t rows, int64_t output) {
    typedef typename T::Number Number;
    int64_t here = std::min<int64_t>(PANEL, a.size_out - output);
    Floats low = all(0.0f), high = all(0.0f);
    if (a.bias) {
        alignas(64) float bias[PANEL] = {};
        std::memcpy(bias, a.bias + output, here * sizeof(float));
        low = Float32::load(bias), high = Float32::load(bias + LANES);
    }
    for (int64_t r = 0; r < rows; r++) {
        Number part[PANEL], *out = (Number *)a.out + (row + r) * a.size_out + output, *line = here == PANEL ? out : part;
        T::store(line, total[r][0] + low);
        T::store(line + LANES, total[r][1] + high);
        if (line == part) std::memcpy(out, part, here * sizeof *part);
    }
}

inline void linear(const Linear &a) {
    if (a.rows == 0) return;
    Division division(a.rows, a.size_out, a.size_in * PANEL * 2, MOST_ROWS);
    Pieces pieces(division.pieces);
    const char *weight = (const char *)a.weight;
    auto some = [&](int64_t piece, int64_t next) {
        division.each(piece, next, weight, [&](int64_t row, int64_t rows, int64_t panel, const char *ahead) {
            Floats total[MOST_ROWS][2];
            multiply_rows(rows, division.tiles == 1)((const uint16_t *)a.x + row * a.x_stride, a.x_stride,
                                                     (const uint16_t *)(weight + panel * division.panel_bytes), a.size_in,
                                                     ahead, total);
            if (a.wide)
                put_panel<Float32>(a, total, row, rows, panel * PANEL);
            else
                put_panel<BFloat16>(a, total, row, rows, panel * PANEL);
        });
    };
    parallel([&](int) { pieces.each(some); });
}
