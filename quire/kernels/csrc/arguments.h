// What the kernels are called with. Pointers are to the first number of a tensor; strides count numbers, not bytes.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

enum Activation { SILU = 0, GELU_TANH = 1, RELU = 2 };

constexpr int64_t MOST_DIM = 1024;  // of a head

struct RmsNorm {  // row r lies at x + r * stride
    const void *x, *weight;
    void *out;
    int64_t rows, stride, dim;
    float eps, offset;
};

struct QKNormRope {  // token t lies at x + t * stride
    void *x;
    const float *cos, *sin;           // (tokens, pairs); pairs may be 0
    const void *q_weight, *k_weight;  // (dim,) or null
    int64_t tokens, q_heads, k_heads, dim, stride, pairs;
    float eps, offset;
};

struct Pages {  // (heads, blocks, block_size, dim), which lie so far apart; of int8, each row behind a float32, its scale
    void *data;
    int64_t head, block, row;
};

struct WritePages {  // values may be null
    Pages key_pages, value_pages;
    const int64_t *slots;
    const void *keys, *values;
    int64_t tokens, heads, block_size, key_dim, value_dim, key_stride, value_stride;
    int rounded;  // to int8
};

struct AddScaled {  // x + y * scale
    const void *x, *y;
    void *out;
    int64_t rows, dim;
    float scale;
};

struct ActAndMul {
    const void *x;
    void *out;
    int64_t rows, size;
    int act;
};

struct PagedDecode {
    const void *q;
    Pages keys, values;
    void *out;
    const int32_t *tables;   // (sequences, table_stride) block tables
    const int64_t *lengths;  // (sequences,) positions, the query's own included
    const float *sinks;      // (heads,) or null
    int64_t sequences, heads, kv_heads, q_stride, key_dim, value_dim, block_size, table_stride, window;  // 0: none
    float scale, softcap;  // softcap 0: none
    int rounded;           // pages of int8
};

struct PagedPrefill {  // bfloat16; the queries of a sequence's last `tokens` positions
    const void *q;
    Pages keys, values;
    void *out;
    const int32_t *table;  // the sequence's blocks
    const float *sinks;    // (heads,) or null
    int64_t tokens, length, heads, kv_heads, q_stride, key_dim, value_dim, block_size, window;  // 0: none
    float scale, softcap;  // softcap 0: none
    int rounded;           // pages of int8
};

struct PagedVarlen {  // of sequences' last tokens, side by side: first the single ones, which attend as in PagedDecode
    PagedDecode all;        // queries and results of all tokens, block table and length of each span; bfloat16
    const int64_t *counts;  // how many spans there are, then each one's tokens
};

struct Linear {
    const void *x, *weight;  // bfloat16, the weight in panels
    const float *bias;       // or null
    void *out;               // float32 if wide, else bfloat16
    int64_t rows, size_in, size_out, x_stride;
    int wide;
};

struct QuantizedLinear {
    const void *x, *weight;
    const float *scales, *corrections;  // (groups, panels * 32) and (panels * 32)
    const float *bias;                  // or null
    void *out;                          // float32 if wide, else of x's type
    int64_t rows, size_in, size_out, x_stride;
    int bits, wide;
};

struct TakeRows {  // word w of row r lies at (r / panel * stride + w) * panel + r % panel
    const uint32_t *from;
    const int64_t *rows;
    uint32_t *out;  // (count, words)
    int64_t count, words, stride, panel;
};

struct ApplyTokenBitmask {
    float *logits;         // (.., vocab)
    const uint32_t *masks;  // (.., words); bit i % 32 of word i / 32 says whether token i may come
    const int64_t *pairs;  // (count, 2) a row of logits, and one of masks
    int64_t count, vocab, words;
};

struct Argmax {
    const float *logits;  // (rows, vocab)
    int64_t *tokens;
    int64_t rows, vocab;
};

struct Sample {
    const float *logits;  // (rows, vocab)
    const float *temperatures;
    const double *randoms;  // in [0, 1)
    int64_t *tokens;
    int64_t rows, vocab;
};

struct Kernels {
    void (*rms_norm)(const RmsNorm &);
    void (*qk_norm_rope)(const QKNormRope &);
    void (*add_scaled)(const AddScaled &);
    void (*act_and_mul)(const ActAndMul &);
    void (*paged_decode)(const PagedDecode &);
    void (*write_pages)(const WritePages &);
    void (*paged_varlen)(const PagedVarlen &);
    void (*linear)(const Linear &);
    void (*quantized_linear)(const QuantizedLinear &);
    void (*take_rows)(const TakeRows &);
    void (*apply_token_bitmask)(const ApplyTokenBitmask &);
    void (*argmax)(const Argmax &);
    void (*sample)(const Sample &);
};
