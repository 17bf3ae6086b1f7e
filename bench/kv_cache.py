"""Decode steps at a long context with a KV cache of int8 beside one of the model's dtype.

    python bench/kv_cache.py [--context 4096] [--requests 1] [--model bench/shapes/qwen3-0.6b]

Two engines with random weights alternate. They find the prompts in the prefix cache, so that a run consists of decode
steps. Figures are milliseconds of a step, medians, the bytes of a token's KV, and the median of the ratios of
neighbouring runs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

from penstock import LLM, SamplingParams

SHAPE = Path(__file__).parent / "shapes" / "qwen3-0.6b"
DTYPES = ("auto", "int8")
STEPS = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(SHAPE))
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    num_blocks = args.requests * (args.context // 16 + 4)
    room = {"max_model_len": args.context, "num_gpu_blocks_override": num_blocks}
    engines = [
        LLM(args.model, load_format="dummy", skip_tokenizer_init=True, kv_cache_dtype=dtype, **room) for dtype in DTYPES
    ]
    prompts = [[(7 * i + 13 * k) % 1000 for i in range(args.context - STEPS - 1)] for k in range(args.requests)]
    params = SamplingParams(temperature=0, max_tokens=STEPS, ignore_eos=True)

    def run(llm: LLM) -> float:
        started = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return (time.perf_counter() - started) / STEPS * 1e3

    for llm in engines:
        run(llm)
    pairs = [[run(llm) for llm in engines] for _ in range(args.rounds)]
    for dtype, llm, times in zip(DTYPES, engines, zip(*pairs, strict=True), strict=True):
        per_token = llm.info.kv_cache_bytes / (llm.info.num_blocks + 1) / llm.info.block_size  # and the null block
        print(f"{dtype}: {statistics.median(times):.1f} ms a step, {per_token:,.0f} bytes of KV per token")
        llm.shutdown()
    print(f"ratio {statistics.median(one / other for one, other in pairs):.3f}")


if __name__ == "__main__":
    main()
