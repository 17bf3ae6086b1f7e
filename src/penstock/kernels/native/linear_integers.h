// Layers of 8-bit weights that quantize their inputs (kernels/quantized.py): a row of x is rounded to integers with a
// scale of its own, and an output is the exact sum of the products, times the row's scale, times the column's.
//
// A panel of packed weights is the 32 scales, kOffset times the sum of each column's integers as int32, and [K / 4][32][4]
// integers, K padded with zeros: 16 columns of 64 inputs are an AMX tile. As sums are exact, instruction sets give the same
// bits, whatever their order.
#pragma once

#include "linear_quantized.h"

namespace {

constexpr float kLargest = 127;
// 2^-119: of numbers much smaller, 127 has no multiple. And the largest finite number.
constexpr float kLeast = 0x1p-119f, kMost = 0x1.fffffep127f;
#if defined(__ARM_FEATURE_MATMUL_INT8) || defined(__AMX_INT8__)
using InputByte = int8_t;
constexpr int kOffset = 0;
#else
// The instruction multiplies unsigned by signed bytes, and so much is added to an input for it.
using InputByte = uint8_t;
constexpr int kOffset = 128;
#endif

typedef int32_t Integers __attribute__((vector_size(kLanes * 4), may_alias));

inline float widen_bits(uint16_t from) {
    const uint32_t bits = static_cast<uint32_t>(from) << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

// Of some inputs in bfloat16. If one is not finite, neither is the result.
inline float largest_magnitude(const uint16_t* inputs, int64_t count) {
    uint16_t most = 0;
    for (int64_t input = 0; input < count; ++input) {
        const uint16_t magnitude = inputs[input] & 0x7fff;
        most = most < magnitude ? magnitude : most;
    }
    return widen_bits(most);
}

// By what inputs are multiplied so that the largest magnitude becomes 127, in which their scale is the magnitude over 127.
// Zero if it is not finite, or too small for that.
inline float integer_factor(float magnitude) {
    return magnitude >= kLeast && magnitude <= kMost ? kLargest / magnitude : 0;
}

// Rounds the multiples of inputs to nearest even, as vLLM does it.
template <int kCount>
PENSTOCK_INLINE void round_inputs(const uint16_t* inputs, float factor, int32_t* integers) {
    for (int i = 0; i < kCount; ++i) {
        const float scaled = factor == 0 ? 0 : widen_bits(inputs[i]) * factor;
        const float limited = scaled > kLargest ? kLargest : scaled < -kLargest ? -kLargest : scaled;
        // Adding 1.5 * 2^23 leaves no room for a fraction: the sum is rounded to an integer.
        const float sum = limited + 12582912.0f;
        int32_t bits;
        memcpy(&bits, &sum, 4);
        integers[i] = bits - 0x4b400000;
    }
}

struct IntegerSums {
    using Element = BFloatKernel::Element;
#if defined(__AMX_INT8__)
    static constexpr int64_t kRows = BFloatKernel::kRows, kStepBytes = BFloatKernel::kStepBytes, kStep = 64;
    static constexpr bool kWholeBlocks = true;
    using Session = BFloatKernel::Session;
#else
    static constexpr int64_t kRows = 8, kStepBytes = 128, kStep = 4;
    static constexpr bool kWholeBlocks = false;
    struct Session {
        explicit Session(int64_t) {}
    };
#endif
    static constexpr int64_t kHeaderBytes = kPanel * 8;

    static int64_t padded_k(int64_t k) { return round_up(k, kStep); }
    static int64_t panel_bytes(const Quantization&, int64_t k) { return kHeaderBytes + padded_k(k) * kPanel; }

#if defined(__AMX_INT8__) || defined(__ARM_FEATURE_MATMUL_INT8)
    static constexpr bool multiplies_bytes() { return true; }
#elif defined(__AVX512F__)
    // Checked at run time: processors with AVX-512 have it or not, whatever else they have.
    static bool multiplies_bytes() {
        static const bool has_vnni = __builtin_cpu_supports("avx512vnni");
        return has_vnni;
    }
#elif defined(__AVX2__)
    // The same of AVX-VNNI and AVX2, which compilers cannot test for by name: leaf 7.1, EAX bit 4.
    static bool multiplies_bytes() {
        static const bool has_vnni = identify(7, 0) >= 1 && (identify(7, 1) >> 4 & 1);
        return has_vnni;
    }
    static uint32_t identify(uint32_t leaf, uint32_t part) {
        uint32_t b, d;
        __asm__ volatile("cpuid" : "+a"(leaf), "=b"(b), "+c"(part), "=d"(d));
        return leaf;
    }
#else
    static constexpr bool multiplies_bytes() { return false; }
#endif

    // A row's inputs are bytes, or 16 bits each, in the order [K / 4][rows][4], or [K / 64][tiles of 16 rows][16][64]; the
    // scales follow those of all rows.
    static int64_t input_bytes(int64_t rows, int64_t k) {
        if (kWholeBlocks) rows = round_up(rows, 16);
        return round_up(padded_k(k) * rows * (multiplies_bytes() ? 1 : 2), 64);
    }
    static int64_t x_bytes(int64_t rows, int64_t k) { return input_bytes(rows, k) + round_up(rows * 4, 64); }

    static void pack_panel(const Quantization&, const uint8_t* codes, const char* const (&numbers)[3], char* weight,
                           int64_t columns, int64_t k) {
        memset(weight, 0, kHeaderBytes + padded_k(k) * kPanel);
        memcpy(weight, numbers[0], columns * sizeof(float));
        int32_t* sums = reinterpret_cast<int32_t*>(weight) + kPanel;
        for (int64_t column = 0; column < columns; ++column)
            for (int64_t input = 0; input < k; ++input) {
                const int8_t code = static_cast<int8_t>(codes[column * k + input]);
                weight[kHeaderBytes + (input / 4 * kPanel + column) * 4 + input % 4] = code;
                sums[column] += kOffset * code;
            }
    }

    // A row that is not finite, or too small, has zeros.
    static void pack_x(const Element* x, char* packed, int64_t rows, int64_t k) {
        float* scales = reinterpret_cast<float*>(packed + input_bytes(rows, k));
        for (int64_t row = 0; row < rows; ++row) {
            const uint16_t* inputs = reinterpret_cast<const uint16_t*>(x) + row * k;
            const float magnitude = largest_magnitude(inputs, k), factor = integer_factor(magnitude);
            scales[row] = magnitude / kLargest;
            if (multiplies_bytes())
                pack_row<InputByte>(inputs, factor, kOffset, packed, rows, row, k);
            else
                pack_row<int16_t>(inputs, factor, 0, packed, rows, row, k);
        }
        // Loads of tiles do not declare to the compiler that they read memory.
        asm volatile("" : : : "memory");
    }

    template <class Input>
    static void pack_row(const uint16_t* inputs, float factor, int32_t offset, char* packed, int64_t rows, int64_t row,
                         int64_t k) {
        constexpr int kSome = 64;
        Input* to = reinterpret_cast<Input*>(packed) + row * 4;
        for (int64_t first = 0; first < padded_k(k); first += kSome) {
            uint16_t own[kSome] = {};
            int32_t integers[kSome];
            Input narrow[kSome];
            memcpy(own, inputs + first, smaller(kSome, k - first) * sizeof *own);
            round_inputs<kSome>(own, factor, integers);
            for (int i = 0; i < kSome; ++i) narrow[i] = static_cast<Input>(integers[i] + offset);
            const int64_t count = smaller(kSome, padded_k(k) - first);
            if (kWholeBlocks)
                memcpy(packed + (first / kSome * divide_up(rows, 16) + row / 16) * 1024 + row % 16 * kSome, narrow, kSome);
            else if (rows == 1)
                memcpy(to + first, narrow, count * sizeof(Input));
            else
                for (int64_t i = 0; i < count; i += 4) memcpy(to + (first + i) * rows, narrow + i, 4 * sizeof(Input));
        }
    }

#if defined(__AMX_INT8__)
    static constexpr int64_t kChunk = 1024, kPanelsOfChunk = BFloatKernel::kPanelsOfChunk;
    static constexpr int64_t kChunkBlocks = BFloatKernel::kChunkBlocks, kStepInputs = 16;

    static const char* widened(const Quantization*, int64_t, const char* panel, Range inputs, float*) {
        return panel + kHeaderBytes + inputs.begin * kPanel;
    }

    // The sums of up to 32 rows, [tiles of 16 rows][2 tiles of 16 columns][16][16], continued if the tile's are.
    static void sum_tiles(const Tile<Element>& tile, const char* weight, float* sums) {
        const bool has_two = tile.rows > 16;
        const char* x = tile.x;
        Prefetch prefetch = tile.prefetch;
        BFloatKernel::begin(tile, tile.continues ? sums : nullptr);
        for (int64_t input = 0; input < tile.k; input += kStep, weight += kStep * kPanel, x += has_two ? 2048 : 1024) {
            _tile_loadd(6, weight, kPanel * 4);
            prefetch.advance();
            _tile_loadd(4, x, kStep);
            _tile_dpbssd(0, 4, 6);
            prefetch.advance();
            _tile_loadd(7, weight + 64, kPanel * 4);
            _tile_dpbssd(1, 4, 7);
            prefetch.advance();
            if (has_two) {
                _tile_loadd(5, x + 1024, kStep);
                _tile_dpbssd(2, 5, 6);
                _tile_dpbssd(3, 5, 7);
            }
            prefetch.advance();
        }
        BFloatKernel::finish(tile, sums);
    }

    static float* run_unfinished(const Tile<Element>& tile, float* left) {
        if (tile.rows > 16) return BFloatKernel::add_to_left<true>(tile, left);
        store_left(left);
        sum_tiles(tile, tile.weight, tile.sums);
        return nullptr;
    }
    static void store_left(float* left) { BFloatKernel::store_left(left); }

    static void store_sums(const Tile<Element>& tile, int64_t row, const float* sums) {
        const int32_t* line = reinterpret_cast<const int32_t*>(sums + row / 16 * 512 + row % 16 * 16);
        BFloatKernel::store_row(tile, row, scaled(tile, row, line, 0), scaled(tile, row, line + 256, 16));
    }
#elif defined(__AVX2__)
#if defined(__AVX512F__)
#define MULTIPLIES_BYTES target("avx512vnni")
    static inline __attribute__((always_inline, MULTIPLIES_BYTES)) Integers add_products(Integers sum, Integers x,
                                                                                         Integers weight) {
        return (Integers)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)x, (__m512i)weight);
    }
#else
#define MULTIPLIES_BYTES target("avxvnni")
    static inline __attribute__((always_inline, MULTIPLIES_BYTES)) Integers add_products(Integers sum, Integers x,
                                                                                         Integers weight) {
        return (Integers)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)x, (__m256i)weight);
    }
