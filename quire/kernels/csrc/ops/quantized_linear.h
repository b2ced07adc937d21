// Linear layers with weights of 8 or 4 bits and scales, in panels of 32 outputs. Inputs are quantized to 8 bits row by
// row, each row with its own scale, so that products are of integers.
//
// 8 bits: (panels, size_in / 4, 32, 4), one scale per output. 4 bits: (panels, size_in / 8, 32, 4), where the lower half
// of a byte belongs to one of four inputs and the upper half to one of the next four; 8 stands for 0; one scale per
// output and GROUP inputs. Inputs are stored as unsigned bytes with an offset of 128; `corrections` is what that adds.
#pragma once

#include "../int8_rows.h"
#include "../panel_matmul.h"

constexpr int64_t GROUP = 64;         // inputs of 4-bit weights that share a scale
constexpr int64_t MAX_ROWS_INT4 = 6;  // their sums need twice the registers

struct QuantizedLinear {
    static constexpr const char *NAME = "quantized_linear";
    static constexpr const char *PARAMETERS[] = {"x", "weight", "scales", "corrections", "bias", "out", "bits",
                                                 "act"};
    static QuantizedLinear check(const Tensor &x, const Tensor &weight, const Tensor &scales, const Tensor &corrections,
                                 const OptionalTensor &bias, const Tensor &out, int64_t bits,
                                 std::optional<std::string_view> act) {
        require(bits == 8 || bits == 4, "bits", "8 or 4 is expected");
        Size rows("rows"), size_in("size_in"), size_out("size_out"), panel("panel", PANEL);
        x.is_floating().has_shape(rows, size_in).is_dense(1);
        require(size_in % (bits == 8 ? LANES : GROUP) == 0, "x",
                "a multiple of 16 inputs, or of 64 with 4 bits, is expected");
        out.has_dtype({x.dtype, DType::FLOAT32}).has_shape(rows, size_out).is_contiguous();
        Size panels("panels", (size_out + PANEL - 1) / PANEL), words("words", size_in * bits / 32);
        Size groups("groups", bits == 8 ? 1 : size_in / GROUP), padded("panels * 32", panels * PANEL);
        weight.has_dtype({DType::INT32}).has_shape(panels, words, panel).is_contiguous();
        scales.has_dtype({DType::FLOAT32}).has_shape(groups, padded).is_contiguous();
        corrections.has_dtype({DType::FLOAT32}).has_shape(padded).is_contiguous();
        if (bias) bias->has_dtype({DType::FLOAT32}).has_shape(size_out).is_contiguous();
        return {x.dtype, out.dtype, x.data(), weight.data(), scales.data<float>(), corrections.data<float>(),
                data_or_null<float>(bias), out.data(), rows, size_in, size_out, x.strides[0], int(bits),
                output_activation(act)};
    }
    void run() const;
    int64_t work() const { return size_in * size_out; }
    int64_t &row_count() { return rows; }

    DType dtype, out_dtype;
    const void *x, *weight;
    const float *scales, *corrections;
    const float *bias;  // or null
    void *out;
    int64_t rows, size_in, size_out, x_stride;
    int bits;
    std::optional<Activation> act;
};
REGISTER_OP(QuantizedLinear);

// Adds the products of four inputs, the bytes of x, to 16 outputs.
inline Ints dot_add(Ints total, Ints weights, int32_t x) {
#if defined(HAVE_INT8_DOT)
    return (Ints)_mm512_dpbusd_epi32((__m512i)total, _mm512_set1_epi32(x), (__m512i)weights);
#else
    for (int i = 0; i < 4; i++) total += ((weights << (24 - 8 * i)) >> 24) * int32_t(uint32_t(x) >> (8 * i) & 255);
    return total;
#endif
}

inline int32_t load_four(const uint8_t *x) {
    int32_t out;
    std::memcpy(&out, x, sizeof out);
    return out;
}

inline Ints load_ints(const void *from) {
    Ints out;
    std::memcpy(&out, from, sizeof out);
    return out;
}

// See panel_matmul. The stride is between the scales of one group of inputs and those of the next one.
template <int rows, class Epilogue>
void panel_matmul_int8(const uint8_t *x, int64_t stride, int64_t size_in, const uint8_t *panel, const float *scales,
                       int64_t, PrefetchStream prefetch, const Epilogue &epilogue) {
    Ints low[rows], high[rows];
#pragma GCC unroll 12
    for (int row = 0; row < rows; row++) low[row] = high[row] = Ints{};
    for (int64_t i = 0; i < size_in; i += 4) {
        Ints first = load_ints(panel + i * PANEL), second = load_ints(panel + i * PANEL + 64);
        prefetch.fetch();
#pragma GCC unroll 12
        for (int row = 0; row < rows; row++) {
            int32_t inputs = load_four(x + row * stride + i);
            low[row] = dot_add(low[row], first, inputs);
            high[row] = dot_add(high[row], second, inputs);
        }
    }
    Floats first_scale = Float32::load(scales), second_scale = Float32::load(scales + LANES);
#pragma GCC unroll 12
    for (int row = 0; row < rows; row++)
        epilogue(row, __builtin_convertvector(low[row], Floats) * first_scale,
                 __builtin_convertvector(high[row], Floats) * second_scale);
}

