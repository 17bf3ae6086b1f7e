// Reports which of the compiled instruction sets this processor supports, and from which sources they were compiled.
#include <cstring>

#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>

static bool amx_permitted() {
    // Linux grants the AMX tile registers on request: ARCH_REQ_XCOMP_PERM for XFEATURE_XTILEDATA.
    return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
}
#elif defined(__x86_64__)
static bool amx_permitted() { return false; }
#elif defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

extern "C" __attribute__((visibility("default"))) const char* penstock_sources() { return PENSTOCK_SOURCES; }

extern "C" __attribute__((visibility("default"))) int penstock_supports(const char* isa) {
    if (std::strcmp(isa, "generic") == 0) return 1;
#if defined(__x86_64__)
    __builtin_cpu_init();
    bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    bool avx512_bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
    if (std::strcmp(isa, "avx2") == 0) return avx2;
    if (std::strcmp(isa, "avx512") == 0) return avx512;
    if (std::strcmp(isa, "avx512_bf16") == 0) return avx512_bf16;
    if (std::strcmp(isa, "amx") == 0) {
        // gcc 12 cannot test for AMX by name: leaf 7, EDX bit 22 is amx-bf16, bit 24 amx-tile, bit 25 amx-int8.
        unsigned a = 7, b, c = 0, d;
        __asm__ volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
        const bool has_all = (d >> 22 & 1) && (d >> 24 & 3) == 3 && __builtin_cpu_supports("avx512vnni");
        return avx512_bf16 && has_all && amx_permitted();
    }
#elif defined(__aarch64__) && defined(__linux__)
    const bool neon = (getauxval(AT_HWCAP) & HWCAP_ASIMD) != 0;
    const unsigned long more = getauxval(AT_HWCAP2);
    if (std::strcmp(isa, "neon") == 0) return neon;
    if (std::strcmp(isa, "neon_bf16") == 0) return neon && (more & HWCAP2_BF16) && (more & HWCAP2_I8MM);
#endif
    return 0;
}
