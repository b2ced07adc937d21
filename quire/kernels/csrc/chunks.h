// The positions of sequences in chunks, which those that begin with the same blocks have in common.
#pragma once

constexpr int64_t CHUNK = 256;  // positions
constexpr int64_t MOST_QUERIES = 32;  // of a key head that are one piece of work, if they are of several sequences

// A chunk's positions, of all the sequences that begin with the same blocks: read once for them.
struct Chunk {
    int64_t sequence, first, last;  // the first of the sequences
    int64_t begin, end;             // of its parts
};

inline int64_t first_seen(const PagedDecode &a, int64_t sequence) {
    return a.window > 0 ? std::max<int64_t>(0, a.lengths[sequence] - a.window) : 0;
}

// How the sequences' positions are divided into chunks.
class Chunks {
  public:
    explicit Chunks(const PagedDecode &a) : begins(a.sequences + 1, 0) {
        struct Part {
            int64_t sequence, first, last, place;
            const int32_t *blocks;
        };
        std::vector<Part> parts;
        for (int64_t s = 0; s < a.sequences; s++) {
            int64_t first = first_seen(a, s), length = a.lengths[s];
            for (int64_t c = first / CHUNK; c * CHUNK < length; c++) {
                int64_t from = std::max(first, c * CHUNK);
                const int32_t *blocks = a.tables + s * a.table_stride + from / a.block_size;
                parts.push_back({s, from, std::min(length, (c + 1) * CHUNK), int64_t(parts.size()), blocks});
            }
            begins[s + 1] = int64_t(parts.size());
        }
        auto blocks_of = [&](const Part &part) { return (part.last - 1) / a.block_size - part.first / a.block_size + 1; };
        auto difference = [&](const Part &x, const Part &y) -> int64_t {
            if (*x.blocks != *y.blocks) return int64_t(*x.blocks) - *y.blocks;
            if (x.first != y.first) return x.first - y.first;
            if (x.last != y.last) return x.last - y.last;
            return std::memcmp(x.blocks, y.blocks, blocks_of(x) * sizeof *x.blocks);
        };
        std::sort(parts.begin(), parts.end(), [&](const Part &x, const Part &y) {
            int64_t differs = difference(x, y);
            return differs ? differs < 0 : x.place < y.place;
        });
        int64_t most = std::max<int64_t>(1, MOST_QUERIES * a.kv_heads / a.heads);
        for (const Part &part : parts) {
            if (list.empty() || list.back().end - list.back().begin == most ||
                difference(part, parts[list.back().begin]) != 0)
                list.push_back({part.sequence, part.first, part.last, int64_t(places.size()), int64_t(places.size())});
            list.back().end++;
            sequences.push_back(part.sequence), places.push_back(part.place);
        }
        std::stable_sort(list.begin(), list.end(), [](const Chunk &x, const Chunk &y) {
            return x.end - x.begin > y.end - y.begin;  // the longest work first
        });
    }
    std::vector<Chunk> list;
    std::vector<int64_t> sequences, places;  // of a chunk's parts: whose it is, and where its result belongs
    std::vector<int64_t> begins;             // (sequences + 1) places of a sequence's results
};
