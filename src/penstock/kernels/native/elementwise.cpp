// Row-wise kernels around the matrix products: norms, rotary embedding with the store into the KV cache, activations.
//
// Arithmetic is fp32; a value is rounded to its storage type where the interface says so (kernels/<name>.py) and
// nowhere else. Sums run over a row in one fixed order.
#include <cmath>
#include <type_traits>

#include "activations.h"
#include "kv_rows.h"
#include "pool.h"

namespace penstock::ISA {
namespace {

// The sum over a row of `count`: add(i, part) adds the lanes from i on to one of four parts.
template <class Add>
PENSTOCK_INLINE float sum_row(int64_t count, const Add& add) {
    constexpr int kParts = 4;
    Vec parts[kParts] = {splat(0), splat(0), splat(0), splat(0)};
    int64_t i = 0;
    for (; i + kParts * kLanes <= count; i += kParts * kLanes)
        for (int part = 0; part < kParts; ++part) parts[part] = add(i + part * kLanes, parts[part]);
#pragma GCC unroll 4
    for (int part = 0; part < kParts; ++part, i += kLanes)
        if (i < count) parts[part] = add(i, parts[part]);
    return sum((parts[0] + parts[1]) + (parts[2] + parts[3]));
}

// 1 / sqrt(mean of squares + eps) of a row of `count`, whose lanes from i on are lanes(i).
template <class Lanes>
PENSTOCK_INLINE float inverse_rms(int64_t count, float eps, const Lanes& lanes) {
    const float total = sum_row(count, [&](int64_t i, Vec squares) {
        const Vec a = lanes(i);
        return fma(a, a, squares);
    });
    return 1.0f / std::sqrt(total / static_cast<float>(count) + eps);
}

// One vector of a normalised row: x times the inverse is rounded to T before a weight of T is applied, and not rounded
// before a weight of float.
template <class T, class W>
PENSTOCK_INLINE Vec normalized(Vec x, float inverse, const W* weight, int64_t count) {
    const Vec quotient = x * splat(inverse), w = load_first(weight, count);
    if constexpr (std::is_same_v<T, W>) return round_to<T>(quotient) * w;
    return quotient * w;
}

template <class T, class W>
void rms_norm_row(const T* x, T* residual, const W* weight, T* out, int64_t hidden, float eps) {
    const float inverse = inverse_rms(hidden, eps, [&](int64_t i) {
        Vec total = load_first(x + i, hidden - i);
        if (residual) {
            total = round_to<T>(total + load_first(residual + i, hidden - i));
            store_first(residual + i, total, hidden - i);
        }
        return total;
    });
    if (residual) x = residual;
    for (int64_t i = 0; i < hidden; i += kLanes) {
        const Vec a = load_first(x + i, hidden - i);
        store_first(out + i, normalized<T>(a, inverse, weight + i, hidden - i), hidden - i);
    }
}

template <class T, class W>
void rms_norm(const void* x, void* residual, const void* weight, void* out, int64_t rows, int64_t hidden, int64_t threads,
              float eps) {
    run_each(rows, hidden, threads, [&](int64_t row) {
        T* residual_row = residual ? static_cast<T*>(residual) + row * hidden : nullptr;
        rms_norm_row(static_cast<const T*>(x) + row * hidden, residual_row, static_cast<const W*>(weight),
                     static_cast<T*>(out) + row * hidden, hidden, eps);
    });
}

template <class T>
void silu_and_mul(const void* gate_up, void* out, int64_t rows, int64_t width, int64_t threads) {
    run_each(rows, width, threads, [&](int64_t row) {
        const T* gate = static_cast<const T*>(gate_up) + row * 2 * width;
        silu_and_mul_row(gate, gate + width, static_cast<T*>(out) + row * width, width);
    });
}

template <class T>
void multiply_by_sigmoid(void* x, const void* gate, int64_t rows, int64_t width, int64_t threads) {
    run_each(rows, width, threads, [&](int64_t row) {
        T* to = static_cast<T*>(x) + row * width;
        const T* from = static_cast<const T*>(gate) + row * width;
        for (int64_t i = 0; i < width; i += kLanes) {
            const Vec factor = splat(1) / sigmoid_denominator(load_first(from + i, width - i));
            store_first(to + i, load_first(to + i, width - i) * round_to<T>(factor), width - i);
        }
    });
}

// One vector of x + residual; `residual` may be null.
template <class T>
PENSTOCK_INLINE Vec sum_with(const T* x, const T* residual, int64_t count) {
    const Vec a = load_first(x, count);
    return residual ? a + load_first(residual, count) : a;
}

// `lanes` zeroed from the `count`-th on.
PENSTOCK_INLINE Vec only_first(Vec lanes, int64_t count) {
    if (count >= kLanes) return lanes;
    alignas(64) float values[kLanes];
    store(values, lanes);
    for (int64_t i = count; i < kLanes; ++i) values[i] = 0;
    return load(values);
}

template <class T>
void layer_norm_row(const T* x, const T* residual, const T* weight, const T* bias, T* out, int64_t hidden, float eps) {
    const auto lanes = [&](int64_t i) { return sum_with(x + i, residual ? residual + i : nullptr, hidden - i); };
    const float total = sum_row(hidden, [&](int64_t i, Vec part) { return part + only_first(lanes(i), hidden - i); });
    const Vec middle = splat(total / static_cast<float>(hidden));
    const float squares = sum_row(hidden, [&](int64_t i, Vec part) {
        const Vec distance = lanes(i) - middle;
        return part + only_first(distance * distance, hidden - i);
    });
    const Vec inverse = splat(1.0f / std::sqrt(squares / static_cast<float>(hidden) + eps));
    for (int64_t i = 0; i < hidden; i += kLanes) {
        const Vec w = load_first(weight + i, hidden - i), b = load_first(bias + i, hidden - i);
        store_first(out + i, fma((lanes(i) - middle) * inverse, w, b), hidden - i);
    }
}

template <class T>
void layer_norm(const void* x, const void* residual, const void* weight, const void* bias, void* out, int64_t rows,
                int64_t hidden, int64_t threads, float eps) {
    run_each(rows, hidden, threads, [&](int64_t row) {
        const T* residual_row = residual ? static_cast<const T*>(residual) + row * hidden : nullptr;
        layer_norm_row(static_cast<const T*>(x) + row * hidden, residual_row, static_cast<const T*>(weight),
                       static_cast<const T*>(bias), static_cast<T*>(out) + row * hidden, hidden, eps);
    });
}

// x Phi(x), with the normal distribution Phi by formula 7.1.26 of Abramowitz and Stegun for the error function, which
// is off by at most 1.5e-7. It gives the tail Phi(-|x|) itself, so that nothing is cancelled where x is negative.
PENSTOCK_INLINE Vec gelu_erf(Vec x) {
    const Vec magnitude = larger(x, splat(0) - x), z = magnitude * splat(0.70710678f);
    const Vec t = splat(1) / fma(splat(0.3275911f), z, splat(1));
    Vec p = splat(1.061405429f);
    p = fma(p, t, splat(-1.453152027f));
    p = fma(p, t, splat(1.421413741f));
    p = fma(p, t, splat(-0.284496736f));
    p = fma(p, t, splat(0.254829592f));
    const Vec tail = splat(0.5f) * p * t * exp2(z * z * splat(-1.44269504f));
    return larger(x, splat(0)) - magnitude * tail;
}

template <class T>
void gelu(void* x, int64_t rows, int64_t width, bool is_tanh, int64_t threads) {
    run_each(rows, width, threads, [&](int64_t row) {
        T* at = static_cast<T*>(x) + row * width;
        for (int64_t i = 0; i < width; i += kLanes) {
            const Vec a = load_first(at + i, width - i);
            store_first(at + i, is_tanh ? gelu_tanh(a) : gelu_erf(a), width - i);
        }
    });
}

template <class T>
void gelu_and_mul_row(const T* gate, const T* up, T* out, int64_t width) {
    for (int64_t i = 0; i < width; i += kLanes)
        store_first(out + i, gelu_erf(load_first(gate + i, width - i)) * load_first(up + i, width - i), width - i);
}

// Rows of `gate` and `up` begin every so many elements.
template <class T>
void gelu_and_mul(const void* gate, int64_t gate_stride, const void* up, int64_t up_stride, void* out, int64_t rows,
                  int64_t width, bool is_tanh, int64_t threads) {
    run_each(rows, width, threads, [&](int64_t row) {
        const T* from = static_cast<const T*>(gate) + row * gate_stride;
        const T* factor = static_cast<const T*>(up) + row * up_stride;
        T* to = static_cast<T*>(out) + row * width;
        is_tanh ? gelu_tanh_and_mul_row(from, factor, to, width) : gelu_and_mul_row(from, factor, to, width);
    });
}

template <class T>
void squared_relu(void* x, int64_t rows, int64_t width, int64_t threads) {
    run_each(rows, width, threads, [&](int64_t row) {
        T* at = static_cast<T*>(x) + row * width;
        squared_relu_row(at, at, width);
    });
}

// x (+ added, rounded to T) times the factor, in place; `added` may be null.
template <class T>
void add_and_scale(void* x, const void* added, int64_t rows, int64_t width, float factor, int64_t threads) {
    run_each(rows, width, threads, [&](int64_t row) {
        T* at = static_cast<T*>(x) + row * width;
        const T* from = added ? static_cast<const T*>(added) + row * width : nullptr;
        for (int64_t i = 0; i < width; i += kLanes) {
            Vec total = load_first(at + i, width - i);
            if (from) total = round_to<T>(total + load_first(from + i, width - i));
            store_first(at + i, total * splat(factor), width - i);
        }
    });
}

// cap tanh(x / cap), with tanh(u) = 1 - 2 / (1 + exp(2 u)).
template <class T>
void soft_cap(void* x, int64_t rows, int64_t width, float cap, int64_t threads) {
    const Vec slope = splat(2 * 1.44269504f / cap), limit = splat(cap), twice = splat(2 * cap);
    run_each(rows, width, threads, [&](int64_t row) {
        T* at = static_cast<T*>(x) + row * width;
        for (int64_t i = 0; i < width; i += kLanes) {
            const Vec a = load_first(at + i, width - i);
            store_first(at + i, limit - twice / (splat(1) + exp2(a * slope)), width - i);
        }
    });
}

void sigmoid(float* x, int64_t count) {
    for (int64_t i = 0; i < count; i += kLanes)
        store_first(x + i, splat(1) / sigmoid_denominator(load_first(x + i, count - i)), count - i);
}

struct Rope {
    const float* cos_sin;      // [max_pos, rotary_dim]: cosines, then sines
    const int64_t* positions;  // [T]
    const int64_t* slots;      // [T], -1 stores nothing
    const void* q_norm;        // [D] of W, or null
    const void* k_norm;        // [D] of W, or null
    const void* v_norm;        // [D] of W, or null
    int64_t tokens, num_heads, num_kv_heads, head_dim, rotary_dim, block_size, threads;
    float eps;
    bool latent;  // no values, which are part of the keys; else the cache has a second plane of them
};

// Rotates the half-split pairs (x[i], x[i + rotary_dim / 2]) of one head and copies the dimensions beyond rotary_dim.
// `x` may be `out`.
template <class T>
void rotate(const T* x, T* out, const float* cos_sin, int64_t rotary_dim, int64_t head_dim) {
    const int64_t half = rotary_dim / 2;
    for (int64_t i = 0; i < half; i += kLanes) {
        const Vec a = load_first(x + i, half - i), b = load_first(x + half + i, half - i);
        const Vec c = load_first(cos_sin + i, half - i), s = load_first(cos_sin + half + i, half - i);
        store_first(out + i, fma(a, c, splat(0) - b * s), half - i);
        store_first(out + half + i, fma(b, c, a * s), half - i);
    }
    if (x != out) std::memcpy(out + rotary_dim, x + rotary_dim, (head_dim - rotary_dim) * sizeof(T));
}

// Returns a head, normalised into `normed` if there is a norm.
template <class T, class W>
const T* norm_head(const Rope& rope, const T* x, T* normed, const W* norm) {
    if (!norm) return x;
    const auto lanes = [&](int64_t i) { return load_first(x + i, rope.head_dim - i); };
    const float inverse = inverse_rms(rope.head_dim, rope.eps, lanes);
    for (int64_t i = 0; i < rope.head_dim; i += kLanes) {
        const int64_t left = rope.head_dim - i;
        store_first(normed + i, normalized<T>(lanes(i), inverse, norm + i, left), left);
    }
    return normed;
}

template <class T, class W>
void rope_head(const Rope& rope, const T* x, T* out, const W* norm, int64_t token) {
    T normed[kMostHeadDim];
    x = norm_head(rope, x, normed, norm);
    const float* cos_sin = rope.cos_sin + rope.positions[token] * rope.rotary_dim;
    rotate(x, out, cos_sin, rope.rotary_dim, rope.head_dim);
}

// The key at `offset` of a block, the first of whose keys is at `keys`.
template <class T, class W>
void rotate_and_store(const Rope& rope, const T* x, T* keys, int64_t offset, const W* norm, int64_t token) {
    rope_head(rope, x, keys + offset * rope.head_dim, norm, token);
}
template <class T, class W, class C>
void rotate_and_store(const Rope& rope, const T* x, C* keys, int64_t offset, const W* norm, int64_t token) {
    T rotated[kMostHeadDim];
    rope_head(rope, x, rotated, norm, token);
    store_key(rotated, rope.head_dim, keys, offset);
}

// The cache consists of C.
template <class T, class W, class C>
void rope_and_store_kv(const Rope& rope, void* qkv, void* kv_cache) {
    const int64_t planes = rope.latent ? 1 : 2, dim = rope.head_dim;
    const int64_t heads = rope.num_heads + planes * rope.num_kv_heads;
    run_each(rope.tokens, heads * dim, rope.threads, [&](int64_t token) {
        T* q = static_cast<T*>(qkv) + token * heads * dim;
        for (int64_t head = 0; head < rope.num_heads; ++head)
            rope_head(rope, q + head * dim, q + head * dim, static_cast<const W*>(rope.q_norm), token);
        const int64_t slot = rope.slots[token];
        if (slot < 0 || rope.num_kv_heads == 0) return;
        const T* k = q + rope.num_heads * dim;
        const T* v = k + rope.num_kv_heads * dim;
        const int64_t head_stride = rope.block_size * row_size<C>(dim), value_offset = rope.num_kv_heads * head_stride;
        const int64_t offset = slot % rope.block_size;
        C* keys = static_cast<C*>(kv_cache) + slot / rope.block_size * planes * value_offset;
        T normed[kMostHeadDim];
        for (int64_t head = 0; head < rope.num_kv_heads; ++head, keys += head_stride) {
            rotate_and_store(rope, k + head * dim, keys, offset, static_cast<const W*>(rope.k_norm), token);
            if (rope.latent) continue;
            const T* value = norm_head(rope, v + head * dim, normed, static_cast<const W*>(rope.v_norm));
            store_value(value, dim, keys + value_offset, offset);
        }
    });
}

template <class T, class W>
void rope_and_store_kv(const Rope& rope, void* qkv, void* kv_cache, bool has_int8_cache) {
    has_int8_cache ? rope_and_store_kv<T, W, int8_t>(rope, qkv, kv_cache)
                   : rope_and_store_kv<T, W, T>(rope, qkv, kv_cache);
}

}  // namespace
}  // namespace penstock::ISA

