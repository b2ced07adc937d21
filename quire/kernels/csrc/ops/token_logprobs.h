// Log-probabilities of chosen tokens, their ranks, and the most likely tokens.
#pragma once

struct TokenLogprobs {
    static constexpr const char *NAME = "token_logprobs";
    static constexpr const char *PARAMETERS[] = {"logits", "tokens", "chosen", "ranks", "top_ids", "top"};
    static TokenLogprobs check(const Tensor &logits, const Tensor &tokens, const Tensor &chosen, const Tensor &ranks,
                               const Tensor &top_ids, const Tensor &top) {
        Argmax a = Argmax::check(logits);
        Size rows("rows", a.rows), count("top");
        tokens.has_dtype({DType::INT64}).has_shape(rows).is_contiguous();
        chosen.has_dtype({DType::FLOAT32}).has_shape(rows).is_contiguous();
        ranks.has_dtype({DType::INT64}).has_shape(rows).is_contiguous();
        top_ids.has_dtype({DType::INT64}).has_shape(rows, count).is_contiguous();
        top.has_dtype({DType::FLOAT32}).has_shape(rows, count).is_contiguous();
        require(count <= a.vocab, "top", "no more tokens than the vocabulary has are expected");
        for (int64_t row = 0; row < a.rows; row++)
            require(tokens.data<int64_t>()[row] >= 0 && tokens.data<int64_t>()[row] < a.vocab, "tokens",
                    "tokens of the vocabulary are expected");
        return {a.logits, tokens.data<int64_t>(), chosen.data<float>(), ranks.data<int64_t>(), top_ids.data<int64_t>(),
                top.data<float>(), a.rows, a.vocab, count};
    }
    void run() const;
    int64_t work() const { return UNLOCKED_WORK; }

    const float *logits;    // (rows, vocab)
    const int64_t *tokens;  // (rows,)
    float *chosen;
    int64_t *ranks, *top_ids;  // (rows,) and (rows, count)
    float *top;                // (rows, count)
    int64_t rows, vocab, count;
};
REGISTER_OP(TokenLogprobs);

inline int64_t count_above(const float *logits, int64_t count, float value) {
    Ints above{};
    int64_t whole = count / LANES * LANES, sum = 0;
    for (int64_t i = 0; i < whole; i += LANES) above -= Float32::load(logits + i) > broadcast(value);
    for (int lane = 0; lane < LANES; lane++) sum += above[lane];
    for (int64_t i = whole; i < count; i++) sum += logits[i] > value;
    return sum;
}

// The most likely tokens of a row, equal ones by id. Those that are impossible are behind all others.
inline Candidates likeliest(const Weights &weights, const float *logits, int64_t count) {
    Candidates candidates = first_candidates(weights, count);
    std::sort(candidates.begin(), candidates.end());
    for (int64_t token = 0; token < weights.vocab() && int64_t(candidates.size()) < count; token++)
        if (!(logits[token] > -INFINITY)) candidates.push_back({-INFINITY, 0.0f, int32_t(token)});
    return candidates;
}

inline void TokenLogprobs::run() const {
    parallel_for(rows, rows * vocab > SERIAL, [&](int64_t row) {
        const float *row_logits = logits + row * vocab;
        float largest = max_logit(row_logits, vocab), token = row_logits[tokens[row]];
        Weights weights(row_logits, vocab, largest, {.temperature = 1.0f, .log_min_p = -INFINITY});
        float log_total = float(std::log(weights.total(nullptr)));
        chosen[row] = token - largest - log_total;
        ranks[row] = 1 + count_above(row_logits, vocab, token);
        if (count == 0) return;
        Candidates candidates = likeliest(weights, row_logits, count);
        for (int64_t i = 0; i < count; i++) {
            top_ids[row * count + i] = candidates[i].token;
            top[row * count + i] = candidates[i].scaled - log_total;
        }
    });
}
