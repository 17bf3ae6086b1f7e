// Engines for bfloat16 on processors that multiply pairs of it: AVX512-BF16 dot products, and AMX tiles.
//
// Both read values as pairs of keys: pair i of a tile holds, for every dimension, the adjacent values of keys 2i and 2i
// + 1 in 32 bits. Dot products and tiles round differently, so one engine serves decode and prefill rows.
#pragma once

#include "attention_tile.h"

#if defined(__AVX512BF16__)

namespace penstock::ISA {

using Pair = uint32_t;  // two neighbouring bf16

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

// The values of a tile as pairs of keys.
class ValuePairs {
public:
    static size_t bytes(Shape shape) { return padded(shape) * (kTile / 2 * sizeof(Pair) + sizeof(bf16)) + 2 * 64; }

    ValuePairs(Arena& arena, Shape shape)
        : row_(shape.head_dim),
          dim_(shape.value_dim),
          stride_(padded(shape)),
          pairs_(arena.zeros<Pair>(kTile / 2 * stride_)),
          zeros_(arena.zeros<bf16>(stride_)) {}

    // Prefetches `lines` lines of the next tile with each pair.
    void set(const KVTile<bf16>& tile, Prefetch<bf16>& prefetch, int64_t lines) {
        for (int pair = 0; pair < kTile / 2; ++pair) {
            prefetch.issue(lines);
            const bf16* even = row(tile, 2 * pair);
            const bf16* odd = row(tile, 2 * pair + 1);
            for (int64_t d = 0; d < dim_; d += 32) interleave(even + d, odd + d, dim_ - d, pairs_ + pair * stride_ + d);
        }
    }

    int64_t stride() const { return stride_; }
    const Pair* pairs() const { return pairs_; }

private:
    static int64_t padded(Shape shape) { return (shape.value_dim + 31) / 32 * 32; }

    const bf16* row(const KVTile<bf16>& tile, int key) const {
        return key >= tile.begin && key < tile.end ? tile.values[key / kSpan] + key % kSpan * row_ : zeros_;
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
    Pair* const pairs_;   // [kTile / 2, stride]
    bf16* const zeros_;   // [stride]
};

#if !defined(__AMX_BF16__)

struct PairUnit {
    using Item = Pair;
    static __m512i vector(const Pair* b) { return _mm512_loadu_si512(b); }
    static Vec step(Vec acc, Pair a, __m512i b) {
        return _mm512_dpbf16_ps(acc, (__m512bh)_mm512_set1_epi32(static_cast<int>(a)), (__m512bh)b);
    }
};

class BFloat16Engine {
public:
    using Storage = bf16;
    using Cached = bf16;
    using Weight = bf16;

    static size_t bytes(Shape shape) {
        return sizeof(Pair) * (kGroups * kGroup * shape.head_dim / 2 + (shape.head_dim + 31) / 32 * 16 * kTile) +
               sizeof(bf16) * (shape.head_dim + kGroup * kTile) + 4 * 64 + ValuePairs::bytes(shape);
    }

    BFloat16Engine(Arena& arena, Shape shape)
        : dim_(shape.head_dim),
          padded_(shape.padded_dim()),
          values_(arena, shape),
          queries_(arena.zeros<Pair>(kGroups * kGroup * dim_ / 2)),
          keys_(arena.zeros<Pair>((dim_ + 31) / 32 * 16 * kTile)),
          zeros_(arena.zeros<bf16>(dim_)),
          weights_(arena.zeros<bf16>(kGroup * kTile)) {}

    void set_queries(int group, const bf16* const* rows, int count) {
        for (int row = 0; row < count; ++row)
            std::memcpy(queries_ + (group * kGroup + row) * dim_ / 2, rows[row], dim_ * sizeof(bf16));
    }

