"""vLLM (the CPU build) on the workload, with random weights in the same shape."""

from __future__ import annotations

import os
import sys

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from vllm import LLM, SamplingParams
from workload import measure


def main() -> None:
    llm = LLM(
        sys.argv[1],
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=2048,
        dtype="bfloat16",
        enable_prefix_caching=False,
        max_num_seqs=64,
    )

    def generate(batch: list[list[int]], num_tokens: int) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        llm.generate([{"prompt_token_ids": prompt} for prompt in batch], params, use_tqdm=False)

    measure("vllm-cpu", generate)


if __name__ == "__main__":
    main()
