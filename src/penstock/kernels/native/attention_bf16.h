// Engines for bfloat16 on processors that multiply pairs of it: AVX512-BF16 dot products, or fused operations with the same
// bits (pairs.h), and AMX tiles.
//
// Both read keys as pairs of adjacent dimensions, for 16 keys side by side, and values as pairs of the adjacent keys 2i and
// 2i + 1, for all dimensions side by side. A cache in pairs (kv_rows.h) stores them so; of other caches, pairs are made
// for every tile. Dot products and tiles round differently, so one engine serves decode and prefill rows; that with tiles
// computes one or two rows with vectors, which round as its tiles do.
#pragma once

#include "attention_tile.h"
#include "pairs.h"

#if defined(__AVX512BF16__)

namespace penstock::ISA {

// Transposes 16 x 16 words of 32 bits.
inline void transpose(__m512i (&r)[16]) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
        const __m512i even_a = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        const __m512i odd_a = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        const __m512i even_b = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        const __m512i odd_b = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
        t[i] = _mm512_shuffle_i32x4(even_a, even_b, 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(odd_a, odd_b, 0x88);
        t[i + 8] = _mm512_shuffle_i32x4(even_a, even_b, 0xdd);
        t[i + 12] = _mm512_shuffle_i32x4(odd_a, odd_b, 0xdd);
    }
    for (int i = 0; i < 16; ++i) r[i] = t[i];
}

// `rows` (16 of them) x 16 pairs from dimension d on, transposed into `to`, whose rows are `stride` pairs apart.
inline void transpose_pairs(const bf16* const* rows, int64_t d, int64_t dim, Pair* to, int64_t stride) {
    const __mmask32 inside = dim - d >= 32 ? ~0u : (1u << (dim - d)) - 1;
    __m512i r[16];
    for (int i = 0; i < 16; ++i) r[i] = _mm512_maskz_loadu_epi16(inside, rows[i] + d);
    transpose(r);
    for (int i = 0; i < 16; ++i) _mm512_storeu_si512(to + i * stride, r[i]);
}

// The values of a tile as pairs of keys. Those that no row sees count as zeros.
class ValuePairs {
public:
    static size_t bytes(Shape shape) { return padded(shape) * (kTile / 2 * sizeof(Pair) + sizeof(bf16)) + 2 * 64; }

    ValuePairs(Arena& arena, Shape shape)
        : row_(shape.head_dim),
          dim_(shape.value_dim),
          stride_(padded(shape)),
          in_pairs_(shape.in_pairs),
          pairs_(arena.zeros<Pair>(kTile / 2 * stride_)),
          zeros_(arena.zeros<bf16>(stride_)) {}

    // Prefetches `lines` lines of the next tile with each pair. If `in_place`, a cache in pairs is read where it is.
    void set(const KVTile<bf16>& tile, Prefetch<bf16>& prefetch, int64_t lines, bool in_place) {
        for (int pair = 0; pair < kTile / 2; ++pair) {
            prefetch.issue(lines);
            at_[pair] = pairs_ + pair * stride_;
            if (in_pairs_) {
                read_pair(tile, pair, in_place);
                continue;
            }
            const bf16* even = row(tile, 2 * pair);
            const bf16* odd = row(tile, 2 * pair + 1);
            for (int64_t d = 0; d < dim_; d += 32) interleave(even + d, odd + d, dim_ - d, pairs_ + pair * stride_ + d);
        }
    }

    // The values of a pair, for all dimensions; unless in place, `stride` behind those of the pair before.
    const Pair* operator[](int pair) const { return at_[pair]; }
    int64_t stride() const { return stride_; }

private:
    static int64_t padded(Shape shape) { return (shape.value_dim + 31) / 32 * 32; }

    static bool is_seen(const KVTile<bf16>& tile, int key) { return key >= tile.begin && key < tile.end; }

