"""Paged attention: Penstock's kernel on each instruction set against torch (gather, then SDPA) and the memory itself.

Decode batches use the next blocks of a cache of several hundred megabytes with every call, as the layers of a model do,
so that keys and values stream from memory; "read" is how long torch takes to add up as many bytes. Contenders
alternate, so a busy moment of the machine affects them alike. Figures are the median and, in brackets, the best. With
--int8 the kernels compete with themselves on a cache of int8, whose rate is that of its own bytes.

    python bench/kernels/attention.py --threads 2 --isa amx,avx512 --int8
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from penstock.kernels import native
from penstock.kernels.host_memory import aligned_bytes
from penstock.kernels.kv_rows import is_in_pairs, quantize_rows, rows_to_pairs
from penstock.kernels.paged_attention import Softmax, paged_attention

module = importlib.import_module("penstock.kernels.paged_attention")
# Qwen3-0.6B.
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 16, 8, 128, 16
# (requests, queries of each, keys of each)
CASES = ((1, 1, 1024), (8, 1, 1024), (32, 1, 1024), (8, 4, 1024), (1, 256, 1024), (1, 1024, 1024), (1, 2048, 2048))
LONG_CASES = ((1, 1, 4096), (1, 1, 16384), (8, 1, 4096), (8, 1, 16384), (1, 4096, 4096))

SOFTMAX = Softmax(HEAD_DIM**-0.5)

Call = Callable[[torch.Tensor], object]


class Case:
    """Requests of one shape, and calls that attend over the blocks of a table [requests, blocks]."""

    def __init__(self, cache: torch.Tensor, requests: int, query_len: int, seq_len: int) -> None:
        self.cache, self.query_len, self.seq_len = cache, query_len, seq_len
        self.q = torch.randn(requests * query_len, NUM_HEADS, HEAD_DIM).to(cache.dtype)
        self.starts = torch.arange(requests + 1, dtype=torch.int32) * query_len
        self.seq_lens = torch.full((requests,), seq_len, dtype=torch.int32)
        blocks = requests * seq_len // BLOCK_SIZE
        order = torch.randperm(cache.shape[0])
        self.tables = [part.view(requests, -1).int() for part in order.split(blocks) if part.numel() == blocks]
        self.num_blocks = blocks

    def penstock(self, isa: str, cache: torch.Tensor) -> Call:
        library = native.library_for(isa)

        def call(table: torch.Tensor) -> None:
            module.library = lambda: library
            paged_attention(self.q, cache, table, self.starts, self.seq_lens, SOFTMAX)

        return call

    def gather_sdpa(self, table: torch.Tensor) -> torch.Tensor:
        """Gathers the blocks, and folds the query heads of a KV head into query rows."""
        requests = table.shape[0]
        kv = self.cache[table.flatten().long()].view(requests, -1, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
        k, v = kv.permute(2, 0, 3, 1, 4, 5).reshape(2, requests, NUM_KV_HEADS, self.seq_len, HEAD_DIM).unbind(0)
        q = self.q.view(requests, self.query_len, NUM_KV_HEADS, -1, HEAD_DIM).transpose(1, 2).flatten(2, 3)
        positions = torch.arange(self.seq_len - self.query_len, self.seq_len)
        rows = positions.repeat_interleave(NUM_HEADS // NUM_KV_HEADS)
        mask = None if self.query_len == 1 else torch.arange(self.seq_len) <= rows[:, None]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    def read(self, table: torch.Tensor) -> torch.Tensor:
        """Reads as many contiguous bytes as the call's keys and values, from anywhere in the cache."""
        first = int(table[0, 0]) % (self.cache.shape[0] - table.numel() + 1)
        return self.cache[first : first + table.numel()].view(torch.float32).sum()


def repeated(blocks: torch.Tensor, copies: int) -> torch.Tensor:
    """Returns copies one after the other, in the memory that an engine has its cache in."""
    found = aligned_bytes(copies * blocks.nbytes).view(blocks.dtype).view(copies, *blocks.shape)
    return found.copy_(blocks.expand_as(found)).flatten(0, 1)


def measure(case: Case, calls: dict[str, Call], seconds: float) -> dict[str, list[float]]:
    """Returns the seconds of each call of each contender, which share `seconds` of measuring."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds
    turn = 0
    while time.perf_counter() < end or turn < 3:
        for name, call in calls.items():
            table = case.tables[turn % len(case.tables)]
            turn += 1
            start = time.perf_counter()
            call(table)
            times[name].append(time.perf_counter() - start)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--isa", default=",".join(native.instruction_sets()), help="instruction sets to compare")
    parser.add_argument("--threads", type=int, default=native.default_num_threads())
    parser.add_argument("--seconds", type=float, default=3, help="measuring time of a case")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--int8", action="store_true", help="compare with a cache of int8 instead of torch")
    parser.add_argument("--long", action="store_true", help="contexts of 4k and 16k tokens; needs 1 GB of memory")
    args = parser.parse_args()
    native.set_num_threads(args.threads)
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    isas = [isa for isa in args.isa.split(",") if isa]
    blocks = torch.randn(64, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM).to(getattr(torch, args.dtype))
    copies = 160 if args.long else 90
    cache, integers = (repeated(each, copies) for each in (blocks, quantize_rows(blocks)))
    in_pairs = {isa: is_in_pairs(cache, native.library_for(isa)) for isa in isas}
    pairs = repeated(rows_to_pairs(blocks), copies) if any(in_pairs.values()) else cache
    print(f"{cache.numel() * cache.element_size() / 1e6:.0f} MB of cache, {args.threads} threads, {args.dtype}")
    for requests, query_len, seq_len in LONG_CASES if args.long else CASES:
        case = Case(cache, requests, query_len, seq_len)
        calls = {isa: case.penstock(isa, pairs if in_pairs[isa] else cache) for isa in isas}
        if args.int8:
            calls |= {f"{isa}, int8": case.penstock(isa, integers) for isa in isas}
        else:
            calls |= {"torch": case.gather_sdpa, "read": case.read}
        for name, times in measure(case, calls, args.seconds).items():
            middle, best = statistics.median(times), min(times)
            speed = case.num_blocks * (integers if "int8" in name else cache)[0].nbytes / 1e9
            print(
                f"{requests:3} x {query_len:4} of {seq_len}  {name:12} {middle * 1e6:9.0f} us [{best * 1e6:9.0f}]"
                f"  {speed / middle:6.1f} GB/s [{speed / best:5.1f}]"
            )


if __name__ == "__main__":
    main()
