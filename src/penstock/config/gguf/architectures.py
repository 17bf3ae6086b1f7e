"""A GGUF file's fields and tensors by the names of a Hugging Face checkpoint.

`read_config` returns a GGUF file's metadata as the fields of `config.json`, so that everything else reads one kind of
configuration; `TensorNames` finds the tensors of a Hugging Face checkpoint among the file's.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from penstock.config.gguf.families import FAMILIES, WITH_EXPERTS
from penstock.config.gguf.family import Family, head_size, largest
from penstock.config.gguf.file import GGUFFile, read_vector
from penstock.config.latent import yarn_amplitude
from penstock.config.quantization import GGUF
from penstock.utils.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor is. An expert's is one of the first dimension of a tensor that holds them all. With `half` the
    tensor has the rows of two, of which these are the first (0) or the second (1); with `second` that tensor has the
    second half of the rows.
    """

    name: str
    expert: int | None = None
    half: int | None = None
    second: str | None = None


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
_YARN = {"beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow", "attention_factor": "yarn_attn_factor"}
# llama.cpp's numbers for `pooling_type`.
_POOLING = {1: "mean", 2: "cls", 3: "last"}
_IN_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"((?:.*\.)?experts)\.(\d+)\.(.+)")
# Tensors that a file may have together with another in one, and which half of that they are.
_JOINED = {
    "ffn_gate_exps": ("ffn_gate_up_exps", 0),
    "ffn_up_exps": ("ffn_gate_up_exps", 1),
    "ssm_beta": ("ssm_ba", 0),
    "ssm_alpha": ("ssm_ba", 1),
}


def family_of(file: GGUFFile) -> Family:
    """Raises ConfigError if the file's architecture is not served."""
    architecture = file.metadata.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in FAMILIES:
        raise ConfigError(
            f"{file.path} has the architecture {architecture!r}, and Penstock reads GGUF files of "
            f"{', '.join(FAMILIES)}: use the safetensors checkpoint"
        )
    if architecture in WITH_EXPERTS and np.any(file.metadata.get(f"{architecture}.expert_count", 0)):
        return WITH_EXPERTS[architecture]
    return FAMILIES[architecture]


def fields_of(file: GGUFFile) -> dict[str, Any]:
    """Returns the metadata of the file's architecture, under names without its own."""
    prefix = f"{file.metadata['general.architecture']}."
    return {name.removeprefix(prefix): value for name, value in file.metadata.items() if name.startswith(prefix)}


class TensorNames:
    """The places of a checkpoint's tensors in a file."""

    def __init__(self, file: GGUFFile) -> None:
        self.family = family_of(file)
        self._names = {**_LAYER, **self.family.tensors}
        self._outer = {**_OUTER, **self.family.outer}
        self._stored = file.tensors.keys()

    def find(self, name: str) -> Place | None:
        """Returns where the file would have a tensor, None if it has no name for it."""
        module, _, kind = name.rpartition(".")
        if module in self._outer:
            return Place(f"{self._outer[module]}.{kind}")
        in_layer = _IN_LAYER.fullmatch(name)
        if in_layer is None:
            return None
        layer, part = in_layer.groups()
        expert = _EXPERT.fullmatch(part)
        if expert is not None:
            part = f"{expert[1]}.{expert[3]}"
        if part in self._names:
            return Place(f"blk.{layer}.{self._names[part]}")
        module = part.removesuffix(f".{kind}")
        number = None if expert is None else int(expert[2])
        if module in self.family.halves:
            first, second = (f"blk.{layer}.{half}.{kind}" for half in self.family.halves[module])
            return Place(first, number, second=second)
        if module not in self._names:
            return None
        place = f"blk.{layer}.{self._names[module]}.{kind}"
        if place not in self._stored and self._names[module] in _JOINED:
            joined, half = _JOINED[self._names[module]]
            joined = f"blk.{layer}.{joined}.{kind}"
            if joined in self._stored:
                return Place(joined, number, half)
        return Place(place, number)


def read_config(file: GGUFFile) -> dict[str, Any]:
    """Returns the fields of `config.json`. Raises ConfigError if the file lacks one, or is not a model's."""
    family, fields = family_of(file), fields_of(file)
    prefix = f"{file.metadata['general.architecture']}."
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ConfigError(f"{file.path} has no token_embd.weight [vocabulary, hidden size]: it is not a whole model")
    if "cls.output.weight" in file.tensors:
        raise ConfigError(f"{file.path} is a reranker, whose scores are not read: use the safetensors checkpoint")
    num_layers = fields.get("block_count")
    if isinstance(num_layers, int) and num_layers > len(file.tensors):
        raise ConfigError(f"{file.path} has {len(file.tensors)} tensors for {prefix}block_count={num_layers} layers")
    if family.model_type == "deepseek_v3" and "expert_gating_func" not in fields:
        # Older files do not say it; only a router of sigmoids has a bias for the choice.
        fields["expert_gating_func"] = 1 + any(name.endswith("exp_probs_b.bias") for name in file.tensors)
    try:
        common = _common(file, family, fields, embedding.shape[0])
        return common | family.fields(fields) | family.tensor_fields(file, fields)
    except (TypeError, ValueError, AttributeError, IndexError, ArithmeticError) as error:
        raise ConfigError(f"{file.path}: the fields {prefix}* cannot be used: {error}") from None
    except KeyError as error:
        raise ConfigError(f"{file.path} lacks the field {prefix}{error.args[0]}") from None


