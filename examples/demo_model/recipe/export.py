"""The trained model as an ordinary Hugging Face folder, and back."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from recipe.model import DemoModel, ModelConfig
from recipe.template import END_OF_TEXT, TURN_END, TURN_START, template_text
from recipe.tokenizer import END_OF_TEXT_ID, TURN_END_ID

LARGEST_BYTES = 16_000_000


def hugging_face_config(config: ModelConfig) -> dict[str, Any]:
    """Returns the contents of config.json."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.context,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "num_nextn_predict_layers": 1,
        "bos_token_id": None,
        "eos_token_id": TURN_END_ID,
        "pad_token_id": END_OF_TEXT_ID,
        "torch_dtype": "bfloat16",
        "use_cache": True,
    }


def _tokenizer_config(config: ModelConfig) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [TURN_START, TURN_END],
        "model_max_length": config.context,
        "clean_up_tokenization_spaces": False,
        "chat_template": template_text(),
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def export(model: DemoModel, tokenizer_path: Path, folder: Path) -> int:
    """Writes the model in bfloat16 with its configuration and tokenizer.

    Returns:
        The folder's size in bytes.

    Raises:
        ValueError: the files together are larger than the built-in model may be.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tensors = {n: t.detach().cpu().to(torch.bfloat16).contiguous() for n, t in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    # The library makes the file readable for its owner only; a model is readable for all users of its folder.
    (folder / "model.safetensors").chmod(0o644)
    _write_json(folder / "config.json", hugging_face_config(model.config))
    eos = [TURN_END_ID, END_OF_TEXT_ID]
    _write_json(
        folder / "generation_config.json", {"eos_token_id": eos, "pad_token_id": END_OF_TEXT_ID, "do_sample": False}
    )
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(model.config))
    if tokenizer_path != folder / "tokenizer.json":
        shutil.copyfile(tokenizer_path, folder / "tokenizer.json")
    size = sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
    if size > LARGEST_BYTES:
        raise ValueError(f"{folder} has {size} bytes; the built-in model may have {LARGEST_BYTES}")
    return size


def load_exported(folder: Path) -> DemoModel:
    """Reads a folder that `export` wrote, as float32 on the CPU.

    Raises:
        RuntimeError: the folder's tensors are not this architecture's.
    """
    from safetensors.torch import load_file

    told = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config = ModelConfig(
        vocab_size=told["vocab_size"],
        hidden_size=told["hidden_size"],
        intermediate_size=told["intermediate_size"],
        num_layers=told["num_hidden_layers"],
        num_heads=told["num_attention_heads"],
        num_kv_heads=told["num_key_value_heads"],
        head_dim=told["head_dim"],
        context=told["max_position_embeddings"],
        rope_theta=told["rope_theta"],
        rms_norm_eps=told["rms_norm_eps"],
    )
    model = DemoModel(config)
    model.load_state_dict({n: t.float() for n, t in load_file(folder / "model.safetensors").items()})
    return model
