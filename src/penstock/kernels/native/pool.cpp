#include "pool.h"
#include "waiting.h"

#include <atomic>
#include <cstdio>
#include <exception>
#include <mutex>
#include <pthread.h>
#include <sched.h>
#include <thread>

namespace {

// How long a thread looks for a new call before it sleeps: long enough to stay awake from one kernel to the next. Waking
// it costs the caller a system call, and on a virtual machine an exit to the hypervisor.
constexpr int64_t kAwakeNanoseconds = 100000;
constexpr int kSpinsPerClock = 50;
// The shortest part of a call that is worth a thread that is awake.
constexpr int64_t kLeastNanoseconds = 16384;
// What waking a thread costs until it has been measured, and the most that a measurement counts: the thread's core may have
// been taken away for longer.
constexpr int64_t kFirstCost = 65536, kMostCost = 1000000;
// How many times as long as estimated a call may take on a slow or busy machine.
constexpr int64_t kSlowest = 4;
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
        threads = start_threads(threads);
        run_ = run;
        context_ = context;
        num_unfinished_.store(parts, std::memory_order_relaxed);
        const uint64_t call = (state_.load(std::memory_order_relaxed) >> 32) + 1;
        places_.store(threads - 1, std::memory_order_relaxed);
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

    // See pool.h; `work` in nanoseconds.
    int64_t useful_threads(int64_t work, int64_t threads) {
        const int64_t most = larger(1, smaller(smaller(threads, most_threads_), work / kLeastNanoseconds));
        if (most == 1 || num_awake() >= most - 1) return most;
        // Other threads find other work, or none, in these two: they may wake a thread too early or too late for it.
        const int64_t now = nanoseconds(), cost = waking_.cost() + 2 * call_.cost();
        const bool goes_on = now - alone_until_.load(std::memory_order_relaxed) < kAwakeNanoseconds;
        const int64_t alone = work + (goes_on ? alone_.load(std::memory_order_relaxed) : 0);
        const bool is_worth_it = alone >= cost;
        alone_.store(is_worth_it ? 0 : alone, std::memory_order_relaxed);
        alone_until_.store(now + kSlowest * work, std::memory_order_relaxed);
        return is_worth_it ? most : 1;
    }

private:
    // A moving average of measured nanoseconds. Of two threads that add at once, one may be lost.
    class Average {
    public:
        explicit Average(int64_t first) : value_(first) {}
        int64_t cost() const { return value_.load(std::memory_order_relaxed); }
        void add(int64_t measured) {
            const int64_t value = cost();
            value_.store(value + (smaller(measured, kMostCost) - value) / 8, std::memory_order_relaxed);
        }

    private:
        std::atomic<int64_t> value_;
    };

    static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
    static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

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

    // Starts threads until there are as many, with the caller, or the system allows no more, and returns how many there are
    // of these. An exception would end the process: the callers of the kernels are not C++.
    int64_t start_threads(int64_t threads) {
        while (num_threads_ < smaller(threads, most_threads_) - 1) {
            try {
                std::thread([this] { serve(); }).detach();
                ++num_threads_;
            } catch (const std::exception& error) {
                most_threads_ = num_threads_ + 1;
                std::fprintf(stderr,
                             "The kernels of process %d have %lld of %lld threads from now on: the system allows no more "
                             "(%s). Raise its limit (ulimit -u or -v, or pids.max of the cgroup) or lower --num-threads\n",
                             getpid(), static_cast<long long>(most_threads_), static_cast<long long>(threads), error.what());
            }
        }
        return smaller(threads, most_threads_);
    }

    void serve() {
        for (;;) {
            const uint32_t seen = calls_.load(std::memory_order_seq_cst);
            if (places_.fetch_sub(1, std::memory_order_relaxed) > 0)
                while (take_part()) continue;
            const int64_t until = nanoseconds() + kAwakeNanoseconds;
            do {
                for (int spin = 0; spin < kSpinsPerClock && calls_.load(std::memory_order_relaxed) == seen; ++spin)
                    pause_briefly();
            } while (calls_.load(std::memory_order_relaxed) == seen && nanoseconds() < until);
            if (calls_.load(std::memory_order_seq_cst) != seen) continue;
            num_asleep_.fetch_add(1, std::memory_order_seq_cst);
            const bool was_woken = syscall(SYS_futex, &calls_, FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0) == 0;
            num_asleep_.fetch_sub(1, std::memory_order_seq_cst);
            if (was_woken) waking_.add(nanoseconds() - woken_at_.load(std::memory_order_relaxed));
        }
    }

    int64_t num_awake() const { return num_threads_ - num_asleep_.load(std::memory_order_seq_cst); }

    // Has `count` threads look for a call.
    void wake(int64_t count) {
        calls_.fetch_add(1, std::memory_order_seq_cst);
        const int64_t missing = count - num_awake();
        if (missing <= 0) return;
        const int64_t now = nanoseconds();
        woken_at_.store(now, std::memory_order_relaxed);
        const bool slept = syscall(SYS_futex, &calls_, FUTEX_WAKE_PRIVATE, static_cast<int>(missing), nullptr, nullptr, 0);
        if (slept) call_.add(nanoseconds() - now);
    }

    std::mutex mutex_;
    std::atomic<int64_t> num_threads_{0};
    std::atomic<int64_t> most_threads_{INT64_MAX};  // that the system allows, with the caller
    void (*run_)(const void*, int64_t) = nullptr;
    const void* context_ = nullptr;
    std::atomic<uint64_t> state_{0};
    std::atomic<int64_t> num_unfinished_{0};
    std::atomic<int64_t> places_{0};  // for threads besides the caller
    std::atomic<uint32_t> calls_{0};
    std::atomic<int32_t> num_asleep_{0};
    // Until a thread runs after it is woken, and the system call that wakes it.
    Average waking_{kFirstCost}, call_{0};
    std::atomic<int64_t> woken_at_{0};
    // How long the latest calls take that would have used threads that sleep, and when the last of them ends at the latest.
    std::atomic<int64_t> alone_{0}, alone_until_{0};
};

// Never destroyed: its threads run until the process ends. A forked process has none of them, and so a pool of its own.
Pool* current = new Pool;
__attribute__((constructor)) void replace_after_forks() {
    pthread_atfork(nullptr, nullptr, [] { current = new Pool; });
}
Pool& pool() { return *current; }

}  // namespace

void penstock_run_parts(int64_t parts, int64_t threads, void (*run)(const void* context, int64_t part),
                        const void* context) {
    pool().run(parts, threads, run, context);
}

int64_t penstock_useful_threads(int64_t nanoseconds, int64_t threads) {
    return pool().useful_threads(nanoseconds, threads);
}
