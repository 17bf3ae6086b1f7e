// Layers by float32 fused multiply-adds: every type where there is no better instruction for it.
//
// A panel of packed weights is [K][32]. x is widened to float32 in the order [K][rows]. Few rows take a panel as a whole,
// kFmaRows at most; where weights must be widened and the registers are few, up to kRowsOfParts rows take it in two
// halves, so that more rows share each widened weight.
#pragma once

#include "linear.h"

namespace {

struct Float {
    float value;
};
struct BFloat {
    uint16_t bits;
};
struct Half {
    uint16_t bits;
};

#if defined(__AVX512F__)

using Vector = __m512;
constexpr int kLanes = 16;
constexpr int64_t kFmaRows = 12, kRowsOfParts = kFmaRows;

inline Vector zero() { return _mm512_setzero_ps(); }
inline Vector broadcast(float value) { return _mm512_set1_ps(value); }
inline Vector multiply_add(Vector a, Vector b, Vector sum) { return _mm512_fmadd_ps(a, b, sum); }
inline Vector add(Vector a, Vector b) { return _mm512_add_ps(a, b); }
inline Vector load(const float* from) { return _mm512_loadu_ps(from); }
inline Vector load(const Float* from) { return _mm512_loadu_ps(&from->value); }
inline Vector load(const Half* from) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from)); }
inline Vector load(const BFloat* from) {
    return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)), 16);
}
inline void store(Float* to, Vector value) { _mm512_storeu_ps(&to->value, value); }
inline void store(Half* to, Vector value) {
    _mm256_storeu_si256((__m256i*)to, _mm512_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
}
inline void store(BFloat* to, Vector value) { _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh(value)); }

#elif defined(__AVX2__)

using Vector = __m256;
constexpr int kLanes = 8;
constexpr int64_t kFmaRows = 3, kRowsOfParts = 6;

inline Vector zero() { return _mm256_setzero_ps(); }
inline Vector broadcast(float value) { return _mm256_set1_ps(value); }
inline Vector multiply_add(Vector a, Vector b, Vector sum) { return _mm256_fmadd_ps(a, b, sum); }
inline Vector add(Vector a, Vector b) { return _mm256_add_ps(a, b); }
inline Vector load(const float* from) { return _mm256_loadu_ps(from); }
inline Vector load(const Float* from) { return _mm256_loadu_ps(&from->value); }
inline Vector load(const Half* from) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from)); }
inline Vector load(const BFloat* from) {
    return (__m256)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from)), 16);
}
inline void store(Float* to, Vector value) { _mm256_storeu_ps(&to->value, value); }
inline void store(Half* to, Vector value) {
    _mm_storeu_si128((__m128i*)to, _mm256_cvtps_ph(value, _MM_FROUND_TO_NEAREST_INT));
}
// To nearest even by adding half a unit, or just under it; a NaN keeps its top half, made quiet.
inline void store(BFloat* to, Vector value) {
    const __m256i bits = (__m256i)value;
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i is_nan = (__m256i)_mm256_cmp_ps(value, value, _CMP_UNORD_Q);
    const __m256i high = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, is_nan), 16);
    const __m256i narrow = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0b1000);
    _mm_storeu_si128((__m128i*)to, _mm256_castsi256_si128(narrow));
}

#else

typedef float Vector __attribute__((vector_size(16)));
constexpr int kLanes = 4;
constexpr int64_t kFmaRows = 3, kRowsOfParts = kFmaRows;

inline float widen(float value) { return value; }
inline float widen(Float value) { return value.value; }
inline float widen(BFloat value) {
    const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
    float result;
    memcpy(&result, &bits, 4);
    return result;
}
inline float widen(Half value) {
    _Float16 half;
    memcpy(&half, &value, 2);
    return static_cast<float>(half);
}
inline void narrow(float value, Float* to) { to->value = value; }
inline void narrow(float value, Half* to) {
    const _Float16 half = static_cast<_Float16>(value);
    memcpy(to, &half, 2);
}
inline void narrow(float value, BFloat* to) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    bits = value != value ? bits | 0x400000 : bits + (bits >> 16 & 1) + 0x7fff;
    to->bits = static_cast<uint16_t>(bits >> 16);
}

