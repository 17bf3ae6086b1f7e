"""The workload that every engine runs: prompts of random tokens, fixed lengths, greedy.

    decode at batch b   (time of OUTPUT tokens - time of 1) / (OUTPUT - 1), prompts of 128 tokens
    prefill             1024 tokens, time to the first token

Each engine's script, whose arguments are a folder with a config.json, the type of the weights and the batches, calls
`measure` with a function that runs one batch, and prints one line of JSON.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

PROMPT, OUTPUT, PREFILL = 128, 65, 1024

Generate = Callable[[list[list[int]], int], None]
"""Runs a batch of prompts to exactly that many output tokens each."""


def prompts(count: int, length: int, vocab_size: int, rng: random.Random) -> list[list[int]]:
    return [[rng.randrange(1000, vocab_size - 1000) for _ in range(length)] for _ in range(count)]


def measure(engine: str, generate: Generate, repeats: int = 1) -> None:
    """Prints `{"engine": ..., "decode_b1": tokens/s, ..., "prefill": tokens/s}`, medians of `repeats`."""
    rng = random.Random(0)
    folder, _, *batches = sys.argv[1:]
    vocab_size = json.loads((Path(folder) / "config.json").read_text())["vocab_size"]

    def timed(count: int, length: int, num_tokens: int) -> float:
        batch = prompts(count, length, vocab_size, rng)
        started = time.perf_counter()
        generate(batch, num_tokens)
        return time.perf_counter() - started

    timed(1, PROMPT, 4)
    result: dict[str, float | str] = {"engine": engine}
    for count in map(int, batches):
        rates = []
        for _ in range(repeats):
            first, all_tokens = timed(count, PROMPT, 1), timed(count, PROMPT, OUTPUT)
            rates.append(count * (OUTPUT - 1) / (all_tokens - first))
        result[f"decode_b{count}"] = round(statistics.median(rates), 1)
    result["prefill"] = round(statistics.median(PREFILL / timed(1, PREFILL, 1) for _ in range(repeats)), 1)
    print(json.dumps(result), flush=True)
