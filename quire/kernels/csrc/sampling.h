// What happens to a row of logits before and while a token is drawn from it.

// The row with -inf where the mask's bit is 0. If nothing that it allows is left, or no number, the mask wins: 0 there.
inline void hold_row(float *logits, const uint32_t *mask, int64_t vocab) {
    const Ints lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const Floats never = all(-INFINITY);
    auto allowed = [=](int64_t i) {  // all bits set where the token may come
        int32_t bits = int32_t(mask[i / 32] >> (i % 32)) & 0xffff;
        return (((Ints{} + bits) >> lane) & 1) != 0;
    };
    auto may = [=](int64_t i) { return mask[i / 32] >> (i % 32) & 1; };
    int64_t whole = vocab / LANES * LANES;
    Floats best = never;
    Ints odd{};
    for (int64_t i = 0; i < whole; i += LANES) {
        Floats x = Float32::load(logits + i);
        Floats held = allowed(i) ? x : never;
        odd |= held != held;
        best = larger(held, best);
        Float32::store(logits + i, held);
    }
    bool good = true, found = false;
    for (int i = 0; i < LANES; i++) good &= !odd[i], found |= best[i] > -INFINITY;
    for (int64_t i = whole; i < vocab; i++) {
        logits[i] = may(i) ? logits[i] : -INFINITY;
        good &= logits[i] == logits[i], found |= logits[i] > -INFINITY;
    }
    if (good && found) return;
    for (int64_t i = 0; i < vocab; i++) logits[i] = may(i) ? 0.0f : -INFINITY;
}

inline void apply_token_bitmask(const ApplyTokenBitmask &a) {
    spread(a.count, a.count * a.vocab > SERIAL, [&](int64_t i) {
        hold_row(a.logits + a.pairs[2 * i] * a.vocab, a.masks + a.pairs[2 * i + 1] * a.words, a.vocab);
    });
}

constexpr int64_t STRETCH = 4096;  // tokens that are looked at in sum before one is looked for among them

// The largest of some logits; what is no number counts for nothing.
inline float most_of(const float *logits, int64_t count) {
    int64_t whole = count / LANES * LANES;
    Floats best = all(-INFINITY);
    for (int64_t i = 0; i < whole; i += LANES) best = larger(Float32::load(logits + i), best);
    float most = -INFINITY;
    for (int i = 0; i < LANES; i++) most = std::max(most, best[i]);
    for (int64_t i = whole; i < count; i++) most = std::max(most, logits[i]);
    return most;
}

// Of equally likely tokens the first.
inline void argmax(const Argmax &a) {
    int64_t stretches = (a.vocab + STRETCH - 1) / STRETCH;
    std::unique_ptr<float[]> most(new float[a.rows * stretches]);
    spread(a.rows * stretches, a.rows * a.vocab > SERIAL, [&](int64_t i) {
        int64_t row = i / stretches, begin = i % stretches * STRETCH;
        most[i] = most_of(a.logits + row * a.vocab + begin, std::min(STRETCH, a.vocab - begin));
    });
    for (int64_t row = 0; row < a.rows; row++) {
        const float *first = most.get() + row * stretches, *best = std::max_element(first, first + stretches);
        int64_t token = (best - first) * STRETCH;
        while (token < a.vocab - 1 && a.logits[row * a.vocab + token] != *best) token++;
        a.tokens[row] = token;
    }
}

// The token at which the running sum of the weights e^(logit / temperature) passes a random share of their total.
inline int64_t draw_row(const float *logits, int64_t vocab, float temperature, double random, double *sums) {
    float most = most_of(logits, vocab);
    auto weights = [=](int64_t i) {
        Floats x = all(-INFINITY);
        if (i + LANES <= vocab) x = Float32::load(logits + i);
        else for (int64_t lane = 0; i + lane < vocab; lane++) x[lane] = logits[i + lane];
        return x == all(-INFINITY) ? all(0.0f) : exponential((x - most) / temperature);
    };
    double total = 0.0;
    for (int64_t begin = 0; begin < vocab; begin += STRETCH) {
        Floats weight = all(0.0f);
        for (int64_t i = begin; i < std::min(vocab, begin + STRETCH); i += LANES) weight += weights(i);
        total += sum(weight);
        sums[begin / STRETCH] = total;
    }
    double share = random * total;
    int64_t stretch = 0;
    while ((stretch + 1) * STRETCH < vocab && !(sums[stretch] > share)) stretch++;
    double running = stretch ? sums[stretch - 1] : 0.0;
    int64_t token = vocab - 1;  // if nothing in the row is a number
    for (int64_t i = stretch * STRETCH; i < std::min(vocab, (stretch + 1) * STRETCH); i += LANES) {
        Floats weight = weights(i);
        for (int lane = 0; lane < LANES; lane++) {
            if (!(weight[lane] > 0.0f)) continue;
            running += weight[lane], token = i + lane;
            if (running > share) return token;
        }
    }
    return token;  // sums in another order may end a little below
}

inline void sample(const Sample &a) {
    int64_t stretches = (a.vocab + STRETCH - 1) / STRETCH;
    std::unique_ptr<double[]> sums(new double[a.rows * stretches]);
    spread(a.rows, a.rows * a.vocab > SERIAL, [&](int64_t row) {
        a.tokens[row] = draw_row(a.logits + row * a.vocab, a.vocab, a.temperatures[row], a.randoms[row],
                                 sums.get() + row * stretches);
    });
}
