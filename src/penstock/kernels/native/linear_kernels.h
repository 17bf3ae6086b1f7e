// The kernel of every type of layer on this instruction set.
#pragma once

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

// Calls `action` with the kernel of a type.
template <class Action>
auto with_kernel(int64_t dtype, Action action) {
    switch (dtype) {
        case kBFloat16: return action(BFloatKernel{});
        case kFloat16: return action(Fma<Half>{});
        default: return action(Fma<Float>{});
    }
}

}  // namespace