#endif

    template <int kCount>
    static __attribute__((noinline, MULTIPLIES_BYTES)) void sum_bytes(const Tile<Element>& tile, int32_t* sums) {
        // So many that their sums fit the registers.
        constexpr int kVectors = kPanel / kLanes, kSome = kLanes == 16 || kCount <= 3 ? kVectors : kCount <= 6 ? 2 : 1;
        const Integers* column_sums = reinterpret_cast<const Integers*>(tile.weight + kPanel * 4);
        Prefetch prefetch = tile.prefetch;
        for (int first = 0; first < kVectors; first += kSome, prefetch.step = 0) {
            Integers all[kCount][kSome];
            for (int row = 0; row < kCount; ++row)
                for (int part = 0; part < kSome; ++part) all[row][part] = Integers{};
            const int32_t* x = reinterpret_cast<const int32_t*>(tile.x);
            const Integers* weight = reinterpret_cast<const Integers*>(tile.weight + kHeaderBytes) + first;
            for (int64_t input = 0; input < tile.k; input += 4, weight += kVectors, x += kCount) {
                prefetch.advance();
                for (int row = 0; row < kCount; ++row) {
                    const Integers four = Integers{} + x[row];
                    for (int part = 0; part < kSome; ++part)
                        all[row][part] = add_products(all[row][part], four, weight[part]);
                }
            }
            for (int row = 0; row < kCount; ++row)
                for (int part = 0; part < kSome; ++part) {
                    const Integers sum = all[row][part] - column_sums[first + part];
                    memcpy(sums + row * kPanel + (first + part) * kLanes, &sum, sizeof sum);
                }
        }
    }
