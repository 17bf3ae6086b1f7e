"""Linear layers: Penstock's kernel on each instruction set against `F.linear` and oneDNN with a prepacked weight.

Every contender owns enough copies of the weight that they stream from memory, and every call takes the next copy, as
the layers of a model do. Contenders alternate, so a busy moment of the machine affects them alike; figures are medians,
with one thread of its processor time, which other processes disturb less.

    python bench/kernels/linear.py --shapes 1024x4096,3072x1024 --rows 1,8,32 --isa amx,avx512
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from penstock.kernels import native
from penstock.kernels.linear import PackedLinear

# Qwen3-0.6B: qkv, o, gate and up, down, lm_head.
SHAPES = "1024x4096,2048x1024,1024x6144,3072x1024,1024x151936"
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

# Calls in a row of one contender.
RUN = 8

Linear = Callable[[torch.Tensor], torch.Tensor]


def prepacked(weight: torch.Tensor, rows: int) -> Linear:
    """Returns oneDNN's linear on a weight in the layout that it prefers for this number of rows."""
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def contenders(weights: list[torch.Tensor], rows: int, isas: list[str]) -> dict[str, list[Linear]]:
    made: dict[str, list[Linear]] = {
        isa: [PackedLinear(weight, library=partial(native.library_for, isa)) for weight in weights] for isa in isas
    }
    made["F.linear"] = [lambda x, weight=weight: F.linear(x, weight) for weight in weights]
    if weights[0].dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        made["prepacked"] = [prepacked(weight, rows) for weight in weights]
    return made


def measure(made: dict[str, list[Linear]], x: torch.Tensor, seconds: float) -> dict[str, float]:
    """Returns the median seconds of a call of each contender, which share `seconds` of measuring."""
    times: dict[str, list[float]] = {name: [] for name in made}
    clock = time.thread_time if native.num_threads() == 1 else time.perf_counter
    end = time.perf_counter() + seconds
    turn = 0
    while time.perf_counter() < end or turn < 3:
        for name, layers in made.items():
            # Several calls in a row: a single one would be affected by the caches and the threads of its predecessor.
            for call in range(RUN):
                layer = layers[(turn * RUN + call) % len(layers)]
                start = clock()
                layer(x)
                if call:
                    times[name].append(clock() - start)
        turn += 1
    return {name: statistics.median(taken) for name, taken in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=SHAPES, help="K x N of each layer")
    parser.add_argument("--rows", default="1,8,32,256,1024")
    parser.add_argument("--isa", default=",".join(native.instruction_sets()[:1]))
    parser.add_argument("--dtype", default="bf16", choices=sorted(DTYPES))
    parser.add_argument(
        "--working-set", type=float, default=640, help="MB of weights that each contender rotates among"
    )
    parser.add_argument("--seconds", type=float, default=1.0, help="for each line of the table")
    parser.add_argument("--threads", type=int, default=native.default_num_threads())
    options = parser.parse_args()
    native.set_num_threads(options.threads)
    torch.set_num_threads(options.threads)
    isas = [isa for isa in options.isa.split(",") if isa]
    print(f"{options.dtype}, {options.threads} threads; us (GB/s of weights, GFLOP/s)")
    for shape in options.shapes.split(","):
        k, n = (int(size) for size in shape.split("x"))
        size = k * n * DTYPES[options.dtype].itemsize
        copies = max(2, round(options.working_set * 1e6 / size))
        weights = [torch.randn(n, k).mul_(k**-0.5).to(DTYPES[options.dtype]) for _ in range(copies)]
        for rows in (int(count) for count in options.rows.split(",")):
            with torch.inference_mode():
                made = contenders(weights, rows, isas)
                x = torch.randn(rows, k).to(DTYPES[options.dtype])
                taken = measure(made, x, options.seconds)
            line = [f"{shape:>12} M={rows:<5}"]
            for name, seconds in taken.items():
                rates = f"{size / seconds / 1e9:.1f}, {2 * rows * k * n / seconds / 1e9:.0f}"
                line.append(f"{name} {seconds * 1e6:.0f} ({rates})")
            print("   ".join(line), flush=True)


if __name__ == "__main__":
    main()
