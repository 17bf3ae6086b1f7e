// One vector of fp32 lanes under one name for every instruction set, and the storage types that it loads and stores.
//
// Everything lives in a namespace named after the instruction set: were it shared, the linker would keep one copy of an
// inline function for all sets, and an older processor could meet instructions it does not have.
#pragma once

#include <cmath>

#if defined(__x86_64__)
// gcc 12 warns of the registers that these headers deliberately leave undefined.
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wpragmas"
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

#include "common.h"

namespace penstock::ISA {

struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};

inline float from_bits(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline uint32_t to_bits(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    return bits;
}

#if defined(__AVX512F__)

using Vec = __m512;
constexpr int kLanes = 16;

inline Vec splat(float value) { return _mm512_set1_ps(value); }
inline Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
inline Vec larger(Vec a, Vec b) { return _mm512_max_ps(a, b); }
inline float sum(Vec a) { return _mm512_reduce_add_ps(a); }
inline float largest(Vec a) { return _mm512_reduce_max_ps(a); }
inline float first_lane(Vec a) { return _mm512_cvtss_f32(a); }

inline __mmask16 first_lanes(int count) { return static_cast<__mmask16>((1u << count) - 1); }

inline Vec load(const float* from) { return _mm512_loadu_ps(from); }
inline void store(float* to, Vec a) { _mm512_storeu_ps(to, a); }
inline Vec widen(__m256i bits, bf16) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
inline Vec widen(__m256i bits, f16) { return _mm512_cvtph_ps(bits); }
inline __m256i narrow(Vec a, bf16) { return (__m256i)_mm512_cvtneps_pbh(a); }
inline __m256i narrow(Vec a, f16) { return _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT); }
template <class T>
inline Vec load(const T* from) {
    return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)), T{});
}
template <class T>
inline void store(T* to, Vec a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), narrow(a, T{}));
}

// Lanes [from, to) of `a`, the others minus infinity.
inline Vec keep_lanes(Vec a, int from, int to) {
    from = from < 0 ? 0 : from > kLanes ? kLanes : from;
    to = to < 0 ? 0 : to > kLanes ? kLanes : to;
    return _mm512_mask_mov_ps(splat(-INFINITY), first_lanes(to) & ~first_lanes(from), a);
}

#else

// Without AVX-512 the compiler's own vectors are used, as wide as the registers.
#if defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
typedef float Vec __attribute__((vector_size(kLanes * 4)));
typedef int32_t IntVec __attribute__((vector_size(kLanes * 4)));

inline Vec splat(float value) { return value - Vec{}; }
#if defined(__AVX2__)
inline Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
#else
inline Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
#endif
inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }
inline float sum(Vec a) {
    for (int width = kLanes / 2; width > 0; width /= 2)
        for (int lane = 0; lane < width; ++lane) a[lane] += a[lane + width];
    return a[0];
}
inline float largest(Vec a) {
    for (int width = kLanes / 2; width > 0; width /= 2)
        for (int lane = 0; lane < width; ++lane) a[lane] = a[lane] > a[lane + width] ? a[lane] : a[lane + width];
    return a[0];
}
inline float first_lane(Vec a) { return a[0]; }

