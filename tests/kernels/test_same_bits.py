"""Instruction sets whose arithmetic has one name compute the same bits, kernel by kernel, on every architecture."""

from __future__ import annotations

import functools
import itertools
import math
import re
import runpy
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import setuptools
import torch

from penstock.config.recurrent import ConvSizes, DeltaSizes, MambaSizes
from penstock.kernels import native
from penstock.kernels.kv_rows import quantize_rows
from penstock.kernels.linear import QuantizationDescriptor
from penstock.kernels.native import ARITHMETIC, DTYPE_CODES
from penstock.kernels.recurrent import STATE_ARGUMENTS
from tests.kernels.native_calls import SOURCE, NativeCalls

ROOT = Path(__file__).parents[2]
CROSS, QEMU = shutil.which("aarch64-linux-gnu-g++"), shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
SETS = [isa for isa in native.instruction_sets() if ARITHMETIC[isa] == "fma"]
DTYPES = tuple(DTYPE_CODES)
THREADS = 2
# Of the description of a quantized weight: its integers, and the codebook.
QUANTIZATION = "".join("f" * 256 if field[0] == "codebook" else "n" for field in QuantizationDescriptor._fields_)
NUM_TOKENS = 24  # of the requests of a recurrent kernel
# Every path by which numbers are rounded, exponents overflow and signs survive.
EDGES = torch.tensor(
    [
        *(0.0, -0.0, 1.0, -1.0, 1e-45, -1e-45, 1e-38, 6e-8, 5.97e-8, 2.98e-8, 6.1e-5, 65504, 65519.9, 65520, -7e4),
        *(3.38e38, 3.4e38, math.inf, -math.inf, math.nan, 1.00390625, 1.01171875, 1.00048828125, 1.00146484375),
    ]
)


