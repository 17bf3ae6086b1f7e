// Layers of quantized weights that round a row's inputs too, a few at a time (kernels/quantized.py): the products of such a
// group are summed exactly, and the groups' sums, each times the scales of its inputs and of its weights, in float32 in
// ascending order. Integers of a group fit a word, so instruction sets give the same bits.
//
// A panel of packed weights is that of ColumnUnits. Each of its words has the codes of every other one of eight inputs for a
// column, in the low or the high halves of its bytes: a byte is multiplied by the byte of x of the same input. Few rows take
// codes from registers; with AMX, more rows multiply by tiles of some groups that are unpacked once.
#pragma once

#include "linear_integers.h"

namespace {

typedef uint32_t Codes __attribute__((vector_size(kLanes * 4), may_alias));
typedef int16_t Pairs16 __attribute__((vector_size(kLanes * 4), may_alias));

using GroupUnits = ColumnUnits<true>;

// The inputs of a row in a group: how many steps of the scale they are, and their sum.
struct InputGroup {
    float scale;
    float scaled_sum;
    int32_t sum;
};

inline Codes load_code_words(const char* from) {
    Codes codes;
    memcpy(&codes, from, sizeof codes);
    return codes;
}

// The halves of kLanes words, whose four parts of four bits become bytes.
inline Codes spread_half_words(const char* from) {
    const Codes words = (Codes)load_half_words(from);
    const Codes bytes = (words | words << 8) & 0x00ff00ff;
    return (bytes | bytes << 4) & 0x0f0f0f0f;
}

// Sums of products of unsigned and signed bytes, four to a word.
#if defined(__AVX512F__)
inline Codes look_up_bytes(Codes table, Codes bytes) { return (Codes)_mm512_shuffle_epi8((__m512i)table, (__m512i)bytes); }
inline Integers add_byte_products(Integers sum, Codes codes, Integers x) {
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes), "v"(x));
    return sum;
}
inline Pairs16 multiply_bytes(Codes codes, Integers x) {
    return (Pairs16)_mm512_maddubs_epi16((__m512i)codes, (__m512i)x);
}
inline Integers join_pairs(Pairs16 pairs) {
    return (Integers)_mm512_madd_epi16((__m512i)pairs, _mm512_set1_epi16(1));
}
inline Codes magnitudes_of(Codes codes) { return (Codes)_mm512_abs_epi8((__m512i)codes); }
inline Integers with_signs(Integers x, Codes codes) {
    return (Integers)_mm512_mask_sub_epi8((__m512i)x, _mm512_movepi8_mask((__m512i)codes), _mm512_setzero_si512(),
                                          (__m512i)x);
}
#elif defined(__AVX2__)
inline Codes look_up_bytes(Codes table, Codes bytes) { return (Codes)_mm256_shuffle_epi8((__m256i)table, (__m256i)bytes); }
inline Integers add_byte_products(Integers sum, Codes codes, Integers x) {
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(codes), "x"(x));
    return sum;
}
inline Pairs16 multiply_bytes(Codes codes, Integers x) {
    return (Pairs16)_mm256_maddubs_epi16((__m256i)codes, (__m256i)x);
}
inline Integers join_pairs(Pairs16 pairs) {
    return (Integers)_mm256_madd_epi16((__m256i)pairs, _mm256_set1_epi16(1));
}
inline Codes magnitudes_of(Codes codes) { return (Codes)_mm256_abs_epi8((__m256i)codes); }
inline Integers with_signs(Integers x, Codes codes) { return (Integers)_mm256_sign_epi8((__m256i)x, (__m256i)codes); }
#else
inline Codes look_up_bytes(Codes table, Codes bytes) {
    uint8_t from[sizeof table], to[sizeof bytes];
    memcpy(from, &table, sizeof from);
    memcpy(to, &bytes, sizeof to);
    for (auto& byte : to) byte = from[byte];
    memcpy(&bytes, to, sizeof bytes);
    return bytes;
}
inline Integers add_byte_products(Integers sum, Codes codes, Integers x) {
#if defined(__ARM_FEATURE_MATMUL_INT8)
    return vusdotq_s32(sum, (uint8x16_t)codes, (int8x16_t)x);
#else
    for (int byte = 0; byte < 4; ++byte)
        sum += (Integers)(codes >> (byte * 8) & 255) * ((x << (24 - byte * 8)) >> 24);
    return sum;
#endif
}
#endif

