"""Tokens per second on a busy machine: numbers of kernel threads, with 0, 1, 2, ... other processes that only compute.

    python bench/busy.py [--neighbours 0 1 2] [--batches 1 8] [--rounds 5]

One engine in one process; the settings alternate within a round, and the median of the rounds is shown. The last column
is the default setting's speed relative to the best one.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator

from penstock import LLM, SamplingParams
from penstock.kernels import native

MAX_TOKENS = 100
SPIN = "while True: pass"


@contextlib.contextmanager
def neighbours(count: int) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            stack.callback(stack.enter_context(subprocess.Popen([sys.executable, "-c", SPIN])).kill)
        yield


def tokens_per_second(llm: LLM, batch: int) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    started = time.perf_counter()
    llm.generate(["Once upon a time"] * batch, params, use_tqdm=False)
    return batch * MAX_TOKENS / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--neighbours", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    llm = LLM(device="cpu", max_model_len=1024, num_gpu_blocks_override=1024)
    default = native.num_threads()
    settings = [1 << power for power in range(default.bit_length()) if 1 << power < default] + [default]
    names = " | ".join(f"{count} threads" for count in settings)
    print(f"| neighbours | batch | {names} | default / best |\n|{'---|' * (3 + len(settings))}")
    for count, batch in itertools.product(args.neighbours, args.batches):
        speeds: dict[int, list[float]] = {threads: [] for threads in settings}
        with neighbours(count):
            for threads in settings * (1 + args.rounds):
                native.set_num_threads(threads)
                speeds[threads].append(tokens_per_second(llm, batch))
        # The first round is the warm-up.
        medians = [statistics.median(speeds[threads][1:]) for threads in settings]
        cells = " | ".join(f"{each:.0f}" for each in medians)
        print(f"| {count} | {batch} | {cells} | {medians[-1] / max(medians):.2f} |", flush=True)


if __name__ == "__main__":
    main()
