// A step's inputs from its spans of tokens.
#pragma once

// Fills the arrays that a model reads in a step, and returns the largest block that the step writes to. Span i is the
// tokens at positions [starts[i], starts[i] + counts[i]) of a row of the request table. Arrays named end_* are for the
// last tokens of the spans `ends`.
struct BuildInputs {
    static constexpr const char *NAME = "build_inputs";
    static constexpr const char *PARAMETERS[] = {
        "rows",  "starts", "counts",   "ends",        "known_tokens", "known_blocks", "block_size",   "tokens",
        "positions", "slots", "seq_lens", "span_counts", "block_tables", "end_rows", "end_seq_lens", "end_block_tables"};
    static BuildInputs check(std::vector<int64_t> rows, std::vector<int64_t> starts, std::vector<int64_t> counts,
                             std::vector<int64_t> ends, const Tensor &known_tokens, const Tensor &known_blocks,
                             int64_t block_size, const Tensor &tokens, const Tensor &positions, const Tensor &slots,
                             const Tensor &seq_lens, const Tensor &span_counts, const Tensor &block_tables,
                             const Tensor &end_rows, const Tensor &end_seq_lens, const Tensor &end_block_tables) {
        Size table_rows("rows"), context("context"), width("blocks"), most_tokens("tokens"), most_spans("spans"),
            most_counts("1 + spans"), most_ends("ends");
        int64_t spans = int64_t(rows.size()), total = 0;
        require(block_size > 0, "block_size", "has to be positive");
        known_tokens.has_dtype({DType::INT32}).has_shape(table_rows, context).is_contiguous();
        known_blocks.has_dtype({DType::INT32}).has_shape(table_rows, width).is_contiguous();
        require(starts.size() == rows.size() && counts.size() == rows.size(), "rows, starts, counts", "one for each span is expected");
        for (int64_t i = 0; i < spans; i++) {
            require(rows[i] >= 0 && rows[i] < table_rows, "rows", "outside of the request table");
            int64_t end = starts[i] + counts[i];
            require(starts[i] >= 0 && counts[i] > 0 && end <= context && end <= width * block_size, "counts",
                    "a span has to be within its row");
            total += counts[i];
        }
        for (int64_t span : ends) require(span >= 0 && span < spans, "ends", "indices of spans are expected");
        for (const Tensor *one : {&tokens, &positions, &slots})
            one->has_dtype({DType::INT64}).has_shape(most_tokens).is_contiguous();
        require(total <= most_tokens, "tokens", "has to hold all tokens of the step");
        seq_lens.has_dtype({DType::INT64}).has_shape(most_spans).is_contiguous();
        span_counts.has_dtype({DType::INT64}).has_shape(most_counts).is_contiguous();
        block_tables.has_dtype({DType::INT32}).has_shape(most_spans, width).is_contiguous();
        require(spans <= most_spans && spans < most_counts, "seq_lens, span_counts", "have to hold all spans of the step");
        for (const Tensor *one : {&end_rows, &end_seq_lens}) one->has_dtype({DType::INT64}).has_shape(most_ends).is_contiguous();
        end_block_tables.has_dtype({DType::INT32}).has_shape(most_ends, width).is_contiguous();
        require(int64_t(ends.size()) <= most_ends, "end_rows", "has to hold all of `ends`");
        return {std::move(rows), std::move(starts), std::move(counts), std::move(ends), known_tokens.data<int32_t>(),
                known_blocks.data<int32_t>(), context, width, block_size, tokens.data<int64_t>(),
                positions.data<int64_t>(), slots.data<int64_t>(), seq_lens.data<int64_t>(), span_counts.data<int64_t>(),
                end_rows.data<int64_t>(), end_seq_lens.data<int64_t>(), block_tables.data<int32_t>(),
                end_block_tables.data<int32_t>()};
    }
    int64_t run() const;
    int64_t work() const { return 0; }

    std::vector<int64_t> rows, starts, counts, ends;
    const int32_t *known_tokens, *known_blocks;  // (rows, context) and (rows, width) of the request table
    int64_t context, width, block_size;
    int64_t *tokens, *positions, *slots, *seq_lens, *span_counts, *end_rows, *end_seq_lens;
    int32_t *block_tables, *end_block_tables;
};
REGISTER_OP(BuildInputs);

inline int64_t BuildInputs::run() const {
    int64_t last_block = 0, at = 0;
    std::vector<int64_t> span_ends(rows.size());
    auto copy_block_table = [&](size_t span, int32_t *to) {
        const int32_t *from = known_blocks + rows[span] * width;
        std::copy(from, from + (starts[span] + counts[span] - 1) / block_size + 1, to);
    };
    span_counts[0] = int64_t(rows.size());
    for (size_t i = 0; i < rows.size(); i++) {
        for (int64_t position = starts[i]; position < starts[i] + counts[i]; position++, at++) {
            int64_t block = known_blocks[rows[i] * width + position / block_size];
            tokens[at] = known_tokens[rows[i] * context + position], positions[at] = position;
            slots[at] = block * block_size + position % block_size;
            last_block = std::max(last_block, block);
        }
        span_counts[1 + i] = counts[i], seq_lens[i] = starts[i] + counts[i], span_ends[i] = at;
        copy_block_table(i, block_tables + i * width);
    }
    for (size_t i = 0; i < ends.size(); i++) {
        end_rows[i] = span_ends[ends[i]] - 1, end_seq_lens[i] = seq_lens[ends[i]];
        copy_block_table(ends[i], end_block_tables + i * width);
    }
    return last_block;
}
