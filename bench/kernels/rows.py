"""Row-wise kernels on each instruction set against their references in torch: norms, rotary embedding, activations.

The sizes are Qwen3-0.6B's. Contenders alternate, so a busy moment of the machine affects them alike; figures are median
microseconds of a call whose operands are in the caches.

    python bench/kernels/rows.py --threads 1 --rows 1,32,256 --isa avx2
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch

from penstock.kernels import native
from penstock.kernels.gelu import gelu
from penstock.kernels.layer_norm import layer_norm
from penstock.kernels.rms_norm import add_rms_norm
from penstock.kernels.rope_and_store_kv import rope_and_store_kv
from penstock.kernels.silu_and_mul import silu_and_mul

MODULES = [
    importlib.import_module(f"penstock.kernels.{name}")
    for name in ("gelu", "layer_norm", "rms_norm", "rope_and_store_kv", "silu_and_mul")
]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
HIDDEN, INTERMEDIATE, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 1024, 3072, 16, 8, 128, 16
MAX_POSITIONS = 4096
EPS = 1e-6
# Rows of a call, so that short calls are timed together.
ROWS_AT_A_TIME = 64


def cases(rows: int, dtype: torch.dtype) -> dict[str, Callable[[], object]]:
    """Returns a call of each kernel on its own random rows."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape).to(dtype)

    x, residual, norm, bias = random(rows, HIDDEN), random(rows, HIDDEN), random(HIDDEN), random(HIDDEN)
    gate_up, wide = random(rows, 2 * INTERMEDIATE), random(rows, INTERMEDIATE)
    qkv = random(rows, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM)
    cache = random(-(-rows // BLOCK_SIZE), 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    angles, heads_norm = torch.rand(MAX_POSITIONS, HEAD_DIM), random(HEAD_DIM)
    positions = torch.arange(rows)
    place = (NUM_HEADS, NUM_KV_HEADS, angles, positions, cache, positions, heads_norm, heads_norm, EPS)
    return {
        "add_rms_norm": lambda: add_rms_norm(x, residual, norm, EPS),
        "layer_norm": lambda: layer_norm(x, residual, norm, bias, EPS),
        "rope_and_store_kv": lambda: rope_and_store_kv(qkv, *place),
        "silu_and_mul": lambda: silu_and_mul(gate_up),
        "gelu": lambda: gelu(wide),
    }


def measure(call: Callable[[], object], isas: list[str | None], rows: int, seconds: float) -> list[float]:
    """Returns the median seconds of a call on each set, and with None of the reference; they share `seconds`."""
    times: list[list[float]] = [[] for _ in isas]
    calls, end = max(1, ROWS_AT_A_TIME // rows), time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[-1]) < 3:
        for isa, taken in zip(isas, times, strict=True):
            for module in MODULES:
                vars(module)["library"] = (lambda: None) if isa is None else partial(native.library_for, isa)
            start = time.perf_counter()
            for _ in range(calls):
                call()
            taken.append((time.perf_counter() - start) / calls)
    return [statistics.median(taken) for taken in times]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,32,256")
    parser.add_argument("--isa", default=",".join(native.instruction_sets()))
    parser.add_argument("--dtype", default="bf16", choices=sorted(DTYPES))
    parser.add_argument("--seconds", type=float, default=1.0, help="for each line of the table")
    parser.add_argument("--threads", type=int, default=native.default_num_threads())
    options = parser.parse_args()
    native.set_num_threads(options.threads)
    torch.set_num_threads(options.threads)
    isas: list[str | None] = [*options.isa.split(","), None]
    print(f"{options.dtype}, {options.threads} threads; us")
    with torch.inference_mode():
        for rows in (int(count) for count in options.rows.split(",")):
            for name, call in cases(rows, DTYPES[options.dtype]).items():
                taken = measure(call, isas, rows, options.seconds)
                found = (f"{isa or 'torch'} {each * 1e6:.1f}" for isa, each in zip(isas, taken, strict=True))
                print(f"{name:>18} rows={rows:<5} " + "   ".join(found), flush=True)


main()
