// The sequences of a step, for ops that keep a state of each.
#pragma once

// Tokens [begin, end) of a sequence, and where its state is.
struct SequenceTokens {
    int64_t slot, begin, end;
};

// Spans of consecutive tokens. Slots and bounds are read in each run: replays may have other ones at the same addresses.
struct Sequences {
    static Sequences check(const Tensor &slots, const Tensor &cu_seqlens, int64_t tokens, int64_t slot_count) {
        Size sequences("sequences"), bounds("sequences + 1");
        slots.has_dtype({DType::INT64}).has_shape(sequences).is_contiguous();
        cu_seqlens.has_dtype({DType::INT64}).has_shape(bounds).is_contiguous();
        require(bounds == sequences + 1, "cu_seqlens", "one bound more than sequences is expected");
        const int64_t *at = cu_seqlens.data<int64_t>(), *of = slots.data<int64_t>();
        require(at[0] == 0 && at[sequences] == tokens, "cu_seqlens", "bounds from 0 to the number of tokens are expected");
        for (int64_t i = 0; i < sequences; i++) {
            require(at[i] <= at[i + 1], "cu_seqlens", "bounds that do not fall are expected");
            require(of[i] >= 0 && of[i] < slot_count, "slots", "indices of states are expected");
        }
        return {of, at};
    }
    // The sequences that have the first `tokens` tokens.
    int64_t count(int64_t tokens) const {
        int64_t count = 0;
        while (bounds[count] < tokens) count++;
        return count;
    }
    SequenceTokens operator[](int64_t i) const { return {slots[i], bounds[i], bounds[i + 1]}; }

    const int64_t *slots, *bounds;
};
