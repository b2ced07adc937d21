// Chooses a token for each row of logits: the one with the largest logit, or a random one by inverse CDF. A row with NaN,
// or whose largest logit is infinite, has none.
#pragma once

constexpr int64_t NO_TOKEN = -1;
constexpr int64_t VOCAB_CHUNK = 4096;  // tokens that are reduced together, before one of them is searched for

struct Argmax {
    static constexpr const char *NAME = "argmax";
    static constexpr const char *PARAMETERS[] = {"logits"};
    static Argmax check(const Tensor &logits) {
        Size rows("rows"), vocab("vocab");
        logits.has_dtype({DType::FLOAT32}).has_shape(rows, vocab).is_contiguous();
        require(vocab > 0, "logits", "at least one token is expected");
        return {logits.data<float>(), rows, vocab};
    }
    std::vector<int64_t> run() const;
    int64_t work() const { return UNLOCKED_WORK; }

    const float *logits;  // (rows, vocab)
    int64_t rows, vocab;
};
REGISTER_OP(Argmax);

struct Sample {
    static constexpr const char *NAME = "sample";
    static constexpr const char *PARAMETERS[] = {"logits", "temperatures", "randoms"};
    static Sample check(const Tensor &logits, std::vector<float> temperatures, std::vector<double> randoms) {
        Argmax a = Argmax::check(logits);
        require(int64_t(temperatures.size()) == a.rows, "temperatures", "one for each row of logits is expected");
        require(int64_t(randoms.size()) == a.rows, "randoms", "one for each row of logits is expected");
        return {a.logits, std::move(temperatures), std::move(randoms), a.rows, a.vocab};
    }
    std::vector<int64_t> run() const;
    int64_t work() const { return UNLOCKED_WORK; }

    const float *logits;  // (rows, vocab)
    std::vector<float> temperatures;
    std::vector<double> randoms;  // in [0, 1)
    int64_t rows, vocab;
};
REGISTER_OP(Sample);

// The largest of some logits; NaN if one of them is.
inline float max_logit(const float *logits, int64_t count) {
    int64_t whole = count / LANES * LANES;
    Floats best = broadcast(-INFINITY);
    Ints nan{};
    for (int64_t i = 0; i < whole; i += LANES) {
        Floats x = Float32::load(logits + i);
        nan |= x != x;
        best = maximum(x, best);
    }
    float largest = -INFINITY;
    bool valid = true;
    for (int i = 0; i < LANES; i++) valid &= !nan[i], largest = std::max(largest, best[i]);
    for (int64_t i = whole; i < count; i++) valid &= logits[i] == logits[i], largest = std::max(largest, logits[i]);
    return valid ? largest : NAN;
}

// The first of equally likely tokens.
inline std::vector<int64_t> Argmax::run() const {
    std::vector<int64_t> tokens(rows);
    int64_t chunks = (vocab + VOCAB_CHUNK - 1) / VOCAB_CHUNK;
    std::unique_ptr<float[]> largest(new float[rows * chunks]);
    parallel_for(rows * chunks, rows * vocab > SERIAL, [&](int64_t i) {
        int64_t row = i / chunks, begin = i % chunks * VOCAB_CHUNK;
        largest[i] = max_logit(logits + row * vocab + begin, std::min(VOCAB_CHUNK, vocab - begin));
    });
    for (int64_t row = 0; row < rows; row++) {
        const float *first = largest.get() + row * chunks, *best = std::max_element(first, first + chunks);
        if (!std::all_of(first, first + chunks, [](float x) { return x < INFINITY; })) {
            tokens[row] = NO_TOKEN;
            continue;
        }
        int64_t token = (best - first) * VOCAB_CHUNK;
        while (token < vocab - 1 && logits[row * vocab + token] != *best) token++;
        tokens[row] = token;
    }
    return tokens;
}

// The token at which the running sum of the weights e^(logit / temperature) exceeds the fraction `random` of their total.
inline int64_t sample_row(const float *logits, int64_t vocab, float temperature, double random, double *sums) {
    float largest = max_logit(logits, vocab);
    if (!(largest < INFINITY)) return NO_TOKEN;
    auto weights = [=](int64_t i) {
        float part[LANES];
        if (i + LANES > vocab)
            for (int64_t lane = 0; lane < LANES; lane++) part[lane] = i + lane < vocab ? logits[i + lane] : -INFINITY;
        Floats x = Float32::load(i + LANES <= vocab ? logits + i : part);
        return select(x == broadcast(-INFINITY), broadcast(0.0f), vector_exp((x - largest) / temperature));
    };
    double total = 0.0;
    for (int64_t begin = 0; begin < vocab; begin += VOCAB_CHUNK) {
        Floats weight = broadcast(0.0f);
        for (int64_t i = begin; i < std::min(vocab, begin + VOCAB_CHUNK); i += LANES) weight += weights(i);
        total += horizontal_sum(weight);
        sums[begin / VOCAB_CHUNK] = total;
    }
    double threshold = random * total;
    int64_t chunk = 0;
    while ((chunk + 1) * VOCAB_CHUNK < vocab && !(sums[chunk] > threshold)) chunk++;
    double running = chunk ? sums[chunk - 1] : 0.0;
    int64_t token = vocab - 1;  // if all logits of the row are -inf
    for (int64_t i = chunk * VOCAB_CHUNK; i < std::min(vocab, (chunk + 1) * VOCAB_CHUNK); i += LANES) {
        Floats weight = weights(i);
        for (int lane = 0; lane < LANES; lane++) {
            if (!(weight[lane] > 0.0f)) continue;
            running += weight[lane], token = i + lane;
            if (running > threshold) return token;
        }
    }
    return token;  // sums in another order may end slightly below the threshold
}

inline std::vector<int64_t> Sample::run() const {
    std::vector<int64_t> tokens(rows);
    int64_t chunks = (vocab + VOCAB_CHUNK - 1) / VOCAB_CHUNK;
    std::unique_ptr<double[]> sums(new double[rows * chunks]);
    parallel_for(rows, rows * vocab > SERIAL, [&](int64_t row) {
        tokens[row] = sample_row(logits + row * vocab, vocab, temperatures[row], randoms[row], sums.get() + row * chunks);
    });
    return tokens;
}
