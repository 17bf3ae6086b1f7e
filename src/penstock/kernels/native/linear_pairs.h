// bfloat16 layers on processors that multiply pairs: AVX512-BF16's dot products, or fused
// operations with the same bits (pairs.h), and AMX's tiles.
//
// A panel of packed weights is [K / 32][2 halves][16 pairs][16 columns][2], K padded with zeros: a half of a step, 1 KiB,
// is one AMX tile, and each of its rows is one AVX512 register.
#pragma once

#include "linear_fma.h"
#include "pairs.h"

#if defined(__AVX512BF16__)

namespace {

struct Pairs {
    using Element = uint16_t;
    static int64_t padded_k(int64_t k) { return round_up(k, 32); }

    static void pack_panel(const Element* weight, Element* panel, int64_t columns, int64_t k) {
        for (int64_t step = 0; step < padded_k(k); step += 32)
            for (int64_t half = 0; half < 2; ++half)
                for (int64_t at = step; at < step + 32; at += 2)
                    for (int64_t column = half * 16; column < half * 16 + 16; ++column) {
                        const Element* row = weight + column * k;
                        *panel++ = column < columns && at < k ? row[at] : 0;
                        *panel++ = column < columns && at + 1 < k ? row[at + 1] : 0;
                    }
    }

    // Waits for what was streamed: like other stores, it must precede the end of a part.
    struct Streams {
        ~Streams() { _mm_sfence(); }
    };

    // Adds the bias to one row of a tile, rounds it to nearest even unless the output is wide, and stores the columns
    // that exist.
    static inline void store_row(const Tile<Element>& tile, int64_t row, __m512 low, __m512 high) {
        const __mmask32 mask = tile.columns == kPanel ? ~0u : (1u << tile.columns) - 1;
        if (tile.bias) {
            low = _mm512_add_ps(low, _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), tile.bias));
            high = _mm512_add_ps(high, _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask >> 16), tile.bias + 16));
        }
        char* out = tile.out + row * tile.out_stride;
        if (tile.is_wide) {
            _mm512_mask_storeu_ps(out, static_cast<__mmask16>(mask), low);
            _mm512_mask_storeu_ps(out + 64, static_cast<__mmask16>(mask >> 16), high);
            return;
        }
        store_columns(tile, out, mask, (__m512i)_mm512_cvtne2ps_pbh(high, low));
    }

    static inline void store_columns(const Tile<Element>& tile, char* out, __mmask32 mask, __m512i columns) {
        if (tile.streams && mask == ~0u && reinterpret_cast<uintptr_t>(out) % 64 == 0)
            _mm512_stream_si512((__m512i*)out, columns);
        else
            _mm512_mask_storeu_epi16(out, mask, columns);
    }
};

#if !defined(__AMX_BF16__)

using penstock::ISA::even_of;
using penstock::ISA::odd_of;
using penstock::ISA::with_products;

// x in the order [K / 2][rows][2], or where products are fused as float32, [K][rows]: the broadcasts of a step are adjacent
// for every K.
struct DotPairs : Pairs {
    static constexpr int64_t kRows = 12;
    static constexpr int64_t kStepBytes = 128;
    static constexpr int64_t kBytesAhead = 4096;
    static constexpr bool kWholeBlocks = false;
    static bool fuses() { return penstock::ISA::fuses_products(); }
    static int64_t x_bytes(int64_t rows, int64_t k) { return rows * padded_k(k) * (fuses() ? 4 : 2); }

    static void pack_x(const Element* x, char* packed, int64_t rows, int64_t k) {
        if (fuses())
            Fma<BFloat>::pack_x(reinterpret_cast<const BFloat*>(x), packed, rows, k);
        else
            pack_pairs(x, reinterpret_cast<Element*>(packed), rows, k);
        const int64_t used = fuses() ? rows * k * 4 : rows * round_up(k, 2) * 2;
        memset(packed + used, 0, x_bytes(rows, k) - used);
    }

    static void pack_pairs(const Element* x, Element* to, int64_t rows, int64_t k) {
        int64_t row = 0;
        for (; row + 4 <= rows && k % 8 == 0; row += 4)
            for (int64_t at = 0; at < k; at += 8) transpose_four(x + row * k + at, k / 2, to + at * rows + row * 2, rows);
        for (; row < rows; ++row)
            for (int64_t at = 0; at < k; at += 2) {
                to[at * rows + row * 2] = x[row * k + at];
                to[at * rows + row * 2 + 1] = at + 1 < k ? x[row * k + at + 1] : 0;
            }
    }

