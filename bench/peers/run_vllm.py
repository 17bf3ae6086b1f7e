"""vLLM (the CPU build) on the workload, with random weights in the same shape: bf16, gptq or w8a8."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# The processor time of this process is measured.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

from quantized_checkpoint import checkpoint
from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind
from workload import Report, longest, measure


def main() -> None:
    folder, weights = sys.argv[1:3]
    is_dummy = weights == "bf16"
    llm = LLM(
        folder if is_dummy else str(checkpoint(Path(folder), weights)),
        load_format="dummy" if is_dummy else "auto",
        skip_tokenizer_init=True,
        max_model_len=longest(),
        dtype="bfloat16",
        enable_prefix_caching=False,
        max_num_seqs=64,
    )

    def generate(batch: list[list[int]], num_tokens: int, report: Report) -> None:
        params = SamplingParams(
            temperature=0.0,
            max_tokens=num_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        for number, prompt in enumerate(batch):
            llm.llm_engine.add_request(f"{id(batch)}-{number}", {"prompt_token_ids": prompt}, params)
        while llm.llm_engine.has_unfinished_requests():
            report(made.request_id for made in llm.llm_engine.step() for _ in made.outputs[0].token_ids)

    measure("vllm-cpu", generate)


if __name__ == "__main__":
    main()
