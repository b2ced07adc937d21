// A step's inputs from its spans of tokens.
#pragma once

// The arrays that build_inputs reads and writes: those of the request table, and those that the model reads in a step.
// Arrays named end_* are for the last tokens of some spans. They are checked once, as reading the properties of a dozen
// tensors in each step takes several microseconds while the caches hold weights.
struct InputArrays {
    static constexpr const char *NAME = "input_arrays";
    static constexpr const char *PARAMETERS[] = {"known_tokens", "known_blocks", "block_size",   "tokens",
                                                 "positions",    "slots",        "seq_lens",     "span_counts",
                                                 "block_tables", "end_rows",     "end_seq_lens", "end_block_tables"};
    static InputArrays check(const Tensor &known_tokens, const Tensor &known_blocks, int64_t block_size,
                             const Tensor &tokens, const Tensor &positions, const Tensor &slots, const Tensor &seq_lens,
                             const Tensor &span_counts, const Tensor &block_tables, const Tensor &end_rows,
                             const Tensor &end_seq_lens, const Tensor &end_block_tables) {
        Size table_rows("rows"), context("context"), width("blocks"), max_tokens("tokens"), max_spans("spans"),
            max_counts("2 + spans"), max_ends("ends");
        require(block_size > 0, "block_size", "a positive size is expected");
        known_tokens.has_dtype({DType::INT32}).has_shape(table_rows, context).is_contiguous();
        known_blocks.has_dtype({DType::INT32}).has_shape(table_rows, width).is_contiguous();
        for (const Tensor *one : {&tokens, &positions, &slots})
            one->has_dtype({DType::INT64}).has_shape(max_tokens).is_contiguous();
        seq_lens.has_dtype({DType::INT64}).has_shape(max_spans).is_contiguous();
        span_counts.has_dtype({DType::INT64}).has_shape(max_counts).is_contiguous();
        require(max_counts == max_spans + 2, "span_counts", "two elements more than seq_lens are expected");
        block_tables.has_dtype({DType::INT32}).has_shape(max_spans, width).is_contiguous();
        for (const Tensor *one : {&end_rows, &end_seq_lens})
            one->has_dtype({DType::INT64}).has_shape(max_ends).is_contiguous();
        end_block_tables.has_dtype({DType::INT32}).has_shape(max_ends, width).is_contiguous();
        std::vector<Reference> owners;
        for (const Tensor *one : {&known_tokens, &known_blocks, &tokens, &positions, &slots, &seq_lens, &span_counts,
                                  &block_tables, &end_rows, &end_seq_lens, &end_block_tables})
            owners.emplace_back(one->object);
        return {std::move(owners), known_tokens.data<int32_t>(), known_blocks.data<int32_t>(), block_size, table_rows,
                context, width, max_tokens, max_spans, max_ends, tokens.data<int64_t>(), positions.data<int64_t>(),
                slots.data<int64_t>(), seq_lens.data<int64_t>(), span_counts.data<int64_t>(), end_rows.data<int64_t>(),
                end_seq_lens.data<int64_t>(), block_tables.data<int32_t>(), end_block_tables.data<int32_t>()};
    }
    std::shared_ptr<const InputArrays> run() const { return std::make_shared<const InputArrays>(*this); }
    int64_t work() const { return 0; }

    std::vector<Reference> owners;
    int32_t *known_tokens;        // (table_rows, context)
    const int32_t *known_blocks;  // (table_rows, width)
    int64_t block_size, table_rows, context, width, max_tokens, max_spans, max_ends;
    int64_t *tokens, *positions, *slots, *seq_lens, *span_counts, *end_rows, *end_seq_lens;
    int32_t *block_tables, *end_block_tables;
};
REGISTER_OP(InputArrays);

// Fills the arrays for a step, and returns the largest block that the step writes to. Span i is the tokens at positions
// [starts[i], starts[i] + counts[i]) of a row of the request table. The first `singles` spans attend as single queries.
// `ends`: indices of the spans for the end_* arrays.
struct BuildInputs {
    static constexpr const char *NAME = "build_inputs";
    static constexpr const char *PARAMETERS[] = {"arrays", "rows", "starts", "counts", "singles", "ends"};
    static BuildInputs check(std::shared_ptr<const InputArrays> arrays, std::vector<int64_t> rows,
                             std::vector<int64_t> starts, std::vector<int64_t> counts, int64_t singles,
                             std::vector<int64_t> ends) {
        const InputArrays &a = *arrays;
        int64_t spans = int64_t(rows.size()), total = 0, positions = std::min(a.context, a.width * a.block_size);
        require(starts.size() == rows.size() && counts.size() == rows.size(), "rows, starts, counts",
                "one for each span is expected");
        for (int64_t i = 0; i < spans; i++) {
            require(rows[i] >= 0 && rows[i] < a.table_rows, "rows", "rows of the request table are expected");
            require(starts[i] >= 0 && counts[i] > 0 && starts[i] + counts[i] <= positions, "starts, counts",
                    "positions of the context are expected");
            total += counts[i];
        }
        require(singles >= 0 && singles <= spans, "singles", "a number of spans is expected");
        require(std::all_of(counts.begin(), counts.begin() + singles, [](int64_t count) { return count == 1; }),
                "singles", "spans of one token are expected");
        for (int64_t span : ends) require(span >= 0 && span < spans, "ends", "indices of spans are expected");
        require(spans <= a.max_spans && total <= a.max_tokens && int64_t(ends.size()) <= a.max_ends, "arrays",
                "the step is larger than they are");
        return {std::move(arrays), std::move(rows), std::move(starts), std::move(counts), singles, std::move(ends)};
    }
    int64_t run() const;
    int64_t work() const { return 0; }

    std::shared_ptr<const InputArrays> arrays;
    std::vector<int64_t> rows, starts, counts;
    int64_t singles;
    std::vector<int64_t> ends;
};
REGISTER_OP(BuildInputs);

inline int64_t BuildInputs::run() const {
    const InputArrays &a = *arrays;
    int64_t last_block = 0, at = 0;
    std::vector<int64_t> span_ends(rows.size());
    auto copy_block_table = [&](size_t span, int32_t *to) {
        const int32_t *from = a.known_blocks + rows[span] * a.width;
        std::copy(from, from + (starts[span] + counts[span] - 1) / a.block_size + 1, to);
    };
    a.span_counts[0] = singles, a.span_counts[1] = int64_t(rows.size());
    for (size_t i = 0; i < rows.size(); i++) {
        for (int64_t position = starts[i]; position < starts[i] + counts[i]; position++, at++) {
            int64_t block = a.known_blocks[rows[i] * a.width + position / a.block_size];
            a.tokens[at] = a.known_tokens[rows[i] * a.context + position], a.positions[at] = position;
            a.slots[at] = block * a.block_size + position % a.block_size;
            last_block = std::max(last_block, block);
        }
        a.span_counts[2 + i] = counts[i], a.seq_lens[i] = starts[i] + counts[i], span_ends[i] = at;
        copy_block_table(i, a.block_tables + i * a.width);
    }
    for (size_t i = 0; i < ends.size(); i++) {
        a.end_rows[i] = span_ends[ends[i]] - 1, a.end_seq_lens[i] = a.seq_lens[ends[i]];
        copy_block_table(ends[i], a.end_block_tables + i * a.width);
    }
    return last_block;
}
