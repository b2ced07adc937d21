// The gated delta rule, token by token: a state forgets, and what it has at a token's key moves towards the token's value.
#pragma once

#include "../sequences.h"
#include "../softplus.h"

struct GatedDeltaRule {
    static constexpr const char *NAME = "gated_delta_rule";
    static constexpr const char *PARAMETERS[] = {"q",    "k",     "v",     "decay",      "beta", "log_rate",
                                                 "bias", "state", "slots", "cu_seqlens", "out",  "most_beta"};
    static constexpr int64_t MAX_DIM = 512;  // elements of a key
    static GatedDeltaRule check(const Tensor &q, const Tensor &k, const Tensor &v, const Tensor &decay, const Tensor &beta,
                                const Tensor &log_rate, const Tensor &bias, const Tensor &state, const Tensor &slots,
                                const Tensor &cu_seqlens, const Tensor &out, float most_beta) {
        Size tokens("tokens"), heads("heads"), key_heads("key heads"), key_dim("key dim"), value_dim("value dim"),
            channels("channels"), slot_count("slots");
        q.is_floating().has_shape(tokens, key_heads, key_dim).is_dense(2);
        k.has_dtype({q.dtype}).has_shape(tokens, key_heads, key_dim).is_dense(2);
        v.has_dtype({q.dtype}).has_shape(tokens, heads, value_dim).is_dense(2);
        decay.has_dtype({q.dtype}).has_shape(tokens, heads, channels).is_dense(2);
        beta.has_dtype({q.dtype}).has_shape(tokens, heads).is_dense(1);
        log_rate.has_dtype({DType::FLOAT32}).has_shape(heads).is_contiguous();
        bias.has_dtype({DType::FLOAT32}).has_shape(heads, channels).is_contiguous();
        state.has_dtype({DType::FLOAT32}).has_shape(slot_count, heads, key_dim, value_dim).is_dense(3);
        out.has_dtype({q.dtype}).has_shape(tokens, heads, value_dim).is_contiguous();
        require(value_dim % LANES == 0, "v", "a multiple of 16 elements of a head is expected");
        require(key_dim <= MAX_DIM, "k", "at most 512 elements of a head are expected");
        require(channels == 1 || channels == key_dim, "decay", "one number of a head or of each of its keys' elements is expected");
        require(key_heads > 0 && heads % key_heads == 0, "k", "key heads for equally many value heads are expected");
        return {Sequences::check(slots, cu_seqlens, tokens, slot_count),
                q.dtype,
                q.data(),
                k.data(),
                v.data(),
                decay.data(),
                beta.data(),
                out.data(),
                log_rate.data<float>(),
                bias.data<float>(),
                state.data<float>(),
                tokens,
                heads,
                key_heads,
                key_dim,
                value_dim,
                channels,
                q.strides[0],
                k.strides[0],
                v.strides[0],
                decay.strides[0],
                beta.strides[0],
                state.strides[0],
                most_beta};
    }
    void run() const;
    int64_t work() const { return tokens * heads * key_dim * value_dim; }
    int64_t &row_count() { return tokens; }

    Sequences sequences;
    DType dtype;
    const void *q, *k, *v, *decay, *beta;
    void *out;
    const float *log_rate, *bias;  // (heads,), (heads, channels)
    float *state;                  // (slots, heads, key_dim, value_dim)
    int64_t tokens, heads, key_heads, key_dim, value_dim, channels;
    int64_t q_stride, k_stride, v_stride, decay_stride, beta_stride, state_stride;
    float most_beta;
};
REGISTER_OP(GatedDeltaRule);

// Some columns of the state of a head in one sequence. VECTORS: of 16 columns. CHANNELS: each element of keys has a decay.
template <class T, int VECTORS, bool CHANNELS>
struct DeltaTile {
    typedef typename T::Element Element;
    static constexpr int64_t COLUMNS = VECTORS * LANES, MAX_DIM = GatedDeltaRule::MAX_DIM;
    static constexpr float EPS = 1e-6f;  // added to the squares of queries and keys