    const bf16* row(const KVTile<bf16>& tile, int key) const {
        return is_seen(tile, key) ? tile.values[key / kSpan] + key % kSpan * row_ : zeros_;
    }

    // A pair is copied unless it is read in place and both of its keys are seen.
    void read_pair(const KVTile<bf16>& tile, int pair, bool in_place) {
        const bool even = is_seen(tile, 2 * pair), odd = is_seen(tile, 2 * pair + 1);
        Pair* const copy = pairs_ + pair * stride_;
        if (!even && !odd) {
            std::memset(copy, 0, dim_ * sizeof(Pair));
            return;
        }
        const Pair* const from = reinterpret_cast<const Pair*>(tile.values[pair / 8 * 2]) + pair % 8 * dim_;
        if (even && odd && in_place) {
            at_[pair] = from;
            return;
        }
        const __mmask32 seen = (even ? 0x55555555 : 0) | (odd ? 0xaaaaaaaa : 0);
        for (int64_t d = 0; d < dim_; d += 16) _mm512_store_si512(copy + d, _mm512_maskz_loadu_epi16(seen, from + d));
    }

    // 32 dimensions of two keys, `count` of which exist.
    static void interleave(const bf16* even, const bf16* odd, int64_t count, Pair* to) {
        const __mmask32 inside = count >= 32 ? ~0u : (1u << count) - 1;
        // Unpacking works within 128 bits: quarters are moved there first so that the pairs come out in order.
        const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
        const __m512i a = _mm512_permutexvar_epi64(order, _mm512_maskz_loadu_epi16(inside, even));
        const __m512i b = _mm512_permutexvar_epi64(order, _mm512_maskz_loadu_epi16(inside, odd));
        _mm512_store_si512(to, _mm512_unpacklo_epi16(a, b));
        _mm512_store_si512(to + 16, _mm512_unpackhi_epi16(a, b));
    }

    const int64_t row_, dim_, stride_;
    const bool in_pairs_;
    Pair* const pairs_;   // [kTile / 2, stride]
    bf16* const zeros_;   // [stride]
    const Pair* at_[kTile / 2];
};

// The keys of a tile that are in pairs already: kTile / 16 times [head_dim / 2, 16].
inline void find_keys(const KVTile<bf16>& tile, const Pair* (&keys)[kTile / 16]) {
    const bf16* seen = nullptr;
    for (int i = 0; i < kTile / 16 && !seen; ++i) seen = tile.keys[2 * i];
    // Scores of keys that no row sees may be any number.
    for (int i = 0; i < kTile / 16; ++i)
        keys[i] = reinterpret_cast<const Pair*>(tile.keys[2 * i] ? tile.keys[2 * i] : seen);
}

#if !defined(__AMX_BF16__)

// Sums of products of pairs; fused, while there is a FlushSubnormals.
template <bool kFused>
class PairSum {
public:
    struct Numbers {
        float even, odd;
    };
    using Input = std::conditional_t<kFused, Numbers, Pair>;
    static constexpr int kRows = kFused ? 6 : 4;  // that share a pair of keys or values

    PENSTOCK_INLINE void begin(Vec sum) { sum_ = sum; }
    PENSTOCK_INLINE void add(Input a, __m512i b) {
        if constexpr (kFused)
            sum_ = fma(splat(a.even), even_of(b), fma(splat(a.odd), odd_of(b), sum_));
        else
            sum_ = _mm512_dpbf16_ps(sum_, (__m512bh)_mm512_set1_epi32(static_cast<int>(a)), (__m512bh)b);
    }
    PENSTOCK_INLINE void end_block() {}
    PENSTOCK_INLINE Vec value() const { return sum_; }

private:
    Vec sum_;
};

#else

// The same with the roundings of tiles, while there is a FlushSubnormals: the even and the odd products of a block have
// sums of their own, which are added up and then to the sum before (TDPBF16PS in Intel's Software Developer's Manual).
class PairSum {
public:
    using Input = Pair;
    static constexpr int kRows = 2;

