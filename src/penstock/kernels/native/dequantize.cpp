// The values of a quantized weight (kernels/quantized.py).
#include "pool.h"
#include "register.h"

namespace {

using namespace penstock::ISA;

// To nearest even. No value is a NaN.
inline uint16_t round_to_bf16(float value) {
    const uint32_t bits = to_bits(value);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

template <bool kHasZero, bool kHasMinimum>
void write_group(const uint8_t* codes, const float* codebook, float scale, float zero, float minimum, int64_t count,
                 uint16_t* out) {
    for (int64_t input = 0; input < count; ++input) {
        float value = codebook[codes[input]];
        if (kHasZero) value -= zero;
        value *= scale;
        if (kHasMinimum) value -= minimum;
        out[input] = round_to_bf16(value);
    }
}

}  // namespace

// Writes the values of codes [rows, inputs] in bfloat16. Scales, zeros and minima are [rows, groups], one for every `group`
// inputs; zeros and minima may be null.
PENSTOCK_EXPORT(void, dequantize)
(const uint8_t* codes, const float* codebook, const float* scales, const float* zeros, const float* minima, uint16_t* out,
 int64_t rows, int64_t inputs, int64_t group, int64_t threads) {
    const int64_t groups = (inputs + group - 1) / group;
    const auto write = zeros ? minima ? write_group<true, true> : write_group<true, false>
                             : minima ? write_group<false, true> : write_group<false, false>;
    run_each(rows, inputs, threads, [&](int64_t row) {
        for (int64_t number = row * groups, first = 0; first < inputs; ++number, first += group)
            write(codes + row * inputs + first, codebook, scales[number], zeros ? zeros[number] : 0,
                  minima ? minima[number] : 0, first + group < inputs ? group : inputs - first,
                  out + row * inputs + first);
    });
}
