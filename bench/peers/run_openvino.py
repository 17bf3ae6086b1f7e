"""OpenVINO (through optimum-intel) on the workload, with random weights in the same shape.

The model is exported once into the folder of the config.json. `q8_0` and `q4_0` stand for OpenVINO's int8 (by row) and
int4 (symmetric, groups of 128; the embedding and the head are int8).
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig
from transformers import AutoConfig, AutoModelForCausalLM
from transformers_generate import generate_with
from workload import measure

WEIGHTS = {
    "bf16": None,
    "q8_0": OVWeightQuantizationConfig(bits=8),
    "q4_0": OVWeightQuantizationConfig(bits=4, sym=True, group_size=128, ratio=1.0),
}


def exported(folder: Path, weights: str) -> Path:
    """Returns a folder with the model of random weights in OpenVINO's format."""
    made, source = folder / f"openvino-{weights}", folder / "transformers"
    if not made.exists():
        torch.manual_seed(0)
        config = AutoConfig.from_pretrained(folder)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(source)
        options = {"export": True, "compile": False, "quantization_config": WEIGHTS[weights]}
        if weights == "bf16":
            options["load_in_8bit"] = False
        OVModelForCausalLM.from_pretrained(source, **options).save_pretrained(made)
    return made


def main() -> None:
    folder, weights = sys.argv[1:3]
    model = OVModelForCausalLM.from_pretrained(
        exported(Path(folder), weights), ov_config={"PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": "2"}
    )
    measure("openvino", generate_with(model))


main()
