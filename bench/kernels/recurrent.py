"""The gated delta rule against torch's forms of it in transformers, and against the bytes that it moves.

The shape is that of a layer of Qwen3.5-0.8B: 16 heads of 128 x 128. Everything from the convolution to the norm is
measured, without the projections before and after it. "chunked" and "recurrent" are transformers' functions for a
prompt and for one token. "copied" is how long torch takes to copy the states of a step, which is what a step of decode
has to read and write at least. Contenders alternate; figures are medians in milliseconds.

    python bench/kernels/recurrent.py --threads 2
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

from penstock.config.recurrent import DeltaSizes
from penstock.kernels import native
from penstock.kernels.gated_delta import GatedDelta
from penstock.kernels.recurrent import StateRequests, StateRows

SIZES, BLOCK_SIZE, CONTEXT = DeltaSizes(16, 16, 128, 128, 4), 16, 512
PROMPTS = (128, 512, 2048)
BATCHES = (1, 8, 32)


def values(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


class Layer:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.conv = values(SIZES.channels, SIZES.taps, dtype=torch.float32)
        heads = (values(SIZES.value_heads, dtype=torch.float32) for _ in range(2))
        self.a_log, self.dt_bias = heads
        self.norm = torch.ones(SIZES.value_size)
        self.rule = GatedDelta(SIZES, self.conv, self.a_log, self.dt_bias, self.norm, 1e-6)

    def penstock(self, requests: int, queries: int, start: int) -> Callable[[], object]:
        qkv, gates = self._inputs(requests * queries)
        states = torch.zeros(requests, SIZES.key_heads, SIZES.head_size)
        width = (start + queries) // BLOCK_SIZE + 1
        table = torch.arange(1, requests + 1, dtype=torch.int32)[:, None].expand(-1, width).contiguous()
        starts = torch.arange(0, (requests + 1) * queries, queries, dtype=torch.int32)
        lengths = torch.full((requests,), start + queries, dtype=torch.int32)
        given = StateRequests(table, starts, lengths, StateRows(BLOCK_SIZE))
        return lambda: self.rule(qkv, gates, states, given)

    def transformers(self, requests: int, queries: int, is_chunked: bool) -> Callable[[], object]:
        qkv, gates = self._inputs(requests * queries)
        qkv = qkv.view(requests, queries, -1)
        conv, norm = self.conv.bfloat16(), qwen.Qwen3NextRMSNormGated(SIZES.value_size).bfloat16()
        state = torch.zeros(requests, SIZES.value_heads, SIZES.key_size, SIZES.value_size)
        rule = qwen.torch_chunk_gated_delta_rule if is_chunked else qwen.torch_recurrent_gated_delta_rule
        keys, width = SIZES.key_heads * SIZES.key_size, SIZES.value_heads * SIZES.value_size

        def call() -> torch.Tensor:
            mixed = qwen.causal_conv1d_fn(qkv.transpose(1, 2), conv, None, activation="silu").transpose(1, 2)
            parts = [part.unflatten(2, (-1, SIZES.key_size)) for part in mixed.split([keys, keys, width], 2)]
            z, b, dt = gates.split([width, SIZES.value_heads, SIZES.value_heads], 1)
            g = -self.a_log.exp() * torch.nn.functional.softplus(dt.float() + self.dt_bias)
            rates = (each.view(requests, queries, -1) for each in (g, b.sigmoid()))
            read, _ = rule(*parts, *rates, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True)
            return norm(read.reshape(-1, SIZES.value_size), z.reshape(-1, SIZES.value_size))

        return call

    def copied(self, requests: int) -> Callable[[], object]:
        states = torch.zeros(requests, SIZES.key_heads, SIZES.head_size)
        other = torch.empty_like(states)
        return lambda: other.copy_(states)

    def _inputs(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        return values(rows, SIZES.channels), values(rows, SIZES.value_heads * (SIZES.value_size + 2))


def medians(calls: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(times.values()))) < 3:
        for name, call in calls.items():
            began = time.perf_counter()
            call()
            times[name].append(1000 * (time.perf_counter() - began))
    return {name: statistics.median(each) for name, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompts", type=int, nargs="*", default=PROMPTS)
    parser.add_argument("--batches", type=int, nargs="*", default=BATCHES)
    parser.add_argument("--seconds", type=float, default=4.0, help="per row")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    native.set_num_threads(args.threads)
    library = native.library()
    print(f"{'torch' if library is None else library.isa} kernels, {args.threads} threads")
    layer = Layer()
    with torch.inference_mode():
        for length in args.prompts:
            calls = {"penstock": layer.penstock(1, length, 0), "chunked": layer.transformers(1, length, True)}
            report(f"prompt of {length}", medians(calls, args.seconds))
        for batch in args.batches:
            calls = {
                "penstock": layer.penstock(batch, 1, CONTEXT),
                "recurrent": layer.transformers(batch, 1, False),
                "copied": layer.copied(batch),
            }
            report(f"batch of {batch}", medians(calls, args.seconds))


def report(row: str, found: dict[str, float]) -> None:
    print(f"{row:>16}  " + "  ".join(f"{name} {value:8.3f}" for name, value in found.items()), flush=True)


main()
