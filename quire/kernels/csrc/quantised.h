// y = x W^T + b for weights of 8 or 4 bits with scales, in panels of 32 outputs. Rows of x are rounded to 8 bits, each
// with a scale of its own, so that the products are of integers.
//
// 8 bits: (panels, size_in / 4, 32, 4), one scale per output. 4 bits: (panels, size_in / 8, 32, 4), where the lower half
// of a byte belongs to one of four inputs and the upper half to one of the four behind them; 8 stands for 0; one scale
// per output and GROUP inputs. Inputs are kept unsigned, 128 above what they are; `corrections` holds what that adds.
#pragma once

constexpr int64_t GROUP = 64;         // inputs that share a scale, of 4-bit weights
constexpr int64_t MOST_ROWS_INT4 = 6;  // their sums need twice the registers

// Adds four inputs' products to 16 outputs.
inline Ints add_products(Ints total, Ints weights, int32_t x) {
#if defined(HAVE_BYTE_PRODUCTS)
    return (Ints)_mm512_dpbusd_epi32((__m512i)total, _mm512_set1_epi32(x), (__m512i)weights);
#else
    for (int i = 0; i < 4; i++) total += ((weights << (24 - 8 * i)) >> 24) * int32_t(uint32_t(x) >> (8 * i) & 255);
    return total;
#endif
}

inline int32_t four(const uint8_t *x) {
    int32_t out;
    std::memcpy(&out, x, sizeof out);
    return out;
}

inline Ints load_ints(const void *from) {
    Ints out;
    std::memcpy(&out, from, sizeof out);
    return out;
}

template <int rows, int lines>
void multiply_int8(const uint8_t *x, int64_t size_in, const uint8_t *panel, const float *scales, int64_t, const char *ahead,
                   Floats (*total)[2]) {
    Ints low[rows], high[rows];
#pragma GCC unroll 12
    for (int row = 0; row < rows; row++) low[row] = high[row] = Ints{};
    for (int64_t i = 0; i < size_in; i += 4) {
        Ints first = load_ints(panel + i * PANEL), second = load_ints(panel + i * PANEL + 64);
        ahead = fetch<lines>(ahead);
#pragma GCC unroll 12
        for (int row = 0; row < rows; row++) {
            int32_t inputs = four(x + row * size_in + i);
            low[row] = add_products(low[row], first, inputs);
            high[row] = add_products(high[row], second, inputs);
        }
    }
#pragma GCC unroll 12
    for (int row = 0; row < rows; row++) {
        total[row][0] = __builtin_convertvector(low[row], Floats) * Float32::load(scales);
        total[row][1] = __builtin_convertvector(high[row], Floats) * Float32::load(scales + LANES);
    }
}

template <int rows, int lines>
void multiply_int4(const uint8_t *x, int64_t size_in, const uint8_t *panel, const float *scales, int64_t next, const char *ahead,
                   Floats (*total)[2]) {
    Ints mask = Ints{} + 0x0f0f0f0f, eights = Ints{} + 0x08080808;
#pragma GCC unroll 12
    for (int row = 0; row < rows; row++) total[row][0] = total[row][1] = all(0.0f);
    for (int64_t begin = 0; begin < size_in; begin += GROUP, scales += next) {
        Ints low[rows], high[rows];
#pragma GCC unroll 12
        for (int row = 0; row < rows; row++) low[row] = high[row] = Ints{};
        for (int64_t i = begin; i < begin + GROUP; i += 8) {
            Ints first = load_ints(panel + i * PANEL / 2), second = load_ints(panel + i * PANEL / 2 + 64);
            ahead = fetch<lines>(ahead);
            for (int half = 0; half < 2; half++) {  // bytes from 0 to 15, less 8 each
                Ints near = less(first & mask, eights), far = less(second & mask, eights);
#pragma GCC unroll 12
                for (int row = 0; row < rows; row++) {
                    int32_t inputs = four(x + row * size_in + i + 4 * half);
                    low[row] = add_products(low[row], near, inputs);
                    high[row] = add_products(high[row], far, inputs);
                }
                first >>= 4, second >>= 4;
            }
        }
        Floats one = Float32::load(scales), two = Float32::load(scales + LANES);
#pragma GCC unroll 12
        for (int row = 0; row < rows; row++) {
            total[row][0] += __builtin_convertvector(low[row], Floats) * one;
            total[row][1] += __builtin_convertvector(high[row], Floats) * two;
        }
    }
}

typedef void MultiplyBytes(const uint8_t *, int64_t, const uint8_t *, const float *, int64_t, const char *, Floats (*)[2]);

template <int lines, int... rows>
inline MultiplyBytes *multiply_bytes(int bits, int64_t count, std::integer_sequence<int, rows...>) {
    static MultiplyBytes *const int8[] = {multiply_int8<rows + 1, lines>...};
    static MultiplyBytes *const int4[] = {multiply_int4<(rows < MOST_ROWS_INT4 ? rows + 1 : 1), lines>...};
    return bits == 8 ? int8[count - 1] : int4[count - 1];
}

// See multiply_rows.
inline MultiplyBytes *multiply_bytes(int bits, int64_t count, bool alone) {
    std::make_integer_sequence<int, int(MOST_ROWS)> all_rows;
    return alone ? multiply_bytes<2>(bits, count, all_rows) : multiply_bytes<1>(bits, count, all_rows);
}

template <class T>
void quantised_linear(const QuantisedLinear &a) {
    if (a.rows == 0) return;
    typedef typename T::Number Number;
    Division division(a.rows, a.size_out, a.size_in * PANEL * a.bits / 8, a.bits == 8 ? MOST_ROWS : MOST_ROWS_INT4);
    Pieces pieces(division.pieces);
    const char *weight = (const char *)a.weight;
    std::unique_ptr<uint8_t[]> x(new uint8_t[a.rows * a.size_in]);
    std::unique_ptr<float[]> steps(new float[a.rows]);
    spread(a.rows, a.rows * a.size_in > SERIAL, [&](int64_t row) {
        steps[row] = quantise_row<T>((const Number *)a.x + row * a.x_stride, &x[row * a.size_in], a.size_in);
    });
    auto some = [&](int64_t piece, int64_t next) {
        division.each(piece, next, weight, [&](int64_t row, int64_t rows, int64_t panel, const char *ahead) {
            Floats total[MOST_ROWS][2];
            multiply_bytes(a.bits, rows, division.tiles == 1)(
                &x[row * a.size_in], a.size_in, (const uint8_t *)weight + panel * division.panel_bytes,
                a.scales + panel * PANEL, division.panels * PANEL, ahead, total);
            const float *correction = a.corrections + panel * PANEL;
            for (int64_t r = 0; r < rows; r++)
                for (int i = 0; i < 2; i++)
                    total[r][i] = (total[r][i] - Float32::load(correction + i * LANES)) * steps[row + r];
            if (a.wide)
                put_panel<Float32>(a, total, row, rows, panel * PANEL);
            else
                put_panel<T>(a, total, row, rows, panel * PANEL);
        });
    };
    parallel([&](int) { pieces.each(some); });
}
