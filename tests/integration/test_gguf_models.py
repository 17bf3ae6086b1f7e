"""Models in GGUF files: every family has the tokens of the checkpoint with the values that the file stands for."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from safetensors.torch import save_file

from penstock.config.model import load_model_config
from penstock.config.model_path import resolve_model_path
from penstock.config.rope import RopeConfig
from penstock.layers.rotary import rotary_table
from tests.gguf_files import write_gguf
from tests.integration.checkpoints import COMMON, LLAMA3_ROPE
from tests.integration.test_identity_families import check_twins

KINDS = gguf.GGMLQuantizationType
SIZES: dict[str, Any] = {
    **COMMON,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 2,
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
# Name -> model type, what differs from SIZES, the type of its matrices, and engine arguments.
MODELS: dict[str, tuple[str, dict[str, Any], KINDS, dict[str, Any]]] = {
    "llama": ("llama", {}, KINDS.Q4_0, {"tensor_parallel_size": 3}),
    "llama, tied": ("llama", {"tie_word_embeddings": True, "attention_bias": True}, KINDS.Q8_0, {}),
    "qwen2": ("qwen2", {}, KINDS.Q5_0, {"tensor_parallel_size": 2}),
    "qwen3": ("qwen3", {}, KINDS.Q4_1, {}),
    "qwen3moe": ("qwen3_moe", EXPERTS, KINDS.Q8_0, {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
    "gemma3": ("gemma3_text", {"sliding_window": 26, "query_pre_attn_scalar": 32}, KINDS.Q4_0, {}),
}


def make_model(model_type: str, changes: dict[str, Any], folder: Path) -> Path:
    path = folder / "model"
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **{**SIZES, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(path)
    return path


@pytest.mark.parametrize("name", MODELS)
def test_a_file_has_the_tokens_of_its_values(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model_type, changes, kind, arguments = MODELS[name]
    path = make_model(model_type, changes, tmp_path)
    file = tmp_path / "model.gguf"
    others = {"v_proj.weight": KINDS.Q8_0, "down_proj.weight": KINDS.F16} if name == "qwen2" else {}
    values = write_gguf(path, file, kind, others)
    twin = tmp_path / "twin"
    shutil.copytree(path, twin)
    save_file({name: value.contiguous() for name, value in values.items()}, twin / "model.safetensors")
    check_twins(file, twin, arguments)


def test_the_frequencies_of_llama_3_are_those_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """llama.cpp stores what the rule does, not its parameters."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = make_model("llama", {"rope_parameters": LLAMA3_ROPE}, tmp_path)
    config = transformers.AutoConfig.from_pretrained(path)
    inverse, _ = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    plain = LLAMA3_ROPE["rope_theta"] ** -(torch.arange(0, 32, 2) / 32)
    write_gguf(path, tmp_path / "model.gguf", KINDS.F32, divisors=plain / inverse)
    found, expected = (
        rotary_table(load_model_config(folder).for_length(128).rope, 32, 128)
        for folder in (resolve_model_path(str(tmp_path / "model.gguf")), path)
    )
    assert torch.allclose(found, expected, atol=1e-4)
    assert not torch.allclose(found, rotary_table(RopeConfig(5e5, "default", {}), 32, 128), atol=1e-2)
