// y = x W^T + b for bfloat16 weights in panels of 32 outputs: (panels, size_in / 2, 32, 2), so that one load brings two
// inputs' weights for 16 outputs. Each output is one chain of sums over its inputs whatever the number of rows is: a
// row's numbers do not depend on what else is in the batch.
#pragma once

constexpr int64_t PANEL = 2 * LANES;     // outputs
constexpr int64_t MOST_ROWS = 12;        // whose sums fit into registers beside the weights
constexpr int64_t NEAR = 768 << 10;      // bytes of weights that stay in a core's second cache

// Adds two inputs' products to 16 outputs; x is the two inputs.
inline Floats add_products(Floats total, Words weights, uint32_t x) {
#if defined(HAVE_BFLOAT16_PRODUCTS)
    return (Floats)_mm512_dpbf16_ps((__m512)total, (__m512bh)weights, (__m512bh)_mm512_set1_epi32(int(x)));
#else
    Floats even = (Floats)(weights << 16), odd = (Floats)(weights & 0xffff0000);
    return total + even * BFloat16::get(uint16_t(x)) + odd * BFloat16::get(uint16_t(x >> 16));
#endif
}

template <int rows>
void multiply(const uint16_t *x, int64_t stride, const uint16_t *panel, int64_t size_in, Floats (*total)[2]) {
    Floats low[rows], high[rows];
    for (int row = 0; row < rows; row++) low[row] = high[row] = all(0.0f);
    for (int64_t i = 0; i < size_in; i += 2) {
        Words first, second;
        std::memcpy(&first, panel + i * PANEL, sizeof first);
        std::memcpy(&second, panel + i * PANEL + PAIR, sizeof second);
        for (int row = 0; row < rows; row++) {
            uint32_t both;
            std::memcpy(&both, x + row * stride + i, sizeof both);
            low[row] = add_products(low[row], first, both);
            high[row] = add_products(high[row], second, both);
        }
    }
    for (int row = 0; row < rows; row++) total[row][0] = low[row], total[row][1] = high[row];
}

typedef void Multiply(const uint16_t *, int64_t, const uint16_t *, int64_t, Floats (*)[2]);

template <int... rows>
inline Multiply *multiply_rows(int64_t count, std::integer_sequence<int, rows...>) {
    static Multiply *const table[] = {multiply<rows + 1>...};
    return table[count - 1];
}

// Writes 32 outputs of some rows, those that there are.
template <class T, class Call>
void put_panel(const Call &a, Floats (*total)[2], int64_t row, int64_t rows, int64_t output) {
    int64_t here = std::min<int64_t>(PANEL, a.size_out - output);
    alignas(64) float bias[PANEL] = {};
    if (a.bias) std::memcpy(bias, a.bias + output, here * sizeof(float));
    for (int64_t r = 0; r < rows; r++) {
        typename T::Number line[PANEL], *out = (typename T::Number *)a.out + (row + r) * a.size_out + output;
        T::store(line, total[r][0] + Float32::load(bias));
        T::store(line + LANES, total[r][1] + Float32::load(bias + LANES));
        std::memcpy(out, line, here * sizeof *line);
    }
}

inline void linear(const Linear &a) {
    if (a.rows == 0) return;
    int64_t panels = (a.size_out + PANEL - 1) / PANEL, panel_size = a.size_in * PANEL;
    // As few tiles of rows as registers allow, of like sizes; some panels at a time, while a tile's rows are near.
    int64_t tiles = (a.rows + MOST_ROWS - 1) / MOST_ROWS, tile = (a.rows + tiles - 1) / tiles;
    int64_t group = std::max<int64_t>(1, std::min<int64_t>(4, NEAR / (2 * panel_size)));
    int64_t groups = (panels + group - 1) / group;
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t g = 0; g < groups; g++) {
        int64_t end = std::min(panels, (g + 1) * group);
        for (int64_t row = 0; row < a.rows; row += tile) {
            int64_t rows = std::min(tile, a.rows - row);
            Multiply *multiply_them = multiply_rows(rows, std::make_integer_sequence<int, int(MOST_ROWS)>{});
            for (int64_t panel = g * group; panel < end; panel++) {
                Floats total[MOST_ROWS][2];
                const uint16_t *x = (const uint16_t *)a.x + row * a.x_stride;
                multiply_them(x, a.x_stride, (const uint16_t *)a.weight + panel * panel_size, a.size_in, total);
                if (a.wide)
                    put_panel<Float32>(a, total, row, rows, panel * PANEL);
                else
                    put_panel<BFloat16>(a, total, row, rows, panel * PANEL);
            }
        }
    }
}