#undef MULTIPLIES_BYTES
#elif defined(__ARM_FEATURE_MATMUL_INT8)
    // Products of 2 rows by 2 columns, each of 8 inputs, for 8 columns at a time.
    template <int kCount>
    static __attribute__((noinline)) void sum_bytes(const Tile<Element>& tile, int32_t* sums) {
        constexpr int kRowPairs = (kCount + 1) / 2;
        Prefetch prefetch = tile.prefetch;
        for (int64_t column = 0; column < kPanel; column += 8, prefetch.step = 0) {
            int32x4_t all[kRowPairs][4];
            for (auto& row : all)
                for (auto& pair : row) pair = vdupq_n_s32(0);
            const char* weight = tile.weight + kHeaderBytes + column * 4;
            const char* x = tile.x;
            for (int64_t input = 0; input < tile.k; input += 8, weight += kPanel * 8, x += kCount * 8) {
                const bool whole = input + 4 < tile.k;
                for (int step = 0; step < 2; ++step) prefetch.advance();
                int8x16_t columns[4];
                for (int half = 0; half < 2; ++half) {
                    const int32x4_t first = load_words(weight + half * 16);
                    const int32x4_t last = whole ? load_words(weight + kPanel * 4 + half * 16) : vdupq_n_s32(0);
                    columns[half * 2] = vreinterpretq_s8_s32(vzip1q_s32(first, last));
                    columns[half * 2 + 1] = vreinterpretq_s8_s32(vzip2q_s32(first, last));
                }
                for (int row = 0; row < kRowPairs; ++row) {
                    const int rows = row * 2 + 1 < kCount ? 2 : 1;
                    int32_t words[4] = {};  // [rows][inputs]
                    for (int i = 0; i < rows; ++i) {
                        memcpy(words + i * 2, x + (row * 2 + i) * 4, 4);
                        if (whole) memcpy(words + i * 2 + 1, x + (kCount + row * 2 + i) * 4, 4);
                    }
                    const int8x16_t both = vreinterpretq_s8_s32(vld1q_s32(words));
                    for (int pair = 0; pair < 4; ++pair)
                        all[row][pair] = vmmlaq_s32(all[row][pair], both, columns[pair]);
                }
            }
            for (int row = 0; row < kCount; ++row)
                for (int pair = 0; pair < 4; ++pair) {
                    const int32x4_t both = all[row / 2][pair];
                    vst1_s32(sums + row * kPanel + column + pair * 2, row % 2 ? vget_high_s32(both) : vget_low_s32(both));
                }
        }
    }

    static inline int32x4_t load_words(const char* from) { return vld1q_s32(reinterpret_cast<const int32_t*>(from)); }
