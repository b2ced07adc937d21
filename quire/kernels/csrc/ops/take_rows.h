// Rows of a table by their indices.
#pragma once

struct TakeRows {
    static constexpr const char *NAME = "take_rows";
    static constexpr const char *PARAMETERS[] = {"table", "indices", "out"};
    static TakeRows check(const Tensor &table, const Tensor &indices, const Tensor &out) {
        Size rows("rows"), size("size"), count("indices");
        table.has_shape(rows, size).is_dense(1);
        indices.has_dtype({DType::INT64}).has_shape(count).is_contiguous();
        out.has_dtype({table.dtype}).has_shape(count, size).is_contiguous();
        int64_t bytes = size * table.item_size, stride = table.strides[0] * table.item_size;
        require(bytes % sizeof(uint32_t) == 0 && stride % sizeof(uint32_t) == 0, "table",
                "rows of whole words of 32 bits are expected");
        return {table.data<uint32_t>(), indices.data<int64_t>(), out.data<uint32_t>(), count, bytes / 4, stride / 4, 1};
    }
    void run() const;
    int64_t work() const { return count * words; }
    int64_t &row_count() { return count; }

    const uint32_t *table;  // word w of row r is at (r / panel * stride + w) * panel + r % panel
    const int64_t *indices;
    uint32_t *out;  // (count, words)
    int64_t count, words, stride, panel;
};
REGISTER_OP(TakeRows);

// Rows of a weight that is packed into panels.
struct TakePanelRows : TakeRows {
    static constexpr const char *NAME = "take_panel_rows";
    static constexpr const char *PARAMETERS[] = {"panels", "indices", "out"};
    static TakePanelRows check(const Tensor &panels, const Tensor &indices, const Tensor &out) {
        Size count("indices"), number("panels"), words("words"), panel("panel", 2 * LANES), size("size");
        panels.has_dtype({DType::INT32}).has_shape(number, words, panel).is_contiguous();
        indices.has_dtype({DType::INT64}).has_shape(count).is_contiguous();
        out.has_shape(count, size).is_contiguous();
        require(size * out.item_size == words * 4, "out", "rows as long as those of panels are expected");
        return {{panels.data<uint32_t>(), indices.data<int64_t>(), out.data<uint32_t>(), count, words, words, panel}};
    }
};
REGISTER_OP(TakePanelRows);

inline void TakeRows::run() const {
    parallel_for(count, count * words > SERIAL, [&](int64_t i) {
        const uint32_t *from = table + indices[i] / panel * stride * panel + indices[i] % panel;
        uint32_t *to = out + i * words;
        if (panel == 1) {
            std::memcpy(to, from, words * sizeof *to);
        } else {
            for (int64_t word = 0; word < words; word++) {
                __builtin_prefetch(from + (word + 16) * panel);
                to[word] = from[word * panel];
            }
        }
    });
}
