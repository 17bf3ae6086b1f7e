"""A step's time on the CPU: milliseconds per step by kernel, and of the whole step.

    python bench/profile_step.py [bench/shapes/qwen3-0.6b] [--quick]

The kernels' times and the rest, which is the time of the Python code around them, are those of layers that are called
one kernel after another. Then the same step is measured with its layers in one call (`penstock.models.repeated`), as
engines run it; the two alternate. The memory floor is the weights' bytes over the read bandwidth that the same process
measures.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import penstock.attention.native as attention
import penstock.layers.norm as norm
import penstock.models.parts as parts
import penstock.models.repeated as repeated
from penstock import LLM, SamplingParams
from penstock.kernels.linear import PackedLinear

SHAPE = Path(__file__).parent / "shapes" / "qwen3-0.6b"
SPENT: Counter[str] = Counter()
# (requests, prompt tokens, output tokens): decode at three batch sizes, and one prefill.
CASES = ((1, 2, 65), (8, 2, 65), (32, 2, 65), (1, 1024, 1))
QUICK_CASES = ((1, 2, 5), (1, 64, 1))
MAX_ROWS = repeated.MAX_ROWS


def timed(owner: Any, name: str, label: Callable[[Any], str] | None = None) -> None:
    """Wraps `owner.name` so that its time is counted."""
    function = getattr(owner, name)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        result = function(*args, **kwargs)
        SPENT[label(args[0]) if label else name] += time.perf_counter() - started
        return result

    setattr(owner, name, wrapper)


def read_bandwidth(num_floats: int) -> float:
    """Returns the bytes per second that torch reads with its threads."""
    import torch  # after penstock, which sets the OpenMP defaults

    memory = torch.ones(num_floats)
    memory.sum()
    started = time.perf_counter()
    for _ in range(4):
        memory.sum()
    return 4 * memory.nbytes / (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", nargs="?", default=str(SHAPE), help="folder with a config.json")
    parser.add_argument("--rounds", type=int, default=3, help="of each case; medians are shown")
    parser.add_argument("--quick", action="store_true", help="a few steps, to try the script")
    args = parser.parse_args()
    timed(PackedLinear, "into", lambda layer: f"linear {layer.in_features}x{layer.out_features}")
    timed(attention, "paged_attention")
    timed(attention, "rope_and_store_kv")
    timed(norm, "add_rms_norm")
    timed(parts, "silu_and_mul")
    llm = LLM(
        args.shape, load_format="dummy", skip_tokenizer_init=True, max_model_len=2048, enable_prefix_caching=False
    )
    rng = random.Random(0)
    vocab_size = llm.config.model.vocab_size

    def generate(count: int, length: int, num_tokens: int) -> float:
        prompts = [[rng.randrange(vocab_size) for _ in range(length)] for _ in range(count)]
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - started

    generate(1 if args.quick else 32, 128, 4)
    print(f"read bandwidth {read_bandwidth(1 << (20 if args.quick else 28)) / 1e9:.1f} GB/s")
    for count, length, num_tokens in QUICK_CASES if args.quick else CASES:
        SPENT.clear()
        times: dict[int, list[float]] = {0: [], MAX_ROWS: []}
        for _ in range(1 if args.quick else args.rounds):
            for rows, each in times.items():
                repeated.MAX_ROWS = rows
                before = SPENT.copy()
                each.append(generate(count, length, num_tokens) / num_tokens * 1e3)
                if rows:
                    SPENT.clear()
                    SPENT.update(before)
        single, whole = (statistics.median(each) for each in times.values())
        steps = num_tokens * len(times[0])
        per_step = {name: round(spent / steps * 1e3, 2) for name, spent in sorted(SPENT.items())}
        rest = single - sum(per_step.values())
        print(f"{count} requests, {length} prompt tokens: {single:.1f} ms a step: {per_step}, rest {rest:.1f}")
        print(f"    layers in one call: {whole:.1f} ms a step, {single / whole:.3f}x")


if __name__ == "__main__":
    main()
