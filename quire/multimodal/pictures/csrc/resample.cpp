// The Python module _resample: changes one edge of pictures of three bytes a pixel, to the bits of Pillow's `resize`.
//
// A value is the rounded sum of weights of 22 bits times bytes, in integers, so the order of additions does not matter, and 16
// bytes are summed at a time. Rows are resized 16 at a time as well: transposed, so that a vector has the same byte of each.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <new>
#include <vector>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif
#define INLINE static inline __attribute__((always_inline))

namespace {

constexpr int LANES = 16;
constexpr int COLORS = 3;
constexpr int WEIGHT_BITS = 22;
constexpr int32_t HALF = 1 << (WEIGHT_BITS - 1);
constexpr double PI = 3.14159265358979323846;
typedef uint8_t Bytes __attribute__((vector_size(LANES)));
typedef int16_t Words __attribute__((vector_size(2 * LANES)));
typedef int32_t Sums __attribute__((vector_size(4 * LANES)));

enum Filter { BILINEAR, BICUBIC, LANCZOS, FILTERS };
constexpr double SUPPORT[FILTERS] = {1.0, 2.0, 3.0};

double sinc(double x) { return x == 0.0 ? 1.0 : std::sin(x * PI) / (x * PI); }

double weight(int filter, double x) {
    constexpr double A = -0.5;
    if (filter == LANCZOS) return -3.0 <= x && x < 3.0 ? sinc(x) * sinc(x / 3) : 0.0;
    x = std::abs(x);
    if (filter == BILINEAR) return x < 1.0 ? 1.0 - x : 0.0;
    if (x < 1.0) return ((A + 2.0) * x - (A + 3.0)) * x * x + 1;
    return x < 2.0 ? (((x - 5) * x + 8) * x - 4) * A : 0.0;
}

// Which elements of a line each element of the resized line is made of, and their weights.
struct Weights {
    Weights(int64_t before, int64_t after, int filter) : first(after), count(after) {
        double scale = double(before) / double(after), filter_scale = std::max(scale, 1.0);
        double support = SUPPORT[filter] * filter_scale;
        stride = int64_t(std::ceil(support)) * 2 + 1;
        values.resize(size_t(after * stride));
        std::vector<double> exact(size_t(stride), 0.0);
        for (int64_t place = 0; place < after; ++place) {
            double center = (double(place) + 0.5) * scale, sum = 0.0;
            int64_t begin = std::max<int64_t>(0, int64_t(center - support + 0.5));
            int64_t number = std::min(before, int64_t(center + support + 0.5)) - begin;
            for (int64_t i = 0; i < number; ++i) {
                exact[size_t(i)] = weight(filter, (double(i + begin) - center + 0.5) * (1.0 / filter_scale));
                sum += exact[size_t(i)];
            }
            for (int64_t i = 0; i < number; ++i) {
                double value = (sum != 0.0 ? exact[size_t(i)] / sum : exact[size_t(i)]) * (1 << WEIGHT_BITS);
                values[size_t(place * stride + i)] = int32_t(value < 0 ? value - 0.5 : value + 0.5);
            }
            first[size_t(place)] = begin;
            count[size_t(place)] = number;
        }
    }

