"""Where a step's time goes on the CPU: milliseconds per step by kernel, beside what the whole step took.

    python bench/profile_step.py [bench/shapes/qwen3-0.6b]

The last column is the Python around the kernels. The memory floor is the weights' bytes over the read bandwidth that
the same process measures.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import penstock.layers.attention as attention_layer
import penstock.layers.norm as norm_layer
import penstock.models.llama as llama
from penstock import LLM, SamplingParams
from penstock.kernels import linear

SPENT: Counter[str] = Counter()
# (requests, prompt tokens, output tokens): decode at three batch sizes, and one prefill.
CASES = ((1, 2, 65), (8, 2, 65), (32, 2, 65), (1, 1024, 1))


def timed(owner: Any, name: str, label: Callable[[Any], str] | None = None) -> None:
    """Replaces `owner.name` by itself with its time counted."""
    function = getattr(owner, name)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        result = function(*args, **kwargs)
        SPENT[label(args[0]) if label else name] += time.perf_counter() - started
        return result

    setattr(owner, name, wrapper)


def read_bandwidth() -> float:
    """Bytes per second that torch reads with its threads."""
    import torch  # after penstock, which sets the OpenMP defaults

    memory = torch.ones(1 << 28)
    memory.sum()
    started = time.perf_counter()
    for _ in range(4):
        memory.sum()
    return 4 * memory.nbytes / (time.perf_counter() - started)


def main() -> None:
    shape = sys.argv[1] if len(sys.argv) > 1 else "bench/shapes/qwen3-0.6b"
    timed(
        linear._NativeLinear,
        "__call__",
        lambda layer: f"linear {layer._descriptor.in_features}x{layer._descriptor.out_features}",
    )
    timed(attention_layer, "paged_attention")
    timed(attention_layer, "rope_and_store_kv")
    timed(norm_layer, "add_rms_norm")
    timed(llama, "silu_and_mul")
    llm = LLM(shape, load_format="dummy", skip_tokenizer_init=True, max_model_len=2048, enable_prefix_caching=False)
    rng = random.Random(0)
    vocab_size = llm.config.model.vocab_size

    def generate(count: int, length: int, num_tokens: int) -> float:
        prompts = [[rng.randrange(vocab_size) for _ in range(length)] for _ in range(count)]
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        started = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - started

    generate(32, 128, 4)
    print(f"read bandwidth {read_bandwidth() / 1e9:.1f} GB/s")
    for count, length, num_tokens in CASES:
        SPENT.clear()
        total = generate(count, length, num_tokens)
        per_step = {name: round(spent / num_tokens * 1e3, 2) for name, spent in sorted(SPENT.items())}
        rest = (total - sum(SPENT.values())) / num_tokens * 1e3
        name = f"{count} requests, {length} prompt tokens"
        print(f"{name}: {total / num_tokens * 1e3:.1f} ms a step: {per_step}, rest {rest:.1f}")


main()
