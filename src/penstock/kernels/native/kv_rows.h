// How the KV cache stores the vector of a token and a head: its numbers, or int8 integers and then their scale, a
// float32. A scale depends on its vector alone, so an integer does not depend on what is stored beside it.
//
// A cache in pairs has other places for the numbers of 16 adjacent tokens and a head, which are the operands of products
// of pairs: keys [head_dim / 2, 16 tokens, 2], and values [8 pairs of tokens, head_dim, 2]. The tokens' bytes together are
// where their rows would be. `kernels/kv_rows.py` knows which caches these are.
#pragma once

#include <cfloat>

#include "vec.h"

namespace penstock::ISA {

constexpr int64_t kMostHeadDim = 512;

// Elements of a row of `dim` numbers that is stored as C.
template <class C>
constexpr int64_t row_size(int64_t dim) {
    return dim;
}
template <>
constexpr int64_t row_size<int8_t>(int64_t dim) {
    return dim + static_cast<int64_t>(sizeof(float));
}

// Stores the numbers x [dim] as a row.
template <class T>
inline void store_row(const T* x, int64_t dim, T* to) {
    std::memcpy(to, x, dim * sizeof(T));
}

// As integers with a scale of a 127th of the largest finite magnitude, which stands for infinities too. A magnitude
// below 2^-100 is stored as zero: no scale is subnormal. A vector with a NaN has a scale that is one.
template <class T>
inline void store_row(const T* x, int64_t dim, int8_t* to) {
    constexpr uint32_t kInfinity = 0x7f800000;
    const float kLeast = from_bits(0x0d800000), kMagic = 12582912.0f;  // 2^-100, and 1.5 * 2^23 as in exp2
    float numbers[kMostHeadDim];
    uint32_t most = 0, most_finite = 0;
    for (int64_t d = 0; d < dim; d += kLanes) store_first(numbers + d, load_first(x + d, dim - d), dim - d);
    for (int64_t d = 0; d < dim; ++d) {
        const uint32_t magnitude = to_bits(numbers[d]) & 0x7fffffff, finite = magnitude < kInfinity ? magnitude : 0;
        most = magnitude > most ? magnitude : most;
        most_finite = finite > most_finite ? finite : most_finite;
    }
    const bool has_nan = most > kInfinity, is_zero = from_bits(most_finite) < kLeast;
    const float largest = has_nan || is_zero ? 0 : from_bits(most_finite);
    const float scale = has_nan ? from_bits(0x7fc00000) : largest / 127.0f, divisor = largest > 0 ? scale : 1;
    for (int64_t d = 0; d < dim; ++d) {
        float number = numbers[d] > -largest ? numbers[d] : -largest;  // also for a NaN
        number = number < largest ? number : largest;
        to[d] = static_cast<int8_t>((number / divisor + kMagic) - kMagic);
    }
    std::memcpy(to + dim, &scale, sizeof scale);
}

using Pair = uint32_t;  // two neighbouring bf16

#if defined(__AVX512BF16__)

// A number of a cache in pairs.
struct Paired {
    bf16 number;
};

// Stores the numbers x [dim] of the token at `offset` of a block, the first of whose keys is at `keys`.
inline void store_key(const bf16* x, int64_t dim, Paired* keys, int64_t offset) {
    Pair* const to = reinterpret_cast<Pair*>(keys + offset / 16 * 16 * dim) + offset % 16;
    for (int64_t d = 0; d < dim / 2; ++d) std::memcpy(to + d * 16, x + 2 * d, sizeof(Pair));
}

// Stores the numbers x [dim] likewise. Another thread may be storing the other token of the pair.
inline void store_value(const bf16* x, int64_t dim, Paired* values, int64_t offset) {
    const int64_t odd = offset % 2;
    Paired* const to = values + (offset - odd) * dim;
    for (int64_t d = 0; d < dim; d += 16) {
        const __m512i numbers = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + d)));
        odd ? _mm512_mask_storeu_epi16(to + 2 * d, 0xaaaaaaaa, _mm512_slli_epi32(numbers, 16))
            : _mm512_mask_storeu_epi16(to + 2 * d, 0x55555555, numbers);
    }
}

#endif

// Stores a key as a row.
template <class T, class C>
inline void store_key(const T* x, int64_t dim, C* keys, int64_t offset) {
    store_row(x, dim, keys + offset * row_size<C>(dim));
}

template <class T, class C>
inline void store_value(const T* x, int64_t dim, C* values, int64_t offset) {
    store_row(x, dim, values + offset * row_size<C>(dim));
}

// Reads the numbers of a row.
template <class C>
class RowReader {
public:
    RowReader(const C* at, int64_t) : at_(at) {}
    // `count` of them, or kLanes if there are more, from dimension d on.
    PENSTOCK_INLINE Vec read(int64_t d, int64_t count) const { return load_first(at_ + d, count); }

private:
    const C* at_;
};

template <>
class RowReader<int8_t> {
public:
    RowReader(const int8_t* at, int64_t dim) : at_(at) {
        if (at) std::memcpy(&scale_, at + dim, sizeof scale_);
    }
    PENSTOCK_INLINE Vec read(int64_t d, int64_t count) const { return load_first(at_ + d, count) * splat(scale_); }

private:
    const int8_t* at_;
    float scale_ = 0;
};

}  // namespace penstock::ISA
