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

// See `multiply`. `next`: how many numbers lie between one group's scales and the next one's.
template <int rows, class Put>
void multiply_int8(const uint8_t *x, int64_t stride, int64_t size_in, const uint8_t *panel, const float *scales, int64_t,
                   Ahead ahead, const Put &put) {
    Ints low[rows], high[rows];
#pragma GCC unroll 12
    for (int row = 0; row < rows; row++) low[row] = high[row] = Ints{};
    for (int64_t i = 0; i < size_in; i += 4) {
        Ints first = load_ints(panel + i * PANEL), second = load_ints(panel + i * PANEL + 64);
        ahead.fetch();
#pragma GCC unroll 12
        for (int row = 0; row < rows; row++) {
            int32_t inputs = four(x + row * stride + i);
            low[row] = add_products(low[row], first, inputs);
            high[row] = add_products(high[row], second, inputs);
        }
    }
    Floats one = Float32::load(scales), two = Float32::load(scales + LANES);
#pragma GCC unroll 12
    for (int row = 0; row < rows; row++)
        put(row, __builtin_convertvector(low[row], Floats) * one, __builtin_convertvector(high[row], Floats) * two);
}

template <int rows, class Put>
void multiply_int4(const uint8_t *x, int64_t stride, int64_t size_in, const uint8_t *panel, const float *scales, int64_t next,
                   Ahead ahead, const Put &put) {
    Ints mask = Ints{} + 0x0f0f0f0f, eights = Ints{} + 0x08080808;
    Floats total[rows][2];
#pragma GCC unroll 12
    for (int row = 0; row < rows; row++) total[row][0] = total[row][1] = all(0.0f);
    for (int64_t begin = 0; begin < size_in; begin += GROUP, scales += next) {
        Ints low[rows], high[rows];
#pragma GCC unroll 12
        for (int row = 0; row < rows; row++) low[row] = high[row] = Ints{};
        for (int64_t i = begin; i < begin + GROUP; i += 8) {
            Ints first = load_ints(panel + i * PANEL / 2), second = load_ints(panel + i * PANEL / 2 + 64);
            ahead.fetch();
            for (int half = 0; half < 2; half++) {  // bytes from 0 to 15, less 8 each
                Ints near = less(first & mask, eights), far = less(second & mask, eights);
#pragma GCC unroll 12
                for (int row = 0; row < rows; row++) {
                    int32_t inputs = four(x + row * stride + i + 4 * half);
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
#pragma GCC unroll 12
    for (int row = 0; row < rows; row++) put(row, total[row][0], total[row][1]);
}

template <class Put>
using MultiplyBytes = void(const uint8_t *, int64_t, int64_t, const uint8_t *, const float *, int64_t, Ahead, const Put &);

template <class Put, int... rows>
MultiplyBytes<Put> *multiply_bytes(int bits, int64_t count, std::integer_sequence<int, rows...>) {
    static MultiplyBytes<Put> *const int8[] = {multiply_int8<rows + 1, Put>...};
    static MultiplyBytes<Put> *const int4[] = {multiply_int4<(rows < MOST_ROWS_INT4 ? rows + 1 : 1), Put>...};
    return bits == 8 ? int8[count - 1] : int4[count - 1];
}

// See multiply_rows.
template <class Put>
MultiplyBytes<Put> *multiply_bytes(int bits, int64_t count) {
    return multiply_bytes<Put>(bits, count, std::make_integer_sequence<int, int(MOST_ROWS)>{});
}

// Outputs of products whose inputs were rounded.
template <class T>
class RoundedOutputs {
  public:
    RoundedOutputs(const QuantizedLinear &a, const float *steps, int64_t row, int64_t rows, int64_t output)
        : outputs_(a, row, rows, output), corrections_(a.corrections + output), steps_(steps + row) {}
    void operator()(int row, Floats low, Floats high) const {
        outputs_(row, (low - Float32::load(corrections_)) * steps_[row],
                 (high - Float32::load(corrections_ + LANES)) * steps_[row]);
    }

  private:
    Outputs<T> outputs_;
    const float *corrections_, *steps_;
};

template <class T, class Out>
void quantised_linear_to(const QuantizedLinear &a) {
    typedef RoundedOutputs<Out> Put;
    int64_t stride = a.size_in + (NearRows::clashing(a.size_in) ? LINE : 0);
    Division division(a.rows, a.size_out, a.size_in * PANEL * a.bits / 8, stride, a.bits == 8 ? MOST_ROWS : MOST_ROWS_INT4);
    Pieces pieces(division.pieces);
    const char *weight = (const char *)a.weight;
    std::unique_ptr<uint8_t[]> x(new uint8_t[a.rows * stride]);
    std::unique_ptr<float[]> steps(new float[a.rows]);
    spread(a.rows, a.rows * a.size_in > SERIAL, [&](int64_t row) {
        steps[row] = quantise_row<T>((const typename T::Number *)a.x + row * a.x_stride, &x[row * stride], a.size_in);
    });
    auto some = [&](int64_t piece, int64_t next) {
        division.each(piece, next, (const char *)x.get(), weight, [&](int64_t row, int64_t rows, int64_t panel, Ahead ahead) {
            multiply_bytes<Put>(a.bits, rows)(&x[row * stride], stride, a.size_in,
                                              (const uint8_t *)weight + panel * division.packed_bytes, a.scales + panel * PANEL,
                                              division.panels * PANEL, ahead, Put(a, steps.get(), row, rows, panel * PANEL));
        });
    };
    parallel([&](int) { pieces.each(some); });
}

template <class T>
void quantized_linear(const QuantizedLinear &a) {
    if (a.rows == 0) return;
    a.wide ? quantised_linear_to<T, Float32>(a) : quantised_linear_to<T, T>(a);
}