#endif

#if !defined(__AMX_INT8__)
    // Eight columns at a time.
    template <int kCount>
    static __attribute__((noinline)) void sum_words(const Tile<Element>& tile, int32_t* sums) {
        const int16_t* inputs = reinterpret_cast<const int16_t*>(tile.x);
        const char* weight = tile.weight + kHeaderBytes;
        for (int64_t column = 0; column < kPanel; column += 8) {
#if defined(__AVX2__)
            // Of each column, the sums of the first two and of the last two of every four inputs.
            __m256i low[kCount], high[kCount];
            for (int row = 0; row < kCount; ++row) low[row] = high[row] = _mm256_setzero_si256();
            const char* from = weight + column * 4;
            const int16_t* x = inputs;
            for (int64_t input = 0; input < tile.k; input += 4, from += kPanel * 4, x += kCount * 4) {
                const __m256i left = _mm256_cvtepi8_epi16(_mm_load_si128((const __m128i*)from));
                const __m256i right = _mm256_cvtepi8_epi16(_mm_load_si128((const __m128i*)(from + 16)));
                for (int row = 0; row < kCount; ++row) {
                    int64_t four;
                    memcpy(&four, x + row * 4, 8);
                    const __m256i all = _mm256_set1_epi64x(four);
                    low[row] = _mm256_add_epi32(low[row], _mm256_madd_epi16(all, left));
                    high[row] = _mm256_add_epi32(high[row], _mm256_madd_epi16(all, right));
                }
            }
            for (int row = 0; row < kCount; ++row) {
                const __m256i both = _mm256_permute4x64_epi64(_mm256_hadd_epi32(low[row], high[row]), 0b11011000);
                _mm256_storeu_si256((__m256i*)(sums + row * kPanel + column), both);
            }
#else
            for (int row = 0; row < kCount; ++row)
                for (int64_t own = column; own < column + 8; ++own) {
                    int32_t sum = 0;
                    for (int64_t input = 0; input < tile.k; ++input)
                        sum += inputs[input / 4 * 4 * kCount + row * 4 + input % 4] *
                               static_cast<int8_t>(weight[(input / 4 * kPanel + own) * 4 + input % 4]);
                    sums[row * kPanel + own] = sum;
                }
#endif
        }
    }

