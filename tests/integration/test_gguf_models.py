"""Models in GGUF files: every family has the tokens of the checkpoint with the values that the file stands for."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from penstock.config.engine import EngineArgs, resolve
from penstock.config.model import load_model_config
from penstock.config.model_path import resolve_model_path
from penstock.config.rope import RopeConfig
from penstock.engine.rank_identity import digest_weights
from penstock.layers.rotary import rotary_table
from penstock.models.sources.opening import loaded_bytes
from penstock.utils.errors import ConfigError
from penstock.worker.load import load_model
from penstock.worker.parts import make_parts
from tests.gguf_files import write_gguf
from tests.integration.checkpoints import COMMON, CONV, DELTA, GRANITE4, LLAMA3_ROPE, NEMOTRON, save_random
from tests.integration.test_disaggregation import transfer_config
from tests.integration.test_identity_families import check_twins
from tests.unit.rank_fakes import make_rank

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
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 64,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
}
SHARED = {"first_k_dense_replace": 1, "moe_intermediate_size": 64, "num_experts_per_tok": 3, "n_shared_experts": 2}
WINDOWS = {"num_hidden_layers": 4, "sliding_window": 26}
LAST_FULL = ["sliding_attention"] * 3 + ["full_attention"]
# Which llama.cpp would not know.
SOME_FULL = ["full_attention", "sliding_attention", "full_attention", "sliding_attention"]
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0 + i / 20 for i in range(6)],
    "long_factor": [1.5 + i / 2 for i in range(6)],
    "original_max_position_embeddings": 64,
}
MULTIPLIERS = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.1,
    "logits_scaling": 6.7,
}
DELTA_LAYERS = {**DELTA, "num_hidden_layers": 3}
CONV_LAYERS = {**CONV, "num_hidden_layers": 3}
MAMBA_LAYERS = {**GRANITE4, "num_hidden_layers": 3, "head_dim": None, "shared_intermediate_size": 160}
GEMMA4 = {
    "num_hidden_layers": 4,
    "global_head_dim": 64,
    "sliding_window": 26,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "tie_word_embeddings": True,
}
# Name -> model type, what differs from SIZES, the type of its matrices, and engine arguments.
MODELS: dict[str, tuple[str, dict[str, Any], KINDS, dict[str, Any]]] = {
    "llama": ("llama", {}, KINDS.Q4_0, {"tensor_parallel_size": 3}),
    "llama, tied": ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}, KINDS.Q8_0, {}),
    "mixtral": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}, KINDS.Q5_1, {"tensor_parallel_size": 2}),
    "qwen2": ("qwen2", {}, KINDS.Q5_0, {"tensor_parallel_size": 2}),
    "qwen3": ("qwen3", {}, KINDS.Q4_1, {}),
    "qwen3, K types": (
        "qwen3",
        {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8},
        KINDS.Q4_K,
        {"tensor_parallel_size": 2},
    ),
    "qwen3moe": ("qwen3_moe", EXPERTS, KINDS.Q8_0, {"tensor_parallel_size": 2, "enable_expert_parallel": True}),
    "gemma2": (
        "gemma2",
        {**WINDOWS, "query_pre_attn_scalar": 32, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 4.0},
        KINDS.Q8_0,
        {"tensor_parallel_size": 2},
    ),
    "gemma3": ("gemma3_text", {"sliding_window": 26, "query_pre_attn_scalar": 32}, KINDS.Q4_0, {}),
    "phi3": ("phi3", {"head_dim": None, "sliding_window": 23}, KINDS.Q4_0, {}),
    "phi3, long contexts": (
        "phi3",
        {"head_dim": None, "rope_parameters": LONGROPE, "tie_word_embeddings": True},
        KINDS.Q8_0,
        {"tensor_parallel_size": 2},
    ),
    "granite": ("granite", {**MULTIPLIERS, "head_dim": None, "tie_word_embeddings": True}, KINDS.Q4_0, {}),
    "granite, biases": ("granite", {**MULTIPLIERS, "head_dim": None, "attention_bias": True}, KINDS.Q8_0, {}),
    "smollm3": ("smollm3", {"num_hidden_layers": 5, "tie_word_embeddings": True}, KINDS.Q8_0, {}),
    "olmo2": ("olmo2", {"num_key_value_heads": 4}, KINDS.Q4_0, {"tensor_parallel_size": 2}),
    "olmo3": ("olmo3", {**WINDOWS, "layer_types": SOME_FULL, "rope_parameters": YARN}, KINDS.Q8_0, {}),
    "exaone4": ("exaone4", {**WINDOWS, "layer_types": SOME_FULL}, KINDS.Q8_0, {}),
    "exaone4, full": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}, KINDS.Q4_0, {}),
    "cohere2": (
        "cohere2",
        {**WINDOWS, "logit_scale": 0.3, "layer_types": LAST_FULL, "tie_word_embeddings": True},
        KINDS.Q8_0,
        {},
    ),
    "mistral3": (
        "ministral3",
        {"rope_parameters": {**YARN, "llama_4_scaling_beta": 0.4, "mscale": 1.0, "mscale_all_dim": 1.0}},
        KINDS.Q8_0,
        {},
    ),
    "glm4": (
        "glm4",
        {"attention_bias": True, "rope_parameters": {"partial_rotary_factor": 0.25}},
        KINDS.Q5_0,
        {"tensor_parallel_size": 2},
    ),
    "gpt-oss": (
        "gpt_oss",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "sliding_window": 26,
            "rope_parameters": {**YARN, "truncate": False, "beta_fast": 4.0},
        },
        KINDS.Q8_0,
        {"tensor_parallel_size": 2},
    ),
    "deepseek-v2": (
        "deepseek_v2",
        {
            **LATENT,
            **SHARED,
            "q_lora_rank": None,
            "topk_method": "group_limited_greedy",
            "n_routed_experts": 8,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.8,
            "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
        KINDS.Q4_0,
        {},
    ),
    "deepseek-v3": (
        "deepseek_v3",
        {
            **LATENT,
            **SHARED,
            "n_routed_experts": 12,
            "n_group": 3,
            "topk_group": 2,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
        },
        KINDS.Q8_0,
        {"tensor_parallel_size": 3},
    ),
    "glm-flash": (
        "glm4_moe_lite",
        {**LATENT, **SHARED, "n_routed_experts": 10, "n_group": 1, "topk_group": 1, "v_head_dim": 64},
        KINDS.Q8_0,
        {},
    ),
    "gemma4": (
        "gemma4_text",
        {**GEMMA4, "hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1},
        KINDS.Q4_0,
        {},
    ),
    "gemma4, shared": (
        "gemma4_text",
        {
            **GEMMA4,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 32,
            "vocab_size_per_layer_input": COMMON["vocab_size"],
            "final_logit_softcapping": 4.0,
        },
        KINDS.Q8_0,
        {},
    ),
    "gemma4, experts": (
        "gemma4_text",
        {
            **GEMMA4,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 64,
        },
        KINDS.Q8_0,
        {"tensor_parallel_size": 2},
    ),
    "qwen35": ("qwen3_5_text", DELTA_LAYERS, KINDS.Q8_0, {"tensor_parallel_size": 2}),
    "qwen35, K types": (
        "qwen3_5_text",
        {
            **DELTA_LAYERS,
            "hidden_size": 256,
            "intermediate_size": 256,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 8,
            "linear_value_head_dim": 64,
            "num_attention_heads": 8,
        },
        KINDS.Q4_K,
        {},
    ),
    "qwen35moe": (
        "qwen3_5_moe_text",
        {**DELTA_LAYERS, **EXPERTS, "shared_expert_intermediate_size": 96},
        KINDS.Q4_0,
        {},
    ),
    "qwen3next": (
        "qwen3_next",
        {**DELTA_LAYERS, **EXPERTS, "shared_expert_intermediate_size": 96, "mlp_only_layers": []},
        KINDS.Q8_0,
        {},
    ),
    "lfm2": ("lfm2", {**CONV_LAYERS, "block_multiple_of": 32, "tie_word_embeddings": True}, KINDS.Q4_0, {}),
    "lfm2moe": (
        "lfm2_moe",
        {**CONV_LAYERS, **EXPERTS, "num_dense_layers": 1},
        KINDS.Q8_0,
        {},
    ),
    "granitehybrid": (
        "granitemoehybrid",
        MAMBA_LAYERS,
        KINDS.Q8_0,
        {},
    ),
    "granitehybrid, experts": (
        "granitemoehybrid",
        {
            **MAMBA_LAYERS,
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "intermediate_size": 96,
        },
        KINDS.Q4_0,
        {"tensor_parallel_size": 2},
    ),
    "nemotron_h": (
        "nemotron_h",
        {**NEMOTRON, "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]},
        KINDS.Q8_0,
        {},
    ),
    "nemotron_h_moe": (
        "nemotron_h",
        {
            **NEMOTRON,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
            "moe_intermediate_size": 64,
            "moe_shared_expert_intermediate_size": 96,
            "n_group": 1,
        },
        KINDS.Q4_0,
        {"tensor_parallel_size": 2},
    ),
    "youtu": ("youtu", {**LATENT, "tie_word_embeddings": True, "attention_bias": True}, KINDS.Q4_0, {}),
}
# Matrices of another kind, by the end of their names.
OTHERS: dict[str, dict[str, KINDS]] = {
    "qwen2": {"v_proj.weight": KINDS.Q8_0, "down_proj.weight": KINDS.F16},
    "qwen3, K types": {"v_proj.weight": KINDS.Q6_K, "o_proj.weight": KINDS.Q5_K, "down_proj.weight": KINDS.Q6_K},
    "gpt-oss": {f"experts.{part}_proj.weight": KINDS.MXFP4 for part in ("gate", "up", "down")},
    "deepseek-v2": {"k_b_proj.weight": KINDS.BF16},
}


def make_model(model_type: str, changes: dict[str, Any], folder: Path) -> Path:
    fields = {name: value for name, value in {**SIZES, **changes}.items() if value is not None or name != "head_dim"}
    config = transformers.AutoConfig.for_model(model_type, **fields)
    return save_random(config, folder / "model", transformers.AutoModelForCausalLM, torch.bfloat16)


def make_twins(name: str, folder: Path, file: Path, num_parts: int = 1) -> Path:
    """Writes a model's file and returns a checkpoint with the values that it stands for."""
    model_type, changes, kind, _ = MODELS[name]
    path = make_model(model_type, changes, folder)
    values = write_gguf(path, file, kind, OTHERS.get(name), num_parts=num_parts)
    twin = folder / "twin"
    shutil.copytree(path, twin)
    save_file({name: value.contiguous() for name, value in values.items()}, twin / "model.safetensors")
    return twin


