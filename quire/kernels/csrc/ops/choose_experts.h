// Routers of mixtures of experts: the experts of a token and their weights.
#pragma once

struct ChooseExperts {
    static constexpr int64_t MAX_EXPERTS = 1024, MAX_CHOSEN = 32;

    static constexpr const char *NAME = "choose_experts";
    static constexpr const char *PARAMETERS[] = {"logits",     "bias",        "expert_scale", "chosen", "weights", "sigmoid", "groups",
                                                 "top_groups", "renormalize", "least_sum",    "scale"};
    static ChooseExperts check(const Tensor &logits, const OptionalTensor &bias, const OptionalTensor &expert_scale,
                               const Tensor &chosen, const Tensor &weights, int64_t sigmoid, int64_t groups,
                               int64_t top_groups, int64_t renormalize, float least_sum, float scale) {
        Size rows("rows"), experts("experts"), top_k("top_k");
        logits.has_dtype({DType::FLOAT32}).has_shape(rows, experts).is_contiguous();
        chosen.has_dtype({DType::INT64}).has_shape(rows, top_k).is_contiguous();
        weights.has_dtype({DType::FLOAT32}).has_shape(rows, top_k).is_contiguous();
        for (const OptionalTensor *each : {&bias, &expert_scale})
            if (*each) (*each)->has_dtype({DType::FLOAT32}).has_shape(experts).is_contiguous();
        require(experts > 0 && experts <= MAX_EXPERTS, "logits", "1 to 1024 experts are expected");
        require(groups > 0 && experts % groups == 0 && top_groups > 0 && top_groups <= groups, "groups",
                "groups of as many experts each, and no more of a token, are expected");
        require(top_k > 0 && top_k <= MAX_CHOSEN && top_k <= top_groups * (experts / groups), "chosen",
                "1 to 32 experts, which the groups of a token have, are expected");
        return {logits.data<float>(), data_or_null<float>(bias), data_or_null<float>(expert_scale), chosen.data<int64_t>(),
                weights.data<float>(), rows, experts, top_k, groups, top_groups, sigmoid != 0, renormalize != 0, least_sum, scale};
    }
    void run() const;
    int64_t work() const { return 8 * rows * experts; }
    int64_t &row_count() { return rows; }

    const float *logits, *bias, *expert_scale;  // the latter two may be null
    int64_t *chosen;
    float *weights;
    int64_t rows, experts, top_k, groups, top_groups;
    bool sigmoid, renormalize;
    float least_sum, scale;
};
REGISTER_OP(ChooseExperts);

// Indices of the largest of some numbers, the largest first; of equal ones that with the lowest index.
struct Largest {
    explicit Largest(int64_t limit) : limit(limit) {}
    void offer(float value, int64_t index) {
        if (count == limit && !(value > values[count - 1])) return;
        int64_t at = count < limit ? count++ : count - 1;
        for (; at > 0 && value > values[at - 1]; at--) values[at] = values[at - 1], indices[at] = indices[at - 1];
        values[at] = value, indices[at] = index;
    }
    int64_t limit, count = 0, indices[ChooseExperts::MAX_EXPERTS];
    float values[ChooseExperts::MAX_EXPERTS];
};

// The scores of all experts: softmax or sigmoids of the logits.
inline void score_experts(const ChooseExperts &a, const float *logits, float *scores) {
    float largest = logits[0];
    for (int64_t i = 1; i < a.experts; i++) largest = std::max(largest, logits[i]);
    for (int64_t i = 0; i < a.experts; i += LANES) {
        float part[LANES] = {};
        int64_t count = std::min<int64_t>(LANES, a.experts - i);
        std::memcpy(part, logits + i, count * sizeof *part);
        Floats x = Float32::load(part);
        Float32::store(part, a.sigmoid ? 1.0f / (1.0f + vector_exp(-x)) : vector_exp(x - largest));
        std::memcpy(scores + i, part, count * sizeof *part);
    }
    if (a.sigmoid) return;
    float sum = 0.0f;
    for (int64_t i = 0; i < a.experts; i++) sum += scores[i];
    for (int64_t i = 0; i < a.experts; i++) scores[i] /= sum;
}

// Which groups a token's experts are of: those with the largest number by which an expert is chosen, with a bias with the
// largest sum of two.
inline Largest choose_groups(const ChooseExperts &a, const float *ranked) {
    int64_t size = a.experts / a.groups;
    Largest groups(a.top_groups);
    for (int64_t group = 0; group < a.groups; group++) {
        Largest best(a.bias && size > 1 ? 2 : 1);
        for (int64_t i = group * size; i < (group + 1) * size; i++) best.offer(ranked[i], i);
        groups.offer(best.count == 2 ? best.values[0] + best.values[1] : best.values[0], group);
    }
    std::sort(groups.indices, groups.indices + groups.count);
    return groups;
}

// Experts are chosen by their scores plus the bias, without a bias by their logits.
inline void ChooseExperts::run() const {
    parallel_for(rows, work() > SERIAL, [&](int64_t row) {
        const float *from = logits + row * experts;
        float scores[MAX_EXPERTS], biased[MAX_EXPERTS];
        score_experts(*this, from, scores);
        if (bias)
            for (int64_t i = 0; i < experts; i++) biased[i] = scores[i] + bias[i];
        const float *ranked = bias ? biased : from;
        Largest best(top_k);
        if (groups == 1) {
            for (int64_t i = 0; i < experts; i++) best.offer(ranked[i], i);
        } else {
            Largest used = choose_groups(*this, ranked);
            int64_t size = experts / groups;
            for (int64_t at = 0; at < used.count; at++)
                for (int64_t i = used.indices[at] * size; i < (used.indices[at] + 1) * size; i++) best.offer(ranked[i], i);
        }
        float sum = 0.0f, *out = weights + row * top_k;
        for (int64_t i = 0; i < top_k; i++) sum += scores[best.indices[i]];
        float divisor = renormalize ? std::max(sum, least_sum) : 1.0f;
        for (int64_t i = 0; i < top_k; i++) {
            int64_t expert = best.indices[i];
            chosen[row * top_k + i] = expert;
            out[i] = scores[expert] / divisor * (expert_scale ? expert_scale[expert] : 1.0f) * scale;
        }
    });
}