    PENSTOCK_INLINE void begin(Vec sum) {
        sum_ = sum;
        even_ = odd_ = splat(0);
    }
    PENSTOCK_INLINE void add(Pair a, __m512i b) {
        const __m512i all = _mm512_set1_epi32(static_cast<int>(a));
        even_ = fma(even_of(all), even_of(b), even_);
        odd_ = fma(odd_of(all), odd_of(b), odd_);
    }
    PENSTOCK_INLINE void end_block() { begin(sum_ + (even_ + odd_)); }
    PENSTOCK_INLINE Vec value() const { return sum_; }

private:
    Vec sum_, even_, odd_;
};

#endif

constexpr int64_t kBlock = 16;  // pairs that a tile multiplies at a time
constexpr int kParts = kTile / 16;

template <int N>
struct Rows {
    static constexpr int kCount = N;
};

// Calls f(Rows, first row) until all rows from `row` to `count` are done, kMost of them at a time while there are as many;
// but eight are twice four.
template <int kMost, class F>
inline void by_rows(int row, int count, const F& f) {
    for (; row + kMost <= count && (kMost <= 4 || count - row != 8); row += kMost) f(Rows<kMost>(), row);
    if constexpr (kMost > 1) by_rows<(kMost > 4 ? 4 : kMost / 2)>(row, count, f);
}

// s [R, kTile] = q [R, steps pairs] k^T, of keys in pairs.
template <class Sum, int R, class Step>
inline void score_pairs(const typename Sum::Input* q, const Pair* const (&parts)[kParts], int64_t steps, float* s,
                        const Step& step) {
    const Pair* keys[kParts];
    for (int part = 0; part < kParts; ++part) keys[part] = parts[part];
    Sum sums[R][kParts];
    for (int r = 0; r < R; ++r)
        for (int part = 0; part < kParts; ++part) sums[r][part].begin(splat(0));
    for (int64_t end = kBlock, i = 0; i < steps; end += kBlock) {
        for (; i < end && i < steps; ++i) {
            step();
            for (int part = 0; part < kParts; ++part) {
                const __m512i column = _mm512_loadu_si512(keys[part] + i * 16);
                for (int r = 0; r < R; ++r) sums[r][part].add(q[r * steps + i], column);
            }
        }
        for (int r = 0; r < R; ++r)
            for (int part = 0; part < kParts; ++part) sums[r][part].end_block();
    }
    for (int r = 0; r < R; ++r)
        for (int part = 0; part < kParts; ++part) store(s + r * kTile + part * kLanes, sums[r][part].value());
}

// acc [R, 16 N columns of `padded`] += w v of the pairs [first, last) of a tile, from dimension d on.
template <class Sum, int R, int N, class Step>
inline void add_columns(const typename Sum::Input* w, const ValuePairs& values, int first, int last, int64_t d,
                        float* acc, int64_t padded, const Step& step) {
    Sum sums[R][N];
    for (int r = 0; r < R; ++r)
        for (int n = 0; n < N; ++n) sums[r][n].begin(load(acc + r * padded + n * kLanes));
    for (int pair = first; pair < last;) {
        for (const int end = (pair / kBlock + 1) * kBlock; pair < end && pair < last; ++pair) {
            step();
            const Pair* const v = values[pair] + d;
            for (int n = 0; n < N; ++n) {
                const __m512i column = _mm512_loadu_si512(v + n * kLanes);
                for (int r = 0; r < R; ++r) sums[r][n].add(w[r * kTile / 2 + pair], column);
            }
        }
        for (int r = 0; r < R; ++r)
            for (int n = 0; n < N; ++n) sums[r][n].end_block();
    }
    for (int r = 0; r < R; ++r)
        for (int n = 0; n < N; ++n) store(acc + r * padded + n * kLanes, sums[r][n].value());
}