using namespace penstock::ISA;

PENSTOCK_EXPORT(void, rms_norm)
(const void* x, void* residual, const void* weight, void* out, int64_t rows, int64_t hidden, int64_t threads, float eps,
 int32_t dtype, int32_t has_float_weight) {
#define CALL(T)                                                                                    \
    has_float_weight ? rms_norm<T, float>(x, residual, weight, out, rows, hidden, threads, eps) \
                     : rms_norm<T, T>(x, residual, weight, out, rows, hidden, threads, eps)
    PENSTOCK_BY_DTYPE(CALL)
#undef CALL
}
PENSTOCK_RECORDABLE(rms_norm)

PENSTOCK_EXPORT(void, silu_and_mul)
(const void* gate_up, void* out, int64_t rows, int64_t width, int64_t threads, int32_t dtype) {
#define CALL(T) silu_and_mul<T>(gate_up, out, rows, width, threads)
    PENSTOCK_BY_DTYPE(CALL)
#undef CALL
}
PENSTOCK_RECORDABLE(silu_and_mul)

PENSTOCK_EXPORT(void, layer_norm)
(const void* x, const void* residual, const void* weight, const void* bias, void* out, int64_t rows, int64_t hidden,
 int64_t threads, float eps, int32_t dtype) {
#define CALL(T) layer_norm<T>(x, residual, weight, bias, out, rows, hidden, threads, eps)
    PENSTOCK_BY_DTYPE(CALL)
#undef CALL
}
PENSTOCK_RECORDABLE(layer_norm)

