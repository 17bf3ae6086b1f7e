// How the KV cache stores the vector of a token and a head: its numbers, or int8 integers and then their scale, a
// float32. A scale depends on its vector alone, so an integer does not depend on what is stored beside it.
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

// Reads the numbers of a row.
template <class C>
class RowReader {
public:
    RowReader(const C* at, int64_t) : at_(at) {}
    // `count` of them, or kLanes if there are more, from dimension d on.
    Vec read(int64_t d, int64_t count) const { return load_first(at_ + d, count); }

private:
    const C* at_;
};

template <>
class RowReader<int8_t> {
public:
    RowReader(const int8_t* at, int64_t dim) : at_(at) {
        if (at) std::memcpy(&scale_, at + dim, sizeof scale_);
    }
    Vec read(int64_t d, int64_t count) const { return load_first(at_ + d, count) * splat(scale_); }

private:
    const int8_t* at_;
    float scale_ = 0;
};

}  // namespace penstock::ISA
