// What the kernels are called with. Pointers are to the first number of a tensor; strides count numbers, not bytes.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

enum Activation { SILU = 0, GELU_TANH = 1, RELU = 2 };

struct RmsNorm {  // row r lies at x + r / heads * stride + r % heads * dim
    const void *x, *weight;
    void *out;
    int64_t rows, heads, stride, dim;
    float eps, offset;
};

struct Rope {
    const void *x, *cos, *sin;
    void *out;
    int64_t tokens, heads, dim, stride, pairs;
};

struct WritePages {
    void *pages;
    const int64_t *slots;
    const void *rows;
    int64_t tokens, heads, row_bytes, token_bytes, slots_per_head;
};

struct ActAndMul {
    const void *x;
    void *out;
    int64_t rows, size;
    int act;
};

struct PagedDecode {
    const void *q, *keys, *values;
    void *out;
    const int32_t *tables;   // (sequences, table_stride) block tables
    const int64_t *lengths;  // (sequences,) positions, the query's own included
    const float *sinks;      // (heads,) or null
    int64_t sequences, heads, kv_heads, q_stride, key_dim, value_dim, key_row, value_row, block_size, head_slots,
        table_stride, window;  // rows of keys and values lie key_row and value_row apart; window 0: none
    float scale, softcap;      // softcap 0: none
};

struct Linear {
    const void *x, *weight;  // bfloat16, the weight in panels
    const float *bias;       // or null
    void *out;               // float32 if wide, else bfloat16
    int64_t rows, size_in, size_out, x_stride;
    int wide;
};

struct Kernels {
    void (*rms_norm)(const RmsNorm &);
    void (*rope)(const Rope &);
    void (*act_and_mul)(const ActAndMul &);
    void (*paged_decode)(const PagedDecode &);
    void (*write_pages)(const WritePages &);
    void (*linear)(const Linear &);
};
