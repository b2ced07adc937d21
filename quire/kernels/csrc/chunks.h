// The positions of sequences in chunks, which sequences that begin with the same blocks share.
#pragma once

constexpr int64_t CHUNK = 256;       // positions
constexpr int64_t MAX_QUERIES = 32;  // of one KV head in a work item, if they are of several sequences

// Positions that are read once, for all sequences that have the same blocks there. In the first chunk of a window, up to 15
// positions come before the window, so that positions have the same lanes in every attention.
struct Chunk {
    int64_t sequence, first, last;  // block table of the first such sequence, positions [first, last)
    int64_t begin, end;             // its parts: one for each such sequence
};

inline int64_t first_visible(const AttentionArguments &a, int64_t sequence) {
    return a.window > 0 ? std::max<int64_t>(0, a.seq_lens[sequence] - a.window) : 0;
}

// Divides the positions of all sequences into chunks.
class Chunks {
  public:
    explicit Chunks(const AttentionArguments &a) : offsets(a.sequences + 1, 0) {
        struct Part {
            int64_t sequence, first, last, result;
            const int32_t *blocks;
        };
        std::vector<Part> parts;
        for (int64_t s = 0; s < a.sequences; s++) {
            int64_t first = first_visible(a, s), length = a.seq_lens[s];
            for (int64_t c = first / CHUNK; c * CHUNK < length; c++) {
                int64_t from = std::max(first / LANES * LANES, c * CHUNK);
                const int32_t *blocks = a.block_tables + s * a.table_stride + from / a.block_size;
                parts.push_back({s, from, std::min(length, (c + 1) * CHUNK), int64_t(parts.size()), blocks});
            }
            offsets[s + 1] = int64_t(parts.size());
        }
        auto block_count = [&](const Part &part) { return (part.last - 1) / a.block_size - part.first / a.block_size + 1; };
        auto compare = [&](const Part &x, const Part &y) -> int64_t {
            if (*x.blocks != *y.blocks) return int64_t(*x.blocks) - *y.blocks;
            if (x.first != y.first) return x.first - y.first;
            if (x.last != y.last) return x.last - y.last;
            return std::memcmp(x.blocks, y.blocks, block_count(x) * sizeof *x.blocks);
        };
        std::sort(parts.begin(), parts.end(), [&](const Part &x, const Part &y) {
            int64_t order = compare(x, y);
            return order ? order < 0 : x.result < y.result;
        });
        int64_t max_sequences = std::max<int64_t>(1, MAX_QUERIES * a.kv_heads / a.heads);
        for (const Part &part : parts) {
            if (list.empty() || list.back().end - list.back().begin == max_sequences ||
                compare(part, parts[list.back().begin]) != 0)
                list.push_back({part.sequence, part.first, part.last, int64_t(results.size()), int64_t(results.size())});
            list.back().end++;
            sequences.push_back(part.sequence), results.push_back(part.result);
        }
        std::stable_sort(list.begin(), list.end(), [](const Chunk &x, const Chunk &y) {
            return x.end - x.begin > y.end - y.begin;  // the longest work first
        });
    }
    std::vector<Chunk> list;
    std::vector<int64_t> sequences, results;  // of each part: its sequence, and the index of its partial result
    std::vector<int64_t> offsets;             // (sequences + 1,) where a sequence's partial results begin
};