template <int rows, class Epilogue>
void panel_matmul_int4(const uint8_t *x, int64_t stride, int64_t size_in, const uint8_t *panel, const float *scales,
                       int64_t scale_stride, PrefetchStream prefetch, const Epilogue &epilogue) {
    Ints mask = Ints{} + 0x0f0f0f0f, eights = Ints{} + 0x08080808;
    Floats total[rows][2];
#pragma GCC unroll 12
    for (int row = 0; row < rows; row++) total[row][0] = total[row][1] = broadcast(0.0f);
    for (int64_t begin = 0; begin < size_in; begin += GROUP, scales += scale_stride) {
        Ints low[rows], high[rows];
#pragma GCC unroll 12
        for (int row = 0; row < rows; row++) low[row] = high[row] = Ints{};
        for (int64_t i = begin; i < begin + GROUP; i += 8) {
            Ints first = load_ints(panel + i * PANEL / 2), second = load_ints(panel + i * PANEL / 2 + 64);
            prefetch.fetch();
            for (int half = 0; half < 2; half++) {  // bytes from 0 to 15, from which 8 is subtracted
                Ints low_weights = subtract_bytes(first & mask, eights);
                Ints high_weights = subtract_bytes(second & mask, eights);
#pragma GCC unroll 12
                for (int row = 0; row < rows; row++) {
                    int32_t inputs = load_four(x + row * stride + i + 4 * half);
                    low[row] = dot_add(low[row], low_weights, inputs);
                    high[row] = dot_add(high[row], high_weights, inputs);
                }
                first >>= 4, second >>= 4;
            }
        }
        Floats first_scale = Float32::load(scales), second_scale = Float32::load(scales + LANES);
#pragma GCC unroll 12
        for (int row = 0; row < rows; row++) {
            total[row][0] += __builtin_convertvector(low[row], Floats) * first_scale;
            total[row][1] += __builtin_convertvector(high[row], Floats) * second_scale;
        }
    }
#pragma GCC unroll 12
    for (int row = 0; row < rows; row++) epilogue(row, total[row][0], total[row][1]);
}

template <class Epilogue>
using QuantizedMatmul = void(const uint8_t *, int64_t, int64_t, const uint8_t *, const float *, int64_t, PrefetchStream,
                             const Epilogue &);

template <class Epilogue, int... rows>
QuantizedMatmul<Epilogue> *quantized_matmul_for(int bits, int64_t count, std::integer_sequence<int, rows...>) {
    static QuantizedMatmul<Epilogue> *const int8[] = {panel_matmul_int8<rows + 1, Epilogue>...};
    static QuantizedMatmul<Epilogue> *const int4[] = {panel_matmul_int4<(rows < MAX_ROWS_INT4 ? rows + 1 : 1), Epilogue>...};
    return bits == 8 ? int8[count - 1] : int4[count - 1];
}

// See panel_matmul_for.
template <class Epilogue>
QuantizedMatmul<Epilogue> *quantized_matmul_for(int bits, int64_t count) {
    return quantized_matmul_for<Epilogue>(bits, count, std::make_integer_sequence<int, int(MAX_ROWS)>{});
}

// Subtracts what the offset of the inputs adds, scales by the rows' scales, then does as OutputEpilogue.
template <class T>
class DequantizeEpilogue {
  public:
    DequantizeEpilogue(const QuantizedLinear &a, const float *row_scales, int64_t row, int64_t rows, int64_t output)
        : outputs_(a, row, rows, output), corrections_(a.corrections + output), row_scales_(row_scales + row) {}
    void operator()(int row, Floats low, Floats high) const {
        outputs_(row, (low - Float32::load(corrections_)) * row_scales_[row],
                 (high - Float32::load(corrections_ + LANES)) * row_scales_[row]);
    }

  private:
    OutputEpilogue<T> outputs_;
    const float *corrections_, *row_scales_;
};

template <class T, class Out>
void quantized_linear(const QuantizedLinear &a) {
    typedef DequantizeEpilogue<Out> Epilogue;
    int64_t stride = a.size_in + (DealiasedRows::aliases(a.size_in) ? LINE : 0);
    Tiling tiling(a.rows, a.size_out, a.size_in * PANEL * a.bits / 8, stride, a.bits == 8 ? MAX_ROWS : MAX_ROWS_INT4);
    WorkItems items(tiling.items);
    const char *weight = (const char *)a.weight;
    std::unique_ptr<uint8_t[]> x(new uint8_t[a.rows * stride]);
    std::unique_ptr<float[]> row_scales(new float[a.rows]);
    parallel_for(a.rows, a.rows * a.size_in > SERIAL, [&](int64_t row) {
        const auto *from = (const typename T::Element *)a.x + row * a.x_stride;
        row_scales[row] = quantize_row<T>(from, &x[row * stride], a.size_in);
    });
    auto body = [&](int64_t row, int64_t rows, int64_t panel, PrefetchStream prefetch) {
        quantized_matmul_for<Epilogue>(a.bits, rows)(
            &x[row * stride], stride, a.size_in, (const uint8_t *)weight + panel * tiling.packed_bytes,
            a.scales + panel * PANEL, tiling.panels * PANEL, prefetch,
            Epilogue(a, row_scales.get(), row, rows, panel * PANEL));
        activate_tile<Out>(a, row, rows, panel * PANEL);
    };
    run_parallel([&](int) {
        items.for_each([&](int64_t item, int64_t next) { tiling.for_each(item, next, (const char *)x.get(), weight, body); });
    });
}

template <class T>
void quantized_linear(const QuantizedLinear &a) {
    a.out_dtype == DType::FLOAT32 ? quantized_linear<T, Float32>(a) : quantized_linear<T, T>(a);
}

inline void QuantizedLinear::run() const {
    if (rows == 0) return;
    dtype == DType::BFLOAT16 ? quantized_linear<BFloat16>(*this) : quantized_linear<Float32>(*this);
}