def numbers(*shape: int, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def add_linear(calls: NativeCalls) -> None:
    shapes = (*itertools.product(((97, 70), (256, 32)), (1, 2, 7, 13, 29)), ((300, 170), 90))
    for dtype, ((k, n), rows) in itertools.product(DTYPES, shapes):
        weight = numbers(n, k).to(dtype)
        packed = torch.zeros(-(-k // 4) * 4 * -(-n // 32) * 32, dtype=dtype)
        x = numbers(rows, k, seed=1).to(dtype)
        for is_wide in (0, 1):
            layer = calls.struct("ppnnnn", packed, numbers(n, scale=8, seed=2), k, n, DTYPE_CODES[dtype], is_wide)
            out = torch.zeros(rows, n + 3, dtype=torch.float32 if is_wide else dtype)
            result = calls.result(f"linear {dtype} {k}x{n} {rows} {is_wide}", out)
            calls.add("linear_pack", "ppn", layer, weight, 1)
            calls.add("linear", "pppnnn", layer, x, result, n + 3, rows, 2)
    for dtype in DTYPES:  # sums of two products that fall between two numbers of the dtype, or beyond all of them
        x = torch.stack((EDGES.repeat(len(EDGES)), EDGES.repeat_interleave(len(EDGES))), 1).to(dtype)
        packed, weight = (
            torch.zeros(128, dtype=dtype),
            torch.tensor([[1.0, 1.0], [1.0, 2**-9], [0.75, -(2**-12)]]).to(dtype),
        )
        layer = calls.struct("ppnnnn", packed, None, 2, 3, DTYPE_CODES[dtype], 0)
        calls.add("linear_pack", "ppn", layer, weight, 1)
        out = calls.result(f"linear edges {dtype}", torch.zeros(len(x), 3, dtype=dtype))
        calls.add("linear", "pppnnn", layer, x, out, 3, len(x), THREADS)


def add_linear_of_any_numbers(calls: NativeCalls) -> None:
    """Numbers of all bit patterns; such as have subnormal products and sums; and such as are subnormal themselves."""
    k, n, rows = 64, 70, 29
    generator = torch.Generator().manual_seed(5)
    bits = [torch.randint(-(2**15), 2**15, (size, k), generator=generator).short() for size in (rows, n)]
    small, smaller, large = 2.0**-63, 2.0**-128, 2.0**30
    cases = {
        "of any bits": [each.view(torch.bfloat16) for each in bits],
        "with small products": [numbers(rows, k, scale=small), numbers(n, k, scale=small, seed=1)],
        "of subnormal numbers": [numbers(rows, k, scale=smaller), numbers(n, k, scale=large, seed=1)],
        "by subnormal numbers": [numbers(rows, k, scale=large), numbers(n, k, scale=smaller, seed=1)],
    }
    for name, (x, weight) in cases.items():
        layer = calls.struct("ppnnnn", torch.zeros(64 * 96).bfloat16(), None, k, n, DTYPE_CODES[torch.bfloat16], 1)
        calls.add("linear_pack", "ppn", layer, weight.bfloat16(), 1)
        out = calls.result(f"products {name}", torch.zeros(rows, n))
        calls.add("linear", "pppnnn", layer, x.bfloat16(), out, n, rows, THREADS)


def add_linear_of_some_rows(calls: NativeCalls) -> None:
    k, n, dtype = 97, 70, torch.bfloat16
    layer = calls.struct("ppnnnnp", torch.zeros(100 * 96, dtype=dtype), None, k, n, DTYPE_CODES[dtype], 0, None)
    calls.add("linear_pack", "ppn", layer, numbers(n, k).to(dtype), 1)
    x = numbers(29, k, seed=1).to(dtype)
    for first, last in ((0, 29), (0, 1), (3, 5), (7, 10), (11, 28)):
        out = calls.result(f"rows {first} {last}", torch.zeros(last - first, n, dtype=dtype))
        calls.add("linear", "pppnnn", layer, x[first:last].clone(), out, n, last - first, THREADS)


def add_quantized(calls: NativeCalls) -> None:
    """Each kind of `kernels.quantized`, and the layer that is not quantized with the same values, "dense"."""
    n, k, group, dtype = 70, 300, 32, torch.bfloat16
    codebook = numbers(256, seed=3).to(dtype).float()
    codes = torch.arange(n * k, dtype=torch.int32).mul(37).view(n, k)
    scales, zeros = numbers(n, -(-k // group)).abs() + 0.1, numbers(n, -(-k // group), seed=4)
    x = numbers(29, k, seed=1).to(dtype)
    values = {0: codebook[codes % 16], 1: codes.to(torch.int8).float(), 3: codebook[codes % 256]}
    values |= {5: codes % 32 - 16.0, 6: codes % 64 - 32.0}
    for kind, has_zeros in itertools.product(values, (0, 1)):
        is_exact = kind > 4  # the product of a code and a scale, which the kernels fuse
        if is_exact and has_zeros:
            continue
        book = [{5: -16.0, 6: -32.0}[kind]] * 256 if is_exact else codebook.tolist()
        scales = scales.bfloat16() if is_exact else scales
        code = DTYPE_CODES[scales.dtype]
        described = calls.struct(QUANTIZATION, kind, group, code, has_zeros, 0, 0, 0, is_exact, 0, *book)
        layer = calls.struct("ppnnnnp", torch.zeros(65536), None, k, n, DTYPE_CODES[dtype], 0, described)
        numbered = (codes % {0: 16, 5: 32, 6: 64}.get(kind, 256)).to(torch.uint8)
        packed = (layer, numbered, scales, zeros if has_zeros else None, None, 1)
        calls.add("linear_pack_quantized", "pppppn", *packed)
        at = torch.arange(k) // group
        weight = ((values[kind] - (zeros[:, at] if has_zeros else 0)) * scales[:, at].float()).to(dtype)
        dense = calls.struct("ppnnnnp", torch.zeros(65536), None, k, n, DTYPE_CODES[dtype], 0, None)
        calls.add("linear_pack", "ppn", dense, weight, 1)
        for name, rows in itertools.product(("quantized", "dense"), (1, 2, 29)):
            out = calls.result(f"{name} {kind} {has_zeros} {rows}", torch.zeros(rows, n, dtype=dtype))
            made = layer if name == "quantized" else dense
            calls.add("linear", "pppnnn", made, x[:rows].clone(), out, n, rows, THREADS)
    for k in (300, 64):
        described = calls.struct("n" * 9, 4, k, DTYPE_CODES[torch.float32], 0, 0, 0, 0, 0, 0)
        layer = calls.struct("ppnnnnp", torch.zeros(65536), None, k, n, DTYPE_CODES[dtype], 0, described)
        numbered = codes[:, :k].to(torch.uint8).contiguous()
        calls.add("linear_pack_quantized", "pppppn", layer, numbered, scales[:, :1].float().contiguous(), None, None, 1)
        for rows in (1, 2, 5, 29):
            out = calls.result(f"sums {k} {rows}", torch.zeros(rows, n, dtype=dtype))
            calls.add("linear", "pppnnn", layer, x[:rows, :k].contiguous(), out, n, rows, THREADS)


def add_quantized_by_group(calls: NativeCalls) -> None:
    """Each kind of integers with inputs that are rounded by groups, and the values of a layer of them."""
    n, dtype = 70, torch.bfloat16
    halves = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    books = {0: halves * 16, 1: [0.0] * 256, 5: [-16.0] * 256, 6: [-32.0] * 256, 7: [0.0] * 256}
    for kind, (k, group), offsets in itertools.product(
        books, ((304, 32), (40, 16)), ("", "zeros", "minima", "factors")
    ):
        if offsets == "zeros" and kind in (0, 5, 6):
            continue
        codes = torch.arange(n * k, dtype=torch.int32).mul(37).view(n, k)
        codes = (codes % {1: 256, 5: 32, 6: 64}.get(kind, 16)).to(torch.uint8)
        groups, has_factors = -(-k // group), offsets == "factors"
        scales = numbers(n, groups, scale=9).to(torch.int8 if has_factors else dtype)
        zeros = (numbers(n, groups, scale=4, seed=4).round()).to(dtype)
        minima = numbers(n, groups, scale=3, seed=5).to(torch.int8 if has_factors else dtype)
        second = zeros if offsets == "zeros" else numbers(n, -(-groups // 4), 2).half() if has_factors else None
        third = minima if offsets in ("minima", "factors") else None
        described = calls.struct(
            QUANTIZATION, kind, group, DTYPE_CODES[dtype], offsets == "zeros", third is not None, 0, 4 * has_factors, 0,
            32 if group % 32 == 0 else 16, *books[kind],
        )  # fmt: skip
        layer = calls.struct("ppnnnnp", torch.zeros(65536), None, k, n, DTYPE_CODES[dtype], 0, described)
        calls.add("linear_pack_quantized", "pppppn", layer, codes, scales, second, third, 1)
        name = f"groups {kind} {k} {offsets}"
        out = calls.result(f"{name} unpacked", torch.zeros(n, k, dtype=dtype))
        calls.add("linear_unpack", "ppn", layer, out, THREADS)
        x = numbers(29, k, seed=1).to(dtype)
        for rows in (1, 2, 3, 29):
            out = calls.result(f"{name} {rows}", torch.zeros(rows, n, dtype=dtype))
            calls.add("linear", "pppnnn", layer, x[:rows].clone(), out, n, rows, THREADS)


def add_block_codes(calls: NativeCalls) -> None:
    count, num_bytes, values = 9, 210, 256
    blocks = torch.arange(count * num_bytes).mul(37).to(torch.uint8)
    for run, bits in itertools.product((1, 32, 64), (1, 2)):
        low, high = (calls.struct("nnn", *planes) for planes in ((0, run, 4), (128, min(run, 32), bits)))
        out = calls.result(f"codes {run} {bits}", torch.zeros(count, values, dtype=torch.uint8))
        calls.add("unpack_codes", "ppppnnnn", low, high, blocks, out, count, num_bytes, values, THREADS)


def add_dequantize(calls: NativeCalls) -> None:
    rows, inputs, group = 5, 90, 16
    codes = torch.arange(rows * inputs).mul(37).to(torch.uint8).view(rows, inputs)
    scales, zeros, minima = (each.clone() for each in numbers(3, rows, -(-inputs // group)))
    for number, (second, third) in enumerate(itertools.product((zeros, None), (minima, None))):
        out = calls.result(f"values {number}", torch.zeros(rows, inputs, dtype=torch.bfloat16))
        operands = codes, numbers(256, seed=1), scales, second, third, out
        calls.add("dequantize", "ppppppnnnn", *operands, rows, inputs, group, THREADS)


def add_experts(calls: NativeCalls) -> None:
    tokens, top_k, experts, k, inner = 23, 2, 3, 72, 40
    ids = torch.arange(tokens * top_k).view(tokens, top_k) % experts
    slots = torch.arange(experts, dtype=torch.int32)
    pairs, rows = torch.zeros(tokens * top_k, dtype=torch.int32), torch.zeros(tokens * top_k, dtype=torch.int32)
    starts = torch.zeros(experts + 1, dtype=torch.int32)
    calls.add("experts_group", "pppppnn", ids, slots, pairs, rows, starts, tokens * top_k, experts)
    for dtype, activation in itertools.product(DTYPES, (0, 1, 2)):
        code = DTYPE_CODES[dtype]
        gate_up, down = torch.zeros(experts, 128 * k, dtype=dtype), torch.zeros(experts, 96 * inner, dtype=dtype)
        for packed, n, width in ((gate_up, 128, k), (down, k, inner)):
            # All slots follow one another, as one layer of whole panels does.
            whole = -(-n // 32) * 32
            layer = calls.struct("ppnnnn", packed, None, width, experts * whole, code, 0)
            calls.add("linear_pack", "ppn", layer, numbers(experts * whole, width, scale=0.3, seed=n).to(dtype), 1)
        described = calls.struct(
            "ppppnnnnnnn", gate_up, down, numbers(experts, 2 * inner), numbers(experts, k), experts, k, inner, inner, k,
            code, activation,
        )  # fmt: skip
        name = f"experts {dtype} {activation}"
        activated = calls.result(f"{name} gate_up", torch.zeros(tokens * top_k, inner, dtype=dtype))
        outputs = calls.result(f"{name} down", torch.zeros(tokens * top_k, k, dtype=dtype))
        combined = calls.result(f"{name} combine", torch.zeros(tokens, k, dtype=dtype))
        x = numbers(tokens, k, scale=4).to(dtype)
        calls.add("experts_gate_up", "pppppnn", described, x, pairs, starts, activated, top_k, THREADS)
        calls.add("experts_down", "ppppn", described, activated, starts, outputs, THREADS)
        weights = numbers(tokens, top_k)
        calls.add("experts_combine", "ppppnnnni", outputs, rows, weights, combined, tokens, top_k, k, THREADS, code)


def add_router(calls: NativeCalls) -> None:
    # Differences of up to 180, so that softmax reaches the smallest powers of two; and none but the largest.
    for (scores, groups), count in itertools.product(((0, 1), (1, 4), (2, 1)), (8, 160)):
        logits = torch.cat((numbers(5, count, scale=4), numbers(5, count, scale=60), torch.zeros(1, count)))
        router = calls.struct(
            "ppnnnnnnnff", numbers(count), numbers(count, seed=1), count, 6, scores, groups, max(1, groups // 2), 1,
            scores, 1e-20, 2.5,
        )  # fmt: skip
        ids = calls.result(f"route ids {scores} {count}", torch.zeros(len(logits), 6, dtype=torch.int64))
        weights = calls.result(f"route weights {scores} {count}", torch.zeros(len(logits), 6))
        calls.add("route", "ppppnn", router, logits, ids, weights, len(logits), THREADS)


def add_attention(calls: NativeCalls, in_pairs: bool = False) -> None:
    # The last group of the last request's queries has one or two rows, and the others more.
    lengths, queries, blocks = (1, 70, 330), (1, 70, 41), 30
    starts = torch.tensor([0, *itertools.accumulate(queries)], dtype=torch.int32)
    table = torch.arange(blocks, dtype=torch.int32).flip(0).contiguous()
    tables = torch.stack((table, table.roll(3), table.roll(7))).contiguous()
    seq_lens, tokens = torch.tensor(lengths, dtype=torch.int32), sum(queries)
    kinds = {  # head_dim, value_dim, planes, window, softcap, whether there are sinks, causal; "int8" is of the cache
        "full": (80, 80, 2, 0, 0.0, False, 1),
        "window": (64, 64, 2, 50, 0.0, False, 1),
        "soft cap": (64, 64, 2, 0, 3.0, False, 1),
        "sinks": (72, 72, 2, 90, 0.0, True, 1),
        "latent": (96, 64, 1, 0, 0.0, False, 1),
        "encoder": (40, 40, 2, 0, 0.0, False, 0),
        "int8": (80, 80, 2, 0, 0.0, False, 1),
        "int8, window": (40, 40, 2, 90, 0.0, True, 1),
    }
    for (kind, shape), dtype in itertools.product(kinds.items(), DTYPES):
        if in_pairs and (dtype != torch.bfloat16 or "int8" in kind):
            continue
        head_dim, value_dim, planes, window, softcap, has_sinks, causal = shape
        heads, kv_heads = (4, 2) if planes == 2 else (4, 1)
        q = numbers(tokens, heads, head_dim, scale=2).to(dtype)
        cache = numbers(blocks, planes, kv_heads, 16, head_dim, scale=2, seed=1).to(dtype)
        cache = quantize_rows(cache) if "int8" in kind else cache
        name = f"attention {kind} {dtype}{' in pairs' * in_pairs}"
        out = calls.result(name, torch.zeros(tokens, heads * value_dim, dtype=dtype))
        calls.add(
            "paged_attention", "pnppnppppnnnnnnnnnffiiiii", q, heads * head_dim, cache, tables, tables.shape[1], starts,
            seq_lens, numbers(heads, scale=3) if has_sinks else None, out, tokens, len(lengths), heads, kv_heads,
            head_dim, value_dim, 16, window, THREADS, head_dim**-0.5, softcap, DTYPE_CODES[dtype], causal, planes == 1,
            cache.dtype == torch.int8, in_pairs,
        )  # fmt: skip


def add_elementwise(calls: NativeCalls) -> None:
    rows, eps = 9, 1e-6
    for dtype, width in itertools.product(DTYPES, (40, 100, 1024)):
        code, name = DTYPE_CODES[dtype], f"{dtype} {width}"
        x, gate_up = numbers(rows, width, scale=3).to(dtype), numbers(rows, 2 * width, scale=3).to(dtype)
        for is_float in (0, 1):
            weight = numbers(width).to(torch.float32 if is_float else dtype)
            residual = calls.result(f"rms_norm residual {name} {is_float}", numbers(rows, width, seed=5).to(dtype))
            out = calls.result(f"rms_norm {name} {is_float}", torch.zeros_like(x))
            calls.add("rms_norm", "ppppnnnfii", x, residual, weight, out, rows, width, THREADS, eps, code, is_float)
        for residual in (None, numbers(rows, width, seed=5).to(dtype)):
            pair = (numbers(width).to(dtype), numbers(width, seed=1).to(dtype))
            out = calls.result(f"layer_norm {name} {residual is None}", torch.zeros_like(x))
            calls.add("layer_norm", "pppppnnnfi", x, residual, *pair, out, rows, width, THREADS, eps, code)
        out = calls.result(f"silu_and_mul {name}", torch.zeros_like(x))
        calls.add("silu_and_mul", "ppnnni", gate_up, out, rows, width, THREADS, code)
        for is_tanh in (0, 1):
            out = calls.result(f"gelu_and_mul {name} {is_tanh}", torch.zeros_like(x))
            halves = (gate_up, 2 * width, gate_up.view(-1)[width:], 2 * width)
            calls.add("gelu_and_mul", "pnpnpnnnii", *halves, out, rows, width, THREADS, is_tanh, code)
            out = calls.result(f"gelu {name} {is_tanh}", x.clone())
            calls.add("gelu", "pnnnii", out, rows, width, THREADS, is_tanh, code)
        out = calls.result(f"add_and_scale {name}", x.clone())
        calls.add(
            "add_and_scale", "ppnnnfi", out, numbers(rows, width, seed=5).to(dtype), rows, width, THREADS, 0.7, code
        )
        out = calls.result(f"soft_cap {name}", x.clone() * 20)
        calls.add("soft_cap", "pnnnfi", out, rows, width, THREADS, 30.0, code)
    # silu(g) = g / (1 + 2^(-g log2 e)), where the power leaves the normal numbers, and in the middle between integers.
    middles = torch.arange(-130, 131) + torch.tensor([[0.0], [0.5], [-0.5]])
    near = torch.cat([(middles * scale).flatten() for scale in (1.0, 1 + 1e-6, 1 - 1e-6)]) * -math.log(2)
    gate = torch.cat((EDGES, near, numbers(4000, scale=50)))
    out = calls.result("silu_and_mul edges", torch.zeros(1, len(gate)))
    both = torch.cat((gate, torch.ones_like(gate)))
    calls.add("silu_and_mul", "ppnnni", both, out, 1, len(gate), 1, DTYPE_CODES[torch.float32])
    out = calls.result("sigmoid", gate.clone())
    calls.add("sigmoid", "pn", out, len(out))
    # Every number of 16 bits, widened and narrowed again.
    for dtype in (torch.bfloat16, torch.float16):
        all_numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
        out = calls.result(f"all {dtype}", torch.zeros_like(all_numbers))
        row, weight = torch.zeros(1, dtype=torch.int32), torch.ones(1)
        calls.add("experts_combine", "ppppnnnni", all_numbers, row, weight, out, 1, 1, 1 << 16, 1, DTYPE_CODES[dtype])


def add_rope(calls: NativeCalls) -> None:
    tokens, heads, block_size = 11, (4, 2), 16
    for dtype, head_dim, is_float, is_int8 in itertools.product(DTYPES, (64, 72), (0, 1), (0, 1)):
        rotated = head_dim - 24 * (head_dim == 72)
        positions, slots = torch.arange(tokens) + 3, torch.arange(tokens).flip(0).contiguous()
        norms = [numbers(head_dim, seed=seed).to(torch.float32 if is_float else dtype) for seed in (3, 4, 5)]
        name = f"rope {dtype} {head_dim} {is_float} {is_int8}"
        qkv = numbers(tokens, (heads[0] + 2 * heads[1]) * head_dim)
        edges = EDGES * 2.0 ** torch.arange(0, -3 * tokens, -3)[:, None]
        edges[::2, EDGES.isnan()] = 0  # a vector with a NaN has no other numbers
        qkv[:, -head_dim : len(EDGES) - head_dim] = edges
        qkv = calls.result(f"{name} q", qkv.to(dtype))
        cache = torch.zeros(1, 2, heads[1], block_size, head_dim, dtype=dtype)
        calls.result(f"{name} cache", cache := quantize_rows(cache) if is_int8 else cache)
        calls.add(
            "rope_and_store_kv", "ppppppppnnnnnnnfiiiii", qkv, cache, numbers(20, rotated), positions, slots, *norms,
            tokens, *heads, head_dim, rotated, block_size, THREADS, 1e-6, DTYPE_CODES[dtype], 0, is_float,
            is_int8, 0,
        )  # fmt: skip


def add_recurrent(calls: NativeCalls) -> None:
    for dtype in DTYPES:
        add_gated_delta(calls, dtype)
        conv = ConvSizes(3, 32, 3)
        layer = calls.struct("pnnn", numbers(conv.taps, conv.channels), conv.heads, conv.width, conv.taps)
        out = torch.zeros(NUM_TOKENS, conv.channels, dtype=dtype)
        inputs = [numbers(NUM_TOKENS, 3 * conv.channels, scale=3).to(dtype)]
        add_step(calls, "short_conv", layer, inputs, out, (conv.heads * conv.head_size, conv.channels))
        mamba = MambaSizes(4, 3, 80, 32, 4, offset=1)
        layer = calls.struct(
            "pppppnnnnnnn", numbers(mamba.taps, mamba.channels), numbers(mamba.channels), numbers(mamba.heads).exp(),
            numbers(mamba.heads, scale=9), numbers(mamba.heads), mamba.heads, mamba.groups, mamba.group, mamba.offset,
            mamba.size, mamba.keys, mamba.taps,
        )  # fmt: skip
        out = torch.zeros(NUM_TOKENS, mamba.inner)
        inputs = [numbers(NUM_TOKENS, mamba.inner + mamba.channels + mamba.heads, scale=3).to(dtype)]
        sizes = (mamba.heads * mamba.head_size, mamba.heads * mamba.draft_inputs)
        add_step(calls, "mamba2", layer, inputs, out, sizes)
        x = calls.result(f"multiply_by_sigmoid {dtype}", numbers(5, 100, scale=3).to(dtype))
        gate = numbers(5, 100, scale=9, seed=2).to(dtype)
        calls.add("multiply_by_sigmoid", "ppnnni", x, gate, 5, 100, THREADS, DTYPE_CODES[dtype])


def add_gated_delta(calls: NativeCalls, dtype: torch.dtype) -> None:
    sizes = DeltaSizes(2, 6, 32, 48, 4)
    layer = calls.struct(
        "ppppnnnnnf", numbers(sizes.taps, sizes.channels), numbers(sizes.value_heads).exp(),
        numbers(sizes.value_heads, scale=9), numbers(sizes.value_size), sizes.key_heads, sizes.value_heads,
        sizes.key_size, sizes.value_size, sizes.taps, 1e-6,
    )  # fmt: skip
    inputs = [
        numbers(NUM_TOKENS, width, scale=3).to(dtype)
        for width in (sizes.channels, sizes.value_heads * (sizes.value_size + 2))
    ]
    out = torch.zeros(NUM_TOKENS, sizes.value_heads * sizes.value_size, dtype=dtype)
    add_step(
        calls,
        "gated_delta",
        layer,
        inputs,
        out,
        (sizes.key_heads * sizes.head_size, sizes.key_heads * sizes.draft_inputs),
    )


def add_step(
    calls: NativeCalls,
    name: str,
    layer: torch.Tensor,
    inputs: list[torch.Tensor],
    out: torch.Tensor,
    sizes: tuple[int, int],
) -> None:
    """Two requests, one of which begins with the state of the other's, with an accepted draft and verifies one.
    `sizes` are those of a block's states, and of the inputs that are kept of a draft.
    """
    table = torch.tensor([[1, 0, 2], [3, 4, 0]], dtype=torch.int32)
    starts, lengths = (torch.tensor(each, dtype=torch.int32) for each in ([0, 21, NUM_TOKENS], [21, 11]))
    rows, pending, drafts = torch.tensor([1, 0]), *(torch.tensor(each, dtype=torch.int32) for each in ([0, 1], [0, 1]))
    dtype = inputs[0].dtype
    out = calls.result(f"{name} {dtype}", out)
    states = calls.result(f"{name} states {dtype}", numbers(4, sizes[0]))
    kept = calls.result(f"{name} drafts {dtype}", numbers(2, 2, sizes[1]).to(dtype))
    calls.add(
        name, f"{'p' * (1 + len(inputs))}{STATE_ARGUMENTS}ni", layer, *inputs, kept, out, states, table, 3, starts,
        lengths, rows, pending, drafts, 2, 8, 2, THREADS, DTYPE_CODES[dtype],
    )  # fmt: skip


def all_calls(*others: Callable[[NativeCalls], None]) -> NativeCalls:
    """`others` add theirs first."""
    calls = NativeCalls()
    for add in (
        *others, add_linear, add_linear_of_some_rows, add_quantized, add_quantized_by_group, add_block_codes,
        add_dequantize, add_experts, add_router, add_attention, add_elementwise, add_rope, add_recurrent,
    ):  # fmt: skip
        add(calls)
    return calls


def differing(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Returns the names of results that differ in a bit; a NaN equals every NaN, whose bits depend on the processor."""
    assert one.keys() == other.keys()
    names: list[str] = []
    for name, found in one.items():
        same = found == other[name]
        if found.is_floating_point():
            integers = {4: torch.int32, 2: torch.int16}[found.itemsize]
            same = found.view(integers) == other[name].view(integers)
            same |= found.isnan() & other[name].isnan()
        if not same.all():
            names.append(f"{name}: {(~same).sum()} of {same.numel()}")
    return names


def compile_driver(compiler: str, target: Path) -> Path:
    subprocess.run([compiler, "-std=c++17", "-O1", "-o", str(target), str(SOURCE), "-ldl"], check=True, timeout=120)
    return target


def compile_library(compiler: str, machine: str, target: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Compiles the kernels as `setup.py` does for a machine, but with few optimizations: no bit may depend on them, and
    they take three times as long.
    """
    monkeypatch.setattr(setuptools, "setup", lambda **_: None)
    monkeypatch.chdir(ROOT)
    made = runpy.run_path("setup.py")
    made["COMMON"].extend(["-O1", "-fstrict-aliasing"])
    try:
        made["compile_native"](compiler, target, machine)
    except subprocess.CalledProcessError as error:
        pytest.fail(error.stderr)
    return target


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Sequence[str]:
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None or native.library() is None:
        pytest.skip("needs a C++ compiler and the native kernels")
    return [str(compile_driver(compiler, tmp_path_factory.mktemp("driver") / "native_calls"))]


@pytest.mark.skipif(len(SETS) < 2, reason="this processor has one instruction set of this arithmetic")
def test_instruction_sets_of_one_arithmetic_compute_the_same_bits(driver: Sequence[str], tmp_path: Path) -> None:
    calls = all_calls()
    results = [calls.run(driver, native.library_for(isa).path, isa, tmp_path) for isa in SETS]
    assert len(results[0]) > 150, "every kernel, in every dtype"
    for isa, result in zip(SETS[1:], results[1:], strict=True):
        assert not differing(results[0], result), f"{SETS[0]} and {isa}"


@pytest.mark.skipif("avx512_bf16" not in native.instruction_sets(), reason="no products of pairs")
def test_fused_products_have_the_bits_of_products_of_pairs(driver: Sequence[str], tmp_path: Path) -> None:
    def result(fused: int) -> dict[str, torch.Tensor]:
        def fuse(calls: NativeCalls) -> None:
            calls.add("fuse_products", "n", fused)

        in_pairs = functools.partial(add_attention, in_pairs=True)
        calls = all_calls(fuse, in_pairs, add_linear_of_any_numbers)
        return calls.run(driver, native.library_for("avx512_bf16").path, "avx512_bf16", tmp_path)

    assert not differing(result(0), result(1))


@pytest.mark.parametrize(("compiler", "machine"), [("c++", "any other machine"), ("aarch64-linux-gnu-g++", "aarch64")])
def test_instruction_sets_of_other_processors_compile(
    compiler: str, machine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tests that run these sets are long."""
    if shutil.which(compiler) is None:
        pytest.skip(f"needs {compiler}")
    checker = tmp_path / "compiler"
    link = 'if [ "$1" = -shared ]; then for target; do :; done; exec touch "$target"; fi'
    checker.write_text(f'#!/bin/sh\n{link}\nexec {compiler} -fsyntax-only "$@"\n')
    checker.chmod(0o755)
    compile_library(str(checker), machine, tmp_path / "library.so", monkeypatch)


@pytest.mark.long
@pytest.mark.skipif(not SETS, reason="this processor has no instruction set of this arithmetic")
def test_portable_kernels_compute_the_same_bits(
    driver: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = compile_library("c++", "any other machine", tmp_path / "generic.so", monkeypatch)
    calls, path = all_calls(), native.library_for(SETS[0]).path
    assert ARITHMETIC["generic"] == ARITHMETIC[SETS[0]]
    portable = calls.run(driver, library, "generic", tmp_path)
    assert not differing(portable, calls.run(driver, path, SETS[0], tmp_path))


@pytest.fixture(scope="module")
def arm64(tmp_path_factory: pytest.TempPathFactory) -> tuple[Sequence[str], Path]:
    """The emulated program that makes the calls, and the library for arm64."""
    if CROSS is None or QEMU is None:
        pytest.skip("needs g++-aarch64-linux-gnu and qemu-user-static")
    folder = tmp_path_factory.mktemp("arm64")
    with pytest.MonkeyPatch.context() as monkeypatch:
        library = compile_library(CROSS, "aarch64", folder / "arm64.so", monkeypatch)
    program = str(compile_driver(CROSS, folder / "arm64_calls"))
    return [QEMU, "-cpu", "max", "-L", "/usr/aarch64-linux-gnu", program], library


@pytest.mark.long
@pytest.mark.skipif(not SETS, reason="this processor has no instruction set of this arithmetic")
def test_arm64_computes_the_same_bits(driver: Sequence[str], arm64: tuple[Sequence[str], Path], tmp_path: Path) -> None:
    emulated, library = arm64
    calls, path = all_calls(), native.library_for(SETS[0]).path
    assert ARITHMETIC["neon"] == ARITHMETIC[SETS[0]]
    found = calls.run(emulated, library, "neon", tmp_path)
    assert not differing(found, calls.run(driver, path, SETS[0], tmp_path))


@pytest.mark.long
def test_arm64_with_products_of_matrices(arm64: tuple[Sequence[str], Path], tmp_path: Path) -> None:
    calls = all_calls()
    with_matrices, without = (calls.run(*arm64, isa, tmp_path) for isa in ("neon_bf16", "neon"))
    for name, found in with_matrices.items():
        if re.match(r"(linear|experts) torch.bfloat16|linear edges torch.bfloat16|rows|quantized|dense", name):
            close = torch.isclose(found, without[name], rtol=2**-6, atol=0.2, equal_nan=True)
            assert close.float().mean() > 0.95, name
        else:
            assert not differing({name: found}, {name: without[name]})
    assert differing(with_matrices, without), "an arithmetic of its own"
    alone = with_matrices["rows 0 29"]
    for first, last in ((0, 1), (3, 5), (7, 10), (11, 28)):
        assert torch.equal(with_matrices[f"rows {first} {last}"], alone[first:last])
    for name, found in with_matrices.items():
        if name.startswith("quantized"):
            assert torch.equal(found, with_matrices[name.replace("quantized", "dense")]), name
