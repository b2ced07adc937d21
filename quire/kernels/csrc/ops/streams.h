// Several hidden states of a token, of which a layer computes one (AltUp); see quire/engine/models/layers/streams.py.
#pragma once

// Sums of x in float32.
template <class T, class Term>
float sum_of(const typename T::Element *x, int64_t count, Term term) {
    Floats sums = broadcast(0.0f);
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) sums += term(T::load(x + i));
    float total = horizontal_sum(sums);
    for (; i < count; i++) total += term(T::to_float(x[i]));
    return total;
}

template <class T>
float mean_square(const typename T::Element *x, int64_t count) {
    return sum_of<T>(x, count, [](auto v) { return v * v; }) / float(count);
}

// x with the root mean square of another row.
struct MatchSize {
    static constexpr const char *NAME = "match_size";
    static constexpr const char *PARAMETERS[] = {"x", "other", "out", "least_square"};
    static MatchSize check(const Tensor &x, const Tensor &other, const Tensor &out, float least_square) {
        Size rows("rows"), dim("dim");
        x.is_floating().has_shape(rows, dim).is_dense(1);
        other.has_dtype({x.dtype}).has_shape(rows, dim).is_dense(1);
        out.has_dtype({x.dtype}).has_shape(rows, dim).is_dense(1);
        return {x.dtype, x.data(), other.data(), out.data(), rows, dim, x.strides[0], other.strides[0], out.strides[0],
                least_square};
    }
    void run() const;
    int64_t work() const { return 2 * rows * dim; }
    int64_t &row_count() { return rows; }

    DType dtype;
    const void *x, *other;
    void *out;
    int64_t rows, dim, x_stride, other_stride, out_stride;
    float least_square;
};
REGISTER_OP(MatchSize);

template <class T>
void match_size(const MatchSize &a) {
    typedef typename T::Element Element;
    parallel_for(a.rows, a.work() > SERIAL, [&](int64_t row) {
        const Element *x = (const Element *)a.x + row * a.x_stride;
        const Element *other = (const Element *)a.other + row * a.other_stride;
        Element *out = (Element *)a.out + row * a.out_stride;
        float square = mean_square<T>(x, a.dim);
        float factor = std::sqrt(mean_square<T>(other, a.dim) / (square < a.least_square ? a.least_square : square));
        int64_t i = 0;
        for (; i + LANES <= a.dim; i += LANES) T::store(out + i, T::load(x + i) * factor);
        for (; i < a.dim; i++) out[i] = T::from_float(T::to_float(x[i]) * factor);
    });
}

inline void MatchSize::run() const {
    dtype == DType::BFLOAT16 ? match_size<BFloat16>(*this) : match_size<Float32>(*this);
}

// What both ops below have: states (rows, count, hidden), and the logits of a router.
struct StreamOp {
    static constexpr int64_t MAX_STREAMS = 8;
    int64_t work() const { return 2 * rows * count * count * hidden; }
    int64_t &row_count() { return rows; }
    // The products of tanh(logits * scale) with a row of the weight.
    template <class T>
    float mixed(int64_t row, int64_t output) const {
        const auto *factors = (const typename T::Element *)weight + output * count;
        float total = 0.0f;
        for (int64_t i = 0; i < count; i++) {
            float product = std::tanh(logits[row * count + i] * scale) * T::to_float(factors[i]);
            total = i == 0 ? product : total + product;
        }
        return total;
    }

    DType dtype;
    const void *states;
    const float *logits;  // (rows, count)
    const void *weight;   // (outputs, count)
    void *out;
    int64_t rows, count, hidden;
    float scale;
};

// Each hidden state plus a mix of all of them. Sums are rounded, one state after the other.
struct PredictStreams : StreamOp {
    static constexpr const char *NAME = "predict_streams";
    static constexpr const char *PARAMETERS[] = {"states", "logits", "weight", "out", "scale"};
    static PredictStreams check(const Tensor &states, const Tensor &logits, const Tensor &weight, const Tensor &out,
                                float scale) {
        Size rows("rows"), count("count"), hidden("hidden");
        states.is_floating().has_shape(rows, count, hidden).is_contiguous();
        Size outputs("count * count", count * count);
        logits.has_dtype({DType::FLOAT32}).has_shape(rows, count).is_contiguous();
        weight.has_dtype({states.dtype}).has_shape(outputs, count).is_contiguous();
        out.has_dtype({states.dtype}).has_shape(rows, count, hidden).is_contiguous();
        require(count <= MAX_STREAMS, "states", "at most 8 hidden states are expected");
        return {{states.dtype, states.data(), logits.data<float>(), weight.data(), out.data(), rows, count, hidden, scale}};
    }
    void run() const;
};
REGISTER_OP(PredictStreams);

template <class T>
void predict_streams(const PredictStreams &a) {
    typedef typename T::Element Element;
    parallel_for(a.rows, a.work() > SERIAL, [&](int64_t row) {
        const Element *states = (const Element *)a.states + row * a.count * a.hidden;
        for (int64_t stream = 0; stream < a.count; stream++) {
            float factors[StreamOp::MAX_STREAMS];
            for (int64_t source = 0; source < a.count; source++)
                factors[source] = T::to_float(T::from_float(a.mixed<T>(row, stream * a.count + source)));
            Element *out = (Element *)a.out + (row * a.count + stream) * a.hidden;
            std::memcpy(out, states + stream * a.hidden, a.hidden * sizeof *out);
            for (int64_t source = 0; source < a.count; source++)
                add_weighted<T>(states + source * a.hidden, factors[source], out, a.hidden);
        }
    });
}

inline void PredictStreams::run() const {
    dtype == DType::BFLOAT16 ? predict_streams<BFloat16>(*this) : predict_streams<Float32>(*this);
}

