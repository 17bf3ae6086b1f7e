"""The workload that every engine runs: prompts of random tokens, fixed lengths, greedy.

    decode at batch b   tokens per second while every request decodes: from the moment when all have a token until one
                        has OUTPUT; prompts of 128 tokens, or of those of a batch like 8@4096
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
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path

PROMPT, OUTPUT, PREFILL = 128, 65, 1024
START = "start"

Report = Callable[[Iterable[Hashable]], None]
"""Called after each step with the request of every new token."""

Generate = Callable[[list[list[int]], int, Report], None]
"""Runs a batch of prompts to exactly that many output tokens each, and reports them step by step."""


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


@dataclass(frozen=True)
class Moment:
    seconds: float
    processor: float
    """Seconds of all threads of this process."""
    num_tokens: int


class Run:
    """One batch, and the moments between which every request decodes."""

    def __init__(self, generate: Generate, batch: list[list[int]], num_tokens: int) -> None:
        self._counts: Counter[Hashable] = Counter()
        self._size = len(batch), num_tokens
        self._moments = [self._now()]
        generate(batch, num_tokens, self._report)
        assert sum(self._counts.values()) == len(batch) * num_tokens, self._counts
        self.begin, self.all_have_one, self.one_has_all = self._moments

    def _report(self, requests: Iterable[Hashable]) -> None:
        self._counts.update(requests)
        if len(self._moments) == 1 and len(self._counts) == self._size[0]:
            self._moments.append(self._now())
        if len(self._moments) == 2 and max(self._counts.values()) == self._size[1]:
            self._moments.append(self._now())

    def _now(self) -> Moment:
        return Moment(time.perf_counter(), time.process_time(), sum(self._counts.values()))


def measure(engine: str, generate: Generate, repeats: int = 1) -> None:
    """Prints `{"engine": ..., "decode_b1": tokens/s, "processor_b1": ms, ..., "prefill": tokens/s}`, each the median of
    `repeats`."""
    rng = random.Random(0)
    vocab_size = json.loads((Path(sys.argv[1]) / "config.json").read_text())["vocab_size"]

    def run(count: int, length: int, num_tokens: int) -> Run:
        return Run(generate, prompts(count, length, vocab_size, rng), num_tokens)

    result: dict[str, float | str] = {"engine": engine}
    if START in sys.argv[3:]:
        run(1, PROMPT, 1)
        print(json.dumps(result | _start()), flush=True)
        return
    run(1, PROMPT, 4)
    for text, count, length in batch_sizes():
        rates: list[float] = []
        processor: list[float] = []
        for _ in range(repeats):
            timed = run(count, length, OUTPUT)
            first, last = timed.all_have_one, timed.one_has_all
            num_tokens = last.num_tokens - first.num_tokens
            rates.append(num_tokens / (last.seconds - first.seconds))
            processor.append((last.processor - first.processor) * 1000 / num_tokens)
        result[f"decode_b{text}"] = round(statistics.median(rates), 1)
        result[f"processor_b{text}"] = round(statistics.median(processor), 1)
    prefills = [run(1, PREFILL, 1) for _ in range(repeats)]
    result["prefill"] = round(
        statistics.median(PREFILL / (each.all_have_one.seconds - each.begin.seconds) for each in prefills), 1
    )
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
