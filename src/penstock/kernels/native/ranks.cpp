// The exchange between the ranks of one engine through memory that all of them map: gathers of columns among the ranks
// of a stage, and byte streams between two ranks. A rank is a process or a thread. `parallel/rank_memory.py` defines
// the layout of the memory, which is initially zero; `kernels/rank_exchange.py` declares these functions and has the
// same in Python.
//
// Every wait ends after a tenth of a second at the latest with kPending, so that the interpreter can handle signals and
// the caller can check whether the engine still exists; the caller then continues where it stopped.
#include "waiting.h"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <cstring>

namespace {

constexpr int32_t kDone = 0, kPending = 1, kLost = 2, kDisagree = 3;
constexpr int64_t kSliceNanoseconds = 100000000;
// The bytes of a long message that are copied before the other side is notified.
constexpr int64_t kChunk = 256 << 10;

using Word = std::atomic<uint32_t>;
static_assert(sizeof(Word) == 4 && Word::is_always_lock_free, "a futex is a plain word of 32 bits");

// Words that different ranks write are two cache lines apart: processors fetch lines in pairs.
struct GroupControl {
    alignas(128) Word num_arrived;
    std::atomic<uint64_t> shapes;  // the sum over the ranks that have arrived
    alignas(128) Word calls;       // at which every rank has arrived
    alignas(128) Word num_asleep;
    alignas(128) Word left;  // set when a rank of the group will make no more calls
};
static_assert(sizeof(GroupControl) == 512, "see parallel/rank_memory.py");

struct ChannelControl {
    alignas(128) Word written;  // bytes, modulo 2^32, as `read`
    // The byte at the ring's start. The writer moves it when the ring is empty, so that small messages reuse the same
    // few pages; it does not move while there is data to read.
    Word base;
    alignas(128) Word read;
    alignas(128) Word readers_asleep;
    alignas(128) Word writers_asleep;
    alignas(128) Word left;  // set when either side will no longer use the channel
};
static_assert(sizeof(ChannelControl) == 640, "see parallel/rank_memory.py");

// Each rank has its own two, in private memory.
struct Group {
    const Word* aborted;
    GroupControl* control;
    int64_t spin_nanoseconds;
    uint32_t index;
    uint32_t count;
    uint32_t calls;
};

struct Channel {
    const Word* aborted;
    ChannelControl* control;
    int64_t spin_nanoseconds;
    char* ring;
    uint32_t size;  // a power of two
};

// The ranks may be processes, so the futex is not a private one.
int sleep_on(Word& word, uint32_t seen, int64_t for_nanoseconds) {
    const timespec time = {for_nanoseconds / 1000000000, for_nanoseconds % 1000000000};
    return syscall(SYS_futex, &word, FUTEX_WAIT, seen, &time, nullptr, 0) == 0 ? 0 : errno;
}

// Sequentially consistent on both sides: either the writer sees that a rank sleeps, or the sleeper sees the new value.
void publish(Word& word, uint32_t value, const Word& num_asleep) {
    word.store(value, std::memory_order_seq_cst);
    if (num_asleep.load(std::memory_order_seq_cst) > 0)
        syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// Waits for `ready(value of word)`.
template <class Ready>
int32_t wait(Word& word, Word& num_asleep, const Word& aborted, const Word& left, int64_t spin_nanoseconds,
             const Ready& ready) {
    if (ready(word.load(std::memory_order_acquire))) return kDone;
    if (spin_nanoseconds > 0) {
        const int64_t end = nanoseconds() + spin_nanoseconds;
        do {
            for (int spin = 0; spin < 16; ++spin) {
                pause_briefly();
                if (ready(word.load(std::memory_order_acquire))) return kDone;
            }
        } while (nanoseconds() < end);
    }
    const int64_t end = nanoseconds() + kSliceNanoseconds;
    num_asleep.fetch_add(1, std::memory_order_seq_cst);
    int32_t status = kPending;
    for (;;) {
        // Before the word: a rank that leaves has completed all its writes.
        const bool lost = aborted.load(std::memory_order_relaxed) || left.load(std::memory_order_acquire);
        const uint32_t seen = word.load(std::memory_order_seq_cst);
        if (ready(seen)) {
            status = kDone;
            break;
        }
        if (lost) {
            status = kLost;
            break;
        }
        const int64_t remaining = end - nanoseconds();
        if (remaining <= 0 || sleep_on(word, seen, remaining) == EINTR) break;
    }
    num_asleep.fetch_sub(1, std::memory_order_seq_cst);
    return status;
}

int32_t wait_for_group(Group& group) {
    GroupControl& control = *group.control;
    const uint32_t calls = group.calls;
    return wait(control.calls, control.num_asleep, *group.aborted, control.left, group.spin_nanoseconds,
                [calls](uint32_t seen) { return static_cast<int32_t>(seen - calls) >= 0; });
}

int64_t offset_in_ring(const Channel& channel, uint32_t position) {
    return (position - channel.control->base.load(std::memory_order_relaxed)) & (channel.size - 1);
}

void copy_into_ring(const Channel& channel, uint32_t position, const char* from, int64_t count) {
    const int64_t start = offset_in_ring(channel, position), first = std::min<int64_t>(count, channel.size - start);
    std::memcpy(channel.ring + start, from, first);
    std::memcpy(channel.ring, from + first, count - first);
}

void copy_from_ring(const Channel& channel, uint32_t position, char* to, int64_t count) {
    const int64_t start = offset_in_ring(channel, position), first = std::min<int64_t>(count, channel.size - start);
    std::memcpy(to, channel.ring + start, first);
    std::memcpy(to + first, channel.ring, count - first);
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

// Continues to wait for the group's last call.
EXPORT int32_t penstock_group_wait(Group* group) { return wait_for_group(*group); }

// Copies `rows` of part_bytes each, part_stride apart, to `out`, where they are out_stride apart, and waits until every
// rank has done so. Without rows it is a barrier.
//
// `out` is in one of three buffers used cyclically, and nothing waits for a buffer to be free. A rank may read the
// result of call k until it begins call k + 2. A rank that writes in call k + 3, to the same buffer, has ended call k +
// 2, so every rank has arrived at call k + 2, and has begun it. With two buffers the writer would be in call k + 2 and
// know only that all have begun call k + 1.
EXPORT int32_t penstock_group_gather(Group* group, const char* part, int64_t rows, int64_t part_bytes,
                                     int64_t part_stride, char* out, int64_t out_stride) {
    if (group->aborted->load(std::memory_order_relaxed)) return kLost;
    if (part_bytes > 0)
        for (int64_t row = 0; row < rows; ++row)
            std::memcpy(out + row * out_stride, part + row * part_stride, part_bytes);
    GroupControl& control = *group->control;
    const uint64_t shape = static_cast<uint64_t>(rows) * 0x9e3779b97f4a7c15u + static_cast<uint64_t>(out_stride);
    ++group->calls;
    control.shapes.fetch_add(shape, std::memory_order_relaxed);
    if (control.num_arrived.fetch_add(1, std::memory_order_acq_rel) + 1 < group->count) return wait_for_group(*group);
    // The last rank to arrive. The others do not access these words before they see the new number of calls.
    if (control.shapes.load(std::memory_order_relaxed) != group->count * shape) {
        control.left.store(1, std::memory_order_release);
        return kDisagree;
    }
    control.shapes.store(0, std::memory_order_relaxed);
    control.num_arrived.store(0, std::memory_order_relaxed);
    publish(control.calls, group->calls, control.num_asleep);
    return kDone;
}

// Appends the pieces to the stream, starting with byte *done of all of them, and updates *done.
EXPORT int32_t penstock_channel_write(Channel* channel, const char* const* pieces, const int64_t* sizes, int64_t count,
                                      int64_t* done) {
    if (channel->aborted->load(std::memory_order_relaxed)) return kLost;
    ChannelControl& control = *channel->control;
    int64_t total = 0;
    for (int64_t piece = 0; piece < count; ++piece) total += sizes[piece];
    uint32_t written = control.written.load(std::memory_order_relaxed), published = written;
    if (control.read.load(std::memory_order_acquire) == written)
        control.base.store(written, std::memory_order_relaxed);
    int64_t begin = 0;  // of the piece, among the bytes of all
    for (int64_t piece = 0; piece < count; begin += sizes[piece++]) {
        while (*done < begin + sizes[piece]) {
            int64_t room = channel->size - (written - control.read.load(std::memory_order_acquire));
            if (room == 0) {
                if (published != written) publish(control.written, published = written, control.readers_asleep);
                // A reader that takes little at a time must not wake this side for each small read.
                const int64_t wanted = std::min<int64_t>(total - *done, channel->size / 4);
                const int32_t status =
                    wait(control.read, control.writers_asleep, *channel->aborted, control.left,
                         channel->spin_nanoseconds,
                         [=](uint32_t read) { return channel->size - static_cast<int64_t>(written - read) >= wanted; });
                if (status != kDone) return status;
                continue;
            }
            const int64_t size = std::min({room, begin + sizes[piece] - *done, kChunk});
            copy_into_ring(*channel, written, pieces[piece] + (*done - begin), size);
            written += static_cast<uint32_t>(size);
            *done += size;
            if (written - published >= kChunk) publish(control.written, published = written, control.readers_asleep);
        }
    }
    if (published != written) publish(control.written, written, control.readers_asleep);
    return kDone;
}

// Takes `size` bytes from the stream, starting with byte *done of them, and updates *done.
EXPORT int32_t penstock_channel_read(Channel* channel, char* data, int64_t size, int64_t* done) {
    if (channel->aborted->load(std::memory_order_relaxed)) return kLost;
    ChannelControl& control = *channel->control;
    uint32_t read = control.read.load(std::memory_order_relaxed);
    while (*done < size) {
        const int64_t available = control.written.load(std::memory_order_acquire) - read;
        if (available == 0) {
            const int32_t status = wait(control.written, control.readers_asleep, *channel->aborted, control.left,
                                        channel->spin_nanoseconds, [=](uint32_t written) { return written != read; });
            if (status != kDone) return status;
            continue;
        }
        const int64_t count = std::min({available, size - *done, kChunk});
        copy_from_ring(*channel, read, data + *done, count);
        read += static_cast<uint32_t>(count);
        *done += count;
        publish(control.read, read, control.writers_asleep);
    }
    return kDone;
}
