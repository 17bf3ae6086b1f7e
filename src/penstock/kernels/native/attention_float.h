// The engine for every storage type and processor: a tile is widened to fp32 once and all products are fp32. A cache of
// integers is read as the fp32 products of integers and scales.
#pragma once

#include "attention_tile.h"

namespace penstock::ISA {

struct FloatUnit {
    using Item = float;
    static Vec vector(const float* b) { return load(b); }
    static Vec step(Vec acc, float a, Vec b) { return fma(splat(a), b, acc); }
};

template <class T, class C = T>
class FloatEngine {
public:
    using Storage = T;
    using Cached = C;
    using Weight = float;

    static size_t bytes(Shape shape) {
        const int64_t rows = kGroups * kGroup * shape.head_dim, tile = kTile * (shape.head_dim + shape.padded_dim());
        return sizeof(float) * (rows + tile + kGroup * kTile) + 4 * 64;
    }

    FloatEngine(Arena& arena, Shape shape)
        : dim_(shape.head_dim),
          value_dim_(shape.value_dim),
          padded_(shape.padded_dim()),
          queries_(arena.zeros<float>(kGroups * kGroup * dim_)),
          keys_(arena.zeros<float>(dim_ * kTile)),
          values_(arena.zeros<float>(kTile * padded_)),
          weights_(arena.zeros<float>(kGroup * kTile)) {}

    void set_queries(int group, const T* const* rows, int count) {
        for (int row = 0; row < count; ++row) {
            float* to = queries_ + (group * kGroup + row) * dim_;
            for (int64_t d = 0; d < dim_; d += kLanes)
                store_first(to + d, load_first(rows[row] + d, dim_ - d), dim_ - d);
        }
    }

    void set_tile(const KVTile<C>& tile, Prefetch<C>& prefetch) {
        prefetch_ = &prefetch;
        for (int key = 0; key < kTile; ++key) {
            prefetch.issue(2 * prefetch.share(kTile));
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
        multiply<FloatUnit>(queries_ + group * kGroup * dim_, dim_, keys_, kTile, s, kTile, count, kTile, dim_, false,
                            *prefetch_);
    }

    Weight* weights() { return weights_; }

    void accumulate(int count, float* acc) const {
        multiply<FloatUnit>(weights_, kTile, values_, padded_, acc, padded_, count, padded_, kTile, true,
                            *prefetch_);
    }

private:
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
    float* const queries_;  // [kGroups, kGroup, head_dim]
    float* const keys_;     // [head_dim, kTile]: transposed
    float* const values_;   // [kTile, padded_dim]
    float* const weights_;  // [kGroup, kTile]
    Prefetch<C>* prefetch_ = nullptr;
};

}  // namespace penstock::ISA
