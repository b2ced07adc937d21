// KV pages: where rows lie, in which order a sequence has them, and prefetches of rows that are read soon.
#pragma once

#include "int8_rows.h"

constexpr int64_t PREFETCH_BYTES = 48 << 10;  // between prefetching a row and reading it; see decision 112
constexpr int64_t MAX_DIM = 1024;             // of a head

// Pages (kv_heads, blocks, block_size, dim): pointer to the elements of the first row, and strides of heads, blocks and rows
// in elements. Rows of int8 have scales in front of their elements.
struct Pages {
    void *data;
    int64_t head_stride, block_stride, row_stride;
};

// Pointer to the elements of one row.
template <class Element>
Element *row_at(const Pages &pages, int64_t head, int64_t block, int64_t offset) {
    return (Element *)pages.data + head * pages.head_stride + block * pages.block_stride + offset * pages.row_stride;
}

// Pages as an argument: of dtype `plain`, or of int8 with scales in front of each row.
struct PagesArgument {
    Pages pages;
    int64_t dim;  // without scales
    bool int8;

    PagesArgument(const Tensor &x, DType plain, Size &kv_heads, Size &blocks, Size &block_size)
        : int8(x.dtype == DType::INT8) {
        Size width("dim");
        x.has_dtype({plain, DType::INT8}).has_shape(kv_heads, blocks, block_size, width).is_dense(1);
        dim = int8 ? Int8Rows<Float32>::dim_of(width) : int64_t(width);
        require(dim > 0, x.name, "rows are too short");
        pages = {x.data(), x.strides[0], x.strides[1], x.strides[2]};
        if (int8) pages.data = (int8_t *)pages.data + Int8Rows<Float32>::prefix(dim);
    }
};

// The rows of consecutive positions of a sequence, page by page.
template <class Element>
class PageIterator {
  public:
    PageIterator() = default;
    PageIterator(const Element *head, const Pages &pages, const int32_t *block_table, int64_t block_size, int64_t first)
        : head_(head), block_table_(block_table + first / block_size), block_stride_(pages.block_stride),
          row_stride_(pages.row_stride), block_size_(block_size), offset_(first % block_size) {}
    const Element *next() {
        if (offset_ == block_size_) offset_ = 0, block_table_++;
        return head_ + *block_table_ * block_stride_ + offset_++ * row_stride_;
    }

  private:
    const Element *head_;
    const int32_t *block_table_;
    int64_t block_stride_, row_stride_, block_size_, offset_;
};

// Prefetches the rows that a thread will read, some way ahead of its reads: no hardware prefetcher can predict where the
// next page is. The rows come in ranges: the keys of a work item, its values, then those of the next item. They go to the
// second-level cache: of prefetches to the first level a core has fewer under way, which are also those of its reads.
template <class Element>
class Prefetcher {
  public:
    // Rows of `dim` elements, and `prefix` in front of them.
    void add(const PageIterator<Element> &rows, int64_t count, int64_t dim, int64_t prefix) {
        int kept = 0;
        for (int i = at_; i < count_; i++)
            if (ranges_[i].count) ranges_[kept++] = ranges_[i];
        at_ = 0, count_ = kept;
        ranges_[count_++] = {rows, count, dim + prefix, prefix};
    }
    // Prefetches the next row.
    void step() {
        while (at_ < count_ && ranges_[at_].count == 0) at_++;
        if (at_ == count_) return;
        Range &range = ranges_[at_];
        const char *row = (const char *)(range.rows.next() - range.prefix);
        for (int64_t byte = 0; byte < range.dim * int64_t(sizeof(Element)); byte += LINE) __builtin_prefetch(row + byte, 0, 2);
        range.count--;
    }

  private:
    struct Range {
        PageIterator<Element> rows;
        int64_t count, dim, prefix;
    };
    Range ranges_[4];
    int at_ = 0, count_ = 0;
};