    // A token's key or query in float32, with zeros behind it up to a whole vector; returns the factor of its normalization.
    INLINE float load_head(const void *from, int64_t token, int64_t stride, float *memory) const {
        const Element *values = (const Element *)from + token * stride + head / (a.heads / a.key_heads) * a.key_dim;
        Floats squares = broadcast(0.0f);
        int64_t i = 0;
        for (; i + LANES <= a.key_dim; i += LANES) {
            Floats value = T::load(values + i);
            Float32::store(memory + i, value);
            squares += value * value;
        }
        if (i < a.key_dim) {
            for (int64_t lane = 0; lane < LANES; lane++)
                memory[i + lane] = i + lane < a.key_dim ? T::to_float(values[i + lane]) : 0.0f;
            Floats value = Float32::load(memory + i);
            squares += value * value;
        }
        return 1.0f / std::sqrt(horizontal_sum(squares) + EPS);
    }
    static INLINE Floats decay_of(Floats logits, Floats bias, float rate) {
        return vector_exp(vector_softplus(logits + bias) * rate);
    }
    // Decays, if they are of a head, and betas of up to 16 tokens.
    INLINE void load_gates(int64_t token, int64_t count) {
        alignas(64) float logits[LANES];
        for (int64_t i = 0; i < LANES; i++)
            logits[i] = i < count ? T::to_float(((const Element *)a.beta)[(token + i) * a.beta_stride + head]) : 0.0f;
        Float32::store(betas, a.most_beta / (1.0f + vector_exp(-Float32::load(logits))));
        if constexpr (!CHANNELS) {
            for (int64_t i = 0; i < LANES; i++)
                logits[i] = i < count ? T::to_float(((const Element *)a.decay)[(token + i) * a.decay_stride + head]) : 0.0f;
            Float32::store(decays, decay_of(Float32::load(logits), broadcast(a.bias[head]), rate));
        }
    }
    // Keys and queries, normalized, and what they are multiplied with in the state before it has forgotten.
    INLINE void load_token(int64_t token, float decay) {
        float key_factor = load_head(a.k, token, a.k_stride, key);
        float query_factor = load_head(a.q, token, a.q_stride, query) / std::sqrt(float(a.key_dim));
        Floats products = broadcast(0.0f), forgets = broadcast(decay);
        for (int64_t i = 0; i < a.key_dim; i += LANES) {
            if constexpr (CHANNELS) {
                const Element *logits = (const Element *)a.decay + token * a.decay_stride + head * a.key_dim + i;
                const float *bias = a.bias + head * a.key_dim + i;
                if (i + LANES <= a.key_dim) forgets = decay_of(T::load(logits), Float32::load(bias), rate);
                else {
                    alignas(64) float last[LANES] = {}, last_bias[LANES] = {};
                    for (int64_t lane = 0; i + lane < a.key_dim; lane++)
                        last[lane] = T::to_float(logits[lane]), last_bias[lane] = bias[lane];
                    forgets = decay_of(Float32::load(last), Float32::load(last_bias), rate);
                }
                Float32::store(channel_decays + i, forgets);
            }
            Floats k = Float32::load(key + i) * key_factor, q = Float32::load(query + i) * query_factor;
            products += k * q;
            Float32::store(key + i, k);
            Float32::store(decayed_key + i, k * forgets);
            Float32::store(query + i, q * forgets);
        }
        key_query = horizontal_sum(products);
    }
    INLINE void run_token(int64_t token, float decay, float beta, float *rows) {
        load_token(token, decay);
        const Element *v = (const Element *)a.v + token * a.v_stride + head * a.value_dim + column;
        Floats known[VECTORS], read[VECTORS], change[VECTORS];
        for (int i = 0; i < VECTORS; i++) known[i] = read[i] = broadcast(0.0f);
        float *row = rows;
        for (int64_t n = 0; n < a.key_dim; n++, row += COLUMNS) {
            Floats k = broadcast(decayed_key[n]), q = broadcast(query[n]);
            for (int i = 0; i < VECTORS; i++) {
                Floats kept = Float32::load(row + i * LANES);
                known[i] += kept * k;
                read[i] += kept * q;
            }
        }
        Element *out = (Element *)a.out + (token * a.heads + head) * a.value_dim + column;
        for (int i = 0; i < VECTORS; i++) {
            change[i] = (T::load(v + i * LANES) - known[i]) * beta;
            T::store(out + i * LANES, read[i] + change[i] * key_query);
        }
        row = rows;
        Floats forgets = broadcast(decay);
        for (int64_t n = 0; n < a.key_dim; n++, row += COLUMNS) {
            Floats k = broadcast(key[n]);
            if constexpr (CHANNELS) forgets = broadcast(channel_decays[n]);
            for (int i = 0; i < VECTORS; i++)
                Float32::store(row + i * LANES, Float32::load(row + i * LANES) * forgets + change[i] * k);
        }
    }
    // The columns are copied, so that they lie together: rows of a state are often multiples of a large power of two apart.
    void run(const SequenceTokens &tokens, float *rows) {
        float *kept = a.state + tokens.slot * a.state_stride + head * a.key_dim * a.value_dim + column;
        for (int64_t n = 0; n < a.key_dim; n++) std::memcpy(rows + n * COLUMNS, kept + n * a.value_dim, COLUMNS * sizeof *rows);
        for (int64_t first = tokens.begin; first < tokens.end; first += LANES) {
            int64_t count = std::min<int64_t>(LANES, tokens.end - first);
            load_gates(first, count);
            for (int64_t i = 0; i < count; i++) run_token(first + i, decays[i], betas[i], rows);
        }
        for (int64_t n = 0; n < a.key_dim; n++) std::memcpy(kept + n * a.value_dim, rows + n * COLUMNS, COLUMNS * sizeof *rows);
    }

