// What the engines of paged attention share: where the keys of a tile lie, and the product that they are made of.
//
// An engine is one way to compute on a tile of keys. It is a class with
//
//   Storage, Cached, Weight         types of q and of the cache; type that softmax writes its weights in
//   Engine(arena, shape)            takes its scratch memory from the arena
//   set_queries(group, rows, count) takes the query rows of one group, at most kGroup
//   multiplies_in_place()           whether it reads values when they are multiplied, and not in set_tile
//   set_tile(tile, prefetch)        takes the keys and values of a tile; keys outside [begin, end) count as zeros;
//                                   both arguments live until the next tile
//   scores(group, count, s)         s [kGroup, kTile] = q k^T of the rows of one group; anything at masked keys
//   weights(group)                  [kGroup, kTile], where softmax leaves one group's weights, zero at masked keys
//   accumulate(group, count, acc)   acc [kGroup, padded_dim] += weights v, where padded_dim is that of a value
//
// A row of s or acc must come from the same sequence of operations whichever rows are beside it.
#pragma once

#include <cstdlib>

#include "kv_rows.h"

namespace penstock::ISA {

constexpr int kTile = 64;   // keys of a tile; a tile begins at a multiple of kTile whatever the query
constexpr int kSpan = 8;    // block sizes are multiples of this: so many keys are always contiguous
constexpr int kGroup = 16;  // query rows that process a tile together
// Groups of one work item, at most, and where a request has more rows: each prepares a tile of keys for all of its groups.
// With more dimensions than kManyDims, the rows of so many would not stay in the second-level cache.
constexpr int kGroups = 8, kManyGroups = 32, kManyDims = 256;

// A cached row has head_dim numbers; a value is value_dim adjacent ones of such a row.
struct Shape {
    int64_t head_dim, value_dim, block_size;
    int64_t groups;  // of one work item, at most
    bool in_pairs;   // the cache is one in pairs (kv_rows.h)
    int64_t padded_dim() const { return (value_dim + 15) / 16 * 16; }  // of a value
};

// Up to kTile keys and values of one request and one KV head.
template <class C>
struct KVTile {
    const C* keys[kTile / kSpan];    // each kSpan rows; null where no query row of the work item may read
    const C* values[kTile / kSpan];  // likewise: the first value, and the others a row apart
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

    // Room for `count` of them, aligned to a cache line and with any contents.
    template <class U>
    U* room(size_t count) {
        char* const at = next_;
        next_ += (count * sizeof(U) + 63) / 64 * 64;
        return reinterpret_cast<U*>(at);
    }

    template <class U>
    U* zeros(size_t count) {
        U* const at = room<U>(count);
        std::memset(at, 0, count * sizeof(U));
        return at;
    }

private:
    struct Block {
        void* memory = nullptr;
        size_t bytes = 0;
        ~Block() { std::free(memory); }
    };
    char* next_;
};

// Keys and values of one tile and of several heads, which are adjacent in a block.
template <class C>
struct KVTiles {
    KVTile<C> first;      // of the first head
    int64_t heads;
    int64_t head_stride;  // elements from one head to the next
    int spans;            // so many in a row are contiguous
    bool has_values;      // else keys contain their values

    // The first head's successor number `head`.
    KVTile<C> of(int64_t head) const {
        KVTile<C> tile = first;
        for (int span = 0; span < kTile / kSpan; ++span) {
            if (tile.keys[span]) tile.keys[span] += head * head_stride;
            if (tile.values[span]) tile.values[span] += head * head_stride;
        }
        return tile;
    }
};

// Prefetches what a thread reads next while a tile of one head is computed: shortly before its use, so that a computation
// that waits for memory has requests in flight, and no more than a core keeps track of.
template <class C>
class Prefetch {
public:
    // Prefetches nothing.
    Prefetch() = default;

    // Prefetches for the head after number `head` of `tiles`, or the first one of `next`, which may be null. Of tiles that
    // are multiplied where they are, the values come with the scores of the same tile.
    Prefetch(const KVTiles<C>& tiles, int64_t head, const KVTiles<C>* next, int64_t head_dim, bool in_place)
        : phases_(in_place ? 2 : 4), piece_bytes_(tiles.spans * kSpan * row_size<C>(head_dim) * sizeof(C)) {
        const bool is_last = head + 1 == tiles.heads;
        if (in_place) add(tiles.of(head).values, tiles.spans);
        if (!is_last || next) {
            const KVTile<C> tile = is_last ? next->of(0) : tiles.of(head + 1);
            add(tile.keys, tiles.spans);
            if (tiles.has_values && !in_place) add(tile.values, tiles.spans);
        }
        begin_piece();
    }

    int64_t lines() const { return num_pieces_ * piece_bytes_ / 64; }

    // Lines to request in each of `steps` steps of one of the phases: scores and accumulation, and before them keys and
    // values, unless these are multiplied in place.
    int64_t share(int64_t steps) const { return (lines() / phases_ + steps - 1) / steps; }

