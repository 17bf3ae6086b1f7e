// Repeats kernel calls that kernels/recording.py has recorded, one after another.
#include "common.h"

namespace {

// A function of PENSTOCK_RECORDABLE, and the index of its first argument among those of all calls.
struct Call {
    void (*run)(const int64_t* arguments);
    int64_t first;
};

}  // namespace

PENSTOCK_EXPORT(void, repeat)(const Call* calls, int64_t count, const int64_t* arguments) {
    for (int64_t i = 0; i < count; ++i) calls[i].run(arguments + calls[i].first);
}