# Those with what others do not have: rows or inputs in another order, divided tensors, experts in one tensor, norms
# plus one, vectors in several dimensions.
QUICK = (
    "llama",
    "qwen2",
    "qwen3, K types",
    "gemma2",
    "phi3, long contexts",
    "granite, biases",
    "gpt-oss",
    "deepseek-v3",
    "gemma4, shared",
    "qwen35, K types",
    "nemotron_h",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in MODELS]
)
def test_a_file_has_the_tokens_of_its_values(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "model.gguf"
    check_twins(file, make_twins(name, tmp_path, file), MODELS[name][3])


def weights_digest(path: Path) -> bytes:
    """Returns what names a model's weights in the fingerprint of KV."""
    options: dict[str, Any] = {"skip_tokenizer_init": True, "kv_transfer_config": transfer_config("kv_producer")}
    config = resolve(EngineArgs(model=str(path), **options)).on_device("cpu")
    return digest_weights([make_rank((0, 0), load_model(config, make_parts(torch.device("cpu"))).read)])


@pytest.mark.parametrize("name", ["gemma4", "gemma2", "qwen2", "qwen3moe", "deepseek-v2"])
def test_values_on_the_grid_and_the_file_of_them_have_one_hash(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Google publishes what it has trained for Q4_0: as such a file, and in bfloat16. llama.cpp stores vectors in
    32 bits, and experts in one tensor.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file, again = tmp_path / "model.gguf", tmp_path / "again.gguf"
    twin = make_twins(name, tmp_path, file)
    on_grid = load_file(twin / "model.safetensors")
    values = write_gguf(twin, again, MODELS[name][2], OTHERS.get(name))
    assert values.keys() == on_grid.keys()
    assert all(torch.equal(values[each], on_grid[each]) for each in on_grid)
    assert weights_digest(twin) == weights_digest(file) == weights_digest(again)
    assert weights_digest(tmp_path / "model") != weights_digest(twin)
    if name == "gemma4":
        check_twins(again, twin, MODELS[name][3])


def test_a_model_in_several_files_is_opened_by_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    files = [tmp_path / f"model-{number:05}-of-00003.gguf" for number in (1, 2, 3)]
    twin = make_twins("qwen3", tmp_path, files[0], num_parts=3)
    # As in the cache of a hub: the files have names, and what they lead to has others.
    (tmp_path / "blobs").mkdir()
    for number, each in enumerate(files):
        each.rename(tmp_path / "blobs" / f"{number}")
        each.symlink_to(tmp_path / "blobs" / f"{number}")
    check_twins(files[1], twin, {})
    assert {resolve_model_path(str(each)) for each in files} == {resolve_model_path(str(files[0]))}
    files[2].unlink()
    with pytest.raises(ConfigError, match=r"model-00003-of-00003\.gguf is missing: .* one of 3 files"):
        resolve_model_path(str(files[0]))


@pytest.mark.parametrize("name", ["llama, tied", "gemma2", "gpt-oss", "qwen3"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_memory_that_is_asked_for_is_what_the_weights_take(
    name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that stay quantized count as such, and others in the model's type."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = tmp_path / "model.gguf"
    make_twins(name, tmp_path, file)
    config = resolve(EngineArgs(model=str(file), dtype=dtype, skip_tokenizer_init=True)).on_device("cpu")
    parts, torch_dtype = make_parts(torch.device("cpu")), getattr(torch, dtype)
    expected = loaded_bytes(config.model, torch_dtype, dtype == "bfloat16")
    found = load_model(config, parts).size
    # Norms, biases and routers are a few.
    assert abs(found.num_bytes - expected) < expected // 50
    bits = 8 * found.num_bytes / found.num_weights
    assert bits == 32 if dtype == "float32" else 5 <= bits < 16
    monkeypatch.setattr(type(parts.memory), "available", lambda _: expected - 1)
    with pytest.raises(ConfigError, match=r"the weights of .* take"):
        load_model(config, parts)


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
