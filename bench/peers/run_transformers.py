"""transformers' `generate` on the workload, with random weights in the same shape."""

from __future__ import annotations

import sys

import torch
import transformers
from workload import measure


def main() -> None:
    config = transformers.AutoConfig.from_pretrained(sys.argv[1])
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    model.generation_config.pad_token_id = 0

    @torch.inference_mode()
    def generate(batch: list[list[int]], num_tokens: int) -> None:
        ids = torch.tensor(batch)
        mask = torch.ones_like(ids)
        model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=num_tokens, min_new_tokens=num_tokens)

    measure("transformers", generate)


main()
