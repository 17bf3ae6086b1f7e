// One register of float32 lanes under one name for every instruction set, and the storage types that it reads and
// writes. Every operation has the same result in every set, bit for bit but for the payload of a NaN; only the narrowing
// of AVX512-BF16 differs, which takes subnormal numbers for zero.
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
#elif defined(__aarch64__)
#include <arm_neon.h>
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

using Register = __m512;
constexpr int kRegisterLanes = 16;

inline Register spread(float value) { return _mm512_set1_ps(value); }
inline Register multiply_add(Register a, Register b, Register sum) { return _mm512_fmadd_ps(a, b, sum); }

inline Register widen(__m256i bits, bf16) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
inline Register widen(__m256i bits, f16) { return _mm512_cvtph_ps(bits); }
#if defined(__AVX512BF16__)
inline __m256i narrow(Register a, bf16) { return (__m256i)_mm512_cvtneps_pbh(a); }
#else
// To nearest even by adding half a unit, or just under it; a NaN keeps its top half, made quiet.
inline __m256i narrow(Register a, bf16) {
    const __m512i bits = _mm512_castps_si512(a);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    const __mmask16 is_nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
    const __m512i kept = _mm512_mask_or_epi32(rounded, is_nan, bits, _mm512_set1_epi32(0x400000));
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(kept, 16));
}
#endif
inline __m256i narrow(Register a, f16) { return _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT); }

inline Register read(const float* from) { return _mm512_loadu_ps(from); }
inline Register read(const int8_t* from) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
}
inline void write(float* to, Register a) { _mm512_storeu_ps(to, a); }
template <class T>
inline Register read(const T* from) {
    return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)), T{});
}
template <class T>
inline void write(T* to, Register a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), narrow(a, T{}));
}

#elif defined(__AVX2__)

using Register = __m256;
constexpr int kRegisterLanes = 8;

inline Register spread(float value) { return _mm256_set1_ps(value); }
inline Register multiply_add(Register a, Register b, Register sum) { return _mm256_fmadd_ps(a, b, sum); }

inline Register read(const float* from) { return _mm256_loadu_ps(from); }
inline Register read(const int8_t* from) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
}
inline Register read(const bf16* from) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
inline Register read(const f16* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
inline void write(float* to, Register a) { _mm256_storeu_ps(to, a); }
// The upper half of every lane is `a` as bf16. To nearest even by adding half a unit, or just under it; a NaN keeps its top
// half, made quiet.
inline __m256i round_upper(Register a) {
    const __m256i bits = _mm256_castps_si256(a);
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
    const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
    return _mm256_blendv_epi8(rounded, quiet, is_nan);
}
// Writes the lanes of both.
inline void write(bf16* to, Register a, Register b) {
    const __m256i narrow =
        _mm256_packus_epi32(_mm256_srli_epi32(round_upper(a), 16), _mm256_srli_epi32(round_upper(b), 16));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_permute4x64_epi64(narrow, 0b11011000));
}
inline void write(bf16* to, Register a) {
    const __m256i high = _mm256_srli_epi32(round_upper(a), 16);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                     _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1)));
}
inline void write(f16* to, Register a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT));
}

#else

// Four lanes: NEON's, or the compiler's own vectors on whatever processor.
typedef float Register __attribute__((vector_size(16)));
constexpr int kRegisterLanes = 4;

inline Register spread(float value) { return Register{value, value, value, value}; }
inline Register read(const float* from) {
    Register a;
    std::memcpy(&a, from, sizeof a);
    return a;
}
inline void write(float* to, Register a) { std::memcpy(to, &a, sizeof a); }

#if defined(__aarch64__)

inline Register multiply_add(Register a, Register b, Register sum) { return vfmaq_f32(sum, a, b); }
inline Register read(const int8_t* from) {
    uint32_t four;
    std::memcpy(&four, from, sizeof four);
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u32(vdup_n_u32(four))))));
}
inline Register read(const bf16* from) {
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(reinterpret_cast<const uint16_t*>(from)), 16));
}
inline Register read(const f16* from) {
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(reinterpret_cast<const uint16_t*>(from))));
}
// To nearest even by adding half a unit, or just under it; a NaN keeps its top half, made quiet.
inline void write(bf16* to, Register a) {
    const uint32x4_t bits = vreinterpretq_u32_f32(a);
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    const uint32x4_t quiet = vorrq_u32(bits, vdupq_n_u32(0x400000));
    const uint16x4_t narrow = vshrn_n_u32(vbslq_u32(vceqq_f32(a, a), rounded, quiet), 16);
    vst1_u16(reinterpret_cast<uint16_t*>(to), narrow);
}
inline void write(f16* to, Register a) {
    vst1_u16(reinterpret_cast<uint16_t*>(to), vreinterpret_u16_f16(vcvt_f16_f32(a)));
}

#else

inline Register multiply_add(Register a, Register b, Register sum) {
    for (int lane = 0; lane < kRegisterLanes; ++lane) sum[lane] = __builtin_fmaf(a[lane], b[lane], sum[lane]);
    return sum;
}
inline float widen_one(int8_t a) { return a; }
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
template <class T>
inline Register read(const T* from) {
    return Register{widen_one(from[0]), widen_one(from[1]), widen_one(from[2]), widen_one(from[3])};
}
template <class T>
inline void write(T* to, Register a) {
    for (int lane = 0; lane < kRegisterLanes; ++lane) to[lane] = narrow_one(a[lane], T{});
}

#endif

#endif

}  // namespace penstock::ISA
