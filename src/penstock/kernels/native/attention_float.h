// The engine for every storage type and processor: a tile is widened to fp32 once and all products are fp32. A cache of
// integers is read as the fp32 products of integers and scales. Few queries multiply a tile of bfloat16 without a copy of
// it, which would take longer than their products.
#pragma once

#include <type_traits>

#include "attention_tile.h"

namespace penstock::ISA {

constexpr int kFewRows = kRegisterLanes == 16 ? 10 : 6;  // queries that read a tile
constexpr int kScored = kWide * kLanes;  // scores are computed for whole blocks of so many keys
constexpr int kRowBlock = 2 * kRegisterLanes;  // likewise of a tile without a copy

// The keys [begin, end) of a tile.
struct KeyRange {
    int begin, end;

    int count() const { return end - begin; }
    // With the others of the blocks of `size` keys that they are in.
    KeyRange in_blocks(int size) const { return {begin / size * size, (end + size - 1) / size * size}; }
};

// A processor has registers for four sums of each of so many queries.
constexpr int kWideRows = kRegisterLanes == 16 ? kFewRows : 2;

// How often score_rows and add_rows call `step`.
inline int64_t score_steps(int count, int keys, int64_t dim) {
    const int at_once = (count <= kWideRows ? 2 : 1) * kRowBlock;
    return (count + 3) / 4 * ((keys + at_once - 1) / at_once) * (dim / 8);
}

inline int64_t add_steps(int count, int keys, int64_t dim) {
    const int64_t at_once = (count <= kWideRows ? 4 : 2) * kRegisterLanes;
    return (count + 3) / 4 * ((dim + at_once - 1) / at_once) * keys;
}

#if defined(__AVX2__)

constexpr bool kReadsRows = true;

// Pairs of adjacent dimensions, one of each row.
#if defined(__AVX512F__)

using Pairs = __m512i;

inline Register evens(Pairs a) { return _mm512_castsi512_ps(_mm512_slli_epi32(a, 16)); }
inline Register odds(Pairs a) {
    return _mm512_castsi512_ps(_mm512_and_si512(a, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
}
// The lower or the upper half of each 128 bits of two registers, in elements of 32 or 64 bits.
inline Pairs lower_32(Pairs a, Pairs b) { return _mm512_unpacklo_epi32(a, b); }
inline Pairs upper_32(Pairs a, Pairs b) { return _mm512_unpackhi_epi32(a, b); }
inline Pairs lower_64(Pairs a, Pairs b) { return _mm512_unpacklo_epi64(a, b); }
inline Pairs upper_64(Pairs a, Pairs b) { return _mm512_unpackhi_epi64(a, b); }
// Four pairs each of rows 0, 4, 8 and 12.
PENSTOCK_INLINE Pairs every_fourth(const bf16* const* rows, int64_t d) {
    const auto load = [&](int row) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[row] + d)); };
    const Pairs two = _mm512_inserti32x4(_mm512_castsi128_si512(load(0)), load(4), 1);
    return _mm512_inserti32x4(_mm512_inserti32x4(two, load(8), 2), load(12), 3);
}

#else

using Pairs = __m256i;

inline Register evens(Pairs a) { return _mm256_castsi256_ps(_mm256_slli_epi32(a, 16)); }
inline Register odds(Pairs a) {
    return _mm256_castsi256_ps(_mm256_and_si256(a, _mm256_set1_epi32(static_cast<int>(0xffff0000))));
}
inline Pairs lower_32(Pairs a, Pairs b) { return _mm256_unpacklo_epi32(a, b); }
inline Pairs upper_32(Pairs a, Pairs b) { return _mm256_unpackhi_epi32(a, b); }
inline Pairs lower_64(Pairs a, Pairs b) { return _mm256_unpacklo_epi64(a, b); }
inline Pairs upper_64(Pairs a, Pairs b) { return _mm256_unpackhi_epi64(a, b); }
// Four pairs each of rows 0 and 4.
PENSTOCK_INLINE Pairs every_fourth(const bf16* const* rows, int64_t d) {
    const auto load = [&](int row) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[row] + d)); };
    return _mm256_inserti128_si256(_mm256_castsi128_si256(load(0)), load(4), 1);
}