// The sums of a vector of columns. Where there is no instruction that adds products to words, they are added in pairs of 16
// bits, which hold the sums of `kMost` products.
template <bool kAddsWords, int kMost>
struct GroupSum {
    Integers words{};
    Pairs16 pairs{};

    // `number` is that of the products in a run of them.
    PENSTOCK_INLINE void add(int number, Codes codes, Integers x) {
#if defined(__AVX2__)
        if constexpr (!kAddsWords) {
            const Pairs16 products = kMost == 1 ? multiply_bytes(magnitudes_of(codes), with_signs(x, codes))
                                                : multiply_bytes(codes, x);
            if constexpr (kMost == 1) {
                words += join_pairs(products);
            } else {
                pairs = number % kMost == 0 ? products : pairs + products;
                // A compiler that adds the products in another order needs more registers than there are.
                asm("" : "+v"(pairs));
                if (number % kMost == kMost - 1) words += join_pairs(pairs);
            }
            asm("" : "+v"(words));
            return;
        }
#endif
        words = add_byte_products(words, codes, x);
    }
};

template <int kGroup>
struct GroupSums {
    using Element = BFloatKernel::Element;
    using Wide = Fma<BFloat>;
    static constexpr int64_t kStepBytes = 128;
    static constexpr int64_t kFewRows = 4;  // which take codes from registers
    // kAhead: bytes by which weights are prefetched for one row; 0: by a panel, as for more rows.
    static constexpr int kVectors = kPanel / kLanes, kUnits = kGroup / kUnit;
#if defined(__AMX_INT8__)
    static constexpr int64_t kRows = 32, kAhead = 8192;
    static constexpr bool kWholeBlocks = true;
    struct Session : BFloatKernel::Session {
        explicit Session(int64_t rows) : BFloatKernel::Session(rows, kGroup) {}
    };
#else
    static constexpr int64_t kRows = kFewRows, kAhead = 0;
    static constexpr bool kWholeBlocks = false;
    struct Session {
        explicit Session(int64_t) {}
    };
#endif

    static int64_t panel_bytes(const Quantization& quantization, int64_t k) {
        return QuantizedPanel(quantization, k).bytes();
    }
    static void pack_panel(const Quantization& quantization, const uint8_t* codes, const char* const (&numbers)[3],
                           char* weight, int64_t columns, int64_t k) {
        Quantized<Wide, GroupUnits, 0, 0>::pack_panel(quantization, codes, numbers, weight, columns, k);
    }

    // Inputs are [K / 8][2][rows][4] bytes, every other one of eight and then the others, or in the same order
    // [K / kGroup][tiles of 16 rows][16][kGroup]; then come [K / kGroup][rows] groups.
    static int64_t input_bytes(int64_t rows, int64_t k) {
        return round_up(k, kGroup) * (rows > kFewRows ? round_up(rows, 16) : rows);
    }
    static int64_t x_bytes(int64_t rows, int64_t k) {
        return round_up(input_bytes(rows, k) + divide_up(k, kGroup) * rows * int64_t{sizeof(InputGroup)}, 64);
    }

    static void pack_x(const Element* x, char* packed, int64_t rows, int64_t k) {
        InputGroup* groups = reinterpret_cast<InputGroup*>(packed + input_bytes(rows, k));
        for (int64_t row = 0; row < rows; ++row) {
            const uint16_t* own = reinterpret_cast<const uint16_t*>(x) + row * k;
            for (int64_t first = 0; first < k; first += kGroup) {
                uint16_t padded[kGroup] = {};
                if (k - first < kGroup) memcpy(padded, own + first, (k - first) * sizeof *own);
                const uint16_t* some = k - first < kGroup ? padded : own + first;
                InputGroup& group = groups[first / kGroup * rows + row];
                if (rows > kFewRows)
                    pack_group(some, packed + first * round_up(rows, 16) + row * kGroup, 1, group);
                else
                    pack_group(some, packed + first * rows + row * 4, rows, group);
            }
        }
        // Loads of tiles do not declare to the compiler that they read memory.
        asm volatile("" : : : "memory");
    }

