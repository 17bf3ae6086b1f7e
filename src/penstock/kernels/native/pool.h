// The threads of the kernels. A call is divided into parts, and threads take the next part when they are free: the
// caller is one of them, and never waits for a thread that has not begun. On a machine with other work, a thread without
// a core delays only the part that it has begun; OpenMP would wait for it at the end of every region.
#pragma once

#include <cstdint>

// Calls run(context, part) for every part in 0..parts, on at most `threads` threads. Which thread takes a part is not
// determined, so no result may depend on it. Several threads may call concurrently: one uses the pool, and the others
// compute alone.
extern "C" void penstock_run_parts(int64_t parts, int64_t threads, void (*run)(const void* context, int64_t part),
                                   const void* context);

// How many threads, of `threads` at most, a call should use that takes one of them so many nanoseconds. A thread that is
// awake is worth a call of some microseconds; one that sleeps, a call that takes as long as waking it, or several of them.
extern "C" __attribute__((visibility("default"))) int64_t penstock_useful_threads(int64_t nanoseconds, int64_t threads);

namespace {

// run(part) for every part in 0..parts.
template <class Run>
void run_parts(int64_t parts, int64_t threads, const Run& run) {
    if (parts <= 1 || threads <= 1) {
        for (int64_t part = 0; part < parts; ++part) run(part);
        return;
    }
    penstock_run_parts(
        parts, threads, [](const void* context, int64_t part) { (*static_cast<const Run*>(context))(part); }, &run);
}

// Calls run(index) for every index in 0..count, each of which takes about `work` nanoseconds.
template <class Run>
void run_each(int64_t count, int64_t work, int64_t threads, const Run& run) {
    const int64_t parts = penstock_useful_threads(count * work, threads);
    run_parts(parts, threads, [&](int64_t part) {
        for (int64_t index = count * part / parts; index < count * (part + 1) / parts; ++index) run(index);
    });
}

}  // namespace
