#include "pool.h"
#include "waiting.h"

#include <atomic>
#include <mutex>
#include <sched.h>
#include <thread>

namespace {

// How long a thread looks for a new call before it sleeps: long enough to stay awake from one kernel to the next. Waking
// it costs the caller a system call, and on a virtual machine an exit to the hypervisor.
constexpr int64_t kAwakeNanoseconds = 100000;
constexpr int kSpinsPerClock = 50;
// How often the caller looks for the end of the last parts before it yields its core each time.
constexpr int kSpins = 2000;
constexpr int64_t kMostParts = (1 << 16) - 1;

// A call, and which of its parts are taken: its number (32 bits), how many parts it has (16) and how many of them are
// taken (16). A part is taken by adding one, which fails if another call has begun since. The rest of a call is read
// after a part has been taken, so it cannot be replaced meanwhile: the caller waits for all parts.
class Pool {
public:
    void run(int64_t parts, int64_t threads, void (*run)(const void*, int64_t), const void* context) {
        std::unique_lock<std::mutex> owner(mutex_, std::try_to_lock);
        if (!owner.owns_lock() || parts > kMostParts) {
            for (int64_t part = 0; part < parts; ++part) run(context, part);
            return;
        }
        while (num_threads_ < threads - 1) start_thread();
        run_ = run;
        context_ = context;
        num_unfinished_.store(parts, std::memory_order_relaxed);
        const uint64_t call = (state_.load(std::memory_order_relaxed) >> 32) + 1;
        allowed_.store(threads - 1, std::memory_order_relaxed);
        state_.store(call << 32 | static_cast<uint64_t>(parts) << 16, std::memory_order_seq_cst);
        wake(smaller(parts, threads) - 1);
        while (take_part()) continue;
        for (int spin = 0; num_unfinished_.load(std::memory_order_acquire) > 0; ++spin) {
            // The thread that has the last part may be waiting for this very core.
            if (spin < kSpins)
                pause_briefly();
            else
                sched_yield();
        }
    }

private:
    static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

    // Returns whether there was one.
    bool take_part() {
        uint64_t state = state_.load(std::memory_order_acquire);
        uint64_t taken;
        do {
            taken = state & 0xffff;
            if (taken == (state >> 16 & 0xffff)) return false;
        } while (!state_.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel));
        run_(context_, static_cast<int64_t>(taken));
        num_unfinished_.fetch_sub(1, std::memory_order_release);
        return true;
    }

    void start_thread() {
        const int64_t number = num_threads_++;
        std::thread([this, number] { serve(number); }).detach();
    }

    void serve(int64_t number) {
        for (;;) {
            const uint32_t seen = calls_.load(std::memory_order_seq_cst);
            if (number < allowed_.load(std::memory_order_relaxed))
                while (take_part()) continue;
            const int64_t until = nanoseconds() + kAwakeNanoseconds;
            do {
                for (int spin = 0; spin < kSpinsPerClock && calls_.load(std::memory_order_relaxed) == seen; ++spin)
                    pause_briefly();
            } while (calls_.load(std::memory_order_relaxed) == seen && nanoseconds() < until);
            if (calls_.load(std::memory_order_seq_cst) != seen) continue;
            num_asleep_.fetch_add(1, std::memory_order_seq_cst);
            syscall(SYS_futex, &calls_, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
            num_asleep_.fetch_sub(1, std::memory_order_seq_cst);
        }
    }

    void wake(int64_t count) {
        calls_.fetch_add(1, std::memory_order_seq_cst);
        if (num_asleep_.load(std::memory_order_seq_cst) > 0)
            syscall(SYS_futex, &calls_, FUTEX_WAKE_PRIVATE, static_cast<int>(count), nullptr, nullptr, 0);
    }

    std::mutex mutex_;
    int64_t num_threads_ = 0;
    void (*run_)(const void*, int64_t) = nullptr;
    const void* context_ = nullptr;
    std::atomic<uint64_t> state_{0};
    std::atomic<int64_t> num_unfinished_{0};
    std::atomic<int64_t> allowed_{0};  // threads besides the caller
    std::atomic<uint32_t> calls_{0};
    std::atomic<int32_t> num_asleep_{0};
};

// Never destroyed: its threads run until the process ends.
Pool& pool() {
    static Pool* const only = new Pool;
    return *only;
}

}  // namespace

void penstock_run_parts(int64_t parts, int64_t threads, void (*run)(const void* context, int64_t part),
                        const void* context) {
    pool().run(parts, threads, run, context);
}
