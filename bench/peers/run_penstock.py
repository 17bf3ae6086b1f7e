"""Penstock on the workload: `python bench/peers/run_penstock.py bench/shapes/qwen3-0.6b`."""

from __future__ import annotations

import sys

from workload import measure

from penstock import LLM, SamplingParams


def main() -> None:
    llm = LLM(
        sys.argv[1], load_format="dummy", skip_tokenizer_init=True, max_model_len=2048, enable_prefix_caching=False
    )

    def generate(batch: list[list[int]], num_tokens: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        llm.generate(batch, params, use_tqdm=False)

    measure("penstock", generate)
    llm.shutdown()


main()