    static PENSTOCK_INLINE void pack_group(const uint16_t* inputs, char* packed, int64_t rows, InputGroup& group) {
        const float magnitude = largest_magnitude(inputs, kGroup), factor = integer_factor(magnitude);
        int32_t integers[kGroup];
        round_inputs<kGroup>(inputs, factor, integers);
        int32_t sum = 0;
        for (int i = 0; i < kGroup; ++i) sum += integers[i];
        int8_t bytes[kGroup];
        for (int i = 0; i < kGroup; ++i) bytes[i] = static_cast<int8_t>(integers[i / 8 * 8 + i % 4 * 2 + i / 4 % 2]);
        for (int i = 0; i < kGroup; i += 4) memcpy(packed + i * rows, bytes + i, 4);
        const float scale = magnitude / kLargest;
        group = {scale, scale * static_cast<float>(sum), sum};
    }

    // What the codes of a kind are as bytes without a sign, or with one (kMost is 1).
    template <int kKind, bool kAddsWords>
    struct Bytes {
        static constexpr int kMost = kKind == kIntegers ? 1 : kKind == kSixes ? 2 : kKind == kFours ? kUnits * 4 : 4;
        Codes table{};
        int32_t shift;  // the number that the byte 0 stands for

        explicit Bytes(const Quantization& quantization) : shift(static_cast<int32_t>(quantization.codebook[0])) {
            if constexpr (kKind == kIntegers) shift = kAddsWords ? -128 : 0;
            if constexpr (kKind == kNibbles) {
                shift = -16;
                uint8_t bytes[sizeof table];
                for (size_t i = 0; i < sizeof bytes; ++i)
                    bytes[i] = static_cast<uint8_t>(quantization.codebook[i % 16] * 2 - shift);
                memcpy(&table, bytes, sizeof table);
            }
        }

        // Of one unit: for inputs 0, 2, 4 and 6, for 1, 3, 5 and 7, and the same of the next eight.
        PENSTOCK_INLINE void unpack(const char* unit, int part, Codes (&codes)[4]) const {
            if constexpr (kKind == kIntegers) {
                for (int number = 0; number < 4; ++number) {
                    codes[number] = load_code_words(unit + (number * kPanel + part * kLanes) * 4);
                    if (kAddsWords) codes[number] ^= 0x80808080;
                }
                return;
            }
            Codes more{};
            const char* high = unit + kNibbleBytes;
            if constexpr (kKind == kFives) more = spread_half_words(high + part * kLanes * 2);
            if constexpr (kKind == kSixes) more = load_code_words(high + part * kLanes * 4);
#pragma GCC unroll 8
            for (int number = 0; number < 4; ++number) {
                const Codes words = load_code_words(unit + (number / 2 * kPanel + part * kLanes) * 4);
                codes[number] = (number % 2 ? words >> 4 : words) & 0x0f0f0f0f;
                if constexpr (kKind == kFives) codes[number] |= more << (4 - number) & 0x10101010;
                if constexpr (kKind == kSixes)
                    codes[number] |= (number < 2 ? more << (4 - number * 2) : more >> (number * 2 - 4)) & 0x30303030;
                if constexpr (kKind == kNibbles) codes[number] = look_up_bytes(table, codes[number]);
            }
        }
    };

