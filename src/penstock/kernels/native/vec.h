// Vectors of sixteen float32 lanes, in as many registers as the instruction set needs for them: so the order of a sum
// over lanes, and with it every bit of a result, is the same in every set.
#pragma once

#include "register.h"

namespace penstock::ISA {

constexpr int kLanes = 16;
constexpr int kRegisters = kLanes / kRegisterLanes;  // of a Vec

#if defined(__AVX512F__)

using Vec = Register;

PENSTOCK_INLINE Vec splat(float value) { return spread(value); }
PENSTOCK_INLINE Vec fma(Vec a, Vec b, Vec c) { return multiply_add(a, b, c); }
PENSTOCK_INLINE Vec larger(Vec a, Vec b) { return _mm512_max_ps(a, b); }
// Halves are added until one lane is left.
PENSTOCK_INLINE float sum(Vec a) {
    const __m256 eight = _mm512_castps512_ps256(a) + _mm512_extractf32x8_ps(a, 1);
    const __m128 four = _mm256_castps256_ps128(eight) + _mm256_extractf128_ps(eight, 1);
    return (four[0] + four[2]) + (four[1] + four[3]);
}
PENSTOCK_INLINE float largest(Vec a) { return _mm512_reduce_max_ps(a); }
PENSTOCK_INLINE float first_lane(Vec a) { return _mm512_cvtss_f32(a); }

PENSTOCK_INLINE __mmask16 first_lanes(int count) { return static_cast<__mmask16>((1u << count) - 1); }

template <class T>
PENSTOCK_INLINE Vec load(const T* from) {
    return read(from);
}
template <class T>
PENSTOCK_INLINE void store(T* to, Vec a) {
    write(to, a);
}

// Lanes [from, to) of `a`, the others minus infinity.
PENSTOCK_INLINE Vec keep_lanes(Vec a, int from, int to) {
    from = from < 0 ? 0 : from > kLanes ? kLanes : from;
    to = to < 0 ? 0 : to > kLanes ? kLanes : to;
    return _mm512_mask_mov_ps(splat(-INFINITY), first_lanes(to) & ~first_lanes(from), a);
}

#else

struct Vec {
    Register part[kRegisters];
};
typedef int32_t IntRegister __attribute__((vector_size(sizeof(Register))));

// The Vec whose register i is f(i).
template <class F>
PENSTOCK_INLINE Vec each_register(const F& f) {
    Vec a;
    for (int i = 0; i < kRegisters; ++i) a.part[i] = f(i);
    return a;
}

PENSTOCK_INLINE Vec operator+(const Vec& a, const Vec& b) {
    return each_register([&](int i) { return a.part[i] + b.part[i]; });
}
PENSTOCK_INLINE Vec operator-(const Vec& a, const Vec& b) {
    return each_register([&](int i) { return a.part[i] - b.part[i]; });
}
PENSTOCK_INLINE Vec operator*(const Vec& a, const Vec& b) {
    return each_register([&](int i) { return a.part[i] * b.part[i]; });
}
PENSTOCK_INLINE Vec operator/(const Vec& a, const Vec& b) {
    return each_register([&](int i) { return a.part[i] / b.part[i]; });
}

PENSTOCK_INLINE Vec splat(float value) {
    return each_register([&](int) { return spread(value); });
}
PENSTOCK_INLINE Vec fma(const Vec& a, const Vec& b, const Vec& c) {
    return each_register([&](int i) { return multiply_add(a.part[i], b.part[i], c.part[i]); });
}
PENSTOCK_INLINE Vec larger(const Vec& a, const Vec& b) {
    return each_register([&](int i) { return a.part[i] > b.part[i] ? a.part[i] : b.part[i]; });
}
typedef float FourLanes __attribute__((vector_size(16)));
// Joins halves until four lanes are left.
template <class Join>
PENSTOCK_INLINE FourLanes join_halves(Vec a, const Join& join) {
    for (int half = kRegisters / 2; half > 0; half /= 2)
        for (int i = 0; i < half; ++i) a.part[i] = join(a.part[i], a.part[i + half]);
#if defined(__AVX2__)
    return join(FourLanes(_mm256_castps256_ps128(a.part[0])), FourLanes(_mm256_extractf128_ps(a.part[0], 1)));
#else
    return a.part[0];
#endif
}
// Halves are added until one lane is left.
PENSTOCK_INLINE float sum(const Vec& a) {
    const FourLanes four = join_halves(a, [](auto x, auto y) { return x + y; });
    return (four[0] + four[2]) + (four[1] + four[3]);
}
PENSTOCK_INLINE float largest(const Vec& a) {
    const auto more = [](auto x, auto y) { return x > y ? x : y; };
    const FourLanes four = join_halves(a, more);
    return more(more(four[0], four[2]), more(four[1], four[3]));
}
PENSTOCK_INLINE float first_lane(const Vec& a) { return a.part[0][0]; }

template <class T>
PENSTOCK_INLINE Vec load(const T* from) {
    return each_register([&](int i) { return read(from + i * kRegisterLanes); });
}
template <class T>
PENSTOCK_INLINE void store(T* to, const Vec& a) {
    for (int i = 0; i < kRegisters; ++i) write(to + i * kRegisterLanes, a.part[i]);
}
#if defined(__AVX2__)
PENSTOCK_INLINE void store(bf16* to, const Vec& a) { write(to, a.part[0], a.part[1]); }
#endif

// Lanes [from, to) of `a`, the others minus infinity.
PENSTOCK_INLINE Vec keep_lanes(const Vec& a, int from, int to) {
    return each_register([&](int i) {
        IntRegister lane;
        for (int n = 0; n < kRegisterLanes; ++n) lane[n] = i * kRegisterLanes + n;
        return (lane >= from) & (lane < to) ? a.part[i] : spread(-INFINITY);
    });
}

#endif

// The first `count` lanes; the others load as zero and are not stored.
template <class T>
PENSTOCK_INLINE Vec load_first(const T* from, int64_t count) {
    if (count >= kLanes) return load(from);
    T padded[kLanes] = {};
    std::memcpy(padded, from, count * sizeof(T));
    return load(padded);
}
template <class T>
PENSTOCK_INLINE void store_first(T* to, Vec a, int64_t count) {
    if (count >= kLanes) return store(to, a);
    T padded[kLanes];
    store(padded, a);
    std::memcpy(to, padded, count * sizeof(T));
}

// `a` rounded to what T holds.
template <class T>
PENSTOCK_INLINE Vec round_to(Vec a) {
#if defined(__AVX512F__)
    return widen(narrow(a, T{}), T{});
#else
    T rounded[kLanes];
    store(rounded, a);
    return load(rounded);
#endif
}
#if defined(__AVX2__) && !defined(__AVX512F__)
template <>
PENSTOCK_INLINE Vec round_to<bf16>(Vec a) {
    const __m256i upper = _mm256_set1_epi32(static_cast<int>(0xffff0000));
    return each_register([&](int i) { return (Register)_mm256_and_si256(round_upper(a.part[i]), upper); });
}
#endif
template <>
PENSTOCK_INLINE Vec round_to<float>(Vec a) {
    return a;
}

// 2^x, relative error below 2e-7; exactly 1 at 0, exactly 0 below -126, infinity from 128 on.
//
// 2^x = 2^n 2^r with n the integer nearest to x; 2^r on [-1/2, 1/2] is a minimax polynomial with constant term 1.
PENSTOCK_INLINE Register exp2(Register x) {
#if defined(__AVX512F__)
    const Register n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const Register r = x - n;
#else
    const Register low = spread(-126.0f), high = spread(128.0f), magic = spread(12582912.0f);
    Register within = x < low ? low : x;
    within = within > high ? high : within;
    // Adding 1.5 * 2^23 leaves no room for a fraction: the sum is rounded to an integer, to even in the middle.
    const Register n = (within + magic) - magic;
    const Register r = within - n;
#endif
    Register p = spread(0.00132647273f);
    p = multiply_add(p, r, spread(0.00967151299f));
    p = multiply_add(p, r, spread(0.0555073358f));
    p = multiply_add(p, r, spread(0.240222424f));
    p = multiply_add(p, r, spread(0.693147004f));
    p = multiply_add(p, r, spread(1.0f));
#if defined(__AVX512F__)
    // Below -126 the result is zero and not subnormal; a NaN is not below and stays.
    const __mmask16 normal = _mm512_cmp_ps_mask(x, spread(-126.0f), _CMP_NLT_UQ);
    return _mm512_maskz_scalef_ps(normal, p, n);
#else
    // n is added to the exponent of p, whose sum with it is neither that of zero nor, below 128, that of infinity. It
    // has no value for a NaN, which stays one if nothing is added.
    const IntRegister exponent = (__builtin_convertvector(n, IntRegister) << 23) & (n == n);
    const IntRegister bits = ((IntRegister)p + exponent) & ~(x < low);
    return (Register)bits;
#endif
}

#if !defined(__AVX512F__)
PENSTOCK_INLINE Vec exp2(const Vec& x) {
    return each_register([&](int i) { return exp2(x.part[i]); });
}
#endif

// Absolute error below 3e-7; exactly -1 and 1 far from zero.
PENSTOCK_INLINE Vec tanh(Vec x) { return splat(1) - splat(2) / (splat(1) + exp2(x * splat(2.88539008f))); }

}  // namespace penstock::ISA
