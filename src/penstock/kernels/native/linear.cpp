// Linear layers with packed weights: out = x @ weight.T + bias, in float32, rounded once to the type of x unless the
// layer's output is wide.
#include "linear_kernels.h"

// Bytes of the packed weight.
PENSTOCK_EXPORT(int64_t, linear_packed_bytes)(const Linear* layer) {
    return with_kernel(layer->dtype, layer->quantization, [&](auto kernel) {
        return panel_bytes<decltype(kernel)>(layer->quantization, layer->in_features) *
               divide_up(layer->out_features, kPanel);
    });
}

// Packs `weight`, [out_features, in_features] in the layer's type, to `layer->weight`, aligned to 64 bytes.
PENSTOCK_EXPORT(void, linear_pack)(const Linear* layer, const void* weight, int64_t threads) {
    with_kernel(layer->dtype, nullptr, [&](auto kernel) {
        if constexpr (!kIsQuantized<decltype(kernel)>) pack<decltype(kernel)>(*layer, weight, threads);
    });
}

// Packs codes, [out_features, in_features], and scales, zeros and minima, each [out_features, groups] in the type of the
// layer's quantization; zeros and minima may be null. Where groups share factors, these are in the place of zeros.
PENSTOCK_EXPORT(void, linear_pack_quantized)
(const Linear* layer, const uint8_t* codes, const char* scales, const char* zeros, const char* minima, int64_t threads) {
    with_kernel(layer->dtype, layer->quantization, [&](auto kernel) {
        using Kernel = decltype(kernel);
        if constexpr (kIsQuantized<Kernel>) {
            const Quantization& quantization = *layer->quantization;
            const int64_t bytes = panel_bytes<Kernel>(&quantization, layer->in_features);
            const int64_t groups = divide_up(layer->in_features, quantization.group);
            const int64_t row_bytes = groups * QuantizedPanel::number_bytes(quantization);
            const int64_t blocks = quantization.factor_groups ? divide_up(groups, quantization.factor_groups) : 0;
            const int64_t second_bytes = blocks ? blocks * 2 * (minima ? 2 : 1) : row_bytes;
            pack_panels(*layer, threads, [&](int64_t panel, int64_t first, int64_t columns) {
                const int64_t at = first * row_bytes;
                const char* numbers[3] = {scales + at, zeros ? zeros + first * second_bytes : nullptr,
                                          minima ? minima + at : nullptr};
                Kernel::pack_panel(quantization, codes + first * layer->in_features, numbers,
                                   const_cast<char*>(layer->weight) + panel * bytes, columns, layer->in_features);
            });
        }
    });
}

// Writes the values of a layer that rounds its inputs in groups, [out_features, in_features], rounded to bfloat16.
PENSTOCK_EXPORT(void, linear_unpack)(const Linear* layer, uint16_t* out, int64_t threads) {
    using Kernel = GroupSums<kUnit>;  // the panels are those of all groups
    const int64_t k = layer->in_features, bytes = Kernel::panel_bytes(*layer->quantization, k);
    pack_panels(*layer, threads, [&](int64_t panel, int64_t first, int64_t columns) {
        Kernel::unpack_panel(*layer->quantization, layer->weight + panel * bytes, out + first * k, columns, k);
    });
}

#if defined(__AVX512BF16__) && !defined(__AMX_BF16__)
// Returns whether products of pairs are fused, and has them fused or not from now on, unless `fused` is negative.
PENSTOCK_EXPORT(int64_t, fuse_products)(int64_t fused) {
    bool& chosen = penstock::ISA::products().fused;
    const bool before = chosen;
    if (fused >= 0) chosen = fused != 0;
    return before;
}
#endif

// out [rows, out_features] = x [rows, in_features] @ weight.T + bias. Rows of `out` are out_stride elements apart.
PENSTOCK_EXPORT(void, linear)
(const Linear* layer, const void* x, void* out, int64_t out_stride, int64_t rows, int64_t threads) {
    with_kernel(layer->dtype, layer->quantization,
                [&](auto kernel) { multiply<decltype(kernel)>(*layer, x, out, out_stride, rows, threads); });
}
PENSTOCK_RECORDABLE(linear)
