// bfloat16 layers whose weights stay quantized in memory (kernels/quantized.py): what a kernel multiplies by is the
// weight's values, rounded to bfloat16, in the very order of the kernel for bfloat16, so the bits are that layer's.
//
// A panel of packed weights is, for one group of inputs after another, the numbers of its 32 columns (scales, then zeros
// and minima if there are any) and its codes in units of 16 inputs, the last one padded. Where several groups share a
// factor by which their numbers are multiplied, the factors of scales and of minima precede these groups. Many rows take a panel that is
// dequantised once into this thread's memory; few rows, for which the memory's bandwidth decides, take each value from a
// register.
#pragma once

#include "linear_fma.h"
#include "linear_matrices.h"
#include "linear_pairs.h"

namespace {

// What the codes of a weight are; also in kernels/quantized.py.
enum QuantizedKind : int64_t {
    kNibbles = 0,   // 4 bits that number an entry of the codebook
    kIntegers = 1,  // 8 bits, in two's complement
    kFloats = 2,    // 8 bits, E4M3
    kTable = 3,     // 8 bits that number an entry of the codebook
    kSums = 4,      // 8 bits, in two's complement, of a layer that quantizes its inputs (linear_integers.h)
    kFives = 5,     // 5 bits: integers from the first entry of the codebook on
    kSixes = 6,     // 6 bits: the same
    kFours = 7,     // 4 bits: the same
};

// How a value is made of its code.
enum Form {
    kScaled = 0,  // the code times the scale
    kFused = 1,   // one fused operation, where the product of scale and code is exact
    kAffine = 2,  // code - zero, times the scale, less the minimum, each rounded
};

struct Quantization {
    int64_t kind;
    int64_t group;         // inputs
    int64_t number_type;   // of scales, zeros and minima
    int64_t has_zeros;
    int64_t has_minima;
    int64_t has_extremes;  // whether a value may be too small or too large for `rounded`
    int64_t factor_groups;  // how many groups of 8-bit scales and minima share a float16 factor; 0: there are none
    int64_t is_exact;       // whether zeros are integers, and products of codes and scales need no rounding
    int64_t input_group;    // how many inputs are rounded together (linear_groups.h): 16 or 32, or 0 if they are not
    float codebook[256];
};

constexpr int64_t kUnit = 16;  // inputs

// Codes of at most 6 bits have their low four in one part of a unit, and the others in the part that follows it.
constexpr int code_bits(int64_t kind) {
    return kind == kNibbles || kind == kFours ? 4 : kind == kFives ? 5 : kind == kSixes ? 6 : 8;
}
// Whether codes are the integers themselves, less a number that zeros take.
constexpr bool counts_from_zero(int64_t kind) { return kind == kFours || kind == kFives || kind == kSixes; }
constexpr int64_t unit_bytes_of(int64_t kind) { return kUnit * kPanel * code_bits(kind) / 8; }
constexpr int64_t kNibbleBytes = unit_bytes_of(kNibbles);

// Where the numbers of a group are, and their factors.
struct GroupNumbers {
    const char* numbers;
    const char* factors;

    GroupNumbers operator+(int64_t bytes) const { return {numbers + bytes, factors + bytes}; }
};

// Where the parts of a panel are.
struct QuantizedPanel {
    int64_t k, group, groups, array_bytes, header_bytes, unit_bytes, factor_groups, factor_bytes;

    QuantizedPanel(const Quantization& quantization, int64_t k)
        : k(k), group(smaller(quantization.group, round_up(k, kUnit))), groups(divide_up(k, group)),
          factor_groups(quantization.factor_groups) {
        array_bytes = kPanel * number_bytes(quantization);
        header_bytes = array_bytes * (1 + (quantization.has_zeros != 0) + (quantization.has_minima != 0));
        factor_bytes = factor_groups ? kPanel * 2 * (1 + (quantization.has_minima != 0)) : 0;
        unit_bytes = unit_bytes_of(quantization.kind);
    }
    static int64_t number_bytes(const Quantization& quantization) {
        return quantization.factor_groups ? 1 : quantization.number_type == kFloat32 ? 4 : 2;
    }
    // How many factors precede a group, its own included, or all groups.
    int64_t factors_to(int64_t number) const { return factor_groups ? number / factor_groups + 1 : 0; }
    int64_t bytes() const {
        return groups * header_bytes + divide_up(k, kUnit) * unit_bytes + factors_to(groups - 1) * factor_bytes;
    }
    int64_t units_of(int64_t number) const { return divide_up(smaller(group, k - number * group), kUnit); }
    // Where a group, of a panel at `weight`, begins with its numbers.
    const char* at(const char* weight, int64_t number) const {
        return weight + number * group_bytes() + factors_to(number) * factor_bytes;
    }
    int64_t group_bytes() const { return header_bytes + group / kUnit * unit_bytes; }
    // The factors of a group, which follow all groups before its block.
    const char* factors_at(const char* weight, int64_t number) const {
        return factor_groups ? at(weight, number - number % factor_groups) - factor_bytes : weight;
    }

