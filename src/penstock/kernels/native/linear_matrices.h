// bfloat16 layers by BFMMLA, arm64's product of matrices: 2 rows by 2 columns of float32 += 2 x 4 by 4 x 2 of bfloat16.
//
// A panel of packed weights is [K / 4][16 pairs of columns][2][4], K padded with zeros, and x is [K / 4][pairs of rows][2][4],
// with a row of zeros for the last one that is missing. The instruction adds two products at a time, in ascending order over
// K, and takes subnormal numbers for zero (Arm Architecture Reference Manual, BFDotAdd); so each element of a product is one
// chain, whatever the other row and column are.
#pragma once

#include "linear_fma.h"

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)

namespace {

struct Matrices : Fma<BFloat> {
    static constexpr int64_t kRows = 8;
    static constexpr int64_t kStepBytes = 4 * kPanel * sizeof(Element);
    static constexpr int64_t kBytesAhead = 4096;
    static constexpr int64_t kPairs = kPanel / 2;  // of columns

    static int64_t padded_k(int64_t k) { return round_up(k, 4); }
    static int64_t x_bytes(int64_t rows, int64_t k) { return round_up(rows, 2) * padded_k(k) * 2; }

    static void pack_panel(const Element* weight, Element* panel, int64_t columns, int64_t k) {
        for (int64_t step = 0; step < k; step += 4)
            for (int64_t column = 0; column < kPanel; ++column)
                for (int64_t at = step; at < step + 4; ++at)
                    *panel++ = column < columns && at < k ? weight[column * k + at] : Element{};
    }

    static void pack_x(const Element* x, char* packed, int64_t rows, int64_t k) {
        const int64_t step_size = round_up(rows, 2) * 4;
        Element* to = reinterpret_cast<Element*>(packed);
        if (rows % 2 || k % 4) memset(packed, 0, x_bytes(rows, k));
        for (int64_t row = 0; row < rows; ++row)
            for (int64_t at = 0; at < k; at += 4)
                memcpy(to + at / 4 * step_size + row * 4, x + row * k + at, smaller(4, k - at) * sizeof(Element));
    }

    static void run(const Tile<Element>& tile) { dispatch<kRows>(tile); }

    template <int kCount>
    static void dispatch(const Tile<Element>& tile) {
        if constexpr (kCount > 1)
            if (tile.rows < kCount) return dispatch<kCount - 1>(tile);
        accumulate<kCount>(tile);
    }

    template <int kCount>
    static __attribute__((noinline)) void accumulate(const Tile<Element>& tile) {
        // As many pairs of columns at a time as there are registers for their sums.
        constexpr int kRowPairs = (kCount + 1) / 2, kSome = kRowPairs == 1 ? 16 : kRowPairs == 2 ? 8 : 4;
        alignas(64) float own[kRowPairs * 2 * kPanel];
        float* sums = tile.continues || tile.is_unfinished ? tile.sums : own;
        Prefetch prefetch = tile.prefetch;
        for (int first = 0; first < kPairs; first += kSome, prefetch.step = 0)
            accumulate<kCount, kSome>(tile, first, prefetch, sums + first * 2);
        if (tile.is_unfinished) return;
        for (int row = 0; row < kCount; ++row) store_sums(tile, row, sums);
    }

    // The sums of kSome pairs of columns from pair `first` on, [rows, kPanel].
    template <int kCount, int kSome>
    static PENSTOCK_INLINE void accumulate(const Tile<Element>& tile, int first, Prefetch& prefetch, float* sums) {
        constexpr int kRowPairs = (kCount + 1) / 2;
        float32x4_t all[kRowPairs][kSome];
#pragma GCC unroll 4
        for (int row = 0; row < kRowPairs; ++row)
#pragma GCC unroll 16
            for (int pair = 0; pair < kSome; ++pair) {
                const float* upper = sums + row * 2 * kPanel + pair * 2;
                const float* lower = row * 2 + 1 < kCount ? upper + kPanel : upper;
                all[row][pair] = tile.continues ? vcombine_f32(vld1_f32(upper), vld1_f32(lower)) : vdupq_n_f32(0);
            }
        const bfloat16_t* x = reinterpret_cast<const bfloat16_t*>(tile.x);
        const bfloat16_t* weight = reinterpret_cast<const bfloat16_t*>(tile.weight) + first * 8;
        for (int64_t at = 0; at < tile.k; at += 4, weight += 4 * kPanel, x += kRowPairs * 8) {
            prefetch.advance();
            bfloat16x8_t rows[kRowPairs];
#pragma GCC unroll 4
            for (int row = 0; row < kRowPairs; ++row) rows[row] = vld1q_bf16(x + row * 8);
#pragma GCC unroll 16
            for (int pair = 0; pair < kSome; ++pair) {
                const bfloat16x8_t columns = vld1q_bf16(weight + pair * 8);
#pragma GCC unroll 4
                for (int row = 0; row < kRowPairs; ++row)
                    all[row][pair] = vbfmmlaq_f32(all[row][pair], rows[row], columns);
            }
        }
#pragma GCC unroll 4
        for (int row = 0; row < kRowPairs; ++row)
#pragma GCC unroll 16
            for (int pair = 0; pair < kSome; ++pair) {
                float* upper = sums + row * 2 * kPanel + pair * 2;
                vst1_f32(upper, vget_low_f32(all[row][pair]));
                if (row * 2 + 1 < kCount) vst1_f32(upper + kPanel, vget_high_f32(all[row][pair]));
            }
    }
};

}  // namespace

#endif