    // The scales of kLanes columns of a group, and its zeros or minima if there are any.
    static PENSTOCK_INLINE void load_factors(const Quantization& quantization, const QuantizedPanel& panel,
                                             const GroupNumbers& group, int64_t at, Vector& scale, Vector& offset) {
        const char* second = group.numbers + panel.array_bytes;
        if (panel.factor_groups) {
            scale = multiplied(group.numbers, group.factors, at);
            if (quantization.has_minima) offset = multiplied(second, group.factors + 2 * kPanel, at);
        } else {
            scale = load_numbers(group.numbers, quantization.number_type, at);
            if (quantization.has_zeros || quantization.has_minima)
                offset = load_numbers(second, quantization.number_type, at);
        }
    }

    template <int kCount, int kKind, bool kAddsWords, bool kHasZeros>
    static __attribute__((noinline)) void accumulate(const Quantization& quantization, const QuantizedPanel& panel,
                                                     const Tile<Element>& tile) {
        constexpr int kTogether = kVectors < 2 ? kVectors : 2;
        const bool has_minima = !kHasZeros && quantization.has_minima;
        const Bytes<kKind, kAddsWords> bytes(quantization);
        Vector all[kCount][kVectors];
#pragma GCC unroll 8
        for (int row = 0; row < kCount; ++row)
#pragma GCC unroll 8
            for (int part = 0; part < kVectors; ++part) all[row][part] = Vector{};
        const int32_t* x = reinterpret_cast<const int32_t*>(tile.x);
        const InputGroup* inputs = reinterpret_cast<const InputGroup*>(tile.x + input_bytes(kCount, panel.k));
        panel.each_group(tile.weight, {0, panel.k}, [&](const GroupNumbers& header, const char* units, int64_t count) {
            if (tile.prefetch.step)
                for (const char* at = header.numbers; at < units; at += 64)
                    __builtin_prefetch(at + tile.prefetch.step, 0, 2);
#pragma GCC unroll 8
            for (int first = 0; first < kVectors; first += kTogether) {
                Vector scales[kTogether], offsets[kTogether], sums[kCount][kTogether];
#pragma GCC unroll 8
                for (int part = 0; part < kTogether; ++part) {
                    load_factors(quantization, panel, header, (first + part) * kLanes, scales[part], offsets[part]);
                    if constexpr (kKind == kNibbles) scales[part] = times(scales[part], spread(0.5));
#pragma GCC unroll 8
                    for (int row = 0; row < kCount; ++row) sums[row][part] = all[row][first + part];
                }
                const int32_t* own = x;
                const InputGroup* group = inputs;
                for (int64_t unit = 0; unit < count; unit += kUnits, group += kCount) {
                    GroupSum<kAddsWords, Bytes<kKind, kAddsWords>::kMost> some[kCount][kTogether];
#pragma GCC unroll 2
                    for (int at = 0; at < kUnits; ++at, own += kCount * 4) {
                        if (at && unit + at >= count) {
                            // The codes of padding, which inputs of zero do not count.
#pragma GCC unroll 8
                            for (int number = 0; number < 4; ++number)
#pragma GCC unroll 8
                                for (int row = 0; row < kCount; ++row)
#pragma GCC unroll 8
                                    for (int part = 0; part < kTogether; ++part)
                                        some[row][part].add(at * 4 + number, Codes{}, Integers{});
                            continue;
                        }
                        const char* codes = units + (unit + at) * panel.unit_bytes;
                        if (first == 0 && tile.prefetch.step)
                            for (int64_t byte = 0; byte < panel.unit_bytes; byte += 64)
                                __builtin_prefetch(codes + tile.prefetch.step + byte, 0, 2);
                        Codes unpacked[kTogether][4];
#pragma GCC unroll 8
                        for (int part = 0; part < kTogether; ++part) bytes.unpack(codes, first + part, unpacked[part]);
#pragma GCC unroll 8
                        for (int number = 0; number < 4; ++number)
#pragma GCC unroll 8
                            for (int row = 0; row < kCount; ++row) {
                                const Integers four = Integers{} + own[number * kCount + row];
#pragma GCC unroll 8
                                for (int part = 0; part < kTogether; ++part)
                                    some[row][part].add(at * 4 + number, unpacked[part][number], four);
                            }
                    }
#pragma GCC unroll 8
                    for (int row = 0; row < kCount; ++row) {
                        const Vector scale = spread(group[row].scale), scaled_sum = spread(group[row].scaled_sum);
#pragma GCC unroll 8
                        for (int part = 0; part < kTogether; ++part) {
                            Integers words = some[row][part].words;
                            if (bytes.shift) words += bytes.shift * group[row].sum;
                            Vector exact = __builtin_convertvector(words, Vector);
                            if constexpr (kHasZeros)
                                exact = multiply_add(spread(group[row].sum), Vector{} - offsets[part], exact);
                            Vector& sum = sums[row][part];
                            sum = multiply_add(times(scale, scales[part]), exact, sum);
                            if (has_minima) sum = multiply_add(scaled_sum, Vector{} - offsets[part], sum);
                        }
                    }
                }
#pragma GCC unroll 8
                for (int part = 0; part < kTogether; ++part)
#pragma GCC unroll 8
                    for (int row = 0; row < kCount; ++row) all[row][first + part] = sums[row][part];
            }
            x += count * 4 * kCount;
            inputs += divide_up(count, kUnits) * kCount;
        });
        alignas(64) float bias[kPanel] = {};
        if (tile.bias) memcpy(bias, tile.bias, tile.columns * sizeof(float));
#pragma GCC unroll 8
        for (int row = 0; row < kCount; ++row) store(tile, row, all[row], bias);
    }

