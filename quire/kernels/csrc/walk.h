// Rows of pages in the order in which a sequence has them.
#pragma once

constexpr int64_t AHEAD = 12 << 10;  // bytes between fetching and reading

// The rows of consecutive positions of a sequence, page by page.
template <class Number>
class Walk {
  public:
    Walk() = default;
    Walk(const Number *head, const Pages &pages, const int32_t *table, int64_t block_size, int64_t first)
        : head_(head), table_(table + first / block_size), block_(pages.block), row_(pages.row), size_(block_size),
          offset_(first % block_size) {}
    const Number *next() {
        if (offset_ == size_) offset_ = 0, table_++;
        return head_ + *table_ * block_ + offset_++ * row_;
    }

  private:
    const Number *head_;
    const int32_t *table_;
    int64_t block_, row_, size_, offset_;
};

// Asks for the rows that a thread will read, some way ahead of its reading: no hardware prefetcher can guess where the
// next page lies. They come in stretches: a task's keys, its values, then those of the next task.
template <class Number>
class Fetcher {
  public:
    void add(const Walk<Number> &walk, int64_t rows, int64_t dim) {
        int kept = 0;
        for (int i = at_; i < count_; i++)
            if (stretches_[i].rows) stretches_[kept++] = stretches_[i];
        at_ = 0, count_ = kept;
        stretches_[count_++] = {walk, rows, dim};
    }
    void step() {
        while (at_ < count_ && stretches_[at_].rows == 0) at_++;
        if (at_ == count_) return;
        Stretch &now = stretches_[at_];
        const char *row = (const char *)now.walk.next();
        for (int64_t byte = 0; byte < now.dim * int64_t(sizeof(Number)); byte += LINE) __builtin_prefetch(row + byte);
        now.rows--;
    }

  private:
    struct Stretch {
        Walk<Number> walk;
        int64_t rows, dim;
    };
    Stretch stretches_[4];
    int at_ = 0, count_ = 0;
};