// Hidden states plus a part each of the difference between what a layer computed of the active one and that.
struct CorrectStreams : StreamOp {
    static constexpr const char *NAME = "correct_streams";
    static constexpr const char *PARAMETERS[] = {"states", "computed", "logits", "weight", "out", "active", "scale"};
    static CorrectStreams check(const Tensor &states, const Tensor &computed, const Tensor &logits, const Tensor &weight,
                                const Tensor &out, int64_t active, float scale) {
        Size rows("rows"), count("count"), hidden("hidden");
        states.is_floating().has_shape(rows, count, hidden).is_contiguous();
        computed.has_dtype({states.dtype}).has_shape(rows, hidden).is_contiguous();
        logits.has_dtype({DType::FLOAT32}).has_shape(rows, count).is_contiguous();
        weight.has_dtype({states.dtype}).has_shape(count, count).is_contiguous();
        out.has_dtype({states.dtype}).has_shape(rows, count, hidden).is_contiguous();
        require(active >= 0 && active < count && hidden % LANES == 0, "states",
                "hidden states of a multiple of 16 elements, the active one among them, are expected");
        return {{states.dtype, states.data(), logits.data<float>(), weight.data(), out.data(), rows, count, hidden, scale},
                computed.data(), active};
    }
    void run() const;

    const void *computed;  // (rows, hidden)
    int64_t active;
};
REGISTER_OP(CorrectStreams);

template <class T>
void correct_streams(const CorrectStreams &a) {
    typedef typename T::Element Element;
    parallel_for(a.rows, a.work() > SERIAL, [&](int64_t row) {
        const Element *states = (const Element *)a.states + row * a.count * a.hidden, *active = states + a.active * a.hidden;
        const Element *computed = (const Element *)a.computed + row * a.hidden;
        for (int64_t stream = 0; stream < a.count; stream++) {
            float factor = T::to_float(T::from_float(a.mixed<T>(row, stream) + 1.0f));
            Element *out = (Element *)a.out + (row * a.count + stream) * a.hidden, part[LANES];
            for (int64_t i = 0; i < a.hidden; i += LANES) {
                T::store(part, T::load(computed + i) - T::load(active + i));
                T::store(part, T::load(part) * factor);
                T::store(out + i, T::load(states + stream * a.hidden + i) + T::load(part));
            }
        }
    });
}

inline void CorrectStreams::run() const {
    dtype == DType::BFLOAT16 ? correct_streams<BFloat16>(*this) : correct_streams<Float32>(*this);
}

// Adds a row to all hidden states of a token but the first, in place.
struct AddToStreams {
    static constexpr const char *NAME = "add_to_streams";
    static constexpr const char *PARAMETERS[] = {"states", "added"};
    static AddToStreams check(const Tensor &states, const Tensor &added) {
        Size rows("rows"), count("count"), hidden("hidden");
        states.is_floating().has_shape(rows, count, hidden).is_contiguous();
        added.has_dtype({states.dtype}).has_shape(rows, hidden).is_contiguous();
        return {states.dtype, states.data(), added.data(), rows, count, hidden};
    }
    void run() const;
    int64_t work() const { return rows * count * hidden; }
    int64_t &row_count() { return rows; }

    DType dtype;
    void *states;
    const void *added;
    int64_t rows, count, hidden;
};
REGISTER_OP(AddToStreams);

template <class T>
void add_to_streams(const AddToStreams &a) {
    typedef typename T::Element Element;
    parallel_for(a.rows, a.work() > SERIAL, [&](int64_t row) {
        for (int64_t stream = 1; stream < a.count; stream++)
            add_weighted<T>((const Element *)a.added + row * a.hidden, 1.0f,
                            (Element *)a.states + (row * a.count + stream) * a.hidden, a.hidden);
    });
}

inline void AddToStreams::run() const {
    dtype == DType::BFLOAT16 ? add_to_streams<BFloat16>(*this) : add_to_streams<Float32>(*this);
}

// Subtracts the mean of each row and so many deviations from it; what is negative then becomes 0. In place.
struct KeepLargest {
    static constexpr const char *NAME = "keep_largest";
    static constexpr const char *PARAMETERS[] = {"x", "deviations"};
    static KeepLargest check(const Tensor &x, float deviations) {
        Size rows("rows"), dim("dim");
        x.is_floating().has_shape(rows, dim).is_dense(1);
        return {x.dtype, x.data(), rows, dim, x.strides[0], deviations};
    }
    void run() const;
    int64_t work() const { return 3 * rows * dim; }
    int64_t &row_count() { return rows; }

    DType dtype;
    void *x;
    int64_t rows, dim, stride;
    float deviations;
};
REGISTER_OP(KeepLargest);

template <class T>
void keep_largest(const KeepLargest &a) {
    typedef typename T::Element Element;
    parallel_for(a.rows, a.work() > SERIAL, [&](int64_t row) {
        Element *x = (Element *)a.x + row * a.stride;
        float mean = sum_of<T>(x, a.dim, [](auto v) { return v; }) / float(a.dim);
        float square = sum_of<T>(x, a.dim, [&](auto v) { return (v - mean) * (v - mean); }) / float(a.dim);
        float least = mean + std::sqrt(square) * a.deviations;
        int64_t i = 0;
        for (; i + LANES <= a.dim; i += LANES) T::store(x + i, maximum(broadcast(0.0f), T::load(x + i) - least));
        for (; i < a.dim; i++) {
            float over = T::to_float(x[i]) - least;
            x[i] = T::from_float(over < 0.0f ? 0.0f : over);  // keeps NaN
        }
    });
}

inline void KeepLargest::run() const {
    dtype == DType::BFLOAT16 ? keep_largest<BFloat16>(*this) : keep_largest<Float32>(*this);
}
