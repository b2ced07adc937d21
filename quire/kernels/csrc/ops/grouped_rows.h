// Rows of a weight of groups, dequantized: embeddings that are stored like the weights of linear layers.
#pragma once

#include "../grouped_weight.h"

struct GroupedRows {
    static constexpr const char *NAME = "grouped_rows";
    static constexpr const char *PARAMETERS[] = {"weight", "factors",    "table",    "order", "bits",    "group",
                                                 "offset", "scale_bits", "minimums", "size",  "indices", "out"};
    // size: outputs of the weight.
    static GroupedRows check(const Tensor &weight, const Tensor &factors, const OptionalTensor &table,
                             const OptionalTensor &order, int64_t bits, int64_t group, int64_t offset, int64_t scale_bits,
                             int64_t minimums, int64_t size, const Tensor &indices, const Tensor &out) {
        Size count("indices"), size_in("size_in");
        indices.has_dtype({DType::INT64}).has_shape(count).is_contiguous();
        out.is_floating().has_shape(count, size_in).is_contiguous();
        return {out.dtype, indices.data<int64_t>(), out.data(), count,
                GroupedWeight::check(weight, factors, table, order, bits, group, offset, scale_bits, minimums, size_in,
                                     size)};
    }
    void run() const;
    int64_t work() const { return count * weight.size_in; }
    int64_t &row_count() { return count; }

    DType dtype;
    const int64_t *indices;  // not checked
    void *out;               // (count, size_in)
    int64_t count;
    GroupedWeight weight;
};
REGISTER_OP(GroupedRows);

// The unsigned code of an input of the step's 16, for an output of the panel's 32.
template <Codes kind>
inline int code_at(const uint8_t *step, int64_t input, int64_t lane, const uint8_t *table) {
    int64_t quad = input / 4, byte = lane * 4 + input % 4;
    if constexpr (kind == Codes::EIGHT) return step[quad * 128 + byte];
    int code = step[lower_bits(kind) + quad / 2 * 128 + byte] >> (4 * (quad % 2)) & 15;
    if constexpr (kind == Codes::TABLE) return table[code];
    if constexpr (kind == Codes::SIX) code |= (step[byte] >> (2 * quad) & 3) << 4;
    return code;
}

template <class Out, Codes kind>
void grouped_row(const GroupedWeight &w, int64_t index, typename Out::Element *out) {
    int64_t lane = index % PANEL;
    auto [step, scales, minimums] = w.panel(index / PANEL);
    float factor = w.factors[index], scale = 0.0f, minimum = 0.0f;
    alignas(64) float all[PANEL];
    auto at_lane = [&](const ScaleRows &rows, int64_t group) {
        Float32::store2(all, rows.load_scaled(group, 0), rows.load_scaled(group, 1));
        return all[lane] * factor;
    };
    for (int64_t begin = 0; begin < w.size_in; begin += STEP, step += step_bytes(kind)) {
        for (int64_t at = 0; at < step_bytes(kind); at += 2 * LINE) __builtin_prefetch(step + 1024 + at + lane * 4);
        if (begin % w.group == 0) {
            scale = at_lane(scales, begin / w.group);
            if (w.minimums) minimum = at_lane(minimums, begin / w.group);
        }
        int64_t end = std::min(begin + STEP, w.size_in);
        for (int64_t input = begin; input < end; input++) {
            float value = float(code_at<kind>(step, input - begin, lane, w.table) - w.offset) * scale + minimum;
            out[w.order ? w.order[input] : input] = Out::from_float(value);
        }
    }
}

template <class Out>
void grouped_rows(const GroupedRows &a) {
    parallel_for(a.count, a.count * a.weight.size_in > SERIAL, [&](int64_t i) {
        auto *out = (typename Out::Element *)a.out + i * a.weight.size_in;
        switch (a.weight.kind) {
            case Codes::FOUR: return grouped_row<Out, Codes::FOUR>(a.weight, a.indices[i], out);
            case Codes::TABLE: return grouped_row<Out, Codes::TABLE>(a.weight, a.indices[i], out);
            case Codes::SIX: return grouped_row<Out, Codes::SIX>(a.weight, a.indices[i], out);
            case Codes::EIGHT: return grouped_row<Out, Codes::EIGHT>(a.weight, a.indices[i], out);
        }
    });
}

inline void GroupedRows::run() const { dtype == DType::FLOAT32 ? grouped_rows<Float32>(*this) : grouped_rows<BFloat16>(*this); }
