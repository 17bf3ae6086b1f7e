// The threads of the kernels. A call is divided into parts, and threads take parts as they come to it: the caller is one
// of them, and never waits for a thread that has not begun. On a machine with other work, where a thread may be without
// a core for milliseconds, the caller computes all parts itself; OpenMP would wait at the end of every region for
// threads with nothing to do.
#pragma once

#include <cstdint>

// Calls run(context, part) for every part in 0..parts, on at most `threads` threads. Which thread takes a part is not
// determined, so no result may depend on it. Calls may come from several threads at a time: one has the pool, and the
// others compute alone.
extern "C" void penstock_run_parts(int64_t parts, int64_t threads, void (*run)(const void* context, int64_t part),
                                   const void* context);

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

// run(index) for every index in 0..count, in parts that are worth a thread: each unit of `work` is worth about a
// nanosecond.
template <class Run>
void run_each(int64_t count, int64_t work, int64_t threads, const Run& run) {
    constexpr int64_t kWorkPerThread = 16384;
    const int64_t useful = count * work / kWorkPerThread;
    const int64_t parts = useful < 1 ? 1 : useful < threads ? useful : threads;
    run_parts(parts, threads, [&](int64_t part) {
        for (int64_t index = count * part / parts; index < count * (part + 1) / parts; ++index) run(index);
    });
}

}  // namespace