// acc [R, padded] += w v of the pairs [first, last) of a tile.
template <class Sum, int R, class Step>
inline void add_pairs(const typename Sum::Input* w, const ValuePairs& values, int first, int last, float* acc,
                      int64_t padded, const Step& step) {
    int64_t d = 0;
    for (; d + 4 * kLanes <= padded; d += 4 * kLanes)
        add_columns<Sum, R, 4>(w, values, first, last, d, acc + d, padded, step);
    for (; d < padded; d += kLanes) add_columns<Sum, R, 1>(w, values, first, last, d, acc + d, padded, step);
}

#if !defined(__AMX_BF16__)

class BFloat16Engine {
public:
    using Storage = bf16;
    using Cached = bf16;
    using Weight = bf16;

    static size_t bytes(Shape shape) {
        return sizeof(float) * kGroup * (shape.groups * shape.head_dim + kTile) + sizeof(Pair) * key_pairs(shape) +
               sizeof(bf16) * (shape.head_dim + shape.groups * kGroup * kTile) + 5 * 64 + ValuePairs::bytes(shape);
    }

    BFloat16Engine(Arena& arena, Shape shape)
        : dim_(shape.head_dim),
          padded_(shape.padded_dim()),
          in_pairs_(shape.in_pairs),
          values_(arena, shape),
          queries_(arena.zeros<float>(shape.groups * kGroup * dim_)),
          staged_(arena.zeros<Pair>(key_pairs(shape))),
          zeros_(arena.zeros<bf16>(dim_)),
          weights_(arena.zeros<bf16>(shape.groups * kGroup * kTile)),
          wide_(arena.zeros<float>(kGroup * kTile)) {
        for (int part = 0; part < kParts; ++part) keys_[part] = staged_ + part * key_pairs(shape) / kParts;
    }

    void set_queries(int group, const bf16* const* rows, int count) {
        float* const to = queries_ + group * kGroup * dim_;
        for (int row = 0; row < count; ++row) {
            if (fuses(count))
                widen_row(rows[row], dim_, to + row * dim_);
            else
                std::memcpy(reinterpret_cast<bf16*>(to) + row * dim_, rows[row], dim_ * sizeof(bf16));
        }
    }

    bool multiplies_in_place() const { return in_pairs_; }

    void set_tile(const KVTile<bf16>& tile, Prefetch<bf16>& prefetch) {
        if (in_pairs_)
            find_keys(tile, keys_);
        else
            stage_keys(tile, prefetch);
        values_.set(tile, prefetch, in_pairs_ ? 0 : prefetch.share(kTile / 2), true);
        first_pair_ = tile.begin / 2;
        last_pair_ = (tile.end + 1) / 2;
        prefetch_ = &prefetch;
    }

    void scores(int group, int count, float* s) const {
        with_products(fuses(count), [&](auto fused) {
            using Sum = PairSum<fused.value>;
            const auto q = reinterpret_cast<const typename Sum::Input*>(queries_ + group * kGroup * dim_);
            with_prefetch(*prefetch_, dim_ / 2, [&](const auto& step) {
                by_rows<Sum::kRows>(0, count, [&](auto rows, int row) {
                    score_pairs<Sum, rows.kCount>(q + row * dim_ / 2, keys_, dim_ / 2, s + row * kTile, step);
                });
            });
        });
    }

    Weight* weights(int group) { return weights_ + group * kGroup * kTile; }

