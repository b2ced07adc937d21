// New keys and values to their slots in KV pages.
#pragma once

#include "../pages.h"

struct WritePages {
    static constexpr const char *NAME = "write_pages";
    static constexpr const char *PARAMETERS[] = {"key_pages", "value_pages", "slots", "keys", "values"};
    static WritePages check(const Tensor &key_pages, const Tensor &value_pages, const Tensor &slots, const Tensor &keys,
                            const OptionalTensor &values) {
        Size tokens("tokens"), heads("kv_heads"), blocks("blocks"), block_size("block_size");
        PagesArgument key(key_pages, keys.is_floating().dtype, heads, blocks, block_size);
        PagesArgument value(value_pages, keys.dtype, heads, blocks, block_size);
        require(key.int8 == value.int8, "value_pages", "the dtype of key_pages is expected");
        Size key_dim("dim of key_pages", key.dim), value_dim("dim of value_pages", value.dim);
        keys.has_shape(tokens, heads, key_dim).is_dense(2);
        if (values) values->has_dtype({keys.dtype}).has_shape(tokens, heads, value_dim).is_dense(2);
        slots.has_dtype({DType::INT64}).has_shape(tokens).is_contiguous();
        require(!key.int8 || (key_dim % LANES == 0 && value_dim % LANES == 0), "key_pages, value_pages",
                "a dim that is a multiple of 16 is expected with int8");
        return {keys.dtype, key.int8, key.pages, value.pages, slots.data<int64_t>(), keys.data(), data_or_null(values),
                tokens, heads, block_size, key_dim, values ? int64_t(value_dim) : 0, keys.strides[0],
                values ? values->strides[0] : 0};
    }
    void run() const;
    int64_t work() const { return tokens * heads * (key_dim + value_dim); }
    int64_t &row_count() { return tokens; }

    DType dtype;
    bool int8;  // pages
    Pages key_pages, value_pages;
    const int64_t *slots;       // block * block_size + offset
    const void *keys, *values;  // (tokens, heads, dim); values may be null
    int64_t tokens, heads, block_size, key_dim, value_dim, key_stride, value_stride;
};
REGISTER_OP(WritePages);

template <class Rows>
void prefetch_row(typename Rows::Element *row, int64_t dim) {
    prefetch_for_write(row - Rows::prefix(dim), Rows::prefix(dim) + dim);
}

template <class T, class Rows>
void write_rows(const WritePages &a) {
    typedef typename Rows::Element Element;
    parallel_for(a.tokens, a.tokens * a.heads * (a.key_dim + a.value_dim) > SERIAL, [&](int64_t token) {
        int64_t block = a.slots[token] / a.block_size, offset = a.slots[token] % a.block_size;
        const typename T::Element *key = (const typename T::Element *)a.keys + token * a.key_stride;
        const typename T::Element *value = (const typename T::Element *)a.values + token * a.value_stride;
        for (int64_t head = 0; head < a.heads; head++) {  // all of them first: one write after the other would miss
            prefetch_row<Rows>(row_at<Element>(a.key_pages, head, block, offset), a.key_dim);
            if (a.values) prefetch_row<Rows>(row_at<Element>(a.value_pages, head, block, offset), a.value_dim);
        }
        for (int64_t head = 0; head < a.heads; head++) {
            Rows::write(key + head * a.key_dim, row_at<Element>(a.key_pages, head, block, offset), a.key_dim);
            if (a.values)
                Rows::write(value + head * a.value_dim, row_at<Element>(a.value_pages, head, block, offset), a.value_dim);
        }
    });
}

template <class T>
void write_pages(const WritePages &a) {
    a.int8 ? write_rows<T, Int8Rows<T>>(a) : write_rows<T, PlainRows<T>>(a);
}

inline void WritePages::run() const {
    dtype == DType::BFLOAT16 ? write_pages<BFloat16>(*this) : write_pages<Float32>(*this);
}
