// Adds all rows of a matrix to a vector of double precision.
#pragma once

struct AddRows {
    static constexpr const char *NAME = "add_rows";
    static constexpr const char *PARAMETERS[] = {"x", "sum"};
    static AddRows check(const Tensor &x, const Tensor &sum) {
        Size rows("rows"), dim("dim");
        x.is_floating().has_shape(rows, dim).is_dense(1);
        sum.has_dtype({DType::FLOAT64}).has_shape(dim).is_contiguous();
        return {x.dtype, x.data(), sum.data<double>(), rows, dim, x.strides[0]};
    }
    void run() const;
    int64_t work() const { return rows * dim; }
    int64_t &row_count() { return rows; }

    DType dtype;
    const void *x;
    double *sum;
    int64_t rows, dim, stride;
};
REGISTER_OP(AddRows);

template <class T>
void add_rows(const AddRows &a) {
    constexpr int64_t COLUMNS = 64;  // of a work item: their sums stay in registers
    parallel_for((a.dim + COLUMNS - 1) / COLUMNS, a.rows * a.dim > SERIAL, [&](int64_t item) {
        int64_t begin = item * COLUMNS, count = std::min(COLUMNS, a.dim - begin);
        double sums[COLUMNS] = {};
        const auto *row = (const typename T::Element *)a.x + begin;
        for (int64_t i = 0; i < a.rows; i++, row += a.stride)
            for (int64_t j = 0; j < count; j++) sums[j] += double(T::to_float(row[j]));
        for (int64_t j = 0; j < count; j++) a.sum[begin + j] += sums[j];
    });
}

inline void AddRows::run() const { dtype == DType::BFLOAT16 ? add_rows<BFloat16>(*this) : add_rows<Float32>(*this); }