    struct Session : Streams {
        explicit Session(int64_t) {}
    };

    static void run(const Tile<Element>& tile) {
        alignas(64) float own[kRows * kPanel];
        float* sums = tile.continues || tile.is_unfinished ? tile.sums : own;
        with_products(fuses(), [&](auto fused) { dispatch<fused.value, kRows>(tile, sums); });
        for (int64_t row = 0; row < tile.rows && !tile.is_unfinished; ++row)
            store_row(tile, row, _mm512_load_ps(sums + row * kPanel), _mm512_load_ps(sums + row * kPanel + 16));
    }

    template <bool kFused, int kCount>
    static void dispatch(const Tile<Element>& tile, float* sums) {
        if constexpr (kCount > 1)
            if (tile.rows < kCount) return dispatch<kFused, kCount - 1>(tile, sums);
        accumulate<kFused, kCount>(tile, sums);
    }

    template <bool kFused, int kCount>
    static __attribute__((noinline)) void accumulate(const Tile<Element>& tile, float* sums) {
        __m512 low[kCount], high[kCount];
        for (int row = 0; row < kCount; ++row) {
            low[row] = tile.continues ? _mm512_load_ps(sums + row * kPanel) : _mm512_setzero_ps();
            high[row] = tile.continues ? _mm512_load_ps(sums + row * kPanel + 16) : _mm512_setzero_ps();
        }
        const int32_t* x = reinterpret_cast<const int32_t*>(tile.x);
        const char* weight = tile.weight;
        Prefetch prefetch = tile.prefetch;
        for (int64_t step = 0; step < tile.k; step += 32, weight += 2048) {
            for (int pair = 0; pair < 16; ++pair) {
                prefetch.advance();
                const __m512i left = _mm512_load_si512(weight + pair * 64);
                const __m512i right = _mm512_load_si512(weight + 1024 + pair * 64);
                x = add_pair<kFused, kCount>(x, left, right, low, high);
            }
        }
        for (int row = 0; row < kCount; ++row) {
            _mm512_store_ps(sums + row * kPanel, low[row]);
            _mm512_store_ps(sums + row * kPanel + 16, high[row]);
        }
    }

    // Adds the products of a pair of inputs by 16 and by 16 columns, and returns where the next pair of x is.
    template <bool kFused, int kCount>
    static PENSTOCK_INLINE const int32_t* add_pair(const int32_t* x, __m512i left, __m512i right, __m512 (&low)[kCount],
                                                   __m512 (&high)[kCount]) {
        if constexpr (!kFused) {
            for (int row = 0; row < kCount; ++row) {
                const __m512bh both = (__m512bh)_mm512_set1_epi32(x[row]);
                low[row] = _mm512_dpbf16_ps(low[row], both, (__m512bh)left);
                high[row] = _mm512_dpbf16_ps(high[row], both, (__m512bh)right);
            }
            return x + kCount;
        }
        add_input(x + kCount, odd_of(left), odd_of(right), low, high);
        add_input(x, even_of(left), even_of(right), low, high);
        return x + 2 * kCount;
    }

    template <int kCount>
    static PENSTOCK_INLINE void add_input(const int32_t* x, __m512 left, __m512 right, __m512 (&low)[kCount],
                                          __m512 (&high)[kCount]) {
        for (int row = 0; row < kCount; ++row) {
            const __m512 value = (__m512)_mm512_set1_epi32(x[row]);
            low[row] = multiply_add(value, left, low[row]);
            high[row] = multiply_add(value, right, high[row]);
        }
    }
};

#else

// Tiles 0 to 3 accumulate 32 rows by 32 columns, 4 and 5 hold rows of x, 6 and 7 weights. x is packed as
// [K / 32][tiles of 16 rows][16][32]; rows beyond x are computed from undefined values, and not stored.
struct TilePairs : Pairs {
    static constexpr int64_t kRows = 32;
    static constexpr int64_t kStepBytes = 512;
    static constexpr int64_t kBytesAhead = 2048;  // mostly within the page that is read
    static constexpr bool kWholeBlocks = true;
    static constexpr int64_t kChunk = 512;
    static constexpr int64_t kPanelsOfChunk = 8;
    static constexpr int64_t kChunkBlocks = 3, kStepInputs = 8;
    static int64_t input_bytes(int64_t rows, int64_t k) { return round_up(rows, 16) * padded_k(k) * 2; }
    static int64_t x_bytes(int64_t rows, int64_t k) { return input_bytes(rows, k); }