inline Vector zero() { return Vector{}; }
inline Vector broadcast(float value) { return Vector{value, value, value, value}; }
inline Vector add(Vector a, Vector b) { return a + b; }
inline Vector multiply_add(Vector a, Vector b, Vector sum) {
    for (int lane = 0; lane < kLanes; ++lane) sum[lane] = __builtin_fmaf(a[lane], b[lane], sum[lane]);
    return sum;
}
template <class T>
inline Vector load(const T* from) {
    return Vector{widen(from[0]), widen(from[1]), widen(from[2]), widen(from[3])};
}
template <class T>
inline void store(T* to, Vector value) {
    for (int lane = 0; lane < kLanes; ++lane) narrow(value[lane], to + lane);
}

#endif

template <class ElementType>
struct Fma {
    using Element = ElementType;
    static constexpr int64_t kRows = sizeof(Element) < 4 ? kRowsOfParts : kFmaRows;
    static constexpr bool kWholeBlocks = false;
    static constexpr int64_t kStepBytes = kPanel * sizeof(Element);
    static constexpr int kVectors = kPanel / kLanes;

    static int64_t padded_k(int64_t k) { return k; }
    static int64_t x_bytes(int64_t rows, int64_t k) { return round_up(rows * k, 16) * 4; }

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
        const Vector value = load(from);
        memcpy(to, &value, sizeof value);
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
        constexpr int kParts = kCount > kFmaRows ? 2 : 1, kSome = kVectors / kParts;
        Vector sums[kCount][kVectors];
        Prefetch prefetch = tile.prefetch;
        accumulate<kCount, kSome, true>(tile, 0, prefetch, sums);
        if constexpr (kParts == 2) accumulate<kCount, kSome, false>(tile, kSome, prefetch, sums);
        alignas(64) float bias[kPanel] = {};
        if (tile.bias) memcpy(bias, tile.bias, tile.columns * sizeof(float));
        for (int row = 0; row < kCount; ++row) store_row(tile, row, sums[row], bias);
    }

    // The sums of the vectors [first, first + kSome) of the panel's columns.
    template <int kCount, int kSome, bool kFetches>
    static inline __attribute__((always_inline)) void accumulate(const Tile<Element>& tile, int first,
                                                                 Prefetch& prefetch,
                                                                 Vector (&all)[kCount][kVectors]) {
        Vector sums[kCount][kSome];
        for (int row = 0; row < kCount; ++row)
            for (int part = 0; part < kSome; ++part) sums[row][part] = zero();
        const float* x = reinterpret_cast<const float*>(tile.x);
        const Element* weight = reinterpret_cast<const Element*>(tile.weight) + first * kLanes;
        for (int64_t at = 0; at < tile.k; ++at, weight += kPanel, x += kCount) {
            if constexpr (kFetches) prefetch.advance();
            // The smaller side of the tile is held in registers: with it and the sums, AVX2's sixteen are used up.
            if constexpr (kSome > kCount) {
                Vector values[kCount];
                for (int row = 0; row < kCount; ++row) values[row] = broadcast(x[row]);
                for (int part = 0; part < kSome; ++part) {
                    const Vector weights = load(weight + part * kLanes);
                    for (int row = 0; row < kCount; ++row)
                        sums[row][part] = multiply_add(values[row], weights, sums[row][part]);
                }
            } else {
                Vector weights[kSome];
                for (int part = 0; part < kSome; ++part) weights[part] = load(weight + part * kLanes);
                for (int row = 0; row < kCount; ++row) {
                    const Vector value = broadcast(x[row]);
                    for (int part = 0; part < kSome; ++part)
                        sums[row][part] = multiply_add(value, weights[part], sums[row][part]);
                }
            }
        }
        for (int row = 0; row < kCount; ++row)
            for (int part = 0; part < kSome; ++part) all[row][first + part] = sums[row][part];
    }

    static inline void store_row(const Tile<Element>& tile, int64_t row, Vector* sums, const float* bias) {
        for (int part = 0; part < kVectors; ++part)
            if (tile.bias) sums[part] = add(sums[part], load(bias + part * kLanes));
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
        for (int part = 0; part < kVectors; ++part) store(to + part * kLanes, sums[part]);
        if (to == line) memcpy(out, line, tile.columns * sizeof(Output));
    }
};

}  // namespace
