// Products of pairs of bfloat16 on processors that have instructions for them.
#pragma once

#include "register.h"

#if defined(__AVX512BF16__)

namespace penstock::ISA {

// The compiler does not know that tile instructions access memory, nor that the control register is one of arithmetic.
inline void fence() { asm volatile("" ::: "memory"); }

// Subnormal operands and results are zeros meanwhile, as those of products of pairs are.
class FlushSubnormals {
public:
    FlushSubnormals() : before_(_mm_getcsr()) {
        _mm_setcsr(before_ | _MM_FLUSH_ZERO_ON | _MM_DENORMALS_ZERO_ON);
        fence();
    }
    ~FlushSubnormals() {
        fence();
        _mm_setcsr(before_);
    }
    FlushSubnormals(const FlushSubnormals&) = delete;

private:
    const unsigned before_;
};

// The even and the odd numbers of pairs, in float32.
PENSTOCK_INLINE Register even_of(__m512i pairs) { return (Register)_mm512_slli_epi32(pairs, 16); }
PENSTOCK_INLINE Register odd_of(__m512i pairs) {
    return (Register)_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000)));
}

#if !defined(__AMX_BF16__)

// Cycles that a number of products takes, by fused operations or by dot products.
template <bool kFused>
__attribute__((noinline)) uint64_t cycles_of_products() {
    constexpr int kSums = 12;  // enough to hide the latency of an operation
    Register sums[kSums]{};
    const Register x = spread(0);
    uint64_t shortest = ~uint64_t{0};
    for (int trial = 0; trial < 16; ++trial) {
        const uint64_t start = __builtin_ia32_rdtsc();
        for (int i = 0; i < 64; ++i) {
#pragma GCC unroll 12
            for (int number = 0; number < kSums; ++number) {
                Register& sum = sums[number];
                if constexpr (kFused)
                    sum = multiply_add(x, x, multiply_add(x, x, sum));
                else
                    sum = _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)x);
                asm volatile("" : "+v"(sum));
            }
        }
        const uint64_t cycles = __builtin_ia32_rdtsc() - start;
        shortest = cycles < shortest ? cycles : shortest;
    }
    return shortest;
}

// A dot product of pairs adds the product of the odd numbers and then that of the even ones, each fused, with subnormals as
// zeros (VDPBF16PS in Intel's Software Developer's Manual). So while there is a FlushSubnormals, two fused operations have
// the same bits, and on Intel's processors they take half the time. They are chosen where they are clearly faster.
struct Products {
    bool fused = cycles_of_products<true>() * 5 < cycles_of_products<false>() * 4;
};
inline Products& products() {
    static Products chosen;
    return chosen;
}
inline bool fuses_products() { return products().fused; }

// Calls f(fused), with `fused` as a constant of its type.
template <class F>
inline void with_products(bool fused, const F& f) {
    if (!fused) return f(std::false_type{});
    const FlushSubnormals meanwhile;
    f(std::true_type{});
}

#endif

}  // namespace penstock::ISA

#endif