    // Calls take(numbers, units, count) for the units of the inputs in a range that begins with one, group after group.
    template <class Take>
    PENSTOCK_INLINE void each_group(const char* weight, Range inputs, const Take& take) const {
        const int64_t first = inputs.begin / group;
        int64_t inside = inputs.begin % group, left = factor_groups ? factor_groups - first % factor_groups : -1;
        const char *numbers = at(weight, first), *factors = factors_at(weight, first);
        while (inputs.begin < inputs.end) {
            const int64_t some = smaller(inputs.end - inputs.begin, group - inside);
            take(GroupNumbers{numbers, factors}, numbers + header_bytes + inside / kUnit * unit_bytes, divide_up(some, kUnit));
            inputs.begin += some;
            inside = 0;
            numbers += group_bytes();
            if (--left == 0) {
                left = factor_groups;
                factors = numbers;
                numbers += factor_bytes;
            }
        }
    }
};

template <int kNumber>
struct Constant {
    static constexpr int value = kNumber;
};

// Calls action(kind, form) for all kinds but kSums.
template <class Action>
void with_kind(const Quantization& quantization, const Action& action) {
    const bool is_affine = quantization.has_zeros || quantization.has_minima;
#define KIND(kind) is_affine ? action(Constant<kind>{}, Constant<kAffine>{}) : action(Constant<kind>{}, Constant<kScaled>{})
    switch (quantization.kind) {
        case kNibbles: return KIND(kNibbles);
        case kFours:
            if (quantization.is_exact) return action(Constant<kFours>{}, Constant<kFused>{});
            return action(Constant<kFours>{}, Constant<kAffine>{});
        case kFives: return action(Constant<kFives>{}, Constant<kFused>{});
        case kSixes: return action(Constant<kSixes>{}, Constant<kFused>{});
        case kIntegers: return KIND(kIntegers);
        case kFloats: return KIND(kFloats);
        default: return KIND(kTable);
    }
#undef KIND
}

// E4M3 is read as the top of a float16, which is less by this factor; the scales take it, exactly.
constexpr float kFloatsFactor = 256;

#if defined(__AVX512F__)

using Words = __m512i;
struct Codebook {
    __m512 values;
    explicit Codebook(const float* from) : values(_mm512_loadu_ps(from)) {}
};

inline Words load_words(const char* from) { return _mm512_loadu_si512(from); }
inline Words next_nibbles(Words words) { return _mm512_srli_epi32(words, 4); }
inline Words load_half_words(const char* from) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from));
}
// The number whose low four bits are those of a word, and the next `count` those from bit `at` on of another.
inline Vector joined(Words low, Words high, int at, int count) {
    high = at < 4 ? _mm512_slli_epi32(high, 4 - at) : _mm512_srli_epi32(high, at - 4);
    // Of three bits, the first where the third is set, and else the second.
    const Words code = _mm512_ternarylogic_epi32(low, high, _mm512_set1_epi32(15), 0xe4);
    return _mm512_cvtepi32_ps(_mm512_and_si512(code, _mm512_set1_epi32((16 << count) - 1)));
}
// Of the lowest four bits of each word; the instruction ignores the others.
inline Vector look_up(const Codebook& codebook, Words words) { return _mm512_permutexvar_ps(words, codebook.values); }
inline Vector low_nibbles(Words words) { return _mm512_cvtepi32_ps(_mm512_and_si512(words, _mm512_set1_epi32(15))); }
inline Vector from_integers(const char* codes) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)codes)));
}
inline Vector from_floats(const char* codes) {
    const __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)codes)), 7);
    return _mm512_cvtph_ps(_mm256_and_si256(wide, _mm256_set1_epi16(static_cast<int16_t>(0xbfff))));
}
inline Vector from_table(const char* codes, const float* codebook) {
    return _mm512_i32gather_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)codes)), codebook, 4);
}
inline Vector minus(Vector a, Vector b) { return _mm512_sub_ps(a, b); }
// A compiler may not fuse this product with the difference that follows it.
inline Vector times(Vector a, Vector b) {
    Vector product = _mm512_mul_ps(a, b);
    asm("" : "+v"(product));
    return product;
}
inline void store_high_halves(uint16_t* to, Vector value) {
    _mm256_storeu_si256((__m256i*)to, _mm512_cvtepi32_epi16(_mm512_srli_epi32((__m512i)value, 16)));
}

#elif defined(__AVX2__)

using Words = __m256i;
struct Codebook {
    __m256 low, high;
    explicit Codebook(const float* from) : low(_mm256_loadu_ps(from)), high(_mm256_loadu_ps(from + 8)) {}
};

inline Words load_words(const char* from) { return _mm256_loadu_si256((const __m256i*)from); }
inline Words next_nibbles(Words words) { return _mm256_srli_epi32(words, 4); }
inline Words load_half_words(const char* from) {
    return _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)from));
}
inline Vector low_nibbles(Words words) { return _mm256_cvtepi32_ps(_mm256_and_si256(words, _mm256_set1_epi32(15))); }
inline Vector joined(Words low, Words high, int at, int count) {
    high = at < 4 ? _mm256_slli_epi32(high, 4 - at) : _mm256_srli_epi32(high, at - 4);
    low = _mm256_and_si256(low, _mm256_set1_epi32(15));
    high = _mm256_and_si256(high, _mm256_set1_epi32((16 << count) - 16));
    return _mm256_cvtepi32_ps(_mm256_or_si256(low, high));
}
// The instructions ignore the bits above the third, which the blend takes as a sign.
inline Vector look_up(const Codebook& codebook, Words words) {
    const __m256 low = _mm256_permutevar8x32_ps(codebook.low, words);
    const __m256 high = _mm256_permutevar8x32_ps(codebook.high, words);
    return _mm256_blendv_ps(low, high, (__m256)_mm256_slli_epi32(words, 28));
}
inline Vector from_integers(const char* codes) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)codes)));
}
inline Vector from_floats(const char* codes) {
    const __m128i wide = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)codes)), 7);
    return _mm256_cvtph_ps(_mm_and_si128(wide, _mm_set1_epi16(static_cast<int16_t>(0xbfff))));
}
inline Vector from_table(const char* codes, const float* codebook) {
    return _mm256_i32gather_ps(codebook, _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)codes)), 4);
}
inline Vector minus(Vector a, Vector b) { return _mm256_sub_ps(a, b); }
inline Vector times(Vector a, Vector b) {
    Vector product = _mm256_mul_ps(a, b);
    asm("" : "+x"(product));
    return product;
}
inline void store_high_halves(uint16_t* to, Vector value) {
    const __m256i high = _mm256_srli_epi32((__m256i)value, 16);
    const __m256i narrow = _mm256_permute4x64_epi64(_mm256_packus_epi32(high, high), 0b1000);
    _mm_storeu_si128((__m128i*)to, _mm256_castsi256_si128(narrow));
}

#else

typedef uint32_t Words __attribute__((vector_size(16)));
struct Codebook {
    const float* values;
    explicit Codebook(const float* from) : values(from) {}
};

inline Words load_words(const char* from) {
    Words words;
    memcpy(&words, from, sizeof words);
    return words;
}
inline Words next_nibbles(Words words) { return words >> 4; }
inline Words load_half_words(const char* from) {
    uint16_t halves[kLanes];
    memcpy(halves, from, sizeof halves);
    return Words{halves[0], halves[1], halves[2], halves[3]};
}
inline Vector floats_of(Words codes) {
    return Vector{float(codes[0]), float(codes[1]), float(codes[2]), float(codes[3])};
}
inline Vector low_nibbles(Words words) { return floats_of(words & 15); }
inline Vector joined(Words low, Words high, int at, int count) {
    high = at < 4 ? high << (4 - at) : high >> (at - 4);
    return floats_of((low & 15) | (high & ((16 << count) - 16)));
}
inline Vector look_up(const Codebook& codebook, Words words) {
    return Vector{codebook.values[words[0] & 15], codebook.values[words[1] & 15], codebook.values[words[2] & 15],
                  codebook.values[words[3] & 15]};
}
inline Vector from_integers(const char* codes) {
    const int8_t* from = reinterpret_cast<const int8_t*>(codes);
    return Vector{float(from[0]), float(from[1]), float(from[2]), float(from[3])};
}
inline Vector from_table(const char* codes, const float* codebook) {
    const uint8_t* from = reinterpret_cast<const uint8_t*>(codes);
    return Vector{codebook[from[0]], codebook[from[1]], codebook[from[2]], codebook[from[3]]};
}
inline Vector from_floats(const char* codes) {
    Half halves[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) {
        const uint32_t code = static_cast<uint8_t>(codes[lane]);
        halves[lane] = Half{static_cast<uint16_t>((code & 0x80) << 8 | (code & 0x7f) << 7)};
    }
    return read(halves);
}
inline Vector minus(Vector a, Vector b) { return a - b; }
inline Vector times(Vector a, Vector b) { return a * b; }
inline void store_high_halves(uint16_t* to, Vector value) {
    const Words bits = (Words)value;
    for (int lane = 0; lane < kLanes; ++lane) to[lane] = static_cast<uint16_t>(bits[lane] >> 16);
}

