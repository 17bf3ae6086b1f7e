// The kernel of every type of layer on this instruction set.
#pragma once

#include "linear_groups.h"

namespace {

// Calls `action` with the kernel of a type, for weights that are quantized as described or, where that is null, are not.
template <class Action>
auto with_kernel(int64_t dtype, const Quantization* quantization, Action action) {
    switch (dtype) {
        case kBFloat16:
            if (!quantization) return action(BFloatKernel{});
            if (quantization->kind == kSums) return action(IntegerSums{});
            switch (quantization->input_group) {
                case 0: return action(QuantizedKernel{});
                case 16: return action(GroupSums<16>{});
                default: return action(GroupSums<32>{});
            }
        case kFloat16: return action(Fma<Half>{});
        default: return action(Fma<Float>{});
    }
}

}  // namespace
