"""The common parts of the groups of `bench/gpu.py`: the job, its sizes, the engine, timing and reports."""

from __future__ import annotations

import gc
import importlib
import json
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from penstock import LLM, SamplingParams
from penstock.runner.passes import EagerPasses


@dataclass(frozen=True)
class Sizes:
    """The workload, as vLLM was measured: prompts and outputs in tokens."""

    batches: tuple[int, ...] = (1, 8, 64)
    prompt: int = 128
    output: int = 257
    prefill: tuple[int, int] = (16, 2048)  # requests, tokens of each
    mix: tuple[int, int, int] = (256, 100, 1024)  # requests, shortest and longest prompt or output
    profiled_steps: int = 32
    rounds: int = 3
    built_in_tokens: int = 64
    soak_batch: int = 96
    bandwidth_bytes: int = 8 << 30
    limits: dict[str, int] = field(
        default_factory=lambda: {"max_model_len": 4096, "max_num_batched_tokens": 16384, "max_num_seqs": 256}
    )


FULL = Sizes()
QUICK = Sizes(
    batches=(1, 2),
    prompt=8,
    output=33,
    prefill=(2, 32),
    mix=(4, 5, 12),
    profiled_steps=4,
    built_in_tokens=24,
    soak_batch=4,
    bandwidth_bytes=1 << 24,
    limits={
        "max_model_len": 128,
        "max_num_batched_tokens": 64,
        "max_num_seqs": 8,
        "num_gpu_blocks_override": 100,
    },
)


@dataclass(frozen=True)
class Job:
    """One group on one shape; lines of JSON are added to `output`."""

    group: str
    shape: str  # a folder with a config.json; empty for the built-in model
    device: str
    quick: bool
    output: str
    work: str  # a folder for checkpoints and caches
    minutes: float  # of the soak

    @property
    def sizes(self) -> Sizes:
        return QUICK if self.quick else FULL

    @property
    def shape_name(self) -> str:
        return Path(self.shape).name if self.shape else "built-in"

    def report(self, key: str, value: float, unit: str, **more: Any) -> None:
        """Writes a figure at once, so that no measurement is lost with the process."""
        line = {"shape": self.shape_name, "group": self.group, "key": key, "value": value, "unit": unit, **more}
        with Path(self.output).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{self.shape_name} {key}: {value:.6g} {unit}", flush=True)


@contextmanager
def engine(job: Job, **engine_args: Any) -> Iterator[LLM]:
    """Yields an engine with random weights in the job's shape, bfloat16, no tokenizer and no prefix cache."""
    defaults = {"load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16", "device": job.device}
    llm = LLM(job.shape, **{**defaults, "enable_prefix_caching": False, **job.sizes.limits, **engine_args})
    try:
        yield llm
    finally:
        llm.shutdown()
        del llm
        gc.collect()
        if job.device == "cuda":
            torch.cuda.empty_cache()


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)


def prompts(llm: LLM, count: int, length: int, rng: random.Random) -> list[list[int]]:
    vocab_size = llm.config.model.vocab_size
    return [[rng.randrange(vocab_size) for _ in range(length)] for _ in range(count)]


@dataclass(frozen=True)
class Run:
    """The measurements of a batch: `cpu_seconds` of all its threads, `steps` that were `replayed` from graphs."""

    seconds: float
    cpu_seconds: float
    steps: int
    replayed: int


class StepCounter:
    """Counts steps that are launched kernel by kernel, and those that are replayed from graphs."""

    def __init__(self) -> None:
        self._calls: Counter[str] = Counter()

    @classmethod
    @contextmanager
    def watching(cls, device: str) -> Iterator[StepCounter]:
        counter = cls()
        owners: list[Any] = [EagerPasses]
        if device == "cuda":
            owners.append(importlib.import_module("penstock.runner.gpu.cudagraphs").GraphedPasses)
        originals = [owner.forward for owner in owners]
        for owner, original in zip(owners, originals, strict=True):
            owner.forward = counter._counted(owner.__name__, original)
        try:
            yield counter
        finally:
            for owner, original in zip(owners, originals, strict=True):
                owner.forward = original

    def _counted(self, name: str, function: Any) -> Any:
        def wrapper(*args: Any) -> Any:
            self._calls[name] += 1
            return function(*args)

        return wrapper

    def run(self, llm: LLM, batch: list[list[int]], params: SamplingParams | Sequence[SamplingParams]) -> Run:
        self._calls.clear()
        started, cpu_started = time.perf_counter(), time.process_time()
        llm.generate(batch, params, use_tqdm=False)
        seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu_started
        launched, graphed = self._calls["EagerPasses"], self._calls["GraphedPasses"]
        # A step without a graph goes through both.
        return Run(seconds, cpu_seconds, max(launched, graphed), max(graphed - launched, 0))
