"""Penstock on the workload: `python bench/peers/run_penstock.py bench/shapes/qwen3-0.6b bf16 1 8`.

Quantized weights are those of the GGUF file that `run_llama_cpp.py` has written into that folder, or of a
checkpoint that `quantized_checkpoint.py` writes.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from quantized_checkpoint import KINDS, checkpoint
from workload import Report, longest, measure

from penstock import LLM, SamplingParams


def main() -> None:
    folder, weights = sys.argv[1:3]
    model = f"{folder}/{weights}.gguf"
    if weights == "bf16":
        model = folder
    elif weights in KINDS:
        model = str(checkpoint(Path(folder), weights))
    llm = LLM(
        model,
        load_format="dummy" if weights == "bf16" else "auto",
        skip_tokenizer_init=True,
        max_model_len=longest(),
        enable_prefix_caching=False,
        quantize_activations=os.environ.get("ACTIVATIONS") or None,
    )

    core: Any = llm._core
    step = core.step

    def generate(batch: list[list[int]], num_tokens: int, report: Report) -> None:
        def reported_step() -> Any:
            result = step()
            report(output.request_id for output in result.outputs for _ in output.new_token_ids)
            return result

        core.step = reported_step
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        llm.generate(batch, params, use_tqdm=False)

    measure("penstock", generate)
    llm.shutdown()


main()
