// The codes of quantized blocks, a byte each (kernels/block_codes.py).
#include "common.h"
#include "pool.h"

namespace {

// Where some bits of a block's codes are, as in kernels/block_codes.py.
struct Planes {
    int64_t at, run, bits;
};

// Writes the planes of `bytes` bytes; or, above what is there, `kIsHigh` ones from the fifth bit on.
template <int kBits, bool kIsHigh, class Word>
inline void put_planes(const uint8_t* from, int64_t bytes, int64_t run, uint8_t* to) {
    constexpr uint64_t kMask = ~uint64_t{0} / 255 * ((1 << kBits) - 1);
    for (int64_t first = 0; first < bytes; first += run)
        for (int bit = 0; bit < 8; bit += kBits)
            for (int64_t byte = 0; byte < run; byte += sizeof(Word), to += sizeof(Word)) {
                Word word, low;
                memcpy(&word, from + first + byte, sizeof word);
                memcpy(&low, to, sizeof low);
                word = static_cast<Word>(word >> bit & static_cast<Word>(kMask));
                if (kIsHigh) word = static_cast<Word>(word << 4 | low);
                memcpy(to, &word, sizeof word);
            }
}

template <bool kIsHigh>
void put(const Planes& planes, const uint8_t* block, int64_t values, uint8_t* to) {
    const int64_t bytes = values * planes.bits / 8, run = planes.run;
    const uint8_t* from = block + planes.at;
#define PUT(bits) \
    run % 8 ? put_planes<bits, kIsHigh, uint8_t>(from, bytes, run, to) : put_planes<bits, kIsHigh, uint64_t>(from, bytes, run, to)
    switch (planes.bits) {
        case 1: return PUT(1);
        case 2: return PUT(2);
        case 4: return PUT(4);
        default: memcpy(to, from, values);
    }
#undef PUT
}

}  // namespace

// Writes the codes of `count` blocks of `block_bytes`, [count, values]. `high` has no bits if there are no more than four.
PENSTOCK_EXPORT(void, unpack_codes)
(const Planes* low, const Planes* high, const uint8_t* blocks, uint8_t* codes, int64_t count, int64_t block_bytes,
 int64_t values, int64_t threads) {
    run_each(count, 1 + values / 8, threads, [&](int64_t number) {
        const uint8_t* block = blocks + number * block_bytes;
        put<false>(*low, block, values, codes + number * values);
        if (high->bits) put<true>(*high, block, values, codes + number * values);
    });
}
