"""The workload that every engine runs: prompts of random tokens, fixed lengths, greedy.

    decode at batch b   (time of OUTPUT tokens - time of 1) / (OUTPUT - 1), prompts of 128 tokens, or of those of a
                        batch like 8@4096
    processor           seconds of all threads in the same time, per token
    prefill             1024 tokens, time to the first token

Each engine's script, whose arguments are a folder with a config.json, the type of the weights and the batches, calls
`measure` with a function that runs one batch in its own process, and prints one line of JSON. With "start" in the place
of the batches it has the time from the process's start to the first token, and the resident memory.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

PROMPT, OUTPUT, PREFILL = 128, 65, 1024
START = "start"

Generate = Callable[[list[list[int]], int], None]
"""Runs a batch of prompts to exactly that many output tokens each."""


def prompts(count: int, length: int, vocab_size: int, rng: random.Random) -> list[list[int]]:
    return [[rng.randrange(1000, vocab_size - 1000) for _ in range(length)] for _ in range(count)]


def batch_sizes() -> list[tuple[str, int, int]]:
    """Returns the batches of the command line: each one's text, requests and prompt tokens."""
    found: list[tuple[str, int, int]] = []
    for text in sys.argv[3:]:
        if text == START:
            continue
        count, _, length = text.partition("@")
        found.append((text, int(count), int(length or PROMPT)))
    return found


def longest() -> int:
    """Returns a number of tokens that no request exceeds."""
    return max([2048, *(length + 2 * OUTPUT for _, _, length in batch_sizes())])


def measure(engine: str, generate: Generate, repeats: int = 1) -> None:
    """Prints `{"engine": ..., "decode_b1": tokens/s, "processor_b1": ms, ..., "prefill": tokens/s}`, each the median of
    `repeats`."""
    rng = random.Random(0)
    vocab_size = json.loads((Path(sys.argv[1]) / "config.json").read_text())["vocab_size"]

    def timed(count: int, length: int, num_tokens: int) -> tuple[float, float]:
        batch = prompts(count, length, vocab_size, rng)
        started, used = time.perf_counter(), time.process_time()
        generate(batch, num_tokens)
        return time.perf_counter() - started, time.process_time() - used

    result: dict[str, float | str] = {"engine": engine}
    if START in sys.argv[3:]:
        timed(1, PROMPT, 1)
        print(json.dumps(result | _start()), flush=True)
        return
    timed(1, PROMPT, 4)
    for text, count, length in batch_sizes():
        rates: list[float] = []
        processor: list[float] = []
        for _ in range(repeats):
            first, all_tokens = timed(count, length, 1), timed(count, length, OUTPUT)
            rates.append(count * (OUTPUT - 1) / (all_tokens[0] - first[0]))
            processor.append((all_tokens[1] - first[1]) * 1000 / (count * (OUTPUT - 1)))
        result[f"decode_b{text}"] = round(statistics.median(rates), 1)
        result[f"processor_b{text}"] = round(statistics.median(processor), 1)
    result["prefill"] = round(statistics.median(PREFILL / timed(1, PREFILL, 1)[0] for _ in range(repeats)), 1)
    print(json.dumps(result), flush=True)


def _start() -> dict[str, float]:
    """Returns the seconds since this process began, and its memory in GB: the largest resident size, that of now, and
    what of it is not pages of files. Linux only.
    """
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    seconds = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    fields = {"peak_gb": "VmHWM", "resident_gb": "VmRSS", "anonymous_gb": "RssAnon"}
    sizes = {name: round(int(lines[field].split()[0]) * 1024 / 1e9, 2) for name, field in fields.items()}
    return {"first_token_s": round(seconds, 1), **sizes}
