"""A step's time on the device: microseconds by kernel, the gaps between kernels, and the memory's floor.

Programmatic launches are off here, because a kernel that waits for the one before it would count that time as its own;
so a step takes longer than otherwise. The floor of a decode step is the size of the weights that it reads and the KV of
its requests divided by the bandwidth that this process measures.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from gpu_parts.common import Job, engine, greedy, prompts
from penstock import LLM
from penstock.config.model import ModelConfig
from penstock.kernels.triton.capabilities import Capabilities

_TOP = 25
_SKIPPED_STEPS = 6  # of prefill, and until decode steps are uniform
_BYTES = 2  # of an element in bfloat16
_WORDS = 60  # of a kernel's name


def profile(job: Job) -> None:
    sizes, rng = job.sizes, random.Random(0)
    bandwidth = read_bandwidth(job.device, sizes.bandwidth_bytes)
    job.report("read_bandwidth", bandwidth / 1e12, "TB/s")
    # Kernels without early launches are compiled at this point: use as few of them as possible.
    with _plain_launches(), engine(job, max_num_seqs=max(sizes.batches)) as llm:
        for batch in sizes.batches:
            steps = sizes.profiled_steps
            context = sizes.prompt + _SKIPPED_STEPS + steps / 2
            floor = 1e6 * decode_bytes(llm.config.model, batch, context) / bandwidth
            window = Window(job.device, _SKIPPED_STEPS, steps)
            num_tokens = _SKIPPED_STEPS + steps + 4
            # Not profiled: includes all work that is done only once.
            llm.generate(prompts(llm, batch, sizes.prompt, rng), greedy(num_tokens), use_tqdm=False)
            with window.over(llm):
                llm.generate(prompts(llm, batch, sizes.prompt, rng), greedy(num_tokens), use_tqdm=False)
            _report(job, f"profile_b{batch}", window, steps, floor_us=floor, context=context)
        count, length = sizes.prefill
        for _ in range(2):
            window = Window(job.device, 0, 1 << 30)
            with window.over(llm):
                llm.generate(prompts(llm, count, length, rng), greedy(1), use_tqdm=False)
        _report(job, "profile_prefill", window, 1)


def _report(job: Job, key: str, window: Window, steps: int, **more: Any) -> None:
    total, busy = window.seconds, sum(window.spent.values()) / 1e6
    kernels = [
        {"name": name[:_WORDS], "us": round(spent / steps, 2), "count": round(window.count[name] / steps, 2)}
        for name, spent in window.spent.most_common(_TOP)
    ]
    idle = 1e6 * total - window.busy_us
    job.report(
        key,
        1e6 * total / steps,
        "us/step without early launches",
        kernels_us=1e6 * busy / steps,
        idle_us=idle / steps,
        kernels=kernels,
        **more,
    )
    for kernel in kernels:
        print(f"    {kernel['us']:10.2f} us {kernel['count']:8.2f} x  {kernel['name']}")
    print(f"    {idle / steps:10.2f} us between kernels" + (f", floor {more['floor_us']:.1f} us" if more else ""))


class Window:
    """Profiles the engine's steps from `skipped` on, `steps` of them or as many as there are."""

    def __init__(self, device: str, skipped: int, steps: int) -> None:
        self._device, self._first, self._last = device, skipped, skipped + steps
        self._profiler = torch.profiler.profile(
            activities=[ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU],
            acc_events=True,  # there is one cycle; without it some versions of torch warn of others
        )
        self.seconds = 0.0
        self.busy_us = 0.0  # when a kernel ran
        self.spent: Counter[str] = Counter()  # microseconds by kernel
        self.count: Counter[str] = Counter()

    @contextmanager
    def over(self, llm: LLM) -> Iterator[None]:
        core: Any = llm._core
        original, number = core.step, 0

        def step() -> Any:
            nonlocal number
            if number == self._first:
                self._begin()
            if number == self._last:
                self._end()
            number += 1
            return original()

        core.step = step
        try:
            yield
        finally:
            core.step = original
        if number <= self._last:
            self._end()

    def _begin(self) -> None:
        self._synchronize()
        self._profiler.start()
        self._started = time.perf_counter()

    def _end(self) -> None:
        self._synchronize()
        self.seconds = time.perf_counter() - self._started
        self._profiler.stop()
        spans: list[tuple[float, float]] = []
        for event in self._profiler.events() or ():
            if self._device == "cuda" and event.device_type != DeviceType.CUDA:
                continue
            spans.append((event.time_range.start, event.time_range.end))
            is_kernel = self._device == "cuda"
            self.spent[event.name] += event.time_range.elapsed_us() if is_kernel else event.self_cpu_time_total
            self.count[event.name] += 1
        self.busy_us = union(spans)

    def _synchronize(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()


def union(spans: list[tuple[float, float]]) -> float:
    """Returns for how long at least one of (begin, end) is open."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


@contextmanager
def _plain_launches() -> Iterator[None]:
    found = Capabilities.of
    Capabilities.of = lambda device: replace(found(device), pdl=False)  # pyright: ignore
    try:
        yield
    finally:
        Capabilities.of = found


def read_bandwidth(device: str, num_bytes: int) -> float:
    """Returns the bytes per second that torch reads in sums, the best of five."""
    memory = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    memory.sum()
    best = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        memory.sum().item()
        best = min(best, time.perf_counter() - started)
    del memory
    if device == "cuda":
        torch.cuda.empty_cache()
    return num_bytes / best


def decode_bytes(config: ModelConfig, batch: int, context: float) -> float:
    """Returns the least that a decode step reads: all layers, the head, and the KV of `context` positions each."""
    hidden, head = config.hidden_size, config.head_dim
    query, key = config.num_attention_heads * head, config.num_key_value_heads * head
    layer = hidden * (2 * query + 2 * key) + 3 * hidden * config.intermediate_size
    weights = config.num_hidden_layers * layer + config.vocab_size * hidden
    return _BYTES * (weights + batch * context * config.num_hidden_layers * 2 * key)