    static void pack_x(const Element* x, char* packed, int64_t rows, int64_t k) {
        Element* to = reinterpret_cast<Element*>(packed);
        const int64_t steps = padded_k(k) / 32, step_size = round_up(rows, 16) * 32;
        for (int64_t row = 0; row < rows; ++row) {
            Element* lines = to + row * 32;
            const Element* from = x + row * k;
            const int64_t whole = k / 32;
            for (int64_t step = 0; step < whole; ++step)
                _mm512_store_si512(lines + step * step_size, _mm512_loadu_si512(from + step * 32));
            if (whole < steps)
                _mm512_store_si512(lines + whole * step_size,
                                   _mm512_maskz_loadu_epi16((1u << (k % 32)) - 1, from + whole * 32));
        }
        // Loads of tiles do not declare to the compiler that they read memory.
        asm volatile("" : : : "memory");
    }

    // The configuration of the tiles belongs to the thread and torch's matrix products set their own: it is set for
    // each call, and the tiles are released after it so that the thread's state stays small.
    class Session : Streams {
    public:
        // For rows of x of `input_bytes` in a tile.
        explicit Session(int64_t rows, int input_bytes = 64) {
            struct alignas(64) {
                uint8_t palette = 1;
                uint8_t reserved[15] = {};
                uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
                uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
            } config;
            if (rows < 16)
                for (int tile = 0; tile < 6; ++tile) config.rows[tile] = static_cast<uint8_t>(rows);
            for (int tile = 4; tile < 6; ++tile) config.row_bytes[tile] = static_cast<uint16_t>(input_bytes);
            for (int tile = 6; tile < 8; ++tile) config.rows[tile] = static_cast<uint8_t>(input_bytes / 4);
            // The compiler's own intrinsic declares only the first eight bytes as read, and it may drop the rest.
            asm volatile("ldtilecfg %0" : : "m"(config));
        }
        ~Session() { _tile_release(); }
    };

    static void run(const Tile<Element>& tile) {
        if (tile.is_unfinished) return accumulate(tile, tile.sums);
        alignas(64) float own[kRows * kPanel];
        float* sums = tile.continues ? tile.sums : own;
        for (int64_t row = 0; row < tile.rows && !tile.streams; ++row)
            __builtin_prefetch(tile.out + row * tile.out_stride, 1);
        accumulate(tile, sums);
        for (int64_t row = 0; row < tile.rows; ++row) store_sums(tile, row, sums);
    }

    // Weights are read as they are.
    static const char* widened(const Quantization*, int64_t, const char* panel, Range inputs, float*) {
        return panel + inputs.begin * kPanel * sizeof(Element);
    }

    static float* run_unfinished(const Tile<Element>& tile, float* left) {
        if (tile.rows > 16) return add_to_left<false>(tile, left);
        store_left(left);
        accumulate(tile, tile.sums);
        return nullptr;
    }

    // Adds the products of more than 16 rows to the tile's sums, or to none. They are left in the tiles, and stored and
    // replaced between the first products of the next call: a tile can be stored only when its last product is done. A
    // step of integers has 64 inputs, and its rows have all 32 columns. Rows of x are loaded past the first-level cache, which
    // holds the weights.
    template <bool kIntegers>
    static float* add_to_left(const Tile<Element>& tile, float* left) {
        constexpr int64_t kStride = kIntegers ? 128 : 64, kHalf = kIntegers ? 64 : 1024, kInputs = kIntegers ? 64 : 32;
        const char* weight = tile.weight;
        const char* x = tile.x;
        // One call in place of four.
        Prefetch prefetch{tile.prefetch.at, tile.prefetch.step * 4};
        Prefetch rows_ahead{tile.rows_ahead.at, tile.rows_ahead.step * 4};
#define REPLACE(number)                                      \
    if (left) _tile_stored(number, left + number * 256, 64); \
    if (tile.continues)                                      \
        _tile_loadd(number, tile.sums + number * 256, 64);   \
    else                                                     \
        _tile_zero(number)
#define MULTIPLY(sum, rows, columns)        \
    if constexpr (kIntegers)                \
        _tile_dpbssd(sum, rows, columns);   \
    else                                    \
        _tile_dpbf16ps(sum, rows, columns)
        _tile_loadd(6, weight, kStride);
        _tile_stream_loadd(4, x, 64);
        REPLACE(0);
        MULTIPLY(0, 4, 6);
        _tile_loadd(7, weight + kHalf, kStride);
        REPLACE(1);
        MULTIPLY(1, 4, 7);
        _tile_stream_loadd(5, x + 1024, 64);
        REPLACE(2);
        MULTIPLY(2, 5, 6);
        REPLACE(3);
        MULTIPLY(3, 5, 7);
        for (int64_t step = kInputs; step < tile.k; step += kInputs) {
            weight += 2048;
            x += 2048;
            _tile_loadd(6, weight, kStride);
            _tile_stream_loadd(4, x, 64);
            MULTIPLY(0, 4, 6);
            _tile_loadd(7, weight + kHalf, kStride);
            MULTIPLY(1, 4, 7);
            _tile_stream_loadd(5, x + 1024, 64);
            prefetch.advance();
            rows_ahead.advance();
            MULTIPLY(2, 5, 6);
            MULTIPLY(3, 5, 7);
        }
#undef REPLACE
#undef MULTIPLY
        return tile.sums;
    }

