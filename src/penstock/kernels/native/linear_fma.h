// Layers by float32 fused multiply-adds: every type where there is no better instruction for it.
//
// A panel of packed weights is [K][32]. x is widened to float32 in the order [K][rows]. Few rows take a panel as a whole,
// kFmaRows at most; where weights must be widened and the registers are few, up to kRowsOfParts rows take it in two
// halves, so that more rows share each widened weight.
#pragma once

#include "linear.h"
#include "register.h"

namespace {

using Float = float;
using BFloat = penstock::ISA::bf16;
using Half = penstock::ISA::f16;
using Vector = penstock::ISA::Register;
using penstock::ISA::multiply_add;
using penstock::ISA::read;
using penstock::ISA::spread;
using penstock::ISA::write;

constexpr int kLanes = penstock::ISA::kRegisterLanes;

// With the sums of these rows, the vectors of a panel and a broadcast number of x, the registers are used up.
#if defined(__AVX512F__)
constexpr int64_t kFmaRows = 14, kRowsOfParts = kFmaRows, kFmaBytesAhead = 4096;
#elif defined(__AVX2__)
constexpr int64_t kFmaRows = 3, kRowsOfParts = 6, kFmaBytesAhead = 1024;
#elif defined(__aarch64__)
constexpr int64_t kFmaRows = 3, kRowsOfParts = 6, kFmaBytesAhead = 4096;
#else
constexpr int64_t kFmaRows = 3, kRowsOfParts = kFmaRows, kFmaBytesAhead = 4096;
#endif

template <class ElementType>
struct Fma {
    using Element = ElementType;
    static constexpr int64_t kRows = sizeof(Element) < 4 ? kRowsOfParts : kFmaRows;
    static constexpr bool kWholeBlocks = false;
    // Prefetching at every input would take up to a seventh of the time.
    static constexpr int64_t kStepInputs = 8, kStepBytes = kStepInputs * kPanel * sizeof(Element);
    static constexpr int64_t kBytesAhead = kFmaBytesAhead;
    static constexpr int kVectors = kPanel / kLanes;
    static constexpr int64_t kChunk = 128;
    static constexpr int64_t kPanelsOfChunk = 4;
    static constexpr int64_t kChunkBlocks = 6;

    static int64_t padded_k(int64_t k) { return k; }
    static int64_t input_bytes(int64_t rows, int64_t k) { return round_up(rows * k, 16) * 4; }
    static int64_t x_bytes(int64_t rows, int64_t k) { return input_bytes(rows, k); }

    struct Session {
        explicit Session(int64_t) {}
    };

    static void pack_panel(const Element* weight, Element* panel, int64_t columns, int64_t k) {
        for (int64_t at = 0; at < k; ++at)
            for (int64_t column = 0; column < kPanel; ++column)
                *panel++ = column < columns ? weight[column * k + at] : Element{};
    }

    static void pack_x(const Element* x, char* packed, int64_t rows, int64_t k) {
        float* to = reinterpret_cast<float*>(packed);
        float wide[4][kLanes];
        for (int64_t first = 0; first < k; first += kLanes) {
            const int64_t count = smaller(kLanes, k - first);
            int64_t row = 0;
            if (count == kLanes)
                for (; row + 4 <= rows; row += 4) {
                    for (int64_t i = 0; i < 4; ++i) widen(x + (row + i) * k + first, wide[i]);
                    for (int64_t at = 0; at < kLanes; at += 4)
                        transpose_four(wide[0] + at, kLanes, to + (first + at) * rows + row, rows);
                }
            for (; row < rows; ++row) {
                Element some[kLanes] = {};
                memcpy(some, x + row * k + first, count * sizeof(Element));
                widen(some, wide[0]);
                for (int64_t at = 0; at < count; ++at) to[(first + at) * rows + row] = wide[0][at];
            }
        }
    }

    static inline void widen(const Element* from, float* to) {
        const Vector value = read(from);
        memcpy(to, &value, sizeof value);
    }

    static void run(const Tile<Element>& tile) { dispatch<kRows, Element>(tile); }

    // The same by weights of float32; sums that are left unfinished are [rows, kPanel].
    static void run_wide(const Tile<Element>& tile) { dispatch<kRows, float>(tile); }
    static float* run_unfinished(const Tile<Element>& tile, float*) { return run_wide(tile), nullptr; }
    static void store_left(const float*) {}

    static void store_sums(const Tile<Element>& tile, int64_t row, const float* sums) {
        alignas(64) float bias[kPanel] = {};
        if (tile.bias) memcpy(bias, tile.bias, tile.columns * sizeof(float));
        Vector line[kVectors];
        for (int part = 0; part < kVectors; ++part) line[part] = read(sums + row * kPanel + part * kLanes);
        store_row(tile, row, line, bias);
    }

