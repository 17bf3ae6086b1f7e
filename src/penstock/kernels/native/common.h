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

#ifndef ISA
#error "compile with -DISA=<instruction set>"
#endif

#define PENSTOCK_CONCAT_(a, b, c) a##b##_##c
#define PENSTOCK_CONCAT(a, b, c) PENSTOCK_CONCAT_(a, b, c)
#define PENSTOCK_EXPORT(type, name) \
    extern "C" __attribute__((visibility("default"))) type PENSTOCK_CONCAT(penstock_, name, ISA)

// Storage types as numbered in kernels/native.py.
enum DType : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };
