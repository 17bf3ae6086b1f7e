// Linear layers with packed weights: out = x @ weight.T + bias, in float32, rounded once to the type of x unless the
// layer's output is wide.
#include "linear.h"

#include "linear_fma.h"
#include "linear_pairs.h"

namespace {

#if defined(__AMX_BF16__)
using BFloatKernel = TilePairs;
#elif defined(__AVX512BF16__)
using BFloatKernel = DotPairs;
#else
using BFloatKernel = Fma<BFloat>;
#endif

// Calls `action` with the kernel of the layer's type.
template <class Action>
auto with_kernel(const Linear& layer, Action action) {
    switch (layer.dtype) {
        case kBFloat16: return action(BFloatKernel{});
        case kFloat16: return action(Fma<Half>{});
        default: return action(Fma<Float>{});
    }
}

}  // namespace

// Bytes of the packed weight.
PENSTOCK_EXPORT(int64_t, linear_packed_bytes)(const Linear* layer) {
    return with_kernel(*layer, [&](auto kernel) {
        return panel_bytes<decltype(kernel)>(*layer) * divide_up(layer->out_features, kPanel);
    });
}

// Packs `weight`, [out_features, in_features] in the layer's type, to `layer->weight`, aligned to 64 bytes.
PENSTOCK_EXPORT(void, linear_pack)(const Linear* layer, const void* weight, int64_t threads) {
    with_kernel(*layer, [&](auto kernel) { pack<decltype(kernel)>(*layer, weight, threads); });
}

// out [heads, rows, out_features] = x [heads, rows, in_features] @ weight [heads, out_features, in_features].T; the
// packed weights of the heads follow one another.
PENSTOCK_EXPORT(void, linear_heads)
(const Linear* layer, int64_t heads, const void* x, void* out, int64_t rows, int64_t threads) {
    with_kernel(*layer, [&](auto kernel) { multiply_heads<decltype(kernel)>(*layer, heads, x, out, rows, threads); });
}

// out [rows, out_features] = x [rows, in_features] @ weight.T + bias.
PENSTOCK_EXPORT(void, linear)(const Linear* layer, const void* x, void* out, int64_t rows, int64_t threads) {
    with_kernel(*layer, [&](auto kernel) { multiply<decltype(kernel)>(*layer, x, out, rows, threads); });
}