#endif

// To bfloat16, to nearest even, of what is not extreme (Veltkamp's splitting, Dekker 1971): the product rounds away what
// 8 bits do not hold, with one less than 2^16 so that it never needs one more bit, and the difference is exact. A negative
// zero becomes a positive one, as any sum begins with.
inline Vector rounded(Vector value) {
    return multiply_add(value, spread(65536), times(value, spread(-65535)));
}

// kLanes numbers of a group, from column `at` on.
inline Vector load_numbers(const char* array, int64_t type, int64_t at) {
    switch (type) {
        case kBFloat16: return read(reinterpret_cast<const BFloat*>(array) + at);
        case kFloat16: return read(reinterpret_cast<const Half*>(array) + at);
        default: return read(reinterpret_cast<const float*>(array) + at);
    }
}

// Numbers of a group that are integers, times their factors.
inline Vector multiplied(const char* integers, const char* factors, int64_t at) {
    return times(from_integers(integers + at), load_numbers(factors, kFloat16, at));
}

// The numbers of kLanes columns of a group.
template <int kKind, int kForm>
struct Numbers {
    Vector scale, zero, minimum;  // with kFused, `minimum` is what is added

    static PENSTOCK_INLINE Numbers load(const Quantization& quantization, const QuantizedPanel& panel,
                                        const GroupNumbers& group, int64_t at) {
        const int64_t type = quantization.number_type;
        const char* header = group.numbers;
        Numbers numbers{};
        if (panel.factor_groups) {
            // The products are exact: a factor has 11 bits.
            numbers.scale = multiplied(header, group.factors, at);
            if constexpr (kForm != kScaled)
                if (quantization.has_minima)
                    numbers.minimum = multiplied(header + panel.array_bytes, group.factors + 2 * kPanel, at);
        } else {
            numbers.scale = load_numbers(header, type, at);
            if constexpr (kKind == kFloats) numbers.scale = times(numbers.scale, spread(kFloatsFactor));
            if constexpr (kForm != kScaled) {
                if (quantization.has_zeros) numbers.zero = load_numbers(header + panel.array_bytes, type, at);
                if (quantization.has_minima)
                    numbers.minimum =
                        load_numbers(header + (1 + (quantization.has_zeros != 0)) * panel.array_bytes, type, at);
            }
        }
        if constexpr (counts_from_zero(kKind)) numbers.zero = minus(numbers.zero, spread(quantization.codebook[0]));
        if constexpr (kForm == kFused) {
            if (!quantization.has_minima) numbers.minimum = times(numbers.zero, numbers.scale);
            numbers.minimum = minus(Vector{}, numbers.minimum);
        }
        return numbers;
    }
    PENSTOCK_INLINE Vector value(Vector code) const {
        if constexpr (kForm == kFused) return multiply_add(code, scale, minimum);
        if constexpr (kForm == kAffine) code = minus(code, zero);
        code = times(code, scale);
        if constexpr (kForm == kAffine) code = minus(code, minimum);
        return code;
    }
};

template <int kKind>
PENSTOCK_INLINE Vector from_bytes(const char* codes, const Quantization& quantization) {
    if constexpr (kKind == kIntegers) return from_integers(codes);
    if constexpr (kKind == kFloats) return from_floats(codes);
    return from_table(codes, quantization.codebook);
}

template <bool kExtremes>
inline void store_rounded(uint16_t* to, Vector value) {
    if constexpr (kExtremes)
        write(reinterpret_cast<BFloat*>(to), value);
    else
        store_high_halves(to, rounded(value));
}

// Write one input of the columns from `column` on to a panel that is not quantized.
template <bool kExtremes>
inline void put_input(Fma<Float>, char* panel, int64_t input, int64_t column, Vector value) {
    if constexpr (kExtremes) {
        BFloat line[kLanes];
        write(line, value);
        value = read(line);
    } else {
        value = rounded(value);
    }
    write(reinterpret_cast<float*>(panel) + input * kPanel + column, value);
}
template <bool kExtremes>
inline void put_input(Fma<BFloat>, char* panel, int64_t input, int64_t column, Vector value) {
    store_rounded<kExtremes>(reinterpret_cast<uint16_t*>(panel) + input * kPanel + column, value);
}
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
template <bool kExtremes>
inline void put_input(Matrices, char* panel, int64_t input, int64_t column, Vector value) {
    uint16_t line[kLanes];
    store_rounded<kExtremes>(line, value);
    uint16_t* to = reinterpret_cast<uint16_t*>(panel) + (input / 4 * kPanel + column) * 4 + input % 4;
    for (int lane = 0; lane < kLanes; ++lane) to[lane * 4] = line[lane];
}
#endif

// Eight codes, the first in the lowest bits.
inline uint64_t load_codes(const uint8_t* codes) {
    uint64_t word;
    memcpy(&word, codes, sizeof word);
    return __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ ? word : __builtin_bswap64(word);
}
// The lowest kBits of every kField bits, one after another.
template <int kBits, int kField>
inline uint64_t low_bits(uint64_t fields) {
    if constexpr (kField == 64)
        return fields & ((uint64_t{1} << kBits) - 1);
    else {
        fields &= ~uint64_t{0} / ((uint64_t{1} << kField) - 1) * ((uint64_t{1} << kBits) - 1);
        return low_bits<kBits * 2, kField * 2>(fields | fields >> (kField - kBits));
    }
}

// The lowest kBits of every 16 bits.
template <int kBits>
constexpr uint64_t kLowest = uint64_t{0x0001000100010001} * ((1 << kBits) - 1);

