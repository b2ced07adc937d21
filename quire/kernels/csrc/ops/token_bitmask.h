// Logits of tokens that a bitmask forbids become -inf.
#pragma once

struct ApplyTokenBitmask {
    static constexpr const char *NAME = "apply_token_bitmask";
    static constexpr const char *PARAMETERS[] = {"logits", "masks", "pairs"};
    static ApplyTokenBitmask check(const Tensor &logits, const Tensor &masks, const Tensor &pairs) {
        Size rows("rows"), vocab("vocab"), mask_count("masks"), words("words"), count("pairs"), two("2", 2);
        logits.has_dtype({DType::FLOAT32}).has_shape(rows, vocab).is_contiguous();
        masks.has_dtype({DType::INT32}).has_shape(mask_count, words).is_contiguous();
        pairs.has_dtype({DType::INT64}).has_shape(count, two).is_contiguous();
        require(words * 32 >= vocab, "masks", "a bit for each token is expected");
        const int64_t *pair = pairs.data<int64_t>();
        for (int64_t i = 0; i < 2 * count; i++)
            require(pair[i] >= 0 && pair[i] < (i % 2 ? mask_count : rows), "pairs",
                    "a row of logits and a row of masks are expected");
        return {logits.data<float>(), masks.data<uint32_t>(), pair, count, vocab, words};
    }
    void run() const;
    int64_t work() const { return count * vocab; }

    float *logits;          // (rows, vocab)
    const uint32_t *masks;  // (masks, words): bit i % 32 of word i / 32 says whether token i is allowed
    const int64_t *pairs;   // (count, 2): a row of logits and a row of masks
    int64_t count, vocab, words;
};
REGISTER_OP(ApplyTokenBitmask);

// Allowed tokens keep their logits. If all of these are -inf, the mask alone decides: they become 0. NaN stays NaN.
inline void mask_row(float *logits, const uint32_t *mask, int64_t vocab) {
    const Ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const Floats forbidden = broadcast(-INFINITY);
    auto allowed_lanes = [=](int64_t i) {  // all bits set where the token is allowed
        int32_t bits = int32_t(mask[i / 32] >> (i % 32)) & 0xffff;
        return (((Ints{} + bits) >> lane) & 1) != 0;
    };
    auto allowed = [=](int64_t i) { return mask[i / 32] >> (i % 32) & 1; };
    int64_t whole = vocab / LANES * LANES;
    Floats best = forbidden;
    Ints nan{};
    for (int64_t i = 0; i < whole; i += LANES) {
        Floats x = Float32::load(logits + i);
        Ints is_nan = x != x;
        Floats masked = select((allowed_lanes(i) | is_nan) != 0, x, forbidden);
        nan |= is_nan;
        best = maximum(masked, best);
        Float32::store(logits + i, masked);
    }
    bool found = false;  // a logit that is not -inf
    for (int i = 0; i < LANES; i++) found |= nan[i] || best[i] > -INFINITY;
    for (int64_t i = whole; i < vocab; i++) {
        logits[i] = allowed(i) || logits[i] != logits[i] ? logits[i] : -INFINITY;
        found |= logits[i] != -INFINITY;
    }
    if (found) return;
    for (int64_t i = 0; i < vocab; i++) logits[i] = allowed(i) ? 0.0f : -INFINITY;
}

inline void ApplyTokenBitmask::run() const {
    parallel_for(count, count * vocab > SERIAL, [&](int64_t i) {
        mask_row(logits + pairs[2 * i] * vocab, masks + pairs[2 * i + 1] * words, vocab);
    });
}
