// Mixtures of experts: the weighted sum of what a token's experts make of it. What an expert does is a capture of its calls.
#pragma once

struct RunExperts {
    static constexpr const char *NAME = "run_experts";
    static constexpr const char *PARAMETERS[] = {"x",     "chosen", "weights", "experts", "first",
                                                 "inputs", "results", "out",    "weighs_inputs"};
    static RunExperts check(const Tensor &x, const Tensor &chosen, const Tensor &weights,
                            const std::vector<std::shared_ptr<const Capture>> &experts, int64_t first, const Tensor &inputs,
                            const Tensor &results, const Tensor &out, int64_t weighs_inputs) {
        Size rows("rows"), hidden("hidden"), top_k("top_k"), capacity("capacity");
        x.is_floating().has_shape(rows, hidden).is_dense(1);
        chosen.has_dtype({DType::INT64}).has_shape(rows, top_k).is_contiguous();
        weights.has_dtype({DType::FLOAT32}).has_shape(rows, top_k).is_contiguous();
        inputs.has_dtype({x.dtype}).has_shape(capacity, hidden).is_contiguous();
        results.has_dtype({x.dtype}).has_shape(capacity, hidden).is_contiguous();
        out.has_dtype({x.dtype}).has_shape(rows, hidden).is_contiguous();
        require(capacity > 0, "inputs", "at least one row is expected");
        return {x.dtype, x.data(), chosen.data<int64_t>(), weights.data<float>(), inputs.data(), results.data(), out.data(),
                rows, x.strides[0], hidden, top_k, capacity, first, weighs_inputs != 0, experts};
    }
    void run() const;
    int64_t work() const { return UNLOCKED_WORK; }
    int64_t &row_count() { return rows; }

    DType dtype;
    const void *x;
    const int64_t *chosen;  // experts; those that are not among `experts` compute nothing
    const float *weights;
    void *inputs, *results, *out;  // of an expert: (capacity, hidden) each; of all
    int64_t rows, x_stride, hidden, top_k, capacity, first;
    bool weighs_inputs;
    std::vector<std::shared_ptr<const Capture>> experts;  // with one count of rows for all kinds
};
REGISTER_OP(RunExperts);

// The pairs of a token and one of its experts, by expert, and by token where they have the same.
class ExpertPairs {
  public:
    explicit ExpertPairs(const RunExperts &a) : begins_(a.experts.size() + 1) {
        int64_t count = int64_t(a.experts.size()), pairs = a.rows * a.top_k;
        auto expert_of = [&](int64_t pair) { return a.chosen[pair] - a.first; };
        auto is_local = [&](int64_t pair) { return expert_of(pair) >= 0 && expert_of(pair) < count; };
        for (int64_t pair = 0; pair < pairs; pair++)
            if (is_local(pair)) begins_[expert_of(pair) + 1]++;
        for (int64_t expert = 0; expert < count; expert++) begins_[expert + 1] += begins_[expert];
        order_.resize(begins_[count]);
        std::vector<int64_t> next(begins_.begin(), begins_.end() - 1);
        for (int64_t pair = 0; pair < pairs; pair++)
            if (is_local(pair)) order_[next[expert_of(pair)]++] = pair;
    }
    int64_t begin(int64_t expert) const { return begins_[expert]; }
    int64_t end(int64_t expert) const { return begins_[expert + 1]; }
    const int64_t *at(int64_t place) const { return &order_[place]; }

  private:
    std::vector<int64_t> begins_, order_;
};

// out[i] = round(y[i] * weight), plus what is in out.
template <class T>
void add_weighted(const typename T::Element *y, float weight, typename T::Element *out, int64_t count) {
    typedef typename T::Element Element;
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) {
        Element product[LANES];
        T::store(product, T::load(y + i) * weight);
        T::store(out + i, T::load(out + i) + T::load(product));
    }
    for (; i < count; i++)
        out[i] = T::from_float(T::to_float(out[i]) + T::to_float(T::from_float(T::to_float(y[i]) * weight)));
}

// Weights are rounded to the dtype, and products with them before they are added, expert by expert.
template <class T>
void run_experts(const RunExperts &a) {
    typedef typename T::Element Element;
    ExpertPairs pairs(a);
    std::memset(a.out, 0, a.rows * a.hidden * sizeof(Element));
    auto weight_of = [&](int64_t pair) { return T::to_float(T::from_float(a.weights[pair])); };
    for (size_t expert = 0; expert < a.experts.size(); expert++) {
        for (int64_t begin = pairs.begin(expert); begin < pairs.end(expert); begin += a.capacity) {
            int64_t count = std::min(a.capacity, pairs.end(expert) - begin);
            const int64_t *order = pairs.at(begin);
            parallel_for(count, count * a.hidden > SERIAL, [&](int64_t i) {
                const Element *from = (const Element *)a.x + order[i] / a.top_k * a.x_stride;
                Element *to = (Element *)a.inputs + i * a.hidden;
                if (!a.weighs_inputs) return (void)std::memcpy(to, from, a.hidden * sizeof *to);
                std::memset(to, 0, a.hidden * sizeof *to);
                add_weighted<T>(from, weight_of(order[i]), to, a.hidden);
            });
            a.experts[expert]->replay(std::vector<int64_t>(a.experts[expert]->kinds(), count));
            parallel_for(count, count * a.hidden > SERIAL, [&](int64_t i) {
                const Element *from = (const Element *)a.results + i * a.hidden;
                Element *to = (Element *)a.out + order[i] / a.top_k * a.hidden;
                add_weighted<T>(from, a.weighs_inputs ? 1.0f : weight_of(order[i]), to, a.hidden);
            });
        }
    }
}

inline void RunExperts::run() const {
    dtype == DType::BFLOAT16 ? run_experts<BFloat16>(*this) : run_experts<Float32>(*this);
}