// Units for kernels that take vectors of columns: 4 bits are [2][32 columns] words, of 8 inputs each, one or two bits more
// [32 columns] half words or words, of 16 inputs each, and 8 bits are [16][32 columns], or with kInWords like 4 bits in two
// words for one: of each 8 inputs, [2][32 columns] words of every other one.
//
// Half words and words have four equal fields, of inputs 0, 1, 8, 9, then of 2, 3, 10, 11, and so on: so the bits of one word
// of 8 bits have one distance there, of a byte in words.
template <bool kInWords = false>
struct ColumnUnits {
    // Where the bits of an input begin.
    static constexpr int more_at(int bits, int input) { return (input % 8 / 2 * 4 + input / 8 * 2 + input % 2) * bits; }

    template <int kBits>
    static PENSTOCK_INLINE void store_codes(char* unit, int64_t column, const uint8_t* codes) {
        if constexpr (kBits == 8 && kInWords) {
            for (int number = 0; number < 4; ++number) {
                const uint64_t some = low_bits<8, 16>(load_codes(codes + number / 2 * 8) >> number % 2 * 8);
                reinterpret_cast<uint32_t*>(unit)[number * kPanel + column] = static_cast<uint32_t>(some);
            }
        } else if constexpr (kBits == 8) {
            for (int64_t input = 0; input < kUnit; ++input) unit[input * kPanel + column] = static_cast<char>(codes[input]);
        } else {
            constexpr int kMore = kBits - 4;
            uint32_t more = 0;
            for (int half = 0; half < 2; ++half) {
                const uint64_t some = load_codes(codes + half * 8);
                reinterpret_cast<uint32_t*>(unit)[half * kPanel + column] = static_cast<uint32_t>(low_bits<4, 8>(some));
                if constexpr (kMore) {
                    const uint64_t even = some >> 4 & kLowest<kMore>, odd = some >> 12 & kLowest<kMore>;
                    const uint64_t fields = low_bits<kMore * 4, 16>(even | odd << kMore);
                    more |= static_cast<uint32_t>(fields) << half * 2 * kMore;
                }
            }
            if constexpr (kBits == 5) reinterpret_cast<uint16_t*>(unit + kNibbleBytes)[column] = static_cast<uint16_t>(more);
            if constexpr (kBits == 6) reinterpret_cast<uint32_t*>(unit + kNibbleBytes)[column] = more;
        }
    }

    static constexpr int kVectors = kPanel / kLanes;

    // Calls take(input, part, values) for every input of a unit and its vectors of columns from `first` on, of which there
    // are as many as `numbers`.
    template <int kKind, int kForm, int kParts, class Take>
    static PENSTOCK_INLINE void each_input(const Quantization& quantization, const Codebook& codebook,
                                           const Numbers<kKind, kForm> (&numbers)[kParts], const char* unit, int first,
                                           const Take& take) {
        constexpr int kMore = code_bits(kKind) - 4;
        Words words[kParts], more[kParts];
#pragma GCC unroll 16
        for (int input = 0; input < kUnit; ++input) {
#pragma GCC unroll 2
            for (int part = 0; part < kParts; ++part) {
                const int64_t at = (first + part) * kLanes;
                if constexpr (kMore < 4) {
                    if (input == 0 && kMore == 1) more[part] = load_half_words(unit + kNibbleBytes + at * 2);
                    if (input == 0 && kMore == 2) more[part] = load_words(unit + kNibbleBytes + at * 4);
                    words[part] = input % 8 ? next_nibbles(words[part]) : load_words(unit + (input / 8 * kPanel + at) * 4);
                    if constexpr (kMore)
                        take(input, part, numbers[part].value(joined(words[part], more[part], more_at(kMore, input), kMore)));
                    else if constexpr (counts_from_zero(kKind))
                        take(input, part, numbers[part].value(low_nibbles(words[part])));
                    else
                        take(input, part, numbers[part].value(look_up(codebook, words[part])));
                } else {
                    char line[kLanes];
                    const char* codes = unit + input * kPanel + at;
                    if constexpr (kInWords) {
                        const char* word = unit + (input / 8 * 2 + input % 2) * kPanel * 4 + input % 8 / 2;
                        for (int lane = 0; lane < kLanes; ++lane) line[lane] = word[(at + lane) * 4];
                        codes = line;
                    }
                    take(input, part, numbers[part].value(from_bytes<kKind>(codes, quantization)));
                }
            }
        }
    }

    template <class Dense, int kKind, int kForm, bool kExtremes>
    static void dequantise(const Quantization& quantization, const QuantizedPanel& panel, const char* weight,
                           Range inputs, char* out) {
        const Codebook codebook(quantization.codebook);
        int64_t first = 0;
        panel.each_group(weight, inputs, [&](const GroupNumbers& header, const char* units, int64_t count) {
            for (int part = 0; part < kVectors; ++part) {
                const Numbers<kKind, kForm> numbers[] = {
                    Numbers<kKind, kForm>::load(quantization, panel, header, part * kLanes)};
                for (int64_t unit = 0; unit < count; ++unit)
                    each_input<kKind, kForm>(
                        quantization, codebook, numbers, units + unit * panel.unit_bytes, part,
                        [&](int input, int, Vector value) {
                            put_input<kExtremes>(Dense(), out, first + unit * kUnit + input, part * kLanes, value);
                        });
            }
            first += count * kUnit;
        });
    }

    static void clear(char* out, int64_t k) { static_cast<void>(out), static_cast<void>(k); }

    static constexpr int kPanelsOfOneRow = 1;