    void set_tile(const KVTile<bf16>& tile, Prefetch<bf16>& prefetch) {
        for (int first = 0; first < kTile; first += 16) {
            const bf16* rows[16];
            for (int i = 0; i < 16; ++i) {
                const int key = first + i;
                const bool seen = key >= tile.begin && key < tile.end;
                rows[i] = seen ? tile.keys[key / kSpan] + key % kSpan * dim_ : zeros_;
            }
            for (int64_t d = 0; d < dim_; d += 32) {
                prefetch.issue(prefetch.share(kTile / 16 * ((dim_ + 31) / 32)));
                transpose_pairs(rows, d, dim_, keys_ + d / 2 * kTile + first, kTile);
            }
        }
        values_.set(tile, prefetch, prefetch.share(kTile / 2));
        prefetch_ = &prefetch;
    }

    void scores(int group, int count, float* s) const {
        multiply<PairUnit>(queries_ + group * kGroup * dim_ / 2, dim_ / 2, keys_, kTile, s, kTile, count, kTile,
                           dim_ / 2, false, *prefetch_);
    }

    Weight* weights() { return weights_; }

    void accumulate(int count, float* acc) const {
        multiply<PairUnit>(reinterpret_cast<const Pair*>(weights_), kTile / 2, values_.pairs(), values_.stride(), acc,
                           padded_, count, padded_, kTile / 2, true, *prefetch_);
    }

private:
    const int64_t dim_, padded_;
    ValuePairs values_;
    Pair* const queries_;  // [kGroups, kGroup, head_dim / 2]
    Pair* const keys_;     // [head_dim / 2, kTile]: pairs of dimensions, transposed
    bf16* const zeros_;    // [head_dim]
    bf16* const weights_;  // [kGroup, kTile]
    Prefetch<bf16>* prefetch_ = nullptr;
};

#else

// Every tile register holds 16 rows of 64 bytes.
struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// The compiler does not know that tile instructions access memory.
inline void fence() { asm volatile("" ::: "memory"); }

// Scores are computed transposed, K q^T: so keys are read from the cache in place, and only the few query rows and the
// scores themselves are transposed.
class BFloat16Engine {
public:
    using Storage = bf16;
    using Cached = bf16;
    using Weight = bf16;

    static size_t bytes(Shape shape) {
        const int64_t wide = (shape.head_dim + 31) / 32 * 32;
        return sizeof(bf16) * (kGroups * kGroup * wide + kTile * wide + kGroup * wide + kGroup * kTile) +
               sizeof(float) * kTile * kGroup + 5 * 64 + ValuePairs::bytes(shape);
    }

    BFloat16Engine(Arena& arena, Shape shape)
        : dim_(shape.head_dim),
          wide_((shape.head_dim + 31) / 32 * 32),
          padded_(shape.padded_dim()),
          direct_(dim_ == wide_ && shape.block_size % 16 == 0),
          values_(arena, shape),
          queries_(arena.zeros<Pair>(kGroups * kGroup * wide_ / 2)),
          staged_(arena.zeros<bf16>(direct_ ? 0 : kTile * wide_)),
          zeros_(arena.zeros<bf16>(kGroup * wide_)),
          weights_(arena.zeros<bf16>(kGroup * kTile)),
          transposed_(arena.zeros<float>(kTile * kGroup)) {
        static const TileConfig config;
        fence();
        _tile_loadconfig(&config);
    }
    ~BFloat16Engine() { _tile_release(); }
    BFloat16Engine(const BFloat16Engine&) = delete;

    void set_queries(int group, const bf16* const* rows, int count) {
        const bf16* all[kGroup];
        for (int row = 0; row < kGroup; ++row) all[row] = row < count ? rows[row] : zeros_;
        Pair* to = queries_ + group * kGroup * wide_ / 2;
        for (int64_t d = 0; d < dim_; d += 32) transpose_pairs(all, d, dim_, to + d * 8, 16);
    }