    const GatedDeltaRule &a;
    int64_t head, column;
    float rate, key_query = 0.0f;
    alignas(64) float betas[LANES], decays[LANES], query[MAX_DIM], key[MAX_DIM], decayed_key[MAX_DIM],
        channel_decays[CHANNELS ? MAX_DIM : LANES];
};

template <class T, int VECTORS, bool CHANNELS>
void gated_delta_rule(const GatedDeltaRule &a) {
    typedef DeltaTile<T, VECTORS, CHANNELS> Tile;
    int64_t tiles = a.value_dim / Tile::COLUMNS;
    parallel_for(a.sequences.count(a.tokens) * a.heads * tiles, a.work() > SERIAL, [&](int64_t item) {
        SequenceTokens tokens = a.sequences[item / tiles / a.heads];
        if (tokens.begin == tokens.end) return;
        int64_t head = item / tiles % a.heads;
        alignas(64) float rows[GatedDeltaRule::MAX_DIM * Tile::COLUMNS];
        Tile tile{a, head, item % tiles * Tile::COLUMNS, -std::exp(a.log_rate[head])};
        tile.run(tokens, rows);
    });
}

template <class T, int VECTORS>
void gated_delta_rule_with(const GatedDeltaRule &a) {
    a.channels == 1 ? gated_delta_rule<T, VECTORS, false>(a) : gated_delta_rule<T, VECTORS, true>(a);
}

template <class T>
void gated_delta_rule_of(const GatedDeltaRule &a) {
    a.value_dim % (2 * LANES) ? gated_delta_rule_with<T, 1>(a) : gated_delta_rule_with<T, 2>(a);
}

inline void GatedDeltaRule::run() const {
    dtype == DType::BFLOAT16 ? gated_delta_rule_of<BFloat16>(*this) : gated_delta_rule_of<Float32>(*this);
}
