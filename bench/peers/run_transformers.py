"""transformers' `generate` on the workload, with random weights in the same shape."""

from __future__ import annotations

import sys

import torch
import transformers
from transformers_generate import generate_with
from workload import measure


def main() -> None:
    config = transformers.AutoConfig.from_pretrained(sys.argv[1])
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    measure("transformers", generate_with(model))


main()