    void set_tile(const KVTile<bf16>& tile, Prefetch<bf16>& prefetch) {
        for (int i = 0; i < kTile / 16; ++i) {
            const bf16* in_place = tile.keys[2 * i] ? tile.keys[2 * i] : zeros_;
            keys_[i] = direct_ ? in_place : staged_ + 16 * i * wide_;
        }
        if (!direct_) stage_keys(tile);
        prefetch_ = &prefetch;
        // The rest is prefetched between the products.
        values_.set(tile, prefetch, prefetch.lines() * 3 / 8 / (kTile / 2));
        begin_ = tile.begin;
        end_ = tile.end;
        fence();
    }

    void scores(int group, int, float* s) const {
        const Pair* q = queries_ + group * kGroup * wide_ / 2;
        const int64_t stride = wide_ * sizeof(bf16);
        fence();
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
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
        _tile_stored(0, transposed_, 64);
        _tile_stored(1, transposed_ + 256, 64);
        _tile_stored(2, transposed_ + 512, 64);
        _tile_stored(3, transposed_ + 768, 64);
        fence();
        for (int key = 0; key < kTile; key += 16) {
            __m512i r[16];
            for (int i = 0; i < 16; ++i) r[i] = _mm512_load_si512(transposed_ + (key + i) * kGroup);
            transpose(r);
            for (int i = 0; i < 16; ++i) _mm512_store_si512(s + i * kTile + key, r[i]);
        }
    }

    Weight* weights() { return weights_; }

    void accumulate(int, float* acc) const {
        fence();
        int64_t column = 0;
        for (; column + 64 <= padded_; column += 64) accumulate_columns<4>(acc + column, column);
        for (; column < padded_; column += 16) accumulate_columns<1>(acc + column, column);
        fence();
    }

private:
    void stage_keys(const KVTile<bf16>& tile) {
        for (int key = 0; key < kTile; ++key) {
            const bool seen = key >= tile.begin && key < tile.end;
            const bf16* from = seen ? tile.keys[key / kSpan] + key % kSpan * dim_ : zeros_;
            std::memcpy(staged_ + key * wide_, from, dim_ * sizeof(bf16));
        }
    }

    // acc [kGroup, 16 N] += weights v; a half of the tile that no row sees is left out.
    template <int N>
    void accumulate_columns(float* acc, int64_t column) const {
        const int64_t stride = padded_ * sizeof(float), value_stride = values_.stride() * sizeof(Pair);
        _tile_loadd(0, acc, stride);
        if (N > 1) _tile_loadd(1, acc + 16, stride);
        if (N > 2) _tile_loadd(2, acc + 32, stride);
        if (N > 3) _tile_loadd(3, acc + 48, stride);
        for (int half = begin_ / 32; half * 32 < end_; ++half) {
            const Pair* v = values_.pairs() + half * 16 * values_.stride() + column;
            _tile_loadd(4, weights_ + half * 32, kTile * sizeof(bf16));
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

    // Four products take about as long as so many lines.
    static constexpr int64_t kLinesBetween = 40;

    const int64_t dim_, wide_, padded_;
    const bool direct_;  // keys can be read in place: 16 adjacent ones, and whole steps of 32 dimensions
    ValuePairs values_;
    Pair* const queries_;      // [kGroups, wide / 32, 16 pairs, kGroup]
    bf16* const staged_;       // [kTile, wide]
    bf16* const zeros_;        // [kGroup, wide]
    bf16* const weights_;      // [kGroup, kTile]
    float* const transposed_;  // [kTile, kGroup]
    const bf16* keys_[kTile / 16];
    Prefetch<bf16>* prefetch_ = nullptr;
    int begin_ = 0, end_ = 0;
};

#endif

// The engine for a cache of integers: it takes the products of integers and scales, rounded to bfloat16.
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
    Weight* weights() { return engine_.weights(); }
    void accumulate(int count, float* acc) const { engine_.accumulate(count, acc); }

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
    Prefetch<bf16> nothing_{nullptr, 0};
};

}  // namespace penstock::ISA

#endif