#endif

// Four pairs of as many rows as a register has lanes, from dimension d on: pairs[i] has pair i of each.
PENSTOCK_INLINE void transpose_pairs(const bf16* const* rows, int64_t d, Pairs (&pairs)[4]) {
    Pairs r[4], t[4];
    for (int i = 0; i < 4; ++i) r[i] = every_fourth(rows + i, d);
    for (int i = 0; i < 4; i += 2) {
        t[i] = lower_32(r[i], r[i + 1]);
        t[i + 1] = upper_32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 2; ++i) {
        pairs[2 * i] = lower_64(t[i], t[i + 2]);
        pairs[2 * i + 1] = upper_64(t[i], t[i + 2]);
    }
}

// s [R, keys of N registers] = q [R, dim] of rows of bfloat16, each element one chain over the dimensions in ascending
// order.
template <int R, int N, class Step>
inline void score_rows(const float* q, const bf16* const* rows, int64_t dim, float* s, const Step& step) {
    Register acc[R][N];
    for (int r = 0; r < R; ++r)
        for (int n = 0; n < N; ++n) acc[r][n] = spread(0);
    for (int64_t d = 0; d < dim; d += 8) {
        step();
        for (int n = 0; n < N; ++n) {
            Pairs pairs[4];
            transpose_pairs(rows + kRegisterLanes * n, d, pairs);
            for (int i = 0; i < 4; ++i) {
                const Register even = evens(pairs[i]), odd = odds(pairs[i]);
                for (int r = 0; r < R; ++r) {
                    const float* at = q + r * dim + d + 2 * i;
                    acc[r][n] = multiply_add(spread(at[1]), odd, multiply_add(spread(at[0]), even, acc[r][n]));
                }
            }
        }
    }
    for (int r = 0; r < R; ++r)
        for (int n = 0; n < N; ++n) write(s + r * kTile + kRegisterLanes * n, acc[r][n]);
}