    std::vector<int64_t> first, count;
    std::vector<int32_t> values;
    int64_t stride;
};

INLINE Bytes load(const uint8_t *from) {
    Bytes bytes;
    std::memcpy(&bytes, from, LANES);
    return bytes;
}

INLINE void store(uint8_t *to, Bytes bytes) { std::memcpy(to, &bytes, LANES); }

// In two steps, as GCC has one instruction for each, but not for both.
INLINE Sums widened(Bytes bytes) { return __builtin_convertvector(__builtin_convertvector(bytes, Words), Sums); }

INLINE Bytes rounded(Sums sums) {
    sums >>= WEIGHT_BITS;
    sums = sums < 0 ? Sums{} : sums;
    sums = sums > 255 ? Sums{} + 255 : sums;
    return __builtin_convertvector(__builtin_convertvector(sums, Words), Bytes);
}

INLINE void transpose(Bytes rows[LANES]) {
    constexpr Bytes LOW = {0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23};
    constexpr Bytes HIGH = {8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    for (int round = 0; round < 4; ++round) {
        Bytes mixed[LANES];
        for (int i = 0; i < LANES / 2; ++i) {
            mixed[2 * i] = __builtin_shuffle(rows[i], rows[i + LANES / 2], LOW);
            mixed[2 * i + 1] = __builtin_shuffle(rows[i], rows[i + LANES / 2], HIGH);
        }
        std::memcpy(rows, mixed, sizeof mixed);
    }
}

// Resizes the columns of bytes: element `place` of the result is a row of `width` bytes.
FOR_EACH_PROCESSOR
void resize_columns(const uint8_t *from, uint8_t *to, int64_t width, int64_t height, const Weights &weights) {
    constexpr int64_t BLOCK = 4 * LANES;
    for (int64_t place = 0; place < height; ++place) {
        const uint8_t *rows = from + weights.first[size_t(place)] * width;
        const int32_t *factors = &weights.values[size_t(place * weights.stride)];
        int64_t count = weights.count[size_t(place)];
        int64_t column = 0;
        for (; column + BLOCK <= width; column += BLOCK) {
            Sums sums[4] = {Sums{} + HALF, Sums{} + HALF, Sums{} + HALF, Sums{} + HALF};
            for (int64_t i = 0; i < count; ++i)
                for (int part = 0; part < 4; ++part)
                    sums[part] += widened(load(rows + i * width + column + part * LANES)) * factors[i];
            for (int part = 0; part < 4; ++part) store(to + place * width + column + part * LANES, rounded(sums[part]));
        }
        for (; column < width; column += LANES) {
            int64_t start = std::min(column, width - LANES);
            Sums sums = Sums{} + HALF;
            for (int64_t i = 0; i < count; ++i) sums += widened(load(rows + i * width + start)) * factors[i];
            store(to + place * width + start, rounded(sums));
        }
    }
}

// Resizes 16 rows. `across` and `resized` have room for as many vectors as a row has bytes, before and after.
FOR_EACH_PROCESSOR
void resize_rows(const uint8_t *from, uint8_t *to, int64_t before, int64_t after, const Weights &weights, uint8_t *across,
                 uint8_t *resized) {
    int64_t width = before * COLORS, new_width = after * COLORS;
    Bytes block[LANES];
    for (int64_t column = 0; column < width; column += LANES) {
        int64_t start = std::min(column, width - LANES);
        for (int row = 0; row < LANES; ++row) block[row] = load(from + row * width + start);
        transpose(block);
        for (int row = 0; row < LANES; ++row) store(across + (start + row) * LANES, block[row]);
    }
    for (int64_t place = 0; place < after; ++place) {
        const uint8_t *pixels = across + weights.first[size_t(place)] * COLORS * LANES;
        const int32_t *factors = &weights.values[size_t(place * weights.stride)];
        int64_t count = weights.count[size_t(place)];
        Sums sums[COLORS] = {Sums{} + HALF, Sums{} + HALF, Sums{} + HALF};
        for (int64_t i = 0; i < count; ++i)
            for (int color = 0; color < COLORS; ++color)
                sums[color] += widened(load(pixels + (i * COLORS + color) * LANES)) * factors[i];
        for (int color = 0; color < COLORS; ++color)
            store(resized + (place * COLORS + color) * LANES, rounded(sums[color]));
    }
    for (int64_t column = 0; column < new_width; column += LANES) {
        int64_t start = std::min(column, new_width - LANES);
        for (int row = 0; row < LANES; ++row) block[row] = load(resized + (start + row) * LANES);
        transpose(block);
        for (int row = 0; row < LANES; ++row) store(to + row * new_width + start, block[row]);
    }
}

void resize_all_rows(const uint8_t *from, uint8_t *to, int64_t height, int64_t before, int64_t after, int filter) {
    Weights weights(before, after, filter);
    std::vector<uint8_t> across(size_t(before * COLORS * LANES)), resized(size_t(after * COLORS * LANES));
    for (int64_t row = 0; row < height; row += LANES) {
        int64_t start = std::min(row, height - LANES);
        resize_rows(from + start * before * COLORS, to + start * after * COLORS, before, after, weights, across.data(),
                    resized.data());
    }
}

PyObject *resize(PyObject *, PyObject *arguments) {
    Py_buffer from, to;
    Py_ssize_t height, width, new_height, new_width;
    int filter;
    if (!PyArg_ParseTuple(arguments, "y*nnw*nni", &from, &height, &width, &to, &new_height, &new_width, &filter)) return nullptr;
    constexpr Py_ssize_t LARGEST = 1 << 20;
    bool valid = std::min({height, width, new_height, new_width}) >= LANES &&
                 std::max({height, width, new_height, new_width}) <= LARGEST && (height == new_height || width == new_width) &&
                 from.len == height * width * COLORS && to.len == new_height * new_width * COLORS && filter >= 0 && filter < FILTERS;
    bool has_memory = true;
    if (valid) {
        auto before = static_cast<const uint8_t *>(from.buf);
        auto after = static_cast<uint8_t *>(to.buf);
        Py_BEGIN_ALLOW_THREADS;
        try {
            if (height == new_height)
                resize_all_rows(before, after, height, width, new_width, filter);
            else
                resize_columns(before, after, width * COLORS, new_height, Weights(height, new_height, filter));
        } catch (const std::bad_alloc &) {
            has_memory = false;
        }
        Py_END_ALLOW_THREADS;
    }
    PyBuffer_Release(&from);
    PyBuffer_Release(&to);
    if (!has_memory) return PyErr_NoMemory();
    if (!valid) {
        PyErr_SetString(PyExc_ValueError, "resize(): two sizes that differ in one edge, of 16 pixels or more, their buffers and a "
                                          "filter are expected");
        return nullptr;
    }
    Py_RETURN_NONE;
}

PyMethodDef methods[] = {{"resize", resize, METH_VARARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "_resample", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__resample() { return PyModule_Create(&module); }
