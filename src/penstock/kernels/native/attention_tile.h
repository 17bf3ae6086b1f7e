// What the engines of paged attention share: where the keys of a tile lie, and the product that they are made of.
//
// An engine is one way to compute on a tile of keys. It is a class with
//
//   Storage, Weight                 type of q and the cache; type that softmax writes its weights in
//   Engine(arena, shape)            takes its scratch memory from the arena
//   set_queries(group, rows, count) takes the query rows of one group, at most kGroup
//   set_tile(tile, prefetch)        takes the keys and values of a tile; keys outside [begin, end) count as zeros;
//                                   both arguments live until the next tile
//   scores(group, count, s)         s [kGroup, kTile] = q k^T of the rows of one group, any number at masked keys
//   weights()                       [kGroup, kTile], where softmax leaves one group's weights, zero at masked keys
//   accumulate(count, acc)          acc [kGroup, padded_dim] += weights v, where padded_dim is that of a value
//
// A row of s or acc must come from the same sequence of operations whichever rows are beside it.
#pragma once

#include <cstdlib>

#include "vec.h"

namespace penstock::ISA {

constexpr int kTile = 64;   // keys of a tile; a tile begins at a multiple of kTile whatever the query
constexpr int kSpan = 8;    // block sizes are multiples of this: so many keys are always contiguous
constexpr int kGroup = 16;  // query rows that process a tile together
constexpr int kGroups = 4;  // groups of one work item

// A cached row has head_dim numbers; a value is value_dim adjacent ones of such a row.
struct Shape {
    int64_t head_dim, value_dim, block_size;
    int64_t padded_dim() const { return (value_dim + 15) / 16 * 16; }  // of a value
};

// Up to kTile keys and values of one request and one KV head.
template <class T>
struct KVTile {
    const T* keys[kTile / kSpan];    // each [kSpan, head_dim]; null where no query row of the work item may read
    const T* values[kTile / kSpan];  // likewise: the first value, and the others head_dim apart
    int begin, end;                  // the keys in [begin, end) are seen by some row and contain data
};

// Memory of one thread, allocated once per call and kept between calls.
class Arena {
public:
    explicit Arena(size_t bytes) {
        thread_local Block block;
        if (block.bytes < bytes) {
            std::free(block.memory);
            block.memory = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
            if (!block.memory) std::abort();
            block.bytes = bytes;
        }
        next_ = static_cast<char*>(block.memory);
    }

    // `count` zeros, aligned to a cache line.
    template <class U>
    U* zeros(size_t count) {
        const size_t bytes = (count * sizeof(U) + 63) / 64 * 64;
        char* at = next_;
        next_ += bytes;
        std::memset(at, 0, bytes);
        return reinterpret_cast<U*>(at);
    }

private:
    struct Block {
        void* memory = nullptr;
        size_t bytes = 0;
        ~Block() { std::free(memory); }
    };
    char* next_;
};

// Prefetches the next tile into the second-level cache while this one is computed. A core keeps few lines in flight:
// they are requested a few at a time during the computation, which would wait for a burst of them.
template <class T>
class Prefetch {
public:
    // A null `next` requests nothing.
    Prefetch(const KVTile<T>* next, int64_t head_dim)
        : next_(next), span_(next ? 0 : kSpans), span_bytes_(kSpan * head_dim * sizeof(T)) {}

    // Lines of a whole tile.
    int64_t lines() const { return kSpans * span_bytes_ / 64; }

    void issue(int64_t lines) {
        for (; span_ < kSpans && lines > 0; ++span_, at_ = 0) {
            const T* span = span_ < kSpans / 2 ? next_->keys[span_] : next_->values[span_ - kSpans / 2];
            const int64_t until = at_ + 64 * lines < span_bytes_ ? at_ + 64 * lines : span_bytes_;
            for (int64_t at = at_; span && at < until; at += 64)
                __builtin_prefetch(reinterpret_cast<const char*>(span) + at, 0, 2);
            lines -= (until - at_) / 64;
            at_ = until;
            if (at_ < span_bytes_) return;
        }
    }

private:
    static constexpr int kSpans = 2 * kTile / kSpan;

    const KVTile<T>* next_;
    int span_;
    int64_t span_bytes_, at_ = 0;
};

// c [R, N vectors] (+)= a [R, k] b [k, N vectors], each element one chain over k in ascending order.
template <class Unit, int R, int N>
inline __attribute__((always_inline)) void multiply_block(const typename Unit::Item* a, int64_t lda,
                                                          const typename Unit::Item* b, int64_t ldb, float* c,
                                                          int64_t ldc, int64_t k, bool add) {
    Vec acc[R][N];
    for (int r = 0; r < R; ++r)
        for (int n = 0; n < N; ++n) acc[r][n] = add ? load(c + r * ldc + n * kLanes) : splat(0);
    for (int64_t i = 0; i < k; ++i)
        for (int n = 0; n < N; ++n) {
            const auto column = Unit::vector(b + i * ldb + n * kLanes);
            for (int r = 0; r < R; ++r) acc[r][n] = Unit::step(acc[r][n], a[r * lda + i], column);
        }
    for (int r = 0; r < R; ++r)
        for (int n = 0; n < N; ++n) store(c + r * ldc + n * kLanes, acc[r][n]);
}

template <class Unit, int N>
inline void multiply_columns(const typename Unit::Item* a, int64_t lda, const typename Unit::Item* b, int64_t ldb,
                             float* c, int64_t ldc, int rows, int64_t k, bool add) {
    int r = 0;
    for (; r + 4 <= rows; r += 4) multiply_block<Unit, 4, N>(a + r * lda, lda, b, ldb, c + r * ldc, ldc, k, add);
    for (; r + 2 <= rows; r += 2) multiply_block<Unit, 2, N>(a + r * lda, lda, b, ldb, c + r * ldc, ldc, k, add);
    for (; r < rows; ++r) multiply_block<Unit, 1, N>(a + r * lda, lda, b, ldb, c + r * ldc, ldc, k, add);
}

// c [rows, columns] (+)= a [rows, k] b [k, columns]; columns is a multiple of 16.
template <class Unit>
inline void multiply(const typename Unit::Item* a, int64_t lda, const typename Unit::Item* b, int64_t ldb, float* c,
                     int64_t ldc, int rows, int64_t columns, int64_t k, bool add) {
    constexpr int kWide = kRegisters == 1 ? 4 : 1;
    int64_t n = 0;
    for (; n + kWide * kLanes <= columns; n += kWide * kLanes)
        multiply_columns<Unit, kWide>(a, lda, b + n, ldb, c + n, ldc, rows, k, add);
    for (; n < columns; n += kLanes) multiply_columns<Unit, 1>(a, lda, b + n, ldb, c + n, ldc, rows, k, add);
}

}  // namespace penstock::ISA
