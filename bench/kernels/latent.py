"""Latent attention in its absorbed form, the only one that Penstock has, against the expanded form.

The shape is DeepSeek-V2-Lite's: 16 heads with keys of 128 + 64 and values of 128, latents of 512. "absorbed" are the
products with W_UK and W_UV and the attention over latents; "expanded" are keys and values of every token made of its
latent, and the attention of 16 heads over them, with values padded to 192 because the kernel has one size of head.
Prefill is one whole prompt. Decode is one token for each of some requests; there, "read" is how long torch takes to add
up the latents' bytes. Contenders alternate; figures are medians in milliseconds.

    python bench/kernels/latent.py --threads 2
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from penstock.kernels import native
from penstock.kernels.heads_linear import PackedHeads
from penstock.kernels.linear import PackedLinear
from penstock.kernels.paged_attention import Softmax, latent_attention, paged_attention

HEADS, PLAIN, ROTARY, VALUE, RANK, BLOCK_SIZE = 16, 128, 64, 128, 512, 16
STORED, SIZE = RANK + ROTARY, PLAIN + ROTARY
SOFTMAX = Softmax(SIZE**-0.5)
PREFILL = (512, 2048, 8192)
DECODE = ((1, 1024), (1, 8192), (8, 1024), (8, 4096))  # requests, tokens of each


class Layer:
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)

        def values(*shape: int) -> torch.Tensor:
            return (torch.randn(*shape, generator=generator) * 0.05).bfloat16()

        self.values = values
        self.absorb, self.expand = PackedHeads(values(HEADS, RANK, PLAIN)), PackedHeads(values(HEADS, VALUE, RANK))
        self.keys_and_values = PackedLinear(values(HEADS * (PLAIN + VALUE), RANK))

    def absorbed(self, requests: int, queries: int, tokens: int) -> Callable[[], object]:
        cache = self.values(requests * tokens // BLOCK_SIZE, 1, 1, BLOCK_SIZE, STORED)
        batch = _batch(requests, queries, tokens)
        plain, rotated = self.values(HEADS, requests * queries, PLAIN), self.values(requests * queries, HEADS, ROTARY)

        def call() -> torch.Tensor:
            q = torch.cat((rotated, self.absorb(plain).transpose(0, 1)), -1)
            attended = latent_attention(q, cache, *batch, SOFTMAX, RANK).unflatten(1, (HEADS, RANK))
            return self.expand(attended.transpose(0, 1).contiguous())

        return call

    def expanded(self, requests: int, queries: int, tokens: int) -> Callable[[], object]:
        latents, rotated = self.values(requests * tokens, RANK), self.values(requests * tokens, 1, ROTARY)
        q, batch = self.values(requests * queries, HEADS, SIZE), _batch(requests, queries, tokens)
        cache = torch.zeros(requests * tokens // BLOCK_SIZE, 2, HEADS, BLOCK_SIZE, SIZE, dtype=torch.bfloat16)

        def call() -> torch.Tensor:
            made = self.keys_and_values(latents).view(-1, BLOCK_SIZE, HEADS, PLAIN + VALUE).transpose(1, 2)
            cache[:, 0, :, :, :PLAIN] = made[..., :PLAIN]
            cache[:, 0, :, :, PLAIN:] = rotated.view(-1, 1, BLOCK_SIZE, ROTARY)
            cache[:, 1, :, :, :VALUE] = made[..., PLAIN:]
            return paged_attention(q, cache, *batch, SOFTMAX)

        return call


def _batch(requests: int, queries: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    table = torch.randperm(requests * tokens // BLOCK_SIZE).view(requests, -1).int()
    return table, torch.arange(requests + 1, dtype=torch.int32) * queries, torch.full((requests,), tokens).int()


def measure(calls: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(next(iter(times.values()))) < 3:
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(each) * 1e3 for name, each in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=5.0, help="of measuring for each row")
    parser.add_argument("--prefill", type=int, nargs="+", default=PREFILL, help="tokens of the prompts")
    args = parser.parse_args()
    native.set_num_threads(args.threads)
    torch.set_num_threads(args.threads)
    layer, library = Layer(), native.library()
    print(f"{'no library' if library is None else library.isa}, {args.threads} threads, one layer, ms")
    print("| prefill, tokens | absorbed | expanded | ratio |\n|---|---|---|---|")
    for tokens in args.prefill:
        calls = {"absorbed": layer.absorbed(1, tokens, tokens), "expanded": layer.expanded(1, tokens, tokens)}
        found = measure(calls, args.seconds)
        ratio = found["absorbed"] / found["expanded"]
        print(f"| {tokens} | {found['absorbed']:.1f} | {found['expanded']:.1f} | {ratio:.2f} |", flush=True)
    print("\n| decode, requests x tokens | absorbed | read |\n|---|---|---|")
    for requests, tokens in DECODE:
        latents = layer.values(requests * tokens, STORED).view(torch.float32)
        found = measure({"absorbed": layer.absorbed(requests, 1, tokens), "read": latents.sum}, args.seconds)
        print(f"| {requests} x {tokens} | {found['absorbed']:.2f} | {found['read']:.2f} |", flush=True)


if __name__ == "__main__":
    main()
