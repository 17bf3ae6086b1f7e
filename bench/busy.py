"""Tokens per second on a busy machine: numbers of kernel threads, with 0, 1, 2, ... other processes that only compute.

    python bench/busy.py [--neighbours 0 1 2] [--nice 0] [--batches 1 8] [--rounds 5] [--shape bench/shapes/qwen3-0.6b]
                         [--threads 1 2 8 64] [--async-scheduling]

One engine in one process; the settings alternate within a round, and the median of the rounds is shown. The last
column is the speed of the last setting, which is the default one unless others are named, relative to the best one.
`--nice 19` gives the neighbours a low priority. The model is the built-in one, or has random weights in the shape of a
folder's config.json. More threads than cores show what an oversubscribed machine does.
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

PROMPT = list(range(100, 106))
SPIN = "import os, sys; os.nice(int(sys.argv[1]))\nwhile True: pass"


@contextlib.contextmanager
def neighbours(count: int, nice: int) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            process = subprocess.Popen([sys.executable, "-c", SPIN, str(nice)])
            stack.callback(stack.enter_context(process).kill)
        yield


def tokens_per_second(llm: LLM, batch: int, max_tokens: int) -> float:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    started = time.perf_counter()
    llm.generate([PROMPT] * batch, params, use_tqdm=False)
    return batch * max_tokens / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--neighbours", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--nice", type=int, default=0, help="of the neighbours")
    parser.add_argument("--shape", help="a folder with a config.json (default: the built-in model)")
    parser.add_argument("--max-tokens", type=int, default=100)
    parser.add_argument("--threads", type=int, nargs="+", help="the settings (default: powers of two, and the default)")
    parser.add_argument("--async-scheduling", action="store_true", help="to be compared in processes of their own")
    args = parser.parse_args()
    model = {"model": args.shape, "load_format": "dummy", "skip_tokenizer_init": True} if args.shape else {}
    model["async_scheduling"] = args.async_scheduling
    llm = LLM(device="cpu", max_model_len=1024, num_gpu_blocks_override=1024, **model)
    default = native.num_threads()
    powers = [1 << power for power in range(default.bit_length()) if 1 << power < default]
    settings = args.threads or [*powers, default]
    names = " | ".join(f"{count} threads" for count in settings)
    print(f"| neighbours | batch | {names} | last / best |\n|{'---|' * (3 + len(settings))}")
    for count, batch in itertools.product(args.neighbours, args.batches):
        speeds: dict[int, list[float]] = {threads: [] for threads in settings}
        with neighbours(count, args.nice):
            for threads in settings * (1 + args.rounds):
                native.set_num_threads(threads)
                speeds[threads].append(tokens_per_second(llm, batch, args.max_tokens))
        # The first round is the warm-up.
        medians = [statistics.median(speeds[threads][1:]) for threads in settings]
        cells = " | ".join(f"{each:.3g}" for each in medians)
        print(f"| {count} | {batch} | {cells} | {medians[-1] / max(medians):.2f} |", flush=True)


if __name__ == "__main__":
    main()