    // Calls no function: the compiler would move the sums of the computation to memory and back for it.
    PENSTOCK_INLINE void issue(int64_t lines) {
        for (; lines > 0 && at_ < end_; --lines) {
            __builtin_prefetch(at_, 0, 2);
            at_ += 64;
            if (at_ >= end_) begin_piece();
        }
    }

private:
    PENSTOCK_INLINE void begin_piece() {
        if (piece_ == num_pieces_) return;
        at_ = pieces_[piece_++];
        end_ = at_ + piece_bytes_;
    }

    // `rows` are those of a tile's keys or values.
    void add(const C* const (&rows)[kTile / kSpan], int spans) {
        for (int span = 0; span < kTile / kSpan; span += spans)
            if (rows[span]) pieces_[num_pieces_++] = reinterpret_cast<const char*>(rows[span]);
    }

    int64_t phases_ = 1, piece_bytes_ = 0;
    const char *at_ = nullptr, *end_ = nullptr;
    int piece_ = 0, num_pieces_ = 0;
    const char* pieces_[2 * kTile / kSpan];  // contiguous keys or values of one head
};

// c [R, N vectors] (+)= a [R, k] b [k, N vectors], each element one chain over k in ascending order. Calls `step` before
// every element of it.
template <class Unit, int R, int N, class Step>
PENSTOCK_INLINE void multiply_block(const typename Unit::Item* a, int64_t lda, const typename Unit::Item* b,
                                    int64_t ldb, float* c, int64_t ldc, int64_t k, bool add, const Step& step) {
    Vec acc[R][N];
    for (int r = 0; r < R; ++r)
        for (int n = 0; n < N; ++n) acc[r][n] = add ? load(c + r * ldc + n * kLanes) : splat(0);
#pragma GCC unroll 4
    for (int64_t i = 0; i < k; ++i) {
        step();
        for (int n = 0; n < N; ++n) {
            const auto column = Unit::vector(b + i * ldb + n * kLanes);
            for (int r = 0; r < R; ++r) acc[r][n] = Unit::step(acc[r][n], a[r * lda + i], column);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int n = 0; n < N; ++n) store(c + r * ldc + n * kLanes, acc[r][n]);
}

template <class Unit, int N, class Step>
inline void multiply_columns(const typename Unit::Item* a, int64_t lda, const typename Unit::Item* b, int64_t ldb,
                             float* c, int64_t ldc, int rows, int64_t k, bool add, const Step& step) {
    int r = 0;
    for (; r + 4 <= rows; r += 4) multiply_block<Unit, 4, N>(a + r * lda, lda, b, ldb, c + r * ldc, ldc, k, add, step);
    for (; r + 2 <= rows; r += 2) multiply_block<Unit, 2, N>(a + r * lda, lda, b, ldb, c + r * ldc, ldc, k, add, step);
    for (; r < rows; ++r) multiply_block<Unit, 1, N>(a + r * lda, lda, b, ldb, c + r * ldc, ldc, k, add, step);
}

constexpr int kWide = kRegisters == 1 ? 4 : 1;  // vectors of a block of columns

template <class Unit, class Step>
inline void multiply_all(const typename Unit::Item* a, int64_t lda, const typename Unit::Item* b, int64_t ldb, float* c,
                         int64_t ldc, int rows, int64_t columns, int64_t k, bool add, const Step& step) {
    int64_t n = 0;
    for (; n + kWide * kLanes <= columns; n += kWide * kLanes)
        multiply_columns<Unit, kWide>(a, lda, b + n, ldb, c + n, ldc, rows, k, add, step);
    for (; n < columns; n += kLanes) multiply_columns<Unit, 1>(a, lda, b + n, ldb, c + n, ldc, rows, k, add, step);
}

// Calls f(step) for a function that prefetches, in each of `steps` calls, its part of a phase's share of lines.
template <class C, class F>
inline void with_prefetch(Prefetch<C>& prefetch, int64_t steps, const F& f) {
    const int64_t lines = prefetch.share(steps);
    if (lines > 0)
        f([&] { prefetch.issue(lines); });
    else
        f([] {});
}

// c [rows, columns] (+)= a [rows, k] b [k, columns]; columns is a multiple of 16.
template <class Unit, class C>
inline void multiply(const typename Unit::Item* a, int64_t lda, const typename Unit::Item* b, int64_t ldb, float* c,
                     int64_t ldc, int rows, int64_t columns, int64_t k, bool add, Prefetch<C>& prefetch) {
    with_prefetch(prefetch, k * ((columns + kWide * kLanes - 1) / (kWide * kLanes)), [&](const auto& step) {
        multiply_all<Unit>(a, lda, b, ldb, c, ldc, rows, columns, k, add, step);
    });
}

}  // namespace penstock::ISA