def _common(file: GGUFFile, family: Family, fields: Mapping[str, Any], vocab_size: int) -> dict[str, Any]:
    num_heads = fields["attention.head_count"]
    dense = {tensor.type.name for tensor in file.tensors.values() if len(tensor.shape) > 1}
    # A model without dense layers may have this alone.
    inner = "expert_feed_forward_length"
    inner = "feed_forward_length" if "feed_forward_length" in fields or inner not in fields else inner
    norm = "layer_norm" if family.model_type == "cohere2" else "layer_norm_rms"
    has_bias = any(name.endswith((".attn_q.bias", ".attn_qkv.bias", ".attn_kv_a_mqa.bias")) for name in file.tensors)
    return {
        "model_type": family.model_type,
        "architectures": [file.metadata["general.architecture"]],
        "torch_dtype": "float16" if dense <= {"F16", "F32"} and "F16" in dense else "bfloat16",
        "vocab_size": vocab_size,
        "hidden_size": fields["embedding_length"],
        "intermediate_size": largest(fields[inner]),
        "num_hidden_layers": fields["block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": largest(fields.get("attention.head_count_kv", num_heads)),
        "head_dim": head_size(fields),
        "max_position_embeddings": fields["context_length"],
        "rms_norm_eps": fields[f"attention.{norm}_epsilon"],
        "rope_theta": fields.get("rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(file, family, fields),
        "is_causal": fields.get("attention.causal", True),
        "gguf_pooling": _POOLING.get(fields.get("pooling_type", 0)),
        "attention_bias": has_bias and family.model_type != "qwen2",
        "mlp_bias": any(name.endswith(".ffn_gate.bias") for name in file.tensors),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "quantization_config": {"quant_method": GGUF, "formats": _formats(file)},
    }


_SMALLEST_SHARE = 0.01


def _formats(file: GGUFFile) -> list[str]:
    """Returns the types of the matrices, that of most bytes first, without those of a few."""
    counts = Counter[str]()
    for tensor in file.tensors.values():
        if len(tensor.shape) > 1:
            counts[tensor.type.name.lower()] += tensor.num_bytes
    return [name for name, count in counts.most_common() if count > counts.total() * _SMALLEST_SHARE]


def _rope_scaling(file: GGUFFile, family: Family, fields: Mapping[str, Any]) -> dict[str, Any] | None:
    """Llama 3's rule is stored as what it does: a divisor for every frequency."""
    if "rope_freqs.weight" in file.tensors:
        divisors = read_vector(file, "rope_freqs.weight")
        return {
            "rope_type": "longrope",
            "short_factor": divisors,
            "long_factor": divisors,
            "original_max_position_embeddings": fields["context_length"],
            "attention_factor": 1.0,
        }
    if "rope_factors_long.weight" in file.tensors:
        return {
            "rope_type": "longrope",
            "short_factor": read_vector(file, "rope_factors_short.weight"),
            "long_factor": read_vector(file, "rope_factors_long.weight"),
            "original_max_position_embeddings": fields["rope.scaling.original_context_length"],
            "attention_factor": fields.get("rope.scaling.attn_factor"),
        }
    kind = fields.get("rope.scaling.type", "linear")
    if kind not in ("none", "linear", "yarn"):
        raise ConfigError(f"{file.path}: rope.scaling.type is {kind!r}, and Penstock reads none, linear and yarn")
    # Old files have `rope.scale_linear` instead, and no type.
    factor = fields.get("rope.scaling.factor", fields.get("rope.scale_linear"))
    if kind == "none" or not factor:
        return None
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        scaling["original_max_position_embeddings"] = fields["rope.scaling.original_context_length"]
        for name, stored in _YARN.items():
            if f"rope.scaling.{stored}" in fields:
                scaling[name] = fields[f"rope.scaling.{stored}"]
        if abs(scaling.get("attention_factor", 0.0) * yarn_amplitude(scaling["factor"]) - 1.0) < 1e-3:
            scaling["attention_factor"] = 1.0  # the file has `attn_factor`, which multiplies YaRN's own amplitude
    return scaling | family.scaling(fields)
