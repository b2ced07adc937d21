// Decode steps that follow each other: the inputs of each, its captured calls, and the tokens that are chosen after it.
#pragma once

#include "build_inputs.h"
#include "sampling.h"

// Steps in which each sequence has one token, the one that was chosen after the step before. They end early after a step in
// which a row has no token, or one that may end its sequence, or when something can be read from `inbox`. Python between
// them would take as long as a tenth of a small model's step, because the weights have displaced what it reads from the
// caches.
struct DecodeSteps {
    static constexpr const char *NAME = "decode_steps";
    static constexpr const char *PARAMETERS[] = {"calls",  "counts", "arrays",  "rows",         "starts", "steps",
                                                 "logits", "ends",   "temperatures", "min_ps", "top_ks", "top_ps", "randoms",
                                                 "inbox"};
    // The arguments are those of replay, build_inputs, of whose arrays there are those of each group, and sample; randoms: for
    // each row of the first step, then of the others. starts: positions in the first step. ends: tokens. inbox: a file
    // descriptor, or -1.
    static DecodeSteps check(std::shared_ptr<const Capture> calls, std::vector<int64_t> counts,
                             std::vector<std::shared_ptr<const InputArrays>> arrays, std::vector<int64_t> rows,
                             std::vector<int64_t> starts, int64_t steps, const Tensor &logits, std::vector<int64_t> ends,
                             std::vector<float> temperatures, std::vector<double> min_ps, std::vector<int64_t> top_ks,
                             std::vector<float> top_ps, std::vector<double> randoms, int64_t inbox) {
        size_t count = rows.size();
        require(counts.size() == calls->kinds(), "counts", "as many as while capturing are expected");
        require(std::all_of(counts.begin(), counts.end(), [&](int64_t rows) { return rows == int64_t(count); }), "counts",
                "the number of rows is expected");
        require(!arrays.empty(), "arrays", "those of at least one group are expected");
        require(steps > 0, "steps", "at least one is expected");
        require(randoms.size() == count * size_t(steps), "randoms", "one for each row of each step is expected");
        std::vector<BuildInputs> inputs;
        for (int64_t &start : starts) start += steps - 1;  // what is in range in the last step is in all of them
        for (auto &group : arrays) {
            require(group->known_tokens == arrays[0]->known_tokens, "arrays", "those of one request table are expected");
            inputs.push_back(BuildInputs::check(group, rows, starts, std::vector<int64_t>(count, 1), int64_t(count), {}));
            for (int64_t &start : inputs.back().starts) start -= steps - 1;
        }
        std::vector<double> first(randoms.begin(), randoms.begin() + count);
        Sample sample = Sample::check(logits, std::move(temperatures), std::move(min_ps), std::move(top_ks), std::move(top_ps),
                                      std::move(first));
        return {std::move(calls), std::move(counts), std::move(inputs), steps, std::move(ends), std::move(sample),
                std::move(randoms), int(inbox)};
    }
    std::vector<int64_t> run() const;
    int64_t work() const { return UNLOCKED_WORK; }

    std::shared_ptr<const Capture> calls;
    std::vector<int64_t> counts;
    std::vector<BuildInputs> inputs;  // of each group
    int64_t steps;
    std::vector<int64_t> ends;
    Sample sample;
    std::vector<double> randoms;  // (steps, rows)
    int inbox;
};
REGISTER_OP(DecodeSteps);

// Whether something can be read from a file descriptor, if it is one.
inline bool is_readable(int descriptor) {
    pollfd polled{descriptor, POLLIN, 0};
    return poll(&polled, 1, 0) > 0 && (polled.revents & POLLIN) != 0;
}

// Returns the tokens of each row of the first step, then of the others. Tokens are added to the request table.
inline std::vector<int64_t> DecodeSteps::run() const {
    std::vector<int64_t> all;
    std::vector<BuildInputs> next = inputs;
    Sample choose = sample;
    bool greedy = std::all_of(choose.choices.begin(), choose.choices.end(), [](const Choice &c) { return c.temperature == 0.0f; });
    size_t rows = choose.choices.size();
    auto may_end = [&](int64_t token) { return token == NO_TOKEN || std::find(ends.begin(), ends.end(), token) != ends.end(); };
    for (int64_t step = 0; step < steps; step++) {
        for (BuildInputs &group : next) group.run();
        calls->replay(counts);
        for (size_t row = 0; row < rows; row++) choose.choices[row].random = randoms[step * rows + row];
        std::vector<int64_t> tokens = greedy ? Argmax{choose.logits, choose.rows, choose.vocab}.run() : choose.run();
        all.insert(all.end(), tokens.begin(), tokens.end());
        if (std::any_of(tokens.begin(), tokens.end(), may_end) || is_readable(inbox)) break;
        const InputArrays &a = *next[0].arrays;
        for (size_t row = 0; row < rows; row++) {
            int64_t position = next[0].starts[row] + 1;
            if (position < a.context) a.known_tokens[next[0].rows[row] * a.context + position] = int32_t(tokens[row]);
        }
        for (BuildInputs &group : next)
            for (int64_t &start : group.starts) start++;
    }
    return all;
}
