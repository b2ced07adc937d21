// Chooses a token for each row of logits: the one with the largest logit, or a random one by inverse CDF. A row with NaN,
// or whose largest logit is infinite, has none. The rule is that of quire/kernels/choose_tokens.py.
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

// How the token of a row is chosen.
struct Choice {
    float temperature;  // 0: the token with the largest logit
    float log_min_p;    // -inf: no min-p
    int64_t top_k;      // 0: all
    float top_p;        // 1: all
    double random;      // in [0, 1)
};

struct Sample {
    static constexpr const char *NAME = "sample";
    static constexpr const char *PARAMETERS[] = {"logits", "temperatures", "min_ps", "top_ks", "top_ps", "randoms"};
    static Sample check(const Tensor &logits, std::vector<float> temperatures, std::vector<double> min_ps,
                        std::vector<int64_t> top_ks, std::vector<float> top_ps, std::vector<double> randoms) {
        Argmax a = Argmax::check(logits);
        auto has_rows = [&](const auto &values, const char *name) {
            require(int64_t(values.size()) == a.rows, name, "one for each row of logits is expected");
        };
        has_rows(temperatures, "temperatures"), has_rows(min_ps, "min_ps"), has_rows(top_ks, "top_ks");
        has_rows(top_ps, "top_ps"), has_rows(randoms, "randoms");
        std::vector<Choice> choices;
        for (int64_t row = 0; row < a.rows; row++)
            choices.push_back({temperatures[row], float(std::log(min_ps[row])), top_ks[row], top_ps[row], randoms[row]});
        return {a.logits, std::move(choices), a.rows, a.vocab};
    }
    std::vector<int64_t> run() const;
    int64_t work() const { return UNLOCKED_WORK; }

    const float *logits;  // (rows, vocab)
    std::vector<Choice> choices;
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

// Index of the first logit that is equal to a value; the last one if none is.
inline int64_t first_equal(const float *logits, int64_t count, float value) {
    int64_t at = 0;
    while (at + LANES <= count && !any(Float32::load(logits + at) == broadcast(value))) at += LANES;
    while (at < count - 1 && logits[at] != value) at++;
    return at;
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
        tokens[row] = token + first_equal(logits + row * vocab + token, vocab - token, *best);
    }
    return tokens;
}

// The weights of a row's tokens: e to the power of scaled logits, (logit - largest logit) / temperature, or 0 where min-p
// drops the token.
class Weights {
  public:
    Weights(const float *logits, int64_t vocab, float largest, const Choice &choice)
        : logits_(logits), vocab_(vocab), temperature_(choice.temperature), largest_(largest),
          above_(std::nextafter(choice.log_min_p, -INFINITY)) {}

    // Those of the tokens from a multiple of LANES on; tokens behind the last have none.
    Floats at(int64_t token) const { return of(scaled(token)); }
    Floats of(Floats scaled) const {
        return select(scaled > broadcast(above_), vector_exp(scaled), broadcast(0.0f));
    }
    Floats scaled(int64_t token) const {
        float part[LANES];
        if (token + LANES > vocab_)
            for (int64_t lane = 0; lane < LANES; lane++)
                part[lane] = token + lane < vocab_ ? logits_[token + lane] : -INFINITY;
        return (Float32::load(token + LANES <= vocab_ ? logits_ + token : part) - largest_) / temperature_;
    }
    float above() const { return above_; }  // scaled logits at most this large have no weight
    int64_t vocab() const { return vocab_; }

    // Their sum, and with `sums` the running sums at the ends of chunks.
    double total(double *sums) const {
        double total = 0.0;
        for (int64_t begin = 0; begin < vocab_; begin += VOCAB_CHUNK) {
            Floats weight = broadcast(0.0f);
            for (int64_t i = begin; i < std::min(vocab_, begin + VOCAB_CHUNK); i += LANES) weight += at(i);
            total += horizontal_sum(weight);
            if (sums) sums[begin / VOCAB_CHUNK] = total;
        }
        return total;
    }

  private:
    const float *logits_;
    int64_t vocab_;
    float temperature_, largest_, above_;
};

// The token at which the running sum of weights, in the order of tokens, exceeds the fraction `random` of their total.
inline int64_t sample_all(const Weights &weights, double random) {
    int64_t vocab = weights.vocab(), chunk = 0;
    std::vector<double> sums((vocab + VOCAB_CHUNK - 1) / VOCAB_CHUNK);
    double threshold = random * weights.total(sums.data());
    while ((chunk + 1) * VOCAB_CHUNK < vocab && !(sums[chunk] > threshold)) chunk++;
    double running = chunk ? sums[chunk - 1] : 0.0;
    int64_t token = vocab - 1;  // if all logits of the row are -inf
    for (int64_t i = chunk * VOCAB_CHUNK; i < std::min(vocab, (chunk + 1) * VOCAB_CHUNK); i += LANES) {
        Floats weight = weights.at(i);
        for (int lane = 0; lane < LANES; lane++) {
            if (!(weight[lane] > 0.0f)) continue;
            running += weight[lane], token = i + lane;
            if (running > threshold) return token;
        }
    }
    return token;  // sums in another order may end slightly below the threshold
}