// acc [R, N registers] += weights [R, kTile] of some rows of bfloat16, each element one chain over ascending keys.
template <int R, int N, class Step>
inline void add_rows(const float* weights, const bf16* const* rows, KeyRange keys, int64_t d, float* acc, int64_t stride,
                     const Step& step) {
    Register sums[R][N];
    for (int r = 0; r < R; ++r)
        for (int n = 0; n < N; ++n) sums[r][n] = read(acc + r * stride + d + kRegisterLanes * n);
    for (int key = keys.begin; key < keys.end; ++key) {
        step();
        for (int n = 0; n < N; ++n) {
            const Register value = read(rows[key] + d + kRegisterLanes * n);
            for (int r = 0; r < R; ++r)
                sums[r][n] = multiply_add(spread(weights[r * kTile + key]), value, sums[r][n]);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int n = 0; n < N; ++n) write(acc + r * stride + d + kRegisterLanes * n, sums[r][n]);
}

template <int N, class Step>
inline void score_rows(int count, const float* q, const bf16* const* rows, int64_t dim, float* s, const Step& step) {
    if (count == 1) score_rows<1, N>(q, rows, dim, s, step);
    if (count == 2) score_rows<2, N>(q, rows, dim, s, step);
    if (count == 3) score_rows<3, N>(q, rows, dim, s, step);
    if (count > 3) score_rows<4, N>(q, rows, dim, s, step);
}

template <int N, class Step>
inline void add_rows(int count, const float* weights, const bf16* const* rows, KeyRange keys, int64_t d, float* acc,
                     int64_t stride, const Step& step) {
    if (count == 1) add_rows<1, N>(weights, rows, keys, d, acc, stride, step);
    if (count == 2) add_rows<2, N>(weights, rows, keys, d, acc, stride, step);
    if (count == 3) add_rows<3, N>(weights, rows, keys, d, acc, stride, step);
    if (count > 3) add_rows<4, N>(weights, rows, keys, d, acc, stride, step);
}

// The products of `count` queries, four at a time; dim is a multiple of 16.
template <class Step>
inline void score_rows(int count, const float* q, const bf16* const* rows, KeyRange keys, int64_t dim, float* s,
                       const Step& step) {
    for (; count > 0; count -= 4, q += 4 * dim, s += 4 * kTile) {
        int key = keys.begin;
        for (; key + kRowBlock < keys.end && count <= kWideRows; key += 2 * kRowBlock)
            score_rows<4>(count, q, rows + key, dim, s + key, step);
        for (; key < keys.end; key += kRowBlock) score_rows<2>(count, q, rows + key, dim, s + key, step);
    }
}

template <class Step>
inline void add_rows(int count, const float* weights, const bf16* const* rows, KeyRange keys, int64_t dim, float* acc,
                     const Step& step) {
    constexpr int64_t lanes = kRegisterLanes;
    for (; count > 0; count -= 4, weights += 4 * kTile, acc += 4 * dim) {
        int64_t d = 0;
        for (; d + 4 * lanes <= dim && count <= kWideRows; d += 4 * lanes)
            add_rows<4>(count, weights, rows, keys, d, acc, dim, step);
        for (; d + 2 * lanes <= dim; d += 2 * lanes) add_rows<2>(count, weights, rows, keys, d, acc, dim, step);
        for (; d < dim; d += lanes) add_rows<1>(count, weights, rows, keys, d, acc, dim, step);
    }
}

#else

constexpr bool kReadsRows = false;

#endif

struct FloatUnit {
    using Item = float;
    static PENSTOCK_INLINE Vec vector(const float* b) { return load(b); }
    static PENSTOCK_INLINE Vec step(Vec acc, float a, Vec b) { return fma(splat(a), b, acc); }
};

template <class T, class C = T>
class FloatEngine {
public:
    using Storage = T;
    using Cached = C;
    using Weight = float;

    static size_t bytes(Shape shape) {
        const int64_t rows = shape.groups * kGroup * shape.head_dim, tile = kTile * (shape.head_dim + shape.padded_dim());
        return sizeof(float) * (rows + tile + shape.groups * kGroup * kTile) + sizeof(C) * shape.head_dim + 5 * 64;
    }

    FloatEngine(Arena& arena, Shape shape)
        : dim_(shape.head_dim),
          value_dim_(shape.value_dim),
          padded_(shape.padded_dim()),
          queries_(arena.room<float>(shape.groups * kGroup * dim_)),
          keys_(arena.room<float>(dim_ * kTile)),
          values_(arena.room<float>(kTile * padded_)),
          weights_(arena.room<float>(shape.groups * kGroup * kTile)),
          zeros_(arena.zeros<C>(dim_)) {}

    void set_queries(int group, const T* const* rows, int count) {
        most_rows_ = group && most_rows_ > count ? most_rows_ : count;
        for (int row = 0; row < count; ++row) {
            float* to = queries_ + (group * kGroup + row) * dim_;
            for (int64_t d = 0; d < dim_; d += kLanes)
                store_first(to + d, load_first(rows[row] + d, dim_ - d), dim_ - d);
        }
    }

    bool multiplies_in_place() const { return reads_rows() && most_rows_ <= kWideRows; }

    void set_tile(const KVTile<C>& tile, Prefetch<C>& prefetch) {
        prefetch_ = &prefetch;
        seen_ = {tile.begin, tile.end};
        if (reads_rows()) return find_rows(tile);
        const KeyRange keys = seen_.in_blocks(4);
        for (int key = keys.begin; key < keys.end; ++key) {
            prefetch.issue(2 * prefetch.share(keys.count()));
            if (key % 4 == 0) set_keys(tile, key);
            const bool seen = is_seen(tile, key);
            const RowReader<C> value = row(tile, tile.values, key);
            for (int64_t d = 0; d < value_dim_; d += kLanes) {
                const int64_t left = value_dim_ - d;
                store_first(values_ + key * padded_ + d, seen ? value.read(d, left) : splat(0), left);
            }
        }
    }

    void scores(int group, int count, float* s) const {
        const float* q = queries_ + group * kGroup * dim_;
        if constexpr (kCanReadRows)
            if (reads_rows()) {
                const KeyRange keys = seen_.in_blocks(kRowBlock);
                return with_prefetch(*prefetch_, score_steps(count, keys.count(), dim_), [&](const auto& step) {
                    score_rows(count, q, key_rows_, keys, dim_, s, step);
                });
            }
        const KeyRange keys = seen_.in_blocks(kScored);
        multiply<FloatUnit>(q, dim_, keys_ + keys.begin, kTile, s + keys.begin, kTile, count, keys.count(), dim_, false,
                            *prefetch_);
    }

    Weight* weights(int group) { return weights_ + group * kGroup * kTile; }

    void accumulate(int group, int count, float* acc) const {
        const float* const weights = weights_ + group * kGroup * kTile;
        if constexpr (kCanReadRows)
            if (reads_rows())
                return with_prefetch(*prefetch_, add_steps(count, seen_.count(), value_dim_), [&](const auto& step) {
                    add_rows(count, weights, value_rows_, seen_, value_dim_, acc, step);
                });
        multiply<FloatUnit>(weights + seen_.begin, kTile, values_ + seen_.begin * padded_, padded_, acc, padded_, count,
                            padded_, seen_.count(), true, *prefetch_);
    }

private:
    static constexpr bool kCanReadRows = kReadsRows && std::is_same<C, bf16>::value;

    bool reads_rows() const {
        return kCanReadRows && most_rows_ <= kFewRows && dim_ % 16 == 0 && value_dim_ % 16 == 0;
    }

    void find_rows(const KVTile<C>& tile) {
        const KeyRange keys = seen_.in_blocks(kRowBlock);
        for (int key = keys.begin; key < keys.end; ++key) {
            const int64_t at = key % kSpan * row_size<C>(dim_);
            key_rows_[key] = is_seen(tile, key) ? tile.keys[key / kSpan] + at : zeros_;
            value_rows_[key] = is_seen(tile, key) ? tile.values[key / kSpan] + at : zeros_;
        }
    }

    static bool is_seen(const KVTile<C>& tile, int key) { return key >= tile.begin && key < tile.end; }

    // Of a key that is not seen there is nothing to read.
    RowReader<C> row(const KVTile<C>& tile, const C* const* spans, int key) const {
        return {is_seen(tile, key) ? spans[key / kSpan] + key % kSpan * row_size<C>(dim_) : nullptr, dim_};
    }

    // Transposes the keys from `first` on, four of them.
    void set_keys(const KVTile<C>& tile, int first) {
        alignas(64) float rows[4][kLanes];
        const RowReader<C> keys[4] = {row(tile, tile.keys, first), row(tile, tile.keys, first + 1),
                                      row(tile, tile.keys, first + 2), row(tile, tile.keys, first + 3)};
        for (int64_t d = 0; d < dim_; d += kLanes) {
            for (int i = 0; i < 4; ++i)
                store(rows[i], is_seen(tile, first + i) ? keys[i].read(d, dim_ - d) : splat(0));
            const int64_t lanes = dim_ - d < kLanes ? dim_ - d : kLanes;
            float* to = keys_ + d * kTile + first;
            int64_t lane = 0;
            for (; lane + 4 <= lanes; lane += 4) transpose_four(rows[0] + lane, kLanes, to + lane * kTile, kTile);
            for (; lane < lanes; ++lane)
                for (int row = 0; row < 4; ++row) to[lane * kTile + row] = rows[row][lane];
        }
    }

    const int64_t dim_, value_dim_, padded_;
    float* const queries_;  // [groups, kGroup, head_dim]
    float* const keys_;     // [head_dim, kTile]: transposed
    float* const values_;   // [kTile, padded_dim]
    float* const weights_;  // [groups, kGroup, kTile]
    C* const zeros_;        // [head_dim]
    int most_rows_ = 0;     // of a group
    KeyRange seen_ = {0, 0};  // of the tile
    const C *key_rows_[kTile], *value_rows_[kTile];
    Prefetch<C>* prefetch_ = nullptr;
};

}  // namespace penstock::ISA