    template <class Base, int kPanels, int kCount, int kKind, int kForm>
    static __attribute__((noinline)) void accumulate(const Quantization& quantization, const QuantizedPanel& panel,
                                                     const Tile<typename Base::Element>* tiles) {
        const Tile<typename Base::Element>& tile = *tiles;
        // A multiply-add waits for the previous one to its accumulator: few rows alternate between those of two vectors.
        constexpr int kTogether = kCount <= (code_bits(kKind) == 8 ? 4 : 2) ? 2 : 1;
        const Codebook codebook(quantization.codebook);
        Vector all[kCount][kVectors];
        for (int row = 0; row < kCount; ++row)
            for (int part = 0; part < kVectors; ++part) all[row][part] = Vector{};
        const float* x = reinterpret_cast<const float*>(tile.x);
        panel.each_group(tile.weight, {0, panel.k}, [&](const GroupNumbers& header, const char* units, int64_t count) {
            for (int first = 0; first < kVectors; first += kTogether) {
                Numbers<kKind, kForm> numbers[kTogether];
                Vector sums[kTogether][kCount];
                for (int part = 0; part < kTogether; ++part) {
                    numbers[part] = Numbers<kKind, kForm>::load(quantization, panel, header, (first + part) * kLanes);
                    for (int row = 0; row < kCount; ++row) sums[part][row] = all[row][first + part];
                }
                for (int64_t unit = 0; unit < count; ++unit) {
                    const char* codes = units + unit * panel.unit_bytes;
                    const float* inputs = x + unit * kUnit * kCount;
                    if (first == 0 && tile.prefetch.step)
                        for (int64_t byte = 0; byte < panel.unit_bytes; byte += 64)
                            __builtin_prefetch(codes + tile.prefetch.step + byte, 0, 2);
                    each_input<kKind, kForm>(
                        quantization, codebook, numbers, codes, first, [&](int input, int part, Vector value) {
                            const Vector weights = rounded(value);
                            for (int row = 0; row < kCount; ++row)
                                sums[part][row] =
                                    multiply_add(spread(inputs[input * kCount + row]), weights, sums[part][row]);
                        });
                }
                for (int part = 0; part < kTogether; ++part)
                    for (int row = 0; row < kCount; ++row) all[row][first + part] = sums[part][row];
            }
            x += count * kUnit * kCount;
        });
        alignas(64) float bias[kPanel] = {};
        if (tile.bias) memcpy(bias, tile.bias, tile.columns * sizeof(float));
        for (int row = 0; row < kCount; ++row) Base::store_row(tile, row, all[row], bias);
    }
};

#if defined(__AVX512BF16__)

// Units for Pairs, whose vectors are of 8 columns with two inputs each: 8 bits are [8 pairs][32 columns][2], and 4 bits
// are [2][2 halves of the columns][8 columns][2 inputs][2] half words, of which the last are for a column and the eighth
// after it, with the codes of 4 pairs each. So one look-up gives the values of two vectors, in the halves of words. Two
// bits more are [2 halves of the columns] half words in the same order, with the codes of 8 pairs each, and one bit more
// is the first byte of a half word for the first half of the columns, and the second for the other.
struct PairUnits {
    template <int kBits>
    static PENSTOCK_INLINE void store_codes(char* unit, int64_t column, const uint8_t* codes) {
        if constexpr (kBits == 8) {
            for (int64_t pair = 0; pair < 8; ++pair) memcpy(unit + (pair * kPanel + column) * 2, codes + pair * 2, 2);
        } else {
            const int64_t half = column / 16;
            const uint64_t first = load_codes(codes), second = load_codes(codes + 8);
            for (int64_t input = 0; input < 2; ++input) {
                const int64_t lane = (column % 8 * 2 + input) * 2 + column % 16 / 8;
                // One input of every pair.
                const uint64_t some = low_bits<8, 16>(first >> input * 8) | low_bits<8, 16>(second >> input * 8) << 32;
                const auto half_words = reinterpret_cast<uint16_t*>(unit), more = half_words + kNibbleBytes / 2;
                const uint64_t low = low_bits<4, 8>(some);
                half_words[half * 32 + lane] = static_cast<uint16_t>(low);
                half_words[64 + half * 32 + lane] = static_cast<uint16_t>(low >> 16);
                if constexpr (kBits == 5)
                    reinterpret_cast<uint8_t*>(more + lane)[half] = static_cast<uint8_t>(low_bits<1, 8>(some >> 4));
                if constexpr (kBits == 6)
                    more[half * 32 + lane] = static_cast<uint16_t>(low_bits<2, 8>(some >> 4));
            }
        }
    }

    // What a code is before it is scaled, in bfloat16, which has all of these numbers: the entries of the codebook, twice,
    // since the highest bit that a look-up takes is that of the next code; or 0 to 63.
    struct Table {
        __m512i first, second;
    };
    static inline __m512i integers_from(float first) {
        const __m512 low = _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        const __m512 from = _mm512_add_ps(low, _mm512_set1_ps(first));
        return (__m512i)_mm512_cvtne2ps_pbh(_mm512_add_ps(from, _mm512_set1_ps(16)), from);
    }
    template <int kKind>
    static inline Table load_table(const float* codebook) {
        if constexpr (kKind == kFives || kKind == kSixes) return {integers_from(0), integers_from(32)};
        if constexpr (kKind == kFours) return {_mm512_broadcast_i64x4(_mm512_castsi512_si256(integers_from(0))), __m512i{}};
        const __m256i once = (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(codebook));
        return {_mm512_broadcast_i64x4(once), __m512i{}};
    }
    // The bits from `at` on in the place of those above the fourth.
    template <int kKind>
    static PENSTOCK_INLINE __m512i look_up(const Table& table, __m512i codes, __m512i more, int at) {
        if constexpr (code_bits(kKind) == 4) return _mm512_permutexvar_epi16(codes, table.first);
        more = at < 4 ? _mm512_slli_epi16(more, 4 - at) : _mm512_srli_epi16(more, at - 4);
        // Of three bits, the first where the third is set, and else the second.
        codes = _mm512_ternarylogic_epi32(codes, more, _mm512_set1_epi16(15), 0xe4);
        if constexpr (kKind == kFives) return _mm512_permutexvar_epi16(codes, table.first);
        return _mm512_permutex2var_epi16(table.first, codes, table.second);
    }

    static constexpr int kVectors = 4;

    // Numbers of 8 columns, each twice.
    template <int kKind, int kForm>
    static PENSTOCK_INLINE void load_group(const Quantization& quantization, const QuantizedPanel& panel,
                                           const GroupNumbers& header, Numbers<kKind, kForm> (&numbers)[kVectors]) {
        const __m512i low = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
        const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
        for (int half = 0; half < 2; ++half) {
            const auto both = Numbers<kKind, kForm>::load(quantization, panel, header, half * 16);
            for (int vector = 0; vector < 2; ++vector) {
                const __m512i order = vector ? high : low;
                auto& own = numbers[half * 2 + vector];
                own.scale = _mm512_permutexvar_ps(order, both.scale);
                if constexpr (kForm == kAffine) own.zero = _mm512_permutexvar_ps(order, both.zero);
                if constexpr (kForm != kScaled) own.minimum = _mm512_permutexvar_ps(order, both.minimum);
            }
        }
    }