inline float widen_one(bf16 a) { return from_bits(static_cast<uint32_t>(a.bits) << 16); }
inline bf16 narrow_one(float a, bf16) {
    const uint32_t bits = to_bits(a);
    if ((bits & 0x7fffffff) > 0x7f800000) return {static_cast<uint16_t>(bits >> 16 | 0x40)};
    return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
inline float widen_one(f16 a) {
    const uint32_t sign = (a.bits & 0x8000u) << 16, rest = a.bits & 0x7fffu;
    if (rest >= 0x7c00) return from_bits(sign | 0x7f800000 | rest << 13);
    // The exponent is rebased by a product, which also makes normal numbers of subnormal ones.
    return from_bits(sign | to_bits(from_bits(rest << 13) * from_bits(0x77800000)));
}
inline f16 narrow_one(float a, f16) {
    const uint32_t sign = to_bits(a) >> 16 & 0x8000, rest = to_bits(a) & 0x7fffffff;
    uint32_t bits;
    if (rest > 0x7f800000) {
        bits = 0x7e00;
    } else if (rest >= 0x477ff000) {
        bits = 0x7c00;
    } else if (rest < 0x38800000) {
        // Adding 0.5 leaves a subnormal's digits, rounded, in the lowest bits of the sum.
        bits = to_bits(from_bits(rest) + 0.5f) - 0x3f000000;
    } else {
        bits = (rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13;
    }
    return {static_cast<uint16_t>(sign | bits)};
}

inline Vec load(const float* from) {
    Vec a;
    std::memcpy(&a, from, sizeof a);
    return a;
}
inline void store(float* to, Vec a) { std::memcpy(to, &a, sizeof a); }
#if defined(__AVX2__)
inline Vec load(const bf16* from) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
inline Vec load(const f16* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
inline void store(f16* to, Vec a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}
#endif
template <class T>
inline Vec load(const T* from) {
    Vec a;
    for (int lane = 0; lane < kLanes; ++lane) a[lane] = widen_one(from[lane]);
    return a;
}
template <class T>
inline void store(T* to, Vec a) {
    for (int lane = 0; lane < kLanes; ++lane) to[lane] = narrow_one(a[lane], T{});
}

inline Vec keep_lanes(Vec a, int from, int to) {
    for (int lane = 0; lane < kLanes; ++lane) a[lane] = lane >= from && lane < to ? a[lane] : -INFINITY;
    return a;
}

#endif

// The first `count` lanes; the others load as zero and are not stored.
template <class T>
inline Vec load_first(const T* from, int64_t count) {
    if (count >= kLanes) return load(from);
    T padded[kLanes] = {};
    std::memcpy(padded, from, count * sizeof(T));
    return load(padded);
}
template <class T>
inline void store_first(T* to, Vec a, int64_t count) {
    if (count >= kLanes) return store(to, a);
    T padded[kLanes];
    store(padded, a);
    std::memcpy(to, padded, count * sizeof(T));
}

// `a` rounded to what T holds.
template <class T>
inline Vec round_to(Vec a) {
#if defined(__AVX512F__)
    return widen(narrow(a, T{}), T{});
#else
    T rounded[kLanes];
    store(rounded, a);
    return load(rounded);
#endif
}
template <>
inline Vec round_to<float>(Vec a) {
    return a;
}

// 2^x, relative error below 2e-7; exactly 1 at 0, exactly 0 below -127 and at minus infinity, infinity above 128.
//
// 2^x = 2^n 2^r with n the integer nearest to x; 2^r on [-1/2, 1/2] is a minimax polynomial with constant term 1.
inline Vec exp2(Vec x) {
#if defined(__AVX512F__)
    const Vec n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
    const Vec low = splat(-127.0f), high = splat(128.0f), magic = splat(12582912.0f);
    x = x < low ? low : x;
    x = x > high ? high : x;
    // Adding 1.5 * 2^23 leaves no room for a fraction: the sum is rounded to an integer.
    const Vec n = (x + magic) - magic;
#endif
    const Vec r = x - n;
    Vec p = splat(0.00132647273f);
    p = fma(p, r, splat(0.00967151299f));
    p = fma(p, r, splat(0.0555073358f));
    p = fma(p, r, splat(0.240222424f));
    p = fma(p, r, splat(0.693147004f));
    p = fma(p, r, splat(1.0f));
#if defined(__AVX512F__)
    // Below -126 the result is zero and not subnormal; a NaN is not below and stays.
    const __mmask16 normal = _mm512_cmp_ps_mask(x, splat(-126.0f), _CMP_NLT_UQ);
    return _mm512_maskz_scalef_ps(normal, p, n);
#else
    return p * (Vec)((__builtin_convertvector(n, IntVec) + 127) << 23);
#endif
}

// Absolute error below 3e-7; exactly -1 and 1 far from zero.
inline Vec tanh(Vec x) { return splat(1) - splat(2) / (splat(1) + exp2(x * splat(2.88539008f))); }

}  // namespace penstock::ISA