    static void store(const Tile<Element>& tile, int64_t row, Vector* sums, const float* bias) {
        Tile<Wide::Element> wide{};
        wide.bias = tile.bias;
        wide.out = tile.out;
        wide.out_stride = tile.out_stride;
        wide.is_wide = tile.is_wide;
        wide.columns = tile.columns;
        Wide::store_row(wide, row, sums, bias);
    }

    template <int kCount, int kKind, bool kHasZeros = false>
    static void run(const Quantization& quantization, const QuantizedPanel& panel, const Tile<Element>& tile) {
        if constexpr (!kHasZeros && (kKind == kFours || kKind == kIntegers))
            if (quantization.has_zeros) return run<kCount, kKind, true>(quantization, panel, tile);
        if constexpr (kCount > 1)
            if (tile.rows < kCount) return run<kCount - 1, kKind, kHasZeros>(quantization, panel, tile);
#if defined(__AVX2__)
        if (!IntegerSums::multiplies_bytes())
            return accumulate<kCount, kKind, false, kHasZeros>(quantization, panel, tile);
#endif
        accumulate<kCount, kKind, true, kHasZeros>(quantization, panel, tile);
    }

    // Calls action(kind) for the kinds that these layers have.
    template <class Action>
    static PENSTOCK_INLINE void with_codes(const Quantization& quantization, const Action& action) {
        switch (quantization.kind) {
            case kNibbles: return action(Constant<kNibbles>{});
            case kFours: return action(Constant<kFours>{});
            case kFives: return action(Constant<kFives>{});
            case kSixes: return action(Constant<kSixes>{});
            default: return action(Constant<kIntegers>{});
        }
    }

#if defined(__AMX_INT8__)
    // Writes the codes of some inputs of a panel as signed bytes, [K / 4][kPanel][4] in the order of the inputs, to `codes`, and
    // for every group of them kPanel scales, and as many zeros or minima, to `factors`.
    template <int kKind>
    static void widen_codes(const Quantization& quantization, const QuantizedPanel& panel, const char* weight, Range some,
                            char* codes, Vector* factors) {
        const Bytes<kKind, false> bytes(quantization);
        const __m512i shift = _mm512_set1_epi8(static_cast<char>(bytes.shift));
        panel.each_group(weight, some, [&](const GroupNumbers& header, const char* units, int64_t count) {
            const int64_t groups = divide_up(count, kUnits);
            for (int part = 0; part < kVectors; ++part) {
                Vector scale, offset{};
                load_factors(quantization, panel, header, part * kLanes, scale, offset);
                if constexpr (kKind == kNibbles) scale = times(scale, spread(0.5));
                for (int64_t group = 0; group < groups; ++group) {
                    factors[(group * 2) * kVectors + part] = scale;
                    factors[(group * 2 + 1) * kVectors + part] = offset;
                }
                for (int64_t unit = 0; unit < count; ++unit) {
                    Codes unpacked[4];
                    bytes.unpack(units + unit * panel.unit_bytes, part, unpacked);
                    char* to = codes + unit * kUnit * kPanel + part * 64;
                    for (int number = 0; number < 4; ++number)
                        _mm512_store_si512(to + number * 128, _mm512_add_epi8((__m512i)unpacked[number], shift));
                }
            }
            factors += groups * kVectors * 2;
            codes += groups * kGroup * kPanel;
        });
        asm volatile("" : : : "memory");
    }