    // Calls take(pair, panel, values of 4 vectors) for every pair of inputs of a unit in one or more panels, which are
    // `distance` bytes apart.
    template <int kPanels, int kKind, int kForm, class Take>
    static PENSTOCK_INLINE void each_pair(
        const Quantization& quantization, const Table& table, const Numbers<kKind, kForm> (&numbers)[kPanels][kVectors],
        const char* units, int64_t distance, const Take& take) {
        const __m512i upper = _mm512_set1_epi32(static_cast<int>(0xffff0000));
        __m512i words[kPanels][2], more[kPanels][2];
        constexpr int kMore = code_bits(kKind) - 4;
        for (int panel = 0; panel < kPanels; ++panel) {
            const char* from = units + panel * distance + kNibbleBytes;
            more[panel][0] = more[panel][1] = kMore == 1 || kMore == 2 ? _mm512_loadu_si512(from) : __m512i{};
            if constexpr (kMore == 2) more[panel][1] = _mm512_loadu_si512(from + 64);
        }
#pragma GCC unroll 8
        for (int pair = 0; pair < 8; ++pair) {
#pragma GCC unroll 2
            for (int panel = 0; panel < kPanels; ++panel) {
                const char* unit = units + panel * distance;
                Vector values[kVectors];
#pragma GCC unroll 2
                for (int half = 0; half < 2; ++half) {
                    Vector left, right;
                    if constexpr (kMore < 4) {
                        __m512i& codes = words[panel][half];
                        codes = pair % 4 == 0 ? _mm512_loadu_si512(unit + pair / 4 * 128 + half * 64)
                                              : _mm512_srli_epi16(codes, 4);
                        const int at = kMore == 1 ? half * 8 + pair : pair * 2;
                        const __m512i both = look_up<kKind>(table, codes, more[panel][half], at);
                        left = (Vector)_mm512_slli_epi32(both, 16);
                        right = (Vector)_mm512_and_si512(both, upper);
                    } else {
                        left = from_bytes<kKind>(unit + pair * 64 + half * 32, quantization);
                        right = from_bytes<kKind>(unit + pair * 64 + half * 32 + 16, quantization);
                    }
                    values[half * 2] = numbers[panel][half * 2].value(left);
                    values[half * 2 + 1] = numbers[panel][half * 2 + 1].value(right);
                }
                take(pair, panel, values);
            }
        }
    }

    static inline Vector rounded_extremes(Vector value) {
        const __m512i bits = (__m512i)value;
        const __mmask16 is_odd = _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0x10000));
        const __m512i even = _mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff));
        const __m512i sum = _mm512_mask_add_epi32(even, is_odd, bits, _mm512_set1_epi32(0x8000));
        return (Vector)_mm512_and_si512(sum, _mm512_set1_epi32(static_cast<int>(0xffff0000)));
    }
    // The instruction that rounds takes numbers below the least normal one for zero, as do those that multiply; but such
    // a number may round to the least normal one.
    template <bool kExtremes>
    static PENSTOCK_INLINE __m512i narrow(Vector low, Vector high) {
        if constexpr (kExtremes) low = rounded_extremes(low), high = rounded_extremes(high);
        return (__m512i)_mm512_cvtne2ps_pbh(high, low);
    }

    template <class Dense, int kKind, int kForm, bool kExtremes>
    static void dequantise(const Quantization& quantization, const QuantizedPanel& panel, const char* weight,
                           Range inputs, char* out) {
        const Table table = load_table<kKind>(quantization.codebook);
        int64_t input = 0;
        panel.each_group(weight, inputs, [&](const GroupNumbers& header, const char* units, int64_t count) {
            Numbers<kKind, kForm> numbers[1][kVectors];
            load_group(quantization, panel, header, numbers[0]);
            for (int64_t unit = 0; unit < count; ++unit, input += kUnit, units += panel.unit_bytes) {
                char* to = out + input / 32 * 2048 + input % 32 / 2 * 64;
                each_pair(quantization, table, numbers, units, 0,
                          [&](int pair, int, const Vector (&values)[kVectors]) {
                              _mm512_store_si512(to + pair * 64, narrow<kExtremes>(values[0], values[1]));
                              _mm512_store_si512(to + 1024 + pair * 64, narrow<kExtremes>(values[2], values[3]));
                          });
            }
        });
    }

    // Clears what follows the last input in its step of 32.
    static void clear(char* out, int64_t k) {
        uint16_t* step = reinterpret_cast<uint16_t*>(out + k / 32 * 2048);
        for (int64_t input = k % 32; k % 32 && input < 32; ++input)
            for (int64_t column = 0; column < kPanel; ++column)
                step[column / 16 * 512 + input / 2 * 32 + column % 16 * 2 + input % 2] = 0;
        // Loads of tiles do not declare to the compiler that they read memory.
        asm volatile("" : : : "memory");
    }

    // A processor that takes long for a sum has two panels' to work on.
    static constexpr int kPanelsOfOneRow = 2;

    template <class Base, int kPanels, int kCount, int kKind, int kForm>
    static void accumulate(const Quantization& quantization, const QuantizedPanel& panel,
                           const Tile<typename Base::Element>* tiles) {
        __m512 sums[kPanels][2][kCount];
        with_products(Base::fuses(), [&](auto fused) {
            sum_panels<Base, fused.value, kPanels, kCount, kKind, kForm>(quantization, panel, tiles, sums);
        });
        for (int number = 0; number < kPanels; ++number)
            for (int row = 0; row < kCount; ++row)
                Base::store_row(tiles[number], row, sums[number][0][row], sums[number][1][row]);
    }

    template <class Base, bool kFused, int kPanels, int kCount, int kKind, int kForm>
    static __attribute__((noinline)) void sum_panels(const Quantization& quantization, const QuantizedPanel& panel,
                                                     const Tile<typename Base::Element>* tiles,
                                                     __m512 (&sums)[kPanels][2][kCount]) {
        const Table table = load_table<kKind>(quantization.codebook);
        const int64_t distance = panel.bytes();
        __m512 low[kPanels][kCount], high[kPanels][kCount];
        for (int number = 0; number < kPanels; ++number)
            for (int row = 0; row < kCount; ++row) low[number][row] = high[number][row] = _mm512_setzero_ps();
        const int32_t* x = reinterpret_cast<const int32_t*>(tiles->x);
        panel.each_group(tiles->weight, {0, panel.k}, [&](const GroupNumbers& header, const char* units, int64_t count) {
            Numbers<kKind, kForm> numbers[kPanels][kVectors];
            for (int number = 0; number < kPanels; ++number) {
                load_group(quantization, panel, header + number * distance, numbers[number]);
                __builtin_prefetch(header.numbers + number * distance + tiles->prefetch.step, 0, 2);
            }
            for (int64_t unit = 0; unit < count; ++unit, units += panel.unit_bytes) {
                const char* ahead = units + tiles->prefetch.step;
                each_pair(quantization, table, numbers, units, distance,
                          [&](int pair, int number, const Vector (&values)[kVectors]) {
                              constexpr int kLines = unit_bytes_of(kKind) / 64;
                              const int line = pair * kLines / 8;
                              if ((pair + 1) * kLines / 8 > line)
                                  __builtin_prefetch(ahead + number * distance + line * 64, 0, 2);
                              const auto next = Base::template add_pair<kFused>(x, narrow<false>(values[0], values[1]),
                                                                                narrow<false>(values[2], values[3]),
                                                                                low[number], high[number]);
                              if (number == kPanels - 1) x = next;
                          });
            }
        });
        for (int number = 0; number < kPanels; ++number)
            for (int row = 0; row < kCount; ++row) {
                sums[number][0][row] = low[number][row];
                sums[number][1][row] = high[number][row];
            }
    }
};

