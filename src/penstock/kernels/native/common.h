// Shared by every kernel source. Each source is compiled once per instruction set with -DISA=<name>; an exported
// function is declared as PENSTOCK_EXPORT(int, name)(...) and gets the C symbol penstock_<name>_<isa>.
//
// Contract of every kernel: pointers are to contiguous memory unless a stride is passed; sizes are in elements; it
// neither allocates per call on the hot path nor throws; and a row's result depends on that row alone, never on how
// many other rows are in the call, nor on the number of threads.
//
// Whatever is not exported lives in an anonymous namespace, and no template of the standard library is instantiated:
// the linker would keep one copy of a shared function for all instruction sets, perhaps one that this processor lacks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>

#ifndef ISA
#error "compile with -DISA=<instruction set>"
#endif

// For functions that take or return vectors: a call that is not inlined would pass those of several registers in memory.
#define PENSTOCK_INLINE inline __attribute__((always_inline))

#define PENSTOCK_CONCAT_(a, b, c) a##b##_##c
#define PENSTOCK_CONCAT(a, b, c) PENSTOCK_CONCAT_(a, b, c)
#define PENSTOCK_EXPORT(type, name) \
    extern "C" __attribute__((visibility("default"))) type PENSTOCK_CONCAT(penstock_, name, ISA)

// Follows the definition of an exported function without a result, and defines another one that takes its arguments from
// an array, each in the first bytes of 64 bits: kernels/recording.py. Whatever a call depends on must be an argument, and
// memory at addresses among the arguments.
#define PENSTOCK_RECORDABLE(name)                                                           \
    PENSTOCK_EXPORT(void, name##_recorded)(const int64_t* arguments) {                      \
        call_recorded(PENSTOCK_CONCAT(penstock_, name, ISA), arguments);                    \
    }

namespace {

template <class T>
T recorded_argument(const int64_t* argument) {
    T value;
    memcpy(&value, argument, sizeof value);
    return value;
}

template <class... Arguments, size_t... kIndices>
void call_recorded(void (*function)(Arguments...), const int64_t* arguments, std::index_sequence<kIndices...>) {
    function(recorded_argument<Arguments>(arguments + kIndices)...);
}

template <class... Arguments>
void call_recorded(void (*function)(Arguments...), const int64_t* arguments) {
    call_recorded(function, arguments, std::index_sequence_for<Arguments...>{});
}

}  // namespace

// Storage types as numbered in kernels/native.py.
enum DType : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

// Calls the macro `call` with the type that `dtype` names.
#define PENSTOCK_BY_DTYPE(call)           \
    switch (dtype) {                      \
        case kFloat32: return call(float); \
        case kBFloat16: return call(bf16); \
        case kFloat16: return call(f16);   \
    }

namespace {

// Transposes a block of 4 x 4 numbers of 32 bits. Strides are the distances of rows, in numbers.
inline void transpose_four(const void* from, int64_t from_stride, void* to, int64_t to_stride) {
    typedef uint32_t Four __attribute__((vector_size(16)));
    Four row[4];
    for (int64_t i = 0; i < 4; ++i) std::memcpy(&row[i], static_cast<const char*>(from) + i * from_stride * 4, 16);
    const Four low[2] = {__builtin_shufflevector(row[0], row[1], 0, 4, 1, 5),
                         __builtin_shufflevector(row[2], row[3], 0, 4, 1, 5)};
    const Four high[2] = {__builtin_shufflevector(row[0], row[1], 2, 6, 3, 7),
                          __builtin_shufflevector(row[2], row[3], 2, 6, 3, 7)};
    const Four column[4] = {__builtin_shufflevector(low[0], low[1], 0, 1, 4, 5),
                            __builtin_shufflevector(low[0], low[1], 2, 3, 6, 7),
                            __builtin_shufflevector(high[0], high[1], 0, 1, 4, 5),
                            __builtin_shufflevector(high[0], high[1], 2, 3, 6, 7)};
    for (int64_t i = 0; i < 4; ++i) std::memcpy(static_cast<char*>(to) + i * to_stride * 4, &column[i], 16);
}

}  // namespace
