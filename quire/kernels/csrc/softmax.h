// Softmax of scores that come in chunks. The weight of a score is 2^(score * log2(e) - exponent), with a whole exponent for
// each chunk: chunks are merged with powers of two, which rounds nothing that was not rounded before.
#pragma once

// What is known of the weights of some scores: their exponent and their sum.
struct SoftmaxSum {
    float exponent = -INFINITY, total = 0.0f;
};

// The exponent with which the weight of a score is between 1/2 and 1.
inline float exponent_of(float score) { return std::ceil(score * LOG2_E); }

// What is taken from scores, times log2(e). Weights of scores of -inf are 0.
inline float shift_of(float exponent) { return exponent == -INFINITY ? 0.0f : exponent; }

// Whether weights with an exponent have digits enough, and may be merged. Not if the score that it is of has no weight, or others are
// far above it.
inline bool is_fit(float total) { return total > 0.0f && total <= 0x1p64f; }

// The sum that a sequence begins with. sink: a score without a value, or null.
inline SoftmaxSum first_sum(const float *sink) {
    if (!sink) return {};
    float exponent = exponent_of(*sink);
    return {exponent, std::exp2(*sink * LOG2_E - shift_of(exponent))};
}

// What weighted values of earlier chunks and those of another one are multiplied with when they are added.
struct MergeFactors {
    float earlier, chunk;
};

// 2^exponent for a whole exponent of at most 0; 0 below -126, and of NaN.
inline float power_of_two(float exponent) {
    uint32_t bits = exponent >= -126.0f ? uint32_t(int32_t(exponent) + 127) << 23 : 0;
    float power;
    std::memcpy(&power, &bits, sizeof power);
    return power;
}

// Adds the sum of a chunk to that of earlier ones.
inline MergeFactors merge(SoftmaxSum &sum, const SoftmaxSum &chunk) {
    float exponent = std::max(sum.exponent, chunk.exponent);
    MergeFactors factors{power_of_two(sum.exponent - exponent), power_of_two(chunk.exponent - exponent)};
    sum = {exponent, sum.total * factors.earlier + chunk.total * factors.chunk};
    return factors;
}

inline float largest_score(const float *scores, int64_t begin, int64_t end) {
    Floats largest = broadcast(-INFINITY);
    for (int64_t i = begin; i < end; i += LANES) largest = maximum(largest, Float32::load(scores + i));
    return horizontal_max(largest);
}

// Writes the softmax weights of scores of queries in the dtype T, with an exponent.
template <class T, class Weight>
SoftmaxSum weights_with_exponent(const float *scores, Weight *weights, int64_t begin, int64_t end, float exponent) {
    Floats shift = broadcast(shift_of(exponent)), total = broadcast(0.0f);
    for (int64_t i = begin; i < end; i += LANES) {
        Floats power = Float32::load(scores + i) * LOG2_E - shift;
        Floats weight = std::is_same_v<T, BFloat16> ? rough_exp2(power) : vector_exp2(power);
        std::conditional_t<std::is_same_v<Weight, float>, Float32, BFloat16>::store(weights + i, weight);
        total += weight;
    }
    return {exponent, horizontal_sum(total)};
}

// Writes the softmax weights of scores of queries in the dtype T. Any exponent will do that is not far from that of the largest
// score, so it is that of the first position that the query sees, mostly: to find the largest one takes a tenth of the time.
template <class T, class Weight>
SoftmaxSum softmax_weights(const float *scores, Weight *weights, int64_t begin, int64_t end, int64_t first) {
    float score = scores[std::clamp(first, begin, end - 1)];
    SoftmaxSum sum = weights_with_exponent<T>(scores, weights, begin, end, exponent_of(score));
    if (is_fit(sum.total)) return sum;
    return weights_with_exponent<T>(scores, weights, begin, end, exponent_of(largest_score(scores, begin, end)));
}
