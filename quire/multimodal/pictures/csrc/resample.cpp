// The Python module _resample: resizes pictures of three bytes a pixel, to the bits of Pillow's `resize`.
//
// The width is changed first, then the height, in bands of rows, so that what is between them stays in the processor's cache. A
// value is the rounded sum of weights of 22 bits times bytes, in integers, so the order of additions does not matter, and 16
// bytes are summed at a time. Rows are resized 16 at a time as well: transposed, so that a vector has the same byte of each.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include "pairs.h"
#include "quads.h"
#include "vectors.h"
#include "weights.h"

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("arch=x86-64-v3", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif
#define INLINE static inline __attribute__((always_inline))

namespace {

constexpr int LANES = 16;
typedef uint8_t Bytes __attribute__((vector_size(LANES)));
typedef int16_t Words __attribute__((vector_size(2 * LANES)));
typedef int32_t Sums __attribute__((vector_size(4 * LANES)));

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

// Resizes the columns of bytes: each element of the result is a row of `width` bytes.
FOR_EACH_PROCESSOR
void resize_columns(const uint8_t *from, uint8_t *to, int64_t width, const Weights &weights) {
    constexpr int64_t BLOCK = 4 * LANES;
    for (int64_t place = 0; place < weights.size(); ++place) {
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

// Resizes 16 rows to vectors of 16 bytes, one of each row. `across` has room for as many vectors as a row has bytes.
FOR_EACH_PROCESSOR
void resize_rows(const uint8_t *from, uint8_t *resized, int64_t before, const Weights &weights, uint8_t *across) {
    int64_t width = before * COLORS;
    Bytes block[LANES];
    for (int64_t column = 0; column < width; column += LANES) {
        int64_t start = std::min(column, width - LANES);
        for (int row = 0; row < LANES; ++row) block[row] = load(from + row * width + start);
        transpose(block);
        for (int row = 0; row < LANES; ++row) store(across + (start + row) * LANES, block[row]);
    }
    for (int64_t place = 0; place < weights.size(); ++place) {
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
}

// Writes 16 rows of `width` bytes, from vectors of 16 bytes, one of each row.
FOR_EACH_PROCESSOR
void write_rows(const uint8_t *vectors, uint8_t *to, int64_t width) {
    Bytes block[LANES];
    for (int64_t column = 0; column < width; column += LANES) {
        int64_t start = std::min(column, width - LANES);
        for (int row = 0; row < LANES; ++row) block[row] = load(vectors + (start + row) * LANES);
        transpose(block);
        for (int row = 0; row < LANES; ++row) store(to + row * width + start, block[row]);
    }
}

// How many products one instruction adds to a sum.
enum Products { SINGLES = 1, PAIRS = 2, QUADS = 4 };

// The most that the processor has, and that are allowed.
Products supported_products(int most) {
#ifdef HAS_QUADS
    if (most >= QUADS && quads::supported()) return QUADS;
#endif
#ifdef HAS_PAIRS
    if (most >= PAIRS && pairs::supported()) return PAIRS;
#endif
    return SINGLES;
}

// The weights of whole rows, in the form for the products.
struct RowWeights {
    RowWeights(int64_t before, int64_t after, int filter, Products products)
        : before(before), after(after), filter(filter), products(products), weights(before, after, filter, 0, after) {
#ifdef HAS_PAIRS
        if (products == PAIRS) paired = pairs::PairedWeights(weights, true);
#endif
#ifdef HAS_QUADS
        if (products == QUADS) grouped = quads::GroupedWeights(weights);
#endif
    }

    int64_t before, after;
    int filter;
    Products products;
    Weights weights;
#ifdef HAS_PAIRS
    pairs::PairedWeights paired;
#endif
#ifdef HAS_QUADS
    quads::GroupedWeights grouped;
#endif
};

// Returns weights that a thread has computed, or computes them: bands of a picture, frames of a video and pictures of one size
// need the same ones, and their sines take longer than the products of a band. A thread keeps the last few, if they are small.
std::shared_ptr<const RowWeights> row_weights(int64_t before, int64_t after, int filter, Products products) {
    constexpr size_t KEPT = 4;
    constexpr int64_t SMALL = 1 << 13;  // pixels of a row; their weights take less than 1 MB
    thread_local std::vector<std::shared_ptr<const RowWeights>> kept;
    for (const auto &weights : kept)
        if (weights->before == before && weights->after == after && weights->filter == filter && weights->products == products)
            return weights;
    auto weights = std::make_shared<const RowWeights>(before, after, filter, products);
    if (std::max(before, after) <= SMALL) {
        if (kept.size() == KEPT) kept.erase(kept.begin());
        kept.push_back(weights);
    }
    return weights;
}

// Resizes rows.
class Rows {
public:
    Rows(int64_t before, int64_t after, int filter, Products products)
        : before_(before), after_(after), products_(products), weights_(row_weights(before, after, filter, products)) {
        mixed_ = Vectors(mixed_size());
        vectors_.resize(size_t(after * COLORS * LANES));
    }

    // Resizes `rows` rows, 16 at a time.
    void resize(const uint8_t *from, uint8_t *to, int64_t rows) {
        for (int64_t row = 0; row < rows; row += LANES) {
            int64_t start = std::min(row, rows - LANES);
            resize_16(from + start * before_ * COLORS);
            write_rows(vectors_.data(), to + start * after_ * COLORS, after_ * COLORS);
        }
    }

private:
    // Bytes of 16 rows in the form for the products.
    int64_t mixed_size() const {
#ifdef HAS_QUADS
        if (products_ == QUADS) return quads::mixed_size(before_);
#endif
#ifdef HAS_PAIRS
        if (products_ == PAIRS) return pairs::mixed_size(before_);
#endif
        return before_ * COLORS * LANES;
    }

    void resize_16(const uint8_t *from) {
#ifdef HAS_QUADS
        if (products_ == QUADS) return quads::resize_rows(from, vectors_.data(), before_, weights_->grouped, mixed_.data());
#endif
#ifdef HAS_PAIRS
        if (products_ == PAIRS) return pairs::resize_rows(from, vectors_.data(), before_, weights_->paired, mixed_.data());
#endif
        resize_rows(from, vectors_.data(), before_, weights_->weights, mixed_.data());
    }

    int64_t before_, after_;
    Products products_;
    std::shared_ptr<const RowWeights> weights_;
    std::vector<uint8_t> vectors_;
    Vectors mixed_;
};

// How pictures are resized.
struct Resizing {
    int64_t height, width, new_height, new_width;
    int filter;
    Products products;

    // Makes the rows from `first` on of the resized picture.
    void make_rows(const uint8_t *from, uint8_t *to, int64_t first, int64_t number) const {
        constexpr int64_t BAND = 128;
        Rows across(width, new_width, filter, products);
        if (height == new_height) return across.resize(from, to, height);
        std::vector<uint8_t> wide;
        for (int64_t start = first; start < first + number; start += BAND) {
            Weights down(height, new_height, filter, start, std::min(BAND, first + number - start));
            int64_t begin = std::max<int64_t>(0, std::min(down.begin(), down.end() - LANES));
            int64_t rows = std::min(height, std::max(down.end(), begin + LANES)) - begin;
            const uint8_t *band = from + begin * width * COLORS;
            if (width != new_width) {
                wide.resize(std::max(wide.size(), size_t(rows * new_width * COLORS)));
                across.resize(band, wide.data(), rows);
                band = wide.data();
            }
            down.count_from(begin);
            resize_all_columns(band, to + (start - first) * new_width * COLORS, rows, down);
        }
    }

    // Resizes `rows` rows, which have the new width, to those of the weights.
    void resize_all_columns(const uint8_t *from, uint8_t *to, int64_t rows, const Weights &weights) const {
#ifdef HAS_QUADS
        if (products == QUADS)
            return quads::resize_columns(from, to, new_width * COLORS, rows, quads::GroupedWeights(weights));
#endif
#ifdef HAS_PAIRS
        if (products == PAIRS) return pairs::resize_columns(from, to, new_width * COLORS, weights);
#endif
        resize_columns(from, to, new_width * COLORS, weights);
    }
};

PyObject *resize(PyObject *, PyObject *arguments) {
    Py_buffer from, to;
    Py_ssize_t height, width, new_height, new_width, first;
    int filter, most_products;
    if (!PyArg_ParseTuple(arguments, "y*nnw*nnini", &from, &height, &width, &to, &new_height, &new_width, &filter, &first,
                          &most_products))
        return nullptr;
    constexpr Py_ssize_t LARGEST = 1 << 20;
    bool valid = std::min({height, width, new_height, new_width}) >= LANES &&
                 std::max({height, width, new_height, new_width}) <= LARGEST && from.len == height * width * COLORS &&
                 to.len > 0 && to.len % (new_width * COLORS) == 0 && filter >= 0 && filter < FILTERS;
    Py_ssize_t rows = valid ? to.len / (new_width * COLORS) : 0;
    valid = valid && first >= 0 && first <= new_height - rows && (height != new_height || rows == height);
    bool has_memory = true;
    if (valid) {
        Py_BEGIN_ALLOW_THREADS;
        try {
            Resizing resizing{height, width, new_height, new_width, filter, supported_products(most_products)};
            resizing.make_rows(static_cast<const uint8_t *>(from.buf), static_cast<uint8_t *>(to.buf), first, rows);
        } catch (const std::bad_alloc &) {
            has_memory = false;
        }
        Py_END_ALLOW_THREADS;
    }
    PyBuffer_Release(&from);
    PyBuffer_Release(&to);
    if (!has_memory) return PyErr_NoMemory();
    if (!valid) {
        PyErr_SetString(PyExc_ValueError, "resize(): two sizes of 16 pixels or more, their buffers, a filter and a row are expected");
        return nullptr;
    }
    Py_RETURN_NONE;
}

PyMethodDef methods[] = {{"resize", resize, METH_VARARGS, nullptr}, {nullptr, nullptr, 0, nullptr}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "_resample", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__resample() { return PyModule_Create(&module); }