    static void store_left(float* left) {
        if (!left) return;
        _tile_stored(0, left, 64);
        _tile_stored(1, left + 256, 64);
        _tile_stored(2, left + 512, 64);
        _tile_stored(3, left + 768, 64);
    }

    // Sums are [tiles of 16 rows][2 tiles of 16 columns][16][16].
    static void store_sums(const Tile<Element>& tile, int64_t row, const float* sums) {
        const float* line = sums + row / 16 * 512 + row % 16 * 16;
        store_row(tile, row, _mm512_load_ps(line), _mm512_load_ps(line + 256));
    }

    static void accumulate(const Tile<Element>& tile, float* sums) {
        begin(tile, tile.continues ? sums : nullptr);
        add(tile);
        finish(tile, sums);
    }

    // The steps of `accumulate`: the sums stay in the tiles between `begin`, from `sums` or zero, and `finish`.
    static void begin(const Tile<Element>& tile, const float* sums = nullptr) {
        if (sums) {
            _tile_loadd(0, sums, 64);
            _tile_loadd(1, sums + 256, 64);
        } else {
            _tile_zero(0);
            _tile_zero(1);
        }
        if (tile.rows <= 16) return;
        if (sums) {
            _tile_loadd(2, sums + 512, 64);
            _tile_loadd(3, sums + 768, 64);
        } else {
            _tile_zero(2);
            _tile_zero(3);
        }
    }

    static void finish(const Tile<Element>& tile, float* sums) {
        _tile_stored(0, sums, 64);
        _tile_stored(1, sums + 256, 64);
        if (tile.rows <= 16) return;
        _tile_stored(2, sums + 512, 64);
        _tile_stored(3, sums + 768, 64);
    }

    // Adds the products of the tile's inputs.
    static void add(const Tile<Element>& tile) {
        if (tile.rows > 16)
            add_two(tile);
        else
            add_one(tile);
    }

    static void add_one(const Tile<Element>& tile) {
        const char* weight = tile.weight;
        const char* x = tile.x;
        Prefetch prefetch = tile.prefetch;
        for (int64_t step = 0; step < tile.k; step += 32, weight += 2048, x += 1024) {
            _tile_loadd(4, x, 64);
            prefetch.advance();
            _tile_loadd(6, weight, 64);
            prefetch.advance();
            _tile_dpbf16ps(0, 4, 6);
            prefetch.advance();
            _tile_loadd(7, weight + 1024, 64);
            _tile_dpbf16ps(1, 4, 7);
            prefetch.advance();
        }
    }

    static void add_two(const Tile<Element>& tile) {
        const char* weight = tile.weight;
        const char* x = tile.x;
        Prefetch prefetch = tile.prefetch;
        for (int64_t step = 0; step < tile.k; step += 32, weight += 2048, x += 2048) {
            _tile_loadd(6, weight, 64);
            prefetch.advance();
            _tile_loadd(4, x, 64);
            _tile_dpbf16ps(0, 4, 6);
            prefetch.advance();
            _tile_loadd(7, weight + 1024, 64);
            _tile_dpbf16ps(1, 4, 7);
            prefetch.advance();
            _tile_loadd(5, x + 1024, 64);
            _tile_dpbf16ps(2, 5, 6);
            prefetch.advance();
            _tile_dpbf16ps(3, 5, 7);
        }
    }
};

template <>
constexpr bool kTakesChunks<TilePairs> = true;

#endif

}  // namespace

#endif
