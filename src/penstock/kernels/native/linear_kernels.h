// The kernel of every type of layer on this instruction set.
#pragma once

#include "linear_integers.h"
#include "linear_quantized.h"

namespace {

// Calls `action` with the kernel of a type, for weights that are quantized as described or, where that is null, are not.
template <class Action>
auto with_kernel(int64_t dtype, const Quantization* quantization, Action action) {
    switch (dtype) {
        case kBFloat16:
            if (!quantization) return action(BFloatKernel{});
            return quantization->kind == kSums ? action(IntegerSums{}) : action(QuantizedKernel{});
        case kFloat16: return action(Fma<Half>{});
        default: return action(Fma<Float>{});
    }
}

}  // namespace