    void accumulate(int group, int count, float* acc) const {
        const bf16* const weights = weights_ + group * kGroup * kTile;
        with_products(fuses(count), [&](auto fused) {
            using Sum = PairSum<fused.value>;
            if constexpr (fused.value) widen_row(weights, count * kTile, wide_);
            const void* const from = fused.value ? static_cast<const void*>(wide_) : weights;
            const auto w = static_cast<const typename Sum::Input*>(from);
            with_prefetch(*prefetch_, kTile / 2 * ((padded_ + 63) / 64), [&](const auto& step) {
                by_rows<Sum::kRows>(0, count, [&](auto rows, int row) {
                    add_pairs<Sum, rows.kCount>(w + row * kTile / 2, values_, first_pair_, last_pair_,
                                                acc + row * padded_, padded_, step);
                });
            });
        });
    }

private:
    // Of a tile whose keys are staged.
    static int64_t key_pairs(Shape shape) { return shape.in_pairs ? 0 : (shape.head_dim + 31) / 32 * 16 * kTile; }

    // Whether so many rows of a group are multiplied by fused operations. Two share too little of the work on the keys.
    static bool fuses(int count) { return count > 2 && fuses_products(); }

    static void widen_row(const bf16* from, int64_t count, float* to) {
        for (int64_t at = 0; at < count; at += kLanes) store_first(to + at, load_first(from + at, count - at), count - at);
    }

    void stage_keys(const KVTile<bf16>& tile, Prefetch<bf16>& prefetch) {
        const int64_t lines = prefetch.share(kParts * ((dim_ + 31) / 32));
        for (int part = 0; part < kParts; ++part) {
            const bf16* rows[16];
            for (int i = 0; i < 16; ++i) {
                const int key = part * 16 + i;
                const bool seen = key >= tile.begin && key < tile.end;
                rows[i] = seen ? tile.keys[key / kSpan] + key % kSpan * dim_ : zeros_;
            }
            Pair* const to = staged_ + part * ((dim_ + 31) / 32 * 256);
            for (int64_t d = 0; d < dim_; d += 32) {
                prefetch.issue(lines);
                transpose_pairs(rows, d, dim_, to + d * 8, 16);
            }
        }
    }

    const int64_t dim_, padded_;
    const bool in_pairs_;
    ValuePairs values_;
    float* const queries_;  // [groups, kGroup, head_dim]; of a group whose products are not fused, in bfloat16
    Pair* const staged_;    // [kParts, head_dim / 2, 16], unless keys are read in place
    bf16* const zeros_;     // [head_dim]
    bf16* const weights_;   // [groups, kGroup, kTile]
    float* const wide_;     // [kGroup, kTile], those of a group
    const Pair* keys_[kParts];
    int first_pair_ = 0, last_pair_ = 0;  // of those that some row sees
    Prefetch<bf16>* prefetch_ = nullptr;
};

#else

// Every tile register holds 16 rows of 64 bytes.
struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Without a cache in pairs, scores are computed transposed, K q^T: so keys are read from the cache in place all the same,
// and only the few query rows and the scores themselves are transposed. Either product is the same sum.
class BFloat16Engine {
public:
    using Storage = bf16;
    using Cached = bf16;
    using Weight = bf16;

    static size_t bytes(Shape shape) {
        const int64_t wide = (shape.head_dim + 31) / 32 * 32;
        return sizeof(bf16) * (shape.groups * kGroup * (wide + kTile) + (kTile + kGroup) * wide) +
               sizeof(float) * kTile * kGroup + 5 * 64 + ValuePairs::bytes(shape);
    }

    BFloat16Engine(Arena& arena, Shape shape)
        : dim_(shape.head_dim),
          wide_((shape.head_dim + 31) / 32 * 32),
          padded_(shape.padded_dim()),
          in_pairs_(shape.in_pairs),
          direct_(dim_ == wide_ && shape.block_size % 16 == 0),
          values_(arena, shape),
          queries_(arena.zeros<Pair>(shape.groups * kGroup * wide_ / 2)),
          staged_(arena.zeros<bf16>(direct_ ? 0 : kTile * wide_)),
          zeros_(arena.zeros<bf16>(kGroup * wide_)),
          weights_(arena.zeros<bf16>(shape.groups * kGroup * kTile)),
          transposed_(arena.room<float>(kTile * kGroup)) {
        static const TileConfig config;
        fence();
        _tile_loadconfig(&config);
    }
    ~BFloat16Engine() { _tile_release(); }
    BFloat16Engine(const BFloat16Engine&) = delete;