    static const char* widened(const Quantization*, int64_t, const char* panel, Range inputs, float* to) {
        const Element* from = reinterpret_cast<const Element*>(panel) + inputs.begin * kPanel;
        if constexpr (sizeof(Element) == sizeof(float)) return reinterpret_cast<const char*>(from);
        const int64_t count = (inputs.end - inputs.begin) * kPanel;
        for (int64_t at = 0; at < count; at += kLanes) write(to + at, read(from + at));
        return reinterpret_cast<const char*>(to);
    }

    template <int kCount, class Weight>
    static void dispatch(const Tile<Element>& tile) {
        if constexpr (kCount > 1)
            if (tile.rows < kCount) return dispatch<kCount - 1, Weight>(tile);
        accumulate<kCount, Weight>(tile);
    }

    template <int kCount, class Weight>
    static __attribute__((noinline)) void accumulate(const Tile<Element>& tile) {
        constexpr int kParts = kCount > kFmaRows ? 2 : 1, kSome = kVectors / kParts;
        alignas(64) float own[kCount * kPanel];
        float* sums = tile.continues || tile.is_unfinished ? tile.sums : own;
        if (!tile.is_unfinished)
            for (int row = 0; row < kCount; ++row) __builtin_prefetch(tile.out + row * tile.out_stride, 1);
        Prefetch prefetch = tile.prefetch;
        accumulate<kCount, Weight, kSome, true>(tile, 0, prefetch, sums);
        if constexpr (kParts == 2) accumulate<kCount, Weight, kSome, false>(tile, kSome, prefetch, sums);
        if (tile.is_unfinished) return;
        for (int row = 0; row < kCount; ++row) store_sums(tile, row, sums);
    }

    // The sums of the vectors [first, first + kSome) of the panel's columns.
    template <int kCount, class Weight, int kSome, bool kFetches>
    static PENSTOCK_INLINE void accumulate(const Tile<Element>& tile, int first, Prefetch& prefetch, float* all) {
        Vector sums[kCount][kSome];
        all += first * kLanes;
#pragma GCC unroll 16
        for (int row = 0; row < kCount; ++row)
#pragma GCC unroll 16
            for (int part = 0; part < kSome; ++part)
                sums[row][part] = tile.continues ? read(all + row * kPanel + part * kLanes) : spread(0);
        const float* x = reinterpret_cast<const float*>(tile.x);
        const Weight* weight = reinterpret_cast<const Weight*>(tile.weight) + first * kLanes;
        const auto add_input = [&]() __attribute__((always_inline)) {
            // The smaller side of the tile is held in registers.
            if constexpr (kSome > kCount) {
                Vector values[kCount];
#pragma GCC unroll 16
                for (int row = 0; row < kCount; ++row) values[row] = spread(x[row]);
#pragma GCC unroll 16
                for (int part = 0; part < kSome; ++part) {
                    const Vector weights = read(weight + part * kLanes);
#pragma GCC unroll 16
                    for (int row = 0; row < kCount; ++row)
                        sums[row][part] = multiply_add(values[row], weights, sums[row][part]);
                }
            } else {
                Vector weights[kSome];
#pragma GCC unroll 16
                for (int part = 0; part < kSome; ++part) weights[part] = read(weight + part * kLanes);
#pragma GCC unroll 16
                for (int row = 0; row < kCount; ++row) {
                    const Vector value = spread(x[row]);
#pragma GCC unroll 16
                    for (int part = 0; part < kSome; ++part)
                        sums[row][part] = multiply_add(value, weights[part], sums[row][part]);
                }
            }
            weight += kPanel;
            x += kCount;
        };
        int64_t left = tile.k;
        for (; left >= kStepInputs; left -= kStepInputs) {
            if constexpr (kFetches) prefetch.advance();
#pragma GCC unroll 2
            for (int input = 0; input < kStepInputs; ++input) add_input();
        }
        for (; left > 0; --left) add_input();
#pragma GCC unroll 16
        for (int row = 0; row < kCount; ++row)
#pragma GCC unroll 16
            for (int part = 0; part < kSome; ++part) write(all + row * kPanel + part * kLanes, sums[row][part]);
    }

    static inline void store_row(const Tile<Element>& tile, int64_t row, Vector* sums, const float* bias) {
        for (int part = 0; part < kVectors; ++part)
            if (tile.bias) sums[part] = sums[part] + read(bias + part * kLanes);
        if (tile.is_wide)
            store_line<Float>(tile, row, sums);
        else
            store_line<Element>(tile, row, sums);
    }

    template <class Output>
    static inline void store_line(const Tile<Element>& tile, int64_t row, const Vector* sums) {
        Output* out = reinterpret_cast<Output*>(tile.out + row * tile.out_stride);
        alignas(64) Output line[kPanel];
        Output* to = tile.columns == kPanel ? out : line;
        for (int part = 0; part < kVectors; ++part) write(to + part * kLanes, sums[part]);
        if (to == line) memcpy(out, line, tile.columns * sizeof(Output));
    }
};

template <class Element>
constexpr bool kTakesChunks<Fma<Element>> = true;

}  // namespace
