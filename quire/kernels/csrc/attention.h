// What decode and prefill attention over KV pages have in common.
#pragma once

#include "pages.h"

// The arguments that all attention over pages has in common.
struct AttentionArguments {
    DType dtype;  // of q and out
    bool int8;    // pages
    const void *q;
    Pages keys, values;
    void *out;
    const int32_t *block_tables;  // (sequences, table_stride)
    const int64_t *seq_lens;      // (sequences,) positions, those of the queries included
    const float *sinks;           // (heads,) or null
    int64_t sequences, heads, kv_heads, q_stride, key_dim, value_dim, block_size, table_stride;
    int64_t window;        // positions that a query sees, its own included; 0: all
    float scale, softcap;  // softcap 0: none
    int64_t positions;     // that the block tables have room for

    // The queries are `tokens` rows; block tables and lengths belong to `sequences` of them.
    static AttentionArguments check(const Tensor &q, const Tensor &keys, const Tensor &values, const Tensor &out,
                                    const Tensor &block_tables, const Tensor &seq_lens, const OptionalTensor &sinks,
                                    int64_t window, float scale, float softcap, Size &tokens, Size &sequences) {
        Size heads("heads"), kv_heads("kv_heads"), blocks("blocks"), block_size("block_size"), width("blocks");
        PagesArgument key(keys, q.is_floating().dtype, kv_heads, blocks, block_size);
        PagesArgument value(values, q.dtype, kv_heads, blocks, block_size);
        require(key.int8 == value.int8, "values", "the dtype of keys is expected");
        for (const PagesArgument *one : {&key, &value})
            require(one->dim % PAIR == 0 && one->dim <= MAX_DIM, "keys, values",
                    "a head dim that is a multiple of 32 and at most 1024 is expected");
        Size key_dim("dim of keys", key.dim), value_dim("dim of values", value.dim);
        q.has_shape(tokens, heads, key_dim).is_dense(2);
        require(kv_heads > 0 && heads % kv_heads == 0, "q", "a multiple of kv_heads is expected as heads");
        out.has_dtype({q.dtype}).has_shape(tokens, heads, value_dim).is_contiguous();
        block_tables.has_dtype({DType::INT32}).has_shape(sequences, width).is_dense(1);
        seq_lens.has_dtype({DType::INT64}).has_shape(sequences).is_contiguous();
        if (sinks) sinks->has_dtype({DType::FLOAT32}).has_shape(heads).is_contiguous();
        require(window >= 0, "window", "cannot be negative");
        return {q.dtype, key.int8, q.data(), key.pages, value.pages, out.data(), block_tables.data<int32_t>(),
                seq_lens.data<int64_t>(), data_or_null<float>(sinks), sequences, heads, kv_heads, q.strides[0], key_dim,
                value_dim, block_size, block_tables.strides[0], window, scale, softcap, sequences * width * block_size};
    }
};