#endif

thread_local Scratch dense_panel;

// Whether a kernel's product can be computed a piece after another, as `begin`, `add` and `finish` do.
template <class Kernel>
constexpr bool kTakesPieces = false;
#if defined(__AMX_BF16__)
template <>
constexpr bool kTakesPieces<TilePairs> = true;
#endif

// The kernel `Base` for quantized weights whose units are `Units`. At most `kFewRows` rows take values from registers;
// others take kChunk inputs of a panel after another from memory, as a panel of the kernel `Chunked`, or all at once if
// that is 0 or there are more than kChunkBlocks blocks of them.
template <class Base, class Units, int kFewRows, int64_t kChunk, int64_t kChunkBlocks = INT64_MAX, class Chunked = Base>
struct Quantized : Base {
    using Element = typename Base::Element;

    static int64_t panel_bytes(const Quantization& quantization, int64_t k) {
        return QuantizedPanel(quantization, k).bytes();
    }

    // Packs `columns` columns. The arrays are rows of the weight: codes [columns, k] and numbers [columns, groups]; where
    // groups share factors, these are the second array, [columns, blocks of groups, 1 or 2].
    static void pack_panel(const Quantization& quantization, const uint8_t* codes, const char* const (&numbers)[3],
                           char* weight, int64_t columns, int64_t k) {
        const QuantizedPanel panel(quantization, k);
        const int64_t size = panel.array_bytes / kPanel, kinds = panel.factor_bytes / kPanel / 2;
        const int bits = code_bits(quantization.kind);
        const auto put_numbers = size == 1 ? put_column<uint8_t> : size == 2 ? put_column<uint16_t> : put_column<uint32_t>;
        const auto put_codes = bits == 4   ? put_units<4>
                               : bits == 5 ? put_units<5>
                               : bits == 6 ? put_units<6>
                                           : put_units<8>;
        if (columns < kPanel) memset(weight, 0, panel.bytes());
        for (int64_t group = 0; group < panel.groups; ++group) {
            if (panel.factor_groups && group % panel.factor_groups == 0) {
                const int64_t blocks = panel.factors_to(panel.groups - 1), block = group / panel.factor_groups;
                for (int64_t number = 0; number < kinds; ++number)
                    put_column<uint16_t>(numbers[1] + (block * kinds + number) * 2, blocks * kinds, columns,
                                         weight + number * kPanel * 2);
                weight += panel.factor_bytes;
            }
            char* to = weight;
            for (int array = 0; array < 3; ++array) {
                if (!numbers[array] || (panel.factor_groups && array == 1)) continue;
                put_numbers(numbers[array] + group * size, panel.groups, columns, to);
                to += panel.array_bytes;
            }
            weight += panel.header_bytes;
            const int64_t first = group * panel.group;
            put_codes(codes + first, k, columns, smaller(panel.group, k - first), weight);
            weight += panel.units_of(group) * panel.unit_bytes;
        }
    }

    // Writes one number of every column, which are `distance` numbers apart.
    template <class Number>
    static void put_column(const char* numbers, int64_t distance, int64_t columns, char* to) {
        for (int64_t column = 0; column < columns; ++column)
            memcpy(to + column * sizeof(Number), numbers + column * distance * sizeof(Number), sizeof(Number));
    }

    // Writes some inputs of every column, whose codes are `distance` bytes apart, as units.
    template <int kBits>
    static void put_units(const uint8_t* codes, int64_t distance, int64_t columns, int64_t inputs, char* units) {
        // A column's inputs in one line of the cache come together.
        constexpr int64_t kSome = 64, kUnitBytes = kUnit * kPanel * kBits / 8;
        for (int64_t first = 0; first < inputs; first += kSome, codes += kSome, units += kSome / kUnit * kUnitBytes) {
            const int64_t some = smaller(kSome, inputs - first), whole = some / kUnit, rest = some % kUnit;
            for (int64_t column = 0; column < columns; ++column) {
                const uint8_t* own = codes + column * distance;
                for (int64_t unit = 0; unit < whole; ++unit)
                    Units::template store_codes<kBits>(units + unit * kUnitBytes, column, own + unit * kUnit);
                if (rest) {
                    uint8_t padded[kUnit] = {};
                    memcpy(padded, own + whole * kUnit, rest);
                    Units::template store_codes<kBits>(units + whole * kUnitBytes, column, padded);
                }
            }
        }
    }

    static bool takes_few_rows(const Blocks<Quantized>& x, const Quantization& quantization) {
        return x.rows <= kFewRows && x.k % 32 == 0 && !quantization.has_extremes && quantization.kind != kTable;
    }

    // How many panels are multiplied together where there are as many.
    static int64_t panels_together(const Blocks<Quantized>& x, const Quantization& quantization) {
        return x.rows == 1 && takes_few_rows(x, quantization) ? Units::kPanelsOfOneRow : 1;
    }