    void set_queries(int group, const bf16* const* rows, int count) {
        most_rows_ = group && most_rows_ > count ? most_rows_ : count;
        Pair* to = queries_ + group * kGroup * wide_ / 2;
        if (in_pairs_) {
            for (int row = 0; row < count; ++row) std::memcpy(to + row * wide_ / 2, rows[row], dim_ * sizeof(bf16));
            return;
        }
        const bf16* all[kGroup];
        for (int row = 0; row < kGroup; ++row) all[row] = row < count ? rows[row] : zeros_;
        for (int64_t d = 0; d < dim_; d += 32) transpose_pairs(all, d, dim_, to + d * 8, 16);
    }

    bool multiplies_in_place() const { return in_pairs_ && most_rows_ <= kFewRows; }

    void set_tile(const KVTile<bf16>& tile, Prefetch<bf16>& prefetch) {
        if (in_pairs_) find_keys(tile, pairs_);
        for (int i = 0; i < kTile / 16 && !in_pairs_; ++i) {
            const bf16* in_place = tile.keys[2 * i] ? tile.keys[2 * i] : zeros_;
            keys_[i] = direct_ ? in_place : staged_ + 16 * i * wide_;
        }
        if (!in_pairs_ && !direct_) stage_keys(tile);
        prefetch_ = &prefetch;
        // The rest is prefetched between the products.
        const bool in_place = multiplies_in_place();
        values_.set(tile, prefetch, in_place ? 0 : prefetch.lines() * 3 / 8 / (kTile / 2), in_place);
        begin_ = tile.begin;
        end_ = tile.end;
        fence();
    }

    void scores(int group, int count, float* s) const {
        const Pair* q = queries_ + group * kGroup * wide_ / 2;
        if (multiplies_in_place()) {
            const FlushSubnormals meanwhile;
            return with_prefetch(*prefetch_, wide_ / 2, [&](const auto& step) {
                by_rows<PairSum::kRows>(0, count, [&](auto rows, int row) {
                    score_pairs<PairSum, rows.kCount>(q + row * wide_ / 2, pairs_, wide_ / 2, s + row * kTile, step);
                });
            });
        }
        fence();
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        in_pairs_ ? multiply_pairs(q) : multiply_keys(q);
        float* const to = in_pairs_ ? s : transposed_;
        // The next 16 keys are beside the ones before, or below them.
        const int64_t stride = sizeof(float) * (in_pairs_ ? kTile : kGroup), next = in_pairs_ ? 16 : 16 * kGroup;
        _tile_stored(0, to, stride);
        _tile_stored(1, to + next, stride);
        _tile_stored(2, to + 2 * next, stride);
        _tile_stored(3, to + 3 * next, stride);
        fence();
        for (int key = 0; key < kTile && !in_pairs_; key += 16) {
            __m512i r[16];
            for (int i = 0; i < 16; ++i) r[i] = _mm512_load_si512(transposed_ + (key + i) * kGroup);
            transpose(r);
            for (int i = 0; i < 16; ++i) _mm512_store_si512(s + i * kTile + key, r[i]);
        }
    }

    Weight* weights(int group) { return weights_ + group * kGroup * kTile; }