// A token that may be chosen. Candidates are ordered by their logits, the largest first, and equal ones by token.
struct Candidate {
    float scaled, weight;
    int32_t token;
    bool operator<(const Candidate &other) const {
        return scaled != other.scaled ? scaled > other.scaled : token < other.token;
    }
};
typedef std::vector<Candidate> Candidates;

// The first `count` candidates of a row, in any order, or all if there are fewer.
inline Candidates first_candidates(const Weights &weights, int64_t count) {
    Candidates candidates;
    float above = weights.above();  // what follows has to be larger to be among the first
    auto drop_others = [&] {
        if (int64_t(candidates.size()) <= count) return;
        std::nth_element(candidates.begin(), candidates.begin() + count - 1, candidates.end());
        candidates.resize(count);
        above = candidates.back().scaled;
    };
    for (int64_t i = 0; i < weights.vocab(); i += LANES) {
        Floats scaled = weights.scaled(i);
        if (!any(scaled > broadcast(above))) continue;
        Floats weight = weights.of(scaled);
        for (int lane = 0; lane < LANES; lane++)
            if (scaled[lane] > above) candidates.push_back({scaled[lane], weight[lane], int32_t(i + lane)});
        if (int64_t(candidates.size()) >= 2 * count + LANES) drop_others();
    }
    drop_others();
    return candidates;
}

inline double total(const Candidates &candidates) {
    double sum = 0.0;
    for (const Candidate &candidate : candidates) sum += candidate.weight;
    return sum;
}

// Index of the first candidate up to which the sum of weights passes; the last one if none does. Those before it are moved
// to the front. Sorts no more than it must: a flat distribution keeps a hundred thousand candidates.
template <class Passes>
int64_t first_passing(Candidates &candidates, Passes passes) {
    constexpr int64_t SORTED = 64;
    auto first = candidates.begin();
    int64_t begin = 0, end = int64_t(candidates.size());
    double before = 0.0;  // sum of the candidates before `begin`
    while (end - begin > SORTED) {
        int64_t middle = begin + (end - begin) / 2;
        std::nth_element(first + begin, first + middle, first + end);
        double sum = before;
        for (int64_t i = begin; i < middle; i++) sum += candidates[i].weight;
        if (passes(sum)) end = middle;
        else begin = middle, before = sum;
    }
    std::sort(first + begin, first + end);
    for (; begin < end - 1; begin++)
        if (passes(before += candidates[begin].weight)) break;
    return begin;
}

// A token among those that top-k and then top-p keep: in the order of candidates, the one at which the running sum of
// weights exceeds the fraction `random` of their total.
inline int64_t sample_first(const Weights &weights, const Choice &choice) {
    constexpr int64_t WIDTHS[] = {256, 4096};  // numbers of candidates that top-p is tried with before it takes all
    int64_t vocab = weights.vocab();
    Candidates candidates;
    double needed;  // sum of weights that top-p keeps
    if (choice.top_k > 0 && choice.top_k < vocab) {
        candidates = first_candidates(weights, choice.top_k);
        needed = choice.top_p * total(candidates);
    } else {
        needed = choice.top_p * weights.total(nullptr);
        for (int64_t width : {WIDTHS[0], WIDTHS[1], vocab}) {
            candidates = first_candidates(weights, width);
            if (int64_t(candidates.size()) < width || total(candidates) >= needed) break;
        }
    }
    std::erase_if(candidates, [](const Candidate &candidate) { return candidate.weight == 0.0f; });
    if (candidates.empty()) return vocab - 1;  // all logits of the row are -inf
    if (choice.top_p < 1.0f) candidates.resize(first_passing(candidates, [&](double sum) { return sum >= needed; }) + 1);
    double threshold = choice.random * total(candidates);
    return candidates[first_passing(candidates, [&](double sum) { return sum > threshold; })].token;
}

inline int64_t sample_row(const float *logits, int64_t vocab, const Choice &choice) {
    float largest = max_logit(logits, vocab);
    if (!(largest < INFINITY)) return NO_TOKEN;
    if (choice.temperature == 0.0f) return first_equal(logits, vocab, largest);
    Weights weights(logits, vocab, largest, choice);
    bool ranked = choice.top_k > 0 || choice.top_p < 1.0f;
    return ranked ? sample_first(weights, choice) : sample_all(weights, choice.random);
}

inline std::vector<int64_t> Sample::run() const {
    std::vector<int64_t> tokens(rows);
    parallel_for(rows, rows * vocab > SERIAL,
                 [&](int64_t row) { tokens[row] = sample_row(logits + row * vocab, vocab, choices[row]); });
    return tokens;
}