PENSTOCK_EXPORT(void, gelu)
(void* x, int64_t rows, int64_t width, int64_t threads, int32_t is_tanh, int32_t dtype) {
#define CALL(T) gelu<T>(x, rows, width, is_tanh != 0, threads)
    PENSTOCK_BY_DTYPE(CALL)
#undef CALL
}
PENSTOCK_RECORDABLE(gelu)

PENSTOCK_EXPORT(void, gelu_and_mul)
(const void* gate, int64_t gate_stride, const void* up, int64_t up_stride, void* out, int64_t rows, int64_t width,
 int64_t threads, int32_t is_tanh, int32_t dtype) {
#define CALL(T) gelu_and_mul<T>(gate, gate_stride, up, up_stride, out, rows, width, is_tanh != 0, threads)
    PENSTOCK_BY_DTYPE(CALL)
#undef CALL
}
PENSTOCK_RECORDABLE(gelu_and_mul)

PENSTOCK_EXPORT(void, squared_relu)(void* x, int64_t rows, int64_t width, int64_t threads, int32_t dtype) {
#define CALL(T) squared_relu<T>(x, rows, width, threads)
    PENSTOCK_BY_DTYPE(CALL)
#undef CALL
}
PENSTOCK_RECORDABLE(squared_relu)

PENSTOCK_EXPORT(void, add_and_scale)
(void* x, const void* added, int64_t rows, int64_t width, int64_t threads, float factor, int32_t dtype) {
#define CALL(T) add_and_scale<T>(x, added, rows, width, factor, threads)
    PENSTOCK_BY_DTYPE(CALL)
#undef CALL
}
PENSTOCK_RECORDABLE(add_and_scale)