    // How many groups' codes and sums are in the first-level cache at a time.
    static constexpr int64_t kTogether = 4;

    // Multiplies `blocks` blocks, of more than kFewRows rows each.
    static void multiply_tiles(const Blocks<GroupSums>& x, int64_t blocks, const Quantization& quantization,
                               const QuantizedPanel& panel, Tile<Element> tile) {
        constexpr int64_t kSums = kRows * kPanel;
        alignas(64) int32_t exact[kTogether * kSums];
        alignas(64) char codes[kTogether * kGroup * kPanel];
        alignas(64) Vector factors[kTogether * kVectors * 2];
        float* sums = reinterpret_cast<float*>(dense_panel.reserve(blocks * kSums * sizeof(float)));
        memset(sums, 0, blocks * kSums * sizeof(float));
        const int64_t groups = divide_up(panel.k, kGroup);
        Prefetch prefetch{tile.weight + tile.prefetch.step,
                          tile.prefetch.step ? round_up(divide_up(panel.bytes(), groups), 64) : 0};
        for (int64_t first = 0; first < groups; first += kTogether) {
            const int64_t some = smaller(kTogether, groups - first);
            const Range range{first * kGroup, smaller(panel.k, (first + some) * kGroup)};
            with_codes(quantization, [&](auto kind) {
                widen_codes<kind.value>(quantization, panel, tile.weight, range, codes, factors);
            });
            for (int64_t block = 0; block < blocks; ++block) {
                const int64_t rows = x.height_of(block), row_tiles = divide_up(rows, 16);
                const char* own = x.packed + block * x.bytes;
                for (int64_t group = 0; group < some; ++group) {
                    sum_group(own + (first + group) * kGroup * row_tiles * 16, codes + group * kGroup * kPanel, row_tiles,
                              exact + group * kSums);
                    if (block == 0) prefetch.advance();
                }
                asm volatile("" : : : "memory");
                const auto inputs = reinterpret_cast<const InputGroup*>(own + input_bytes(rows, x.k)) + first * rows;
                if (quantization.has_zeros)
                    add_sums<true>(quantization, exact, inputs, factors, rows, some, sums + block * kSums);
                else
                    add_sums<false>(quantization, exact, inputs, factors, rows, some, sums + block * kSums);
            }
        }
        alignas(64) float bias[kPanel] = {};
        if (tile.bias) memcpy(bias, tile.bias, tile.columns * sizeof(float));
        const int64_t rows = smaller(x.rows, x.first(blocks));
        for (int64_t row = 0; row < rows; ++row) store(tile, row, reinterpret_cast<Vector*>(sums + row * kPanel), bias);
    }

