"""What a family's GGUF files call its tensors and fields, and what llama.cpp's converter does with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.config.gguf.file import GGUFFile

Fields = Mapping[str, Any]
"""An architecture's metadata, without the architecture's name before it."""


@dataclass(frozen=True, slots=True)
class Family:
    """`tensors` are the names that differ from Llama's; one with a point, and one of a tensor without a kind, is the
    tensor's whole name. `outer` are those outside layers. Each of `halves` is in two tensors, which have one half of
    its rows each. `has_pairs` says that rows of queries and keys were reordered for a rotation of neighbours,
    `has_tiled_values` that the value heads of a gated delta net were: the first one of each key head, then the second.
    `norm_offset` was added to the weights of norms, but for `plain_norms`. `fields` and `scaling` return fields of
    `config.json`, and of its `rope_scaling` if there is one; `tensor_fields` those that the tensors tell.
    """

    model_type: str
    tensors: Mapping[str, str] = field(default_factory=dict[str, str])
    outer: Mapping[str, str] = field(default_factory=dict[str, str])
    halves: Mapping[str, tuple[str, str]] = field(default_factory=dict[str, tuple[str, str]])
    has_pairs: bool = False
    has_tiled_values: bool = False
    norm_offset: float = 0.0
    plain_norms: tuple[str, ...] = ()
    fields: Callable[[Fields], dict[str, Any]] = lambda _: {}
    scaling: Callable[[Fields], dict[str, Any]] = lambda _: {}
    tensor_fields: Callable[[GGUFFile, Fields], dict[str, Any]] = lambda _, __: {}


def head_size(fields: Fields) -> int:
    """Returns the size of a head of keys. Raises KeyError if the fields do not tell."""
    size = fields.get("attention.key_length")
    return fields["embedding_length"] // fields["attention.head_count"] if size is None else size


def by_layer(value: Any, num_layers: int) -> list[Any]:
    """Returns a field's values for all layers: it is a list of them, or one for all."""
    values = value.tolist() if hasattr(value, "tolist") else [value] * num_layers
    if len(values) != num_layers:
        raise ValueError(f"a field has {len(values)} values for {num_layers} layers")
    return values


def largest(value: Any) -> Any:
    """Returns the largest of a field's values: layers without such a part have 0 of it."""
    return max(value.tolist()) if hasattr(value, "tolist") else value


def rotated_part(fields: Fields) -> dict[str, Any]:
    size = head_size(fields)
    return {"partial_rotary_factor": fields.get("rope.dimension_count", size) / size}


def qwen3_experts(fields: Fields) -> dict[str, Any]:
    return {
        "num_experts": fields["expert_count"],
        "num_experts_per_tok": fields["expert_used_count"],
        "moe_intermediate_size": fields["expert_feed_forward_length"],
        "norm_topk_prob": True,
    }


HEAD_NORMS = {"self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
EXPERTS = {
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}
ROUTED = {**EXPERTS, "mlp.gate": "ffn_gate_inp"}