    void accumulate(int group, int count, float* acc) const {
        const bf16* const weights = weights_ + group * kGroup * kTile;
        if (multiplies_in_place()) {
            const FlushSubnormals meanwhile;
            const Pair* w = reinterpret_cast<const Pair*>(weights);
            return with_prefetch(*prefetch_, kTile / 2 * ((padded_ + 63) / 64), [&](const auto& step) {
                by_rows<PairSum::kRows>(0, count, [&](auto rows, int row) {
                    add_pairs<PairSum, rows.kCount>(w + row * kTile / 2, values_, begin_ / 2, (end_ + 1) / 2,
                                                    acc + row * padded_, padded_, step);
                });
            });
        }
        fence();
        int64_t column = 0;
        for (; column + 64 <= padded_; column += 64) accumulate_columns<4>(weights, acc + column, column);
        for (; column < padded_; column += 16) accumulate_columns<1>(weights, acc + column, column);
        fence();
    }

private:
    // Tiles 0 to 3 += q k^T, 16 keys each.
    void multiply_pairs(const Pair* q) const {
        for (int64_t d = 0; d < wide_; d += 32) {
            _tile_loadd(4, q + d / 2, wide_ * sizeof(bf16));
            _tile_loadd(5, pairs_[0] + d * 8, 64);
            _tile_dpbf16ps(0, 4, 5);
            _tile_loadd(6, pairs_[1] + d * 8, 64);
            _tile_dpbf16ps(1, 4, 6);
            _tile_loadd(7, pairs_[2] + d * 8, 64);
            _tile_dpbf16ps(2, 4, 7);
            _tile_loadd(5, pairs_[3] + d * 8, 64);
            _tile_dpbf16ps(3, 4, 5);
            prefetch_->issue(kLinesBetween);
        }
    }

    // Tiles 0 to 3 += k q^T, 16 keys each.
    void multiply_keys(const Pair* q) const {
        const int64_t stride = wide_ * sizeof(bf16);
        for (int64_t d = 0; d < wide_; d += 32) {
            _tile_loadd(4, q + d * 8, 64);
            _tile_loadd(5, keys_[0] + d, stride);
            _tile_dpbf16ps(0, 5, 4);
            _tile_loadd(6, keys_[1] + d, stride);
            _tile_dpbf16ps(1, 6, 4);
            _tile_loadd(7, keys_[2] + d, stride);
            _tile_dpbf16ps(2, 7, 4);
            _tile_loadd(5, keys_[3] + d, stride);
            _tile_dpbf16ps(3, 5, 4);
            prefetch_->issue(kLinesBetween);
        }
    }

    void stage_keys(const KVTile<bf16>& tile) {
        for (int key = 0; key < kTile; ++key) {
            const bool seen = key >= tile.begin && key < tile.end;
            const bf16* from = seen ? tile.keys[key / kSpan] + key % kSpan * dim_ : zeros_;
            std::memcpy(staged_ + key * wide_, from, dim_ * sizeof(bf16));
        }
    }

    // acc [kGroup, 16 N] += weights v; a half of the tile that no row sees is left out.
    template <int N>
    void accumulate_columns(const bf16* weights, float* acc, int64_t column) const {
        const int64_t stride = padded_ * sizeof(float), value_stride = values_.stride() * sizeof(Pair);
        _tile_loadd(0, acc, stride);
        if (N > 1) _tile_loadd(1, acc + 16, stride);
        if (N > 2) _tile_loadd(2, acc + 32, stride);
        if (N > 3) _tile_loadd(3, acc + 48, stride);
        for (int half = begin_ / 32; half * 32 < end_; ++half) {
            const Pair* v = values_[half * 16] + column;
            _tile_loadd(4, weights + half * 32, kTile * sizeof(bf16));
            _tile_loadd(5, v, value_stride);
            _tile_dpbf16ps(0, 4, 5);
            if (N > 1) {
                _tile_loadd(6, v + 16, value_stride);
                _tile_dpbf16ps(1, 4, 6);
            }
            if (N > 2) {
                _tile_loadd(7, v + 32, value_stride);
                _tile_dpbf16ps(2, 4, 7);
            }
            if (N > 3) {
                _tile_loadd(5, v + 48, value_stride);
                _tile_dpbf16ps(3, 4, 5);
            }
            prefetch_->issue(kLinesBetween);
        }
        _tile_stored(0, acc, stride);
        if (N > 1) _tile_stored(1, acc + 16, stride);
        if (N > 2) _tile_stored(2, acc + 32, stride);
        if (N > 3) _tile_stored(3, acc + 48, stride);
    }

