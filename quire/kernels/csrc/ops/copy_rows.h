// Copies of parts of rows, with zeros behind them where there is more room, and of token ids below a limit.
#pragma once

struct CopyRows {
    static constexpr const char *NAME = "copy_rows";
    static constexpr const char *PARAMETERS[] = {"x", "out"};
    static CopyRows check(const Tensor &x, const Tensor &out) {
        Size rows("rows"), heads("heads"), dim("dim"), width("width");
        x.has_shape(rows, heads, dim).is_dense(1);
        out.has_dtype({x.dtype}).has_shape(rows, heads, width).is_dense(1);
        require(width >= dim, "out", "at least as many columns as x has are expected");
        int64_t size = x.item_size;
        return {x.data<char>(), out.data<char>(), rows, heads, dim * size, (width - dim) * size, x.strides[0] * size,
                x.strides[1] * size, out.strides[0] * size, out.strides[1] * size};
    }
    void run() const {
        parallel_for(rows, work() > SERIAL, [&](int64_t row) {
            for (int64_t head = 0; head < heads; head++) {
                char *to = out + row * out_stride + head * out_head_stride;
                std::memcpy(to, x + row * x_stride + head * x_head_stride, bytes);
                std::memset(to + bytes, 0, padding);
            }
        });
    }
    int64_t work() const { return rows * heads * bytes / 4; }
    int64_t &row_count() { return rows; }

    const char *x;
    char *out;
    int64_t rows, heads, bytes, padding, x_stride, x_head_stride, out_stride, out_head_stride;  // strides are bytes
};
REGISTER_OP(CopyRows);

// Ids, of which those at the limit and above become 0.
struct LimitIds {
    static constexpr const char *NAME = "limit_ids";
    static constexpr const char *PARAMETERS[] = {"ids", "out", "limit"};
    static LimitIds check(const Tensor &ids, const Tensor &out, int64_t limit) {
        Size count("ids");
        ids.has_dtype({DType::INT64}).has_shape(count).is_contiguous();
        out.has_dtype({DType::INT64}).has_shape(count).is_contiguous();
        return {ids.data<int64_t>(), out.data<int64_t>(), count, limit};
    }
    void run() const {
        for (int64_t i = 0; i < count; i++) out[i] = ids[i] < limit ? ids[i] : 0;
    }
    int64_t work() const { return count; }
    int64_t &row_count() { return count; }

    const int64_t *ids;
    int64_t *out, count, limit;
};
REGISTER_OP(LimitIds);