    // Multiplies one panel, or two where `panels_together` allows it, whose tiles are at `tiles`.
    static void multiply_panels(const Blocks<Quantized>& x, const Quantization& quantization, const char* weight,
                                bool follows, Tile<Element>* tiles, int64_t count) {
        const QuantizedPanel panel(quantization, x.k);
        if (takes_few_rows(x, quantization)) {
            tiles->x = x.packed;
            for (int64_t number = 0; number < count; ++number) tiles[number].rows = x.rows;
            tiles->weight = weight;
            tiles->prefetch.step = follows ? count * panel.bytes() : 0;
            with_kind(quantization, [&](auto kind, auto form) {
                if constexpr (kind.value != kTable && kFewRows) {
                    if (count > 1)
                        Units::template accumulate<Base, Units::kPanelsOfOneRow, 1, kind.value, form.value>(
                            quantization, panel, tiles);
                    else
                        few_rows<kFewRows, kind.value, form.value>(quantization, panel, tiles);
                }
            });
            return;
        }
        Tile<Element>& tile = *tiles;
        if constexpr (kTakesPieces<Base>)
            if (x.count == 1) return multiply_in_pieces(x, quantization, weight, follows, tile);
        tile.k = Base::padded_k(x.k);
        const bool takes_chunks = kChunk && x.count <= kChunkBlocks;
        const int64_t chunk = takes_chunks ? kChunk : round_up(x.k, 32);
        const int64_t dense_bytes =
            chunk * kPanel * (takes_chunks ? sizeof(typename Chunked::Element) : sizeof(Element));
        const int64_t sums_of_block = Base::kRows * kPanel;
        char* dense = dense_panel.reserve(dense_bytes + (takes_chunks ? x.count * sums_of_block * 4 : 0));
        char* out = tile.out;
        tile.weight = dense;
        const int64_t step = follows ? divide_up(panel.bytes() * Base::kStepBytes, tile.k * kPanel * 2) : 0;
        for (int64_t first = 0; first < x.k; first += chunk) {
            const Range inputs{first, smaller(x.k, first + chunk)};
            with_kind(quantization, [&](auto kind, auto form) {
                if (takes_chunks)
                    dequantise<Chunked, kind.value, form.value>(quantization, panel, weight, inputs, dense);
                else
                    dequantise<Base, kind.value, form.value>(quantization, panel, weight, inputs, dense);
            });
            Units::clear(dense, inputs.end - first);
            tile.k = Base::padded_k(inputs.end - first);
            tile.continues = first > 0;
            tile.is_unfinished = inputs.end < x.k;
            tile.prefetch = Prefetch{weight + panel.bytes() + panel.bytes() * first / x.k / 64 * 64, step};
            for (int64_t block = 0; block < x.count; ++block) {
                tile.rows = x.height_of(block);
                tile.x = x.packed + block * x.bytes + Base::x_bytes(tile.rows, first);
                tile.sums = reinterpret_cast<float*>(dense + dense_bytes) + block * sums_of_block;
                tile.out = out + x.first(block) * tile.out_stride;
                if (takes_chunks)
                    run_chunk(tile);
                else
                    Base::run(tile);
                tile.prefetch.step = 0;
            }
        }
    }

    // The values of some inputs of a panel.
    static const char* widened(const Quantization* quantization, int64_t k, const char* weight, Range inputs, float* to) {
        char* const dense = reinterpret_cast<char*>(to);
        const QuantizedPanel panel(*quantization, k);
        with_kind(*quantization, [&](auto kind, auto form) {
            dequantise<Base, kind.value, form.value>(*quantization, panel, weight, inputs, dense);
        });
        Units::clear(dense, inputs.end - inputs.begin);
        return dense;
    }

    // Multiplies one block of rows by one panel. While the tiles take a piece of it, the next one is dequantised.
    static void multiply_in_pieces(const Blocks<Quantized>& x, const Quantization& quantization, const char* weight,
                                   bool follows, Tile<Element> tile) {
        constexpr int64_t kPiece = 64, kBytes = kPiece * kPanel * sizeof(Element);
        const QuantizedPanel panel(quantization, x.k);
        char* dense = dense_panel.reserve(2 * kBytes + Base::kRows * kPanel * sizeof(float));
        const int64_t step = follows ? divide_up(panel.bytes() * Base::kStepBytes, Base::padded_k(x.k) * kPanel * 2) : 0;
        const int64_t piece_bytes = panel.bytes() * kPiece / x.k / 64 * 64;
        tile.rows = x.rows;
        Base::begin(tile);
        with_kind(quantization, [&](auto kind, auto form) {
            for (int64_t first = 0; first < x.k; first += kPiece) {
                const Range inputs{first, smaller(x.k, first + kPiece)};
                char* piece = dense + first / kPiece % 2 * kBytes;
                dequantise<Base, kind.value, form.value>(quantization, panel, weight, inputs, piece);
                Units::clear(piece, inputs.end - first);
                if (first) Base::add(tile);
                tile.weight = piece;
                tile.x = x.packed + Base::x_bytes(x.rows, first);
                tile.k = Base::padded_k(inputs.end - first);
                tile.prefetch = Prefetch{weight + panel.bytes() + first / kPiece * piece_bytes, step};
            }
        });
        Base::add(tile);
        float* sums = reinterpret_cast<float*>(dense + 2 * kBytes);
        Base::finish(tile, sums);
        for (int64_t row = 0; row < x.rows; ++row) Base::store_sums(tile, row, sums);
    }

    template <class Dense, int kKind, int kForm>
    static void dequantise(const Quantization& quantization, const QuantizedPanel& panel, const char* weight,
                           Range inputs, char* out) {
        constexpr int kSlowForm = kKind == kFives || kKind == kSixes ? kFused : kAffine;
        if (quantization.has_extremes)
            Units::template dequantise<Dense, kKind, kSlowForm, true>(quantization, panel, weight, inputs, out);
        else
            Units::template dequantise<Dense, kKind, kForm, false>(quantization, panel, weight, inputs, out);
    }

    static void run_chunk(const Tile<Element>& tile) {
        if constexpr (sizeof(typename Chunked::Element) == sizeof(Element))
            Base::run(tile);
        else
            Base::run_wide(tile);
    }

    template <int kCount, int kKind, int kForm>
    static void few_rows(const Quantization& quantization, const QuantizedPanel& panel, const Tile<Element>* tile) {
        if constexpr (kCount > 1)
            if (tile->rows < kCount) return few_rows<kCount - 1, kKind, kForm>(quantization, panel, tile);
        Units::template accumulate<Base, 1, kCount, kKind, kForm>(quantization, panel, tile);
    }
};

#if defined(__AMX_BF16__)
using BFloatKernel = TilePairs;
using QuantizedKernel = Quantized<TilePairs, PairUnits, 0, TilePairs::kChunk>;
#elif defined(__AVX512BF16__)
using BFloatKernel = DotPairs;
using QuantizedKernel = Quantized<DotPairs, PairUnits, 4, 1024>;
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
using BFloatKernel = Matrices;
using QuantizedKernel = Quantized<Matrices, ColumnUnits<>, 0, 256>;
#else
using BFloatKernel = Fma<BFloat>;
// Every number of few rows has functions of its own. A chunk of float32 stays in the first-level cache.
constexpr int kFmaFewRows = kRowsOfParts > 8 ? 8 : kRowsOfParts < 4 ? kRowsOfParts : 4;
using QuantizedKernel = Quantized<Fma<BFloat>, ColumnUnits<>, kFmaFewRows, 128, 8, Fma<Float>>;
#endif

template <>
constexpr bool kIsQuantized<QuantizedKernel> = true;
#if defined(__AMX_BF16__)
template <>
constexpr bool kTakesChunks<QuantizedKernel> = true;
#endif

}  // namespace