PENSTOCK_EXPORT(void, soft_cap)
(void* x, int64_t rows, int64_t width, int64_t threads, float cap, int32_t dtype) {
#define CALL(T) soft_cap<T>(x, rows, width, cap, threads)
    PENSTOCK_BY_DTYPE(CALL)
#undef CALL
}
PENSTOCK_RECORDABLE(soft_cap)

PENSTOCK_EXPORT(void, multiply_by_sigmoid)
(void* x, const void* gate, int64_t rows, int64_t width, int64_t threads, int32_t dtype) {
#define CALL(T) multiply_by_sigmoid<T>(x, gate, rows, width, threads)
    PENSTOCK_BY_DTYPE(CALL)
#undef CALL
}
PENSTOCK_RECORDABLE(multiply_by_sigmoid)

PENSTOCK_EXPORT(void, sigmoid)(float* x, int64_t count) { sigmoid(x, count); }

PENSTOCK_EXPORT(void, rope_and_store_kv)
(void* qkv, void* kv_cache, const float* cos_sin, const int64_t* positions, const int64_t* slots, const void* q_norm,
 const void* k_norm, const void* v_norm, int64_t tokens, int64_t num_heads, int64_t num_kv_heads, int64_t head_dim,
 int64_t rotary_dim, int64_t block_size, int64_t threads, float eps, int32_t dtype, int32_t latent,
 int32_t has_float_norms, int32_t has_int8_cache, int32_t in_pairs) {
    const Rope rope{cos_sin,      positions, slots,      q_norm,     k_norm,  v_norm, tokens,     num_heads,
                    num_kv_heads, head_dim,  rotary_dim, block_size, threads, eps,    latent != 0};
#if defined(__AVX512BF16__)
    if (in_pairs)
        return has_float_norms ? rope_and_store_kv<bf16, float, Paired>(rope, qkv, kv_cache)
                               : rope_and_store_kv<bf16, bf16, Paired>(rope, qkv, kv_cache);
#endif
#define CALL(T)                                                                        \
    has_float_norms ? rope_and_store_kv<T, float>(rope, qkv, kv_cache, has_int8_cache) \
                    : rope_and_store_kv<T, T>(rope, qkv, kv_cache, has_int8_cache)
    PENSTOCK_BY_DTYPE(CALL)
#undef CALL
}
PENSTOCK_RECORDABLE(rope_and_store_kv)