#endif

    template <int kCount>
    static void run(const Tile<Element>& tile) {
#if defined(__AMX_INT8__)
        alignas(64) float sums[kCount * kPanel];
        sum_tiles(tile, tile.weight + kHeaderBytes, sums);
        for (int64_t row = 0; row < tile.rows; ++row) store_sums(tile, row, sums);
#else
        if constexpr (kCount > 1)
            if (tile.rows < kCount) return run<kCount - 1>(tile);
        alignas(64) int32_t sums[kCount * kPanel];
#if defined(__ARM_FEATURE_MATMUL_INT8)
        sum_bytes<kCount>(tile, sums);
#elif defined(__AVX2__)
        if (multiplies_bytes())
            sum_bytes<kCount>(tile, sums);
        else
            sum_words<kCount>(tile, sums);
#else
        sum_words<kCount>(tile, sums);
#endif
        for (int64_t row = 0; row < tile.rows; ++row) store_row(tile, row, sums + row * kPanel);
#endif
    }

    // The products of some columns of a row whose sums are at `sums`.
    static PENSTOCK_INLINE Vector scaled(const Tile<Element>& tile, int64_t row, const int32_t* sums, int64_t column) {
        const float scale = reinterpret_cast<const float*>(tile.x + input_bytes(tile.rows, tile.k))[row];
        Integers words;
        memcpy(&words, sums, sizeof words);
        const float* scales = reinterpret_cast<const float*>(tile.weight) + column;
        return times(times(__builtin_convertvector(words, Vector), spread(scale)), read(scales));
    }

#if !defined(__AMX_INT8__)
    static void store_row(const Tile<Element>& tile, int64_t row, const int32_t* sums) {
        alignas(64) float values[kPanel], bias[kPanel] = {};
        if (tile.bias) memcpy(bias, tile.bias, tile.columns * sizeof(float));
        for (int64_t part = 0; part < kPanel; part += kLanes) {
            Vector value = scaled(tile, row, sums + part, part);
            if (tile.bias) value = value + read(bias + part);
            write(values + part, value);
        }
        char* out = tile.out + row * tile.out_stride;
        if (tile.is_wide) {
            memcpy(out, values, tile.columns * sizeof(float));
            return;
        }
        alignas(64) BFloat line[kPanel];
        for (int64_t part = 0; part < kPanel; part += kLanes) write(line + part, read(values + part));
        memcpy(out, line, tile.columns * sizeof(BFloat));
    }
#endif

    static int64_t panels_together(const Blocks<IntegerSums>&, const Quantization&) { return 1; }

    static void multiply_panels(const Blocks<IntegerSums>& x, const Quantization& quantization, const char* weight,
                                bool follows, Tile<Element>* tiles, int64_t) {
        const int64_t bytes = panel_bytes(quantization, x.k);
        Tile<Element>& tile = *tiles;
        char* out = tile.out;
        tile.weight = weight;
        tile.k = padded_k(x.k);
        const bool is_single = x.count == 1;
        const int64_t ahead_bytes = is_single ? BFloatKernel::kBytesAhead : bytes;
        tile.prefetch = Prefetch{weight + ahead_bytes, follows || is_single ? kStepBytes : 0};
        for (int64_t block = 0; block < x.count; ++block) {
            tile.x = x.packed + block * x.bytes;
            tile.out = out + x.first(block) * tile.out_stride;
            tile.rows = x.height_of(block);
            run<kRows>(tile);
            tile.prefetch.step = 0;
        }
    }
};

template <>
constexpr bool kIsQuantized<IntegerSums> = true;
#if defined(__AMX_INT8__)
template <>
constexpr bool kTakesChunks<IntegerSums> = true;
#endif

}  // namespace