    // Vectors are faster if no group has more rows.
    static constexpr int kFewRows = 2;
    // Four products take about as long as so many lines.
    static constexpr int64_t kLinesBetween = 40;

    const int64_t dim_, wide_, padded_;
    const bool in_pairs_;
    const bool direct_;  // keys can be read in place: 16 adjacent ones, and whole steps of 32 dimensions
    ValuePairs values_;
    Pair* const queries_;      // [groups, wide / 32, 16 pairs, kGroup]; in pairs, [groups, kGroup, wide / 2]
    bf16* const staged_;       // [kTile, wide]
    bf16* const zeros_;        // [kGroup, wide]
    bf16* const weights_;      // [groups, kGroup, kTile]
    float* const transposed_;  // [kTile, kGroup]
    const bf16* keys_[kTile / 16];
    const Pair* pairs_[kTile / 16];
    Prefetch<bf16>* prefetch_ = nullptr;
    int begin_ = 0, end_ = 0;
    int most_rows_ = 0;  // of a group
};

#endif

// The engine for a cache of integers, which is not in pairs: it takes the products of integers and scales, rounded to bfloat16.
class DequantizingEngine {
public:
    using Storage = bf16;
    using Cached = int8_t;
    using Weight = bf16;

    static size_t bytes(Shape shape) {
        return 2 * (kTile * sizeof(bf16) * shape.head_dim + 64) + BFloat16Engine::bytes(shape);
    }

    DequantizingEngine(Arena& arena, Shape shape)
        : dim_(shape.head_dim),
          keys_(arena.zeros<bf16>(kTile * dim_)),
          values_(arena.zeros<bf16>(kTile * dim_)),
          engine_(arena, shape) {}

    void set_queries(int group, const bf16* const* rows, int count) { engine_.set_queries(group, rows, count); }

    bool multiplies_in_place() const { return false; }

    void set_tile(const KVTile<int8_t>& tile, Prefetch<int8_t>& prefetch) {
        tile_.begin = tile.begin;
        tile_.end = tile.end;
        for (int span = 0; span < kTile / kSpan; ++span) {
            tile_.keys[span] = tile.keys[span] ? keys_ + span * kSpan * dim_ : nullptr;
            tile_.values[span] = tile.values[span] ? values_ + span * kSpan * dim_ : nullptr;
        }
        for (int key = tile.begin; key < tile.end; ++key) {
            prefetch.issue(4 * prefetch.share(kTile));
            const int64_t at = key % kSpan * row_size<int8_t>(dim_);
            dequantize(tile.keys[key / kSpan] + at, keys_ + key * dim_);
            dequantize(tile.values[key / kSpan] + at, values_ + key * dim_);
        }
        engine_.set_tile(tile_, nothing_);
    }

    void scores(int group, int count, float* s) const { engine_.scores(group, count, s); }
    Weight* weights(int group) { return engine_.weights(group); }
    void accumulate(int group, int count, float* acc) const { engine_.accumulate(group, count, acc); }

private:
    void dequantize(const int8_t* from, bf16* to) const {
        const RowReader<int8_t> row(from, dim_);
        for (int64_t d = 0; d < dim_; d += kLanes) store_first(to + d, row.read(d, dim_ - d), dim_ - d);
    }

    const int64_t dim_;
    bf16* const keys_;    // [kTile, head_dim]
    bf16* const values_;  // [kTile, head_dim]
    BFloat16Engine engine_;
    KVTile<bf16> tile_;
    Prefetch<bf16> nothing_;
};

}  // namespace penstock::ISA

#endif
