"""Linear layers with quantized weights beside the same layers in bfloat16.

    python bench/quantized.py [--shapes 1024x4096,1024x6144,3072x1024] [--kinds int4,int8] [--rows 1,8,32,256]

Every contender owns enough copies of the weight that they stream from memory, and every call takes the next copy, as
the layers of a model do. Contenders alternate, so a busy moment of the machine affects them alike; figures are medians.
GB/s are those of the weight as it is packed, and the ratio is the time in bfloat16 over the contender's. `q4_k+int8` is
q4_k with rounded activations.
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from kernels.linear import measure

from penstock.kernels import native
from penstock.kernels.linear import PackedLinear
from penstock.kernels.quantized import E2M1, E4M3, QuantizedWeight, integers, signed_integers

# Qwen3-0.6B: qkv, gate and up, down; Qwen3-4B: the same.
SHAPES = "1024x4096,1024x6144,3072x1024,2560x6144,2560x19456,9728x2560"
# Bits, codebook, inputs of a group (0 for all), the type of the scales (int8: with a float16 factor for 256 inputs),
# and whether there are zeros and minima.
KINDS = {
    "int4": (4, integers(4, 8), 128, torch.float16, False, False),
    "awq": (4, integers(4), 128, torch.float16, True, False),
    "q4_0": (4, integers(4, 8), 32, torch.float16, False, False),
    "q4_k": (4, integers(4), 32, torch.int8, False, True),
    "q5_k": (5, integers(5), 32, torch.int8, False, True),
    "q6_k": (6, integers(6, 32), 16, torch.int8, False, False),
    "mxfp4": (4, E2M1, 32, torch.bfloat16, False, False),
    "int8": (8, signed_integers(8), 0, torch.float32, False, False),
    "q8_0": (8, signed_integers(8), 32, torch.float16, False, False),
    "fp8": (8, E4M3, 128, torch.float32, False, False),
    "w8a8": (8, signed_integers(8), 0, torch.float32, False, False),
}


def make(kind: str, rows: int, inputs: int) -> QuantizedWeight:
    kind, _, activations = kind.partition("+")
    by = "by group" if activations else "by row" if kind == "w8a8" else None
    bits, codebook, group, dtype, has_zeros, has_minima = KINDS[kind]
    group = group or inputs
    shape = rows, -(-inputs // group)
    codes = torch.randint(0, 2**bits, (rows, inputs), dtype=torch.uint8)
    if codebook is E4M3:
        codes = torch.where(codes % 128 == 127, 0, codes)
    if dtype == torch.int8:
        blocks = 1 + has_minima, rows, -(-inputs // 256)
        numbers = [torch.randint(0, 64, shape, dtype=dtype) for _ in range(blocks[0])]
        return QuantizedWeight(
            codes,
            codebook,
            numbers[0],
            group,
            bits,
            minima=numbers[1] if has_minima else None,
            factors=(torch.rand(blocks) * inputs**-0.5 / 512).half(),
            factor_groups=256 // group,
            quantizes_inputs=by,
        )
    return QuantizedWeight(
        codes,
        codebook,
        (torch.rand(shape) * inputs**-0.5 / 8).to(dtype),
        group,
        bits,
        torch.full(shape, 8, dtype=dtype) if has_zeros else None,
        torch.rand(shape, dtype=dtype) if has_minima else None,
        quantizes_inputs=by,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=SHAPES, help="K x N of each layer")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--rows", default="1,8,32,256")
    parser.add_argument("--isa", default=native.instruction_sets()[0], choices=native.instruction_sets())
    parser.add_argument("--working-set", type=float, default=256, help="MB of bfloat16 that contenders rotate among")
    parser.add_argument("--seconds", type=float, default=0.7, help="for each line of the table")
    parser.add_argument("--threads", type=int, default=native.default_num_threads())
    options = parser.parse_args()
    native.set_num_threads(options.threads)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    kinds = options.kinds.split(",")
    pack = partial(PackedLinear, library=lambda: native.library_for(options.isa))
    print(f"{options.isa}, {options.threads} threads; us (GB/s, ratio to bfloat16)")
    for shape in options.shapes.split(","):
        k, n = (int(size) for size in shape.split("x"))
        copies = max(2, round(options.working_set * 1e6 / (k * n * 2)))
        weights = {kind: make(kind, n, k) for kind in kinds}
        # Copies of one weight: what they hold does not matter, that they are not in the cache does.
        made = {"bf16": [pack(torch.randn(n, k).bfloat16()) for _ in range(copies)]}
        made |= {kind: [pack(weight) for _ in range(copies * 16 // weight.bits)] for kind, weight in weights.items()}
        sizes = {"bf16": 2 * k * n} | {kind: weight.nbytes for kind, weight in weights.items()}
        for rows in (int(count) for count in options.rows.split(",")):
            with torch.inference_mode():
                taken = measure(made, torch.randn(rows, k).bfloat16(), options.seconds)
            line = [f"{shape:>12} M={rows:<4}"]
            for name, seconds in taken.items():
                ratio = "" if name == "bf16" else f", {taken['bf16'] / seconds:.2f}x"
                line.append(f"{name} {seconds * 1e6:.0f} ({sizes[name] / seconds / 1e9:.1f}{ratio})")
            print("   ".join(line), flush=True)


if __name__ == "__main__":
    main()
