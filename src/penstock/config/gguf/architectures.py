"""What llama.cpp calls a model's fields and tensors, by architecture.

`read_config` returns a GGUF file's metadata as the fields of `config.json`, so that everything else reads one kind of
configuration; `TensorNames` finds the tensors of a Hugging Face checkpoint among the file's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.config.gguf.file import GGUFFile
from penstock.config.quantization import GGUF
from penstock.utils.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor is. An expert's is one of the first dimension of a tensor that holds them all."""

    name: str
    expert: int | None = None


@dataclass(frozen=True, slots=True)
class _Family:
    """`tensors` are the names that differ from Llama's. `has_pairs` says that rows of queries and keys are stored for a
    rotation of neighbours, and `norm_offset` what was added to the weights of norms.
    """

    model_type: str
    tensors: Mapping[str, str] = field(default_factory=dict[str, str])
    has_pairs: bool = False
    norm_offset: float = 0.0
    fields: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda _: {}


def _experts(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "num_experts": fields["expert_count"],
        "num_experts_per_tok": fields["expert_used_count"],
        "moe_intermediate_size": fields["expert_feed_forward_length"],
        "norm_topk_prob": True,
    }


_LAYERS_OF_LARGEST_GEMMA3 = 62


def _gemma3(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "sliding_window": fields["attention.sliding_window"],
        "sliding_window_pattern": fields.get("attention.sliding_window_pattern", 6),
        "rope_local_base_freq": fields.get("rope.freq_base_swa", 10000.0),
        # As llama.cpp does: the largest model divides by another number than its size of a head, and no field says so.
        "query_pre_attn_scalar": (
            fields["embedding_length"] // fields["attention.head_count"]
            if fields["block_count"] == _LAYERS_OF_LARGEST_GEMMA3
            else fields["attention.key_length"]
        ),
        "hidden_activation": "gelu_pytorch_tanh",
    }


_HEAD_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
_ROUTED = {
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}
_SANDWICH = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
# llama.cpp's `general.architecture` -> the family.
FAMILIES = {
    "llama": _Family("llama", has_pairs=True),
    "qwen2": _Family("qwen2"),
    "qwen3": _Family("qwen3", _HEAD_NORMS),
    "qwen3moe": _Family("qwen3_moe", {**_HEAD_NORMS, **_ROUTED}, fields=_experts),
    "gemma3": _Family("gemma3_text", {**_HEAD_NORMS, **_SANDWICH}, norm_offset=1.0, fields=_gemma3),
}
_OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_IN_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(.+)")


def family_of(file: GGUFFile) -> _Family:
    """Raises ConfigError if the file's architecture is not served."""
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in FAMILIES:
        raise ConfigError(
            f"{file.path} has the architecture {architecture!r}, and Penstock reads GGUF files of "
            f"{', '.join(FAMILIES)}: use the safetensors checkpoint"
        )
    return FAMILIES[architecture]


class TensorNames:
    """The places of a checkpoint's tensors in a file."""

    def __init__(self, file: GGUFFile) -> None:
        self.family = family_of(file)
        self._names = {**_LAYER, **self.family.tensors}

    def find(self, name: str) -> Place | None:
        """Returns where the file would have a tensor, None if it has no name for it."""
        module, _, kind = name.rpartition(".")
        if module in _OUTER:
            return Place(f"{_OUTER[module]}.{kind}")
        in_layer = _IN_LAYER.fullmatch(module)
        if in_layer is None:
            return None
        layer, part = in_layer.groups()
        expert = _EXPERT.fullmatch(part)
        if expert is not None:
            part = f"{expert[1]}.{expert[3]}"
        if part not in self._names:
            return None
        return Place(f"blk.{layer}.{self._names[part]}.{kind}", None if expert is None else int(expert[2]))


def head_dim(file: GGUFFile) -> int:
    """Returns the size of a head of keys. Raises KeyError if the file does not tell."""
    prefix = file.metadata["general.architecture"]
    size = file.metadata.get(f"{prefix}.attention.key_length")
    if size is not None:
        return size
    return file.metadata[f"{prefix}.embedding_length"] // file.metadata[f"{prefix}.attention.head_count"]


def read_config(file: GGUFFile) -> dict[str, Any]:
    """Returns the fields of `config.json`. Raises ConfigError if the file lacks one, or is not a model's."""
    family = family_of(file)
    prefix = f"{file.metadata['general.architecture']}."
    fields = {name.removeprefix(prefix): value for name, value in file.metadata.items() if name.startswith(prefix)}
    num_files = file.metadata.get("split.count", 1)
    if num_files not in (0, 1):
        raise ConfigError(
            f"{file.path} is one of {num_files} files: join them with llama.cpp's llama-gguf-split --merge, and "
            "pass the result"
        )
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ConfigError(f"{file.path} has no token_embd.weight [vocabulary, hidden size]: it is not a whole model")
    if family.model_type == "llama" and fields.get("expert_count"):
        raise ConfigError(f"{file.path} is Mixtral, which Penstock reads from safetensors: use that checkpoint")
    num_layers = fields.get("block_count")
    if isinstance(num_layers, int) and num_layers > len(file.tensors):
        raise ConfigError(f"{file.path} has {len(file.tensors)} tensors for {prefix}block_count={num_layers} layers")
    try:
        return _common(file, family, fields, embedding.shape[0]) | family.fields(fields)
    except (TypeError, ZeroDivisionError) as error:
        raise ConfigError(f"{file.path}: the fields {prefix}* cannot be used: {error}") from None
    except KeyError as error:
        raise ConfigError(f"{file.path} lacks the field {prefix}{error.args[0].removeprefix(prefix)}") from None


def _common(file: GGUFFile, family: _Family, fields: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    num_heads = fields["attention.head_count"]
    dense = {tensor.type.name for tensor in file.tensors.values() if len(tensor.shape) > 1}
    return {
        "model_type": family.model_type,
        "architectures": [file.metadata["general.architecture"]],
        "torch_dtype": "float16" if dense <= {"F16", "F32"} and "F16" in dense else "bfloat16",
        "vocab_size": vocab_size,
        "hidden_size": fields["embedding_length"],
        "intermediate_size": fields["feed_forward_length"],
        "num_hidden_layers": fields["block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields.get("attention.head_count_kv", num_heads),
        "head_dim": head_dim(file),
        "max_position_embeddings": fields["context_length"],
        "rms_norm_eps": fields["attention.layer_norm_rms_epsilon"],
        "rope_theta": fields.get("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(file, fields),
        "attention_bias": "blk.0.attn_q.bias" in file.tensors and family.model_type != "qwen2",
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "quantization_config": {"quant_method": GGUF},
    }


def _rope_scaling(file: GGUFFile, fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """Llama 3's rule is stored as what it does: a divisor for every frequency."""
    tensor = file.tensors.get("rope_freqs.weight")
    if tensor is not None:
        if tensor.type.name != "F32" or len(tensor.shape) != 1:
            raise ConfigError(f"{file.path}: rope_freqs.weight must be F32 numbers in one dimension")
        divisors = file.rows("rope_freqs.weight", 0, 1).view("<f4")[0].tolist()
        return {
            "rope_type": "longrope",
            "short_factor": divisors,
            "long_factor": divisors,
            "original_max_position_embeddings": fields["context_length"],
            "attention_factor": 1.0,
        }
    kind = fields.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise ConfigError(f"{file.path}: rope.scaling.type is {kind!r}, and Penstock reads none, linear and yarn")
    scaling = {"rope_type": kind, "factor": fields["rope.scaling.factor"]}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = fields["rope.scaling.original_context_length"]
    return scaling
