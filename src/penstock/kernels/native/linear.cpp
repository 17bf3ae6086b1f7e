// Linear layers with packed weights: out = x @ weight.T + bias, in float32, rounded once to the type of x unless the
// layer's output is wide.
#include "linear_kernels.h"

// Bytes of the packed weight.
PENSTOCK_EXPORT(int64_t, linear_packed_bytes)(const Linear* layer) {
    return with_kernel(layer->dtype, [&](auto kernel) {
        return panel_bytes<decltype(kernel)>(layer->in_features) * divide_up(layer->out_features, kPanel);
    });
}

// Packs `weight`, [out_features, in_features] in the layer's type, to `layer->weight`, aligned to 64 bytes.
PENSTOCK_EXPORT(void, linear_pack)(const Linear* layer, const void* weight, int64_t threads) {
    with_kernel(layer->dtype, [&](auto kernel) { pack<decltype(kernel)>(*layer, weight, threads); });
}

// out [rows, out_features] = x [rows, in_features] @ weight.T + bias.
PENSTOCK_EXPORT(void, linear)(const Linear* layer, const void* x, void* out, int64_t rows, int64_t threads) {
    with_kernel(layer->dtype, [&](auto kernel) { multiply<decltype(kernel)>(*layer, x, out, rows, threads); });
}
PENSTOCK_RECORDABLE(linear)