    // The exact sums of a group, [rows, kPanel].
    static PENSTOCK_INLINE void sum_group(const char* x, const char* codes, int64_t row_tiles, int32_t* exact) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_loadd(4, x, kGroup);
        _tile_loadd(6, codes, kPanel * 4);
        _tile_dpbssd(0, 4, 6);
        _tile_loadd(7, codes + 64, kPanel * 4);
        _tile_dpbssd(1, 4, 7);
        _tile_stored(0, exact, kPanel * 4);
        _tile_stored(1, exact + 16, kPanel * 4);
        if (row_tiles == 1) return;
        _tile_zero(2);
        _tile_zero(3);
        _tile_loadd(5, x + 16 * kGroup, kGroup);
        _tile_dpbssd(2, 5, 6);
        _tile_dpbssd(3, 5, 7);
        _tile_stored(2, exact + 16 * kPanel, kPanel * 4);
        _tile_stored(3, exact + 16 * kPanel + 16, kPanel * 4);
    }

    // Adds the groups' sums to those of the rows, [rows, kPanel].
    template <bool kHasZeros>
    static void add_sums(const Quantization& quantization, const int32_t* exact, const InputGroup* inputs,
                         const Vector* factors, int64_t rows, int64_t groups, float* sums) {
        const bool has_minima = !kHasZeros && quantization.has_minima;
        for (int64_t at = 0; at < rows * kPanel; at += kLanes) {
            const Vector* factor = factors + at / kLanes % kVectors;
            const InputGroup* own = inputs + at / kPanel;
            Vector sum = read(sums + at);
            for (int64_t group = 0; group < groups; ++group, factor += kVectors * 2, own += rows) {
                Integers words;
                memcpy(&words, exact + group * kRows * kPanel + at, sizeof words);
                Vector value = __builtin_convertvector(words, Vector);
                if constexpr (kHasZeros) {
                    const Vector inputs_sum = __builtin_convertvector(Integers{} + own->sum, Vector);
                    value = multiply_add(inputs_sum, Vector{} - factor[kVectors], value);
                }
                sum = multiply_add(times(spread(own->scale), factor[0]), value, sum);
                if (has_minima) sum = multiply_add(spread(own->scaled_sum), Vector{} - factor[kVectors], sum);
            }
            write(sums + at, sum);
        }
    }
#endif

    static int64_t panels_together(const Blocks<GroupSums>&, const Quantization&) { return 1; }

    static void multiply_panels(const Blocks<GroupSums>& x, const Quantization& quantization, const char* weight,
                                bool follows, Tile<Element>* tiles, int64_t) {
        const QuantizedPanel panel(quantization, x.k);
        Tile<Element>& tile = *tiles;
        char* out = tile.out;
        tile.weight = weight;
        tile.prefetch.step = kAhead && x.rows == 1 ? kAhead : follows ? panel.bytes() : 0;
        int64_t block = 0;
#if defined(__AMX_INT8__)
        // The last block may have few rows.
        block = x.count - (x.height_of(x.count - 1) <= kFewRows);
        if (block) {
            multiply_tiles(x, block, quantization, panel, tile);
            tile.prefetch.step = 0;
        }
#endif
        for (; block < x.count; ++block, tile.prefetch.step = 0) {
            tile.x = x.packed + block * x.bytes;
            tile.out = out + x.first(block) * tile.out_stride;
            tile.rows = x.height_of(block);
            with_codes(quantization, [&](auto kind) { run<kFewRows, kind.value>(quantization, panel, tile); });
        }
    }

    // Writes the values of a panel's columns, [columns, k], rounded to bfloat16.
    static void unpack_panel(const Quantization& quantization, const char* weight, uint16_t* out, int64_t columns, int64_t k) {
        const QuantizedPanel panel(quantization, k);
        uint16_t* dense = reinterpret_cast<uint16_t*>(dense_panel.reserve(round_up(k, kUnit) * kPanel * 2));
        with_kind(quantization, [&](auto kind, auto) {
            constexpr int kForm = kind.value == kFives || kind.value == kSixes ? kFused : kAffine;
            GroupUnits::dequantise<Fma<BFloat>, kind.value, kForm, true>(quantization, panel, weight, {0, k},
                                                                         reinterpret_cast<char*>(dense));
        });
        for (int64_t column = 0; column < columns; ++column)
            for (int64_t input = 0; input < k; ++input) out[column * k + input] = dense[input * kPanel + column];
    }
};

template <int kGroup>
constexpr bool kIsQuantized<GroupSums<kGroup>> = true;

}  // namespace
