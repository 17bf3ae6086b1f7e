// Activations, and gated ones of a row: gate [width] and up [width] -> out [width], float32 throughout, rounded to T once.
#pragma once

#include "vec.h"

namespace penstock::ISA {
namespace {

PENSTOCK_INLINE Vec sigmoid_denominator(Vec x) { return splat(1) + exp2(x * splat(-1.44269504f)); }

// log(1 + e^x), relative error below 1e-6.
PENSTOCK_INLINE Vec softplus(Vec x) {
    const Vec zero = splat(0), magnitude = larger(x, zero - x), u = exp2(magnitude * splat(-1.44269504f));
    // log(1 + u) = 2 artanh(s), and s is at most a third.
    const Vec s = u / (u + splat(2)), square = s * s;
    Vec series = splat(2.0f / 15);
    for (int odd = 13; odd > 0; odd -= 2) series = fma(series, square, splat(2.0f / static_cast<float>(odd)));
    return fma(series, s, larger(x, zero));
}

// silu(gate) * up (kernels/silu_and_mul.py).
template <class T>
void silu_and_mul_row(const T* gate, const T* up, T* out, int64_t width) {
    for (int64_t i = 0; i < width; i += kLanes) {
        const Vec g = load_first(gate + i, width - i), u = load_first(up + i, width - i);
        store_first(out + i, g / sigmoid_denominator(g) * u, width - i);
    }
}

// x / 2 (1 + tanh(u)) = x / (1 + exp(-2 u)) with u = sqrt(2 / pi) (x + 0.044715 x^3).
PENSTOCK_INLINE Vec gelu_tanh(Vec x) {
    const Vec u = splat(0.79788456f) * fma(splat(0.044715f) * x * x, x, x);
    return x / (splat(1) + exp2(u * splat(-2 * 1.44269504f)));
}

// gelu(gate) * up with the approximation by a hyperbolic tangent (kernels/gelu.py).
template <class T>
void gelu_tanh_and_mul_row(const T* gate, const T* up, T* out, int64_t width) {
    for (int64_t i = 0; i < width; i += kLanes)
        store_first(out + i, gelu_tanh(load_first(gate + i, width - i)) * load_first(up + i, width - i), width - i);
}

// gpt-oss' activation (clamped_swiglu in kernels/experts.py).
template <class T>
void clamped_swiglu_row(const T* gate, const T* up, T* out, int64_t width) {
    constexpr float kAlpha = 1.702f, kLimit = 7.0f;
    const Vec zero = splat(0), limit = splat(kLimit);
    for (int64_t i = 0; i < width; i += kLanes) {
        // The smaller of two is minus the larger of their negatives. A NaN stays one in `larger` as its second operand.
        const Vec g = zero - larger(zero - limit, zero - load_first(gate + i, width - i));
        const Vec low = zero - larger(zero - limit, zero - load_first(up + i, width - i));
        const Vec u = larger(zero - limit, low);
        store_first(out + i, (u + splat(1)) * (g / sigmoid_denominator(g * splat(kAlpha))), width - i);
    }
}

// max(x, 0)^2, which may be in place (kernels/relu.py). A NaN stays one in `larger` as its second operand.
template <class T>
void squared_relu_row(const T* x, T* out, int64_t width) {
    for (int64_t i = 0; i < width; i += kLanes) {
        const Vec positive = larger(splat(0), load_first(x + i, width - i));
        store_first(out + i, positive * positive, width - i);
    }
}

}  // namespace
}  // namespace penstock::ISA
