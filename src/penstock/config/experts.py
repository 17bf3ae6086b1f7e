"""The fields of a mixture of experts, read from `config.json`.

A sparse layer's router chooses `top_k` of `num_experts` experts for every token, each an MLP. Only this module
knows which model types have experts, and how their fields are named.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from penstock.config.families import read_activation
from penstock.config.fields import read_count, read_number
from penstock.config.nemotron import EXPERTS
from penstock.utils.errors import ConfigError

SOFTMAX, SIGMOID, TOP_K_SOFTMAX = "softmax", "sigmoid", "top_k_softmax"
BEST, TWO_BEST = "best", "two_best"
SILU, CLAMPED = "silu", "clamped"
_TWO = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """The router's rule is `layers.router.route`; `kernels.experts` has the activations' formulas.

    `scores` is how logits become scores: SOFTMAX over all experts, SIGMOID, or TOP_K_SOFTMAX, which chooses by logits
    and takes the softmax of those chosen. With more than one of `num_groups` groups of experts, only the `top_groups`
    best are chosen from; a group's score is its BEST expert's or the sum of its TWO_BEST. `renormalizes` divides the
    weights by their sum, and all are multiplied by `scaling`.
    """

    num_experts: int
    top_k: int
    intermediate_size: int
    sparse_layers: tuple[bool, ...]
    scores: str = SOFTMAX
    renormalizes: bool = True
    num_groups: int = 1
    top_groups: int = 1
    group_score: str = BEST
    scaling: float = 1.0
    least_sum: float = 1e-20  # added to a sum of sigmoids by which weights are divided: all of them may be zero
    has_correction_bias: bool = False  # added to the scores for the choice alone
    has_router_bias: bool = False
    shared_intermediate_size: int = 0  # of the MLP that every token passes through; 0: there is none
    has_shared_gate: bool = False  # a sigmoid, one number per token, multiplies the shared MLP's result
    activation: str = SILU
    has_biases: bool = False
    has_expert_scales: bool = False  # an expert's weights are multiplied by a number of its own, after all else

    def is_sparse(self, layer: int) -> bool:
        """Returns whether the layer has experts; layers after the model's own, of draft modules, have."""
        return layer >= len(self.sparse_layers) or self.sparse_layers[layer]


def read_experts(raw: Mapping[str, Any]) -> ExpertsConfig | None:
    """Reads the contents of a `config.json`; None if it describes a model without experts.

    Raises ConfigError for an unknown router and for impossible numbers, KeyError if a field is missing.
    """
    read = _READERS.get(raw.get("model_type", ""))
    if read is None:
        return None
    config = read(raw)
    if config is not None:
        _check(config)
        if config.activation == SILU != read_activation(raw):
            raise ConfigError(f"the activation of a {raw['model_type']} with experts must be {SILU}")
    return config


def _read_qwen3(raw: Mapping[str, Any]) -> ExpertsConfig:
    step, num_layers = read_count(raw, "decoder_sparse_step", 1), read_count(raw, "num_hidden_layers")
    dense: list[int] = raw.get("mlp_only_layers") or []
    return ExpertsConfig(
        num_experts=_num_experts(raw),
        top_k=read_count(raw, "num_experts_per_tok"),
        intermediate_size=read_count(raw, "moe_intermediate_size"),
        sparse_layers=tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers)),
        renormalizes=bool(raw.get("norm_topk_prob", False)),
        shared_intermediate_size=read_count(raw, "shared_expert_intermediate_size", 0, least=0),
        has_shared_gate=bool(raw.get("shared_expert_intermediate_size")),
    )


def _read_mixtral(raw: Mapping[str, Any]) -> ExpertsConfig:
    return ExpertsConfig(
        num_experts=_num_experts(raw),
        top_k=read_count(raw, "num_experts_per_tok", 2),
        intermediate_size=read_count(raw, "intermediate_size"),
        sparse_layers=(True,) * read_count(raw, "num_hidden_layers"),
    )


def _read_granite(raw: Mapping[str, Any]) -> ExpertsConfig | None:
    if raw["num_local_experts"] == 0:
        return None
    shared = read_count(raw, "shared_intermediate_size")
    return replace(_read_mixtral(raw), scores=TOP_K_SOFTMAX, renormalizes=False, shared_intermediate_size=shared)


def _read_lfm2(raw: Mapping[str, Any]) -> ExpertsConfig:
    num_dense = read_count(raw, "num_dense_layers", least=0)
    return ExpertsConfig(
        num_experts=_num_experts(raw),
        top_k=read_count(raw, "num_experts_per_tok"),
        intermediate_size=read_count(raw, "moe_intermediate_size"),
        sparse_layers=tuple(layer >= num_dense for layer in range(read_count(raw, "num_hidden_layers"))),
        scores=SIGMOID,
        renormalizes=bool(raw.get("norm_topk_prob", True)),
        scaling=read_number(raw, "routed_scaling_factor", 1.0),
        least_sum=1e-6,
        has_correction_bias=bool(raw.get("use_expert_bias", True)),
    )


def _read_gpt_oss(raw: Mapping[str, Any]) -> ExpertsConfig:
    for name, known in (("swiglu_alpha", 1.702), ("swiglu_limit", 7.0)):
        if raw.get(name, known) != known:
            raise ConfigError(f"{name} must be {known}, got {raw[name]!r}")
    return replace(
        _read_mixtral(raw),
        top_k=read_count(raw, "num_experts_per_tok", 4),
        scores=TOP_K_SOFTMAX,
        renormalizes=False,
        has_router_bias=True,
        activation=CLAMPED,
        has_biases=True,
    )


def _read_gemma4(raw: Mapping[str, Any]) -> ExpertsConfig | None:
    if not raw.get("enable_moe_block"):
        return None
    return ExpertsConfig(
        num_experts=_num_experts(raw),
        top_k=read_count(raw, "top_k_experts"),
        intermediate_size=read_count(raw, "moe_intermediate_size"),
        sparse_layers=(True,) * read_count(raw, "num_hidden_layers"),
        activation=read_activation(raw),
        has_expert_scales=True,
    )


def _read_deepseek(raw: Mapping[str, Any]) -> ExpertsConfig:
    """Reads DeepSeek-V2's, V3's and GLM's fields. Only V2 has a choice of methods; the later ones have V3's."""
    is_v2 = raw["model_type"] == "deepseek_v2"
    method = _choice(raw, "topk_method", ("greedy", "group_limited_greedy") if is_v2 else ("noaux_tc",))
    _choice(raw, "scoring_func", (SOFTMAX,) if is_v2 else (SIGMOID,))
    if is_v2 and raw.get("norm_topk_prob"):
        raise ConfigError("norm_topk_prob must be false for deepseek_v2, got True")
    has_groups = method != "greedy"
    intermediate = read_count(raw, "moe_intermediate_size")
    return ExpertsConfig(
        num_experts=_num_experts(raw),
        top_k=read_count(raw, "num_experts_per_tok"),
        intermediate_size=intermediate,
        sparse_layers=_deepseek_layers(raw),
        scores=SOFTMAX if is_v2 else SIGMOID,
        renormalizes=not is_v2 and bool(raw.get("norm_topk_prob", True)),
        num_groups=read_count(raw, "n_group", 1) if has_groups else 1,
        top_groups=read_count(raw, "topk_group", 1) if has_groups else 1,
        group_score=BEST if is_v2 else TWO_BEST,
        scaling=read_number(raw, "routed_scaling_factor", 1.0),
        has_correction_bias=not is_v2,
        shared_intermediate_size=intermediate * read_count(raw, "n_shared_experts", 0, least=0),
    )


def _read_nemotron(raw: Mapping[str, Any]) -> ExpertsConfig | None:
    sparse_layers = tuple(kind == EXPERTS for kind in raw["layer_types"])
    if not any(sparse_layers):
        return None
    return ExpertsConfig(
        num_experts=read_count(raw, "n_routed_experts"),
        top_k=read_count(raw, "num_experts_per_tok"),
        intermediate_size=read_count(raw, "moe_intermediate_size"),
        sparse_layers=sparse_layers,
        scores=SIGMOID,
        renormalizes=bool(raw.get("norm_topk_prob", True)),
        num_groups=read_count(raw, "n_group", 1),
        top_groups=read_count(raw, "topk_group", 1),
        group_score=TWO_BEST,
        scaling=read_number(raw, "routed_scaling_factor", 1.0),
        has_correction_bias=True,
        shared_intermediate_size=read_count(raw, "moe_shared_expert_intermediate_size"),
        activation=read_activation(raw),
    )


def _deepseek_layers(raw: Mapping[str, Any]) -> tuple[bool, ...]:
    """Returns which layers are sparse, from `mlp_layer_types` if given, else from the first one and every how many."""
    num_layers = read_count(raw, "num_hidden_layers")
    kinds: list[str] | None = raw.get("mlp_layer_types")
    if kinds:
        if len(kinds) != num_layers or not set(kinds) <= {"dense", "sparse"}:
            raise ConfigError(f"mlp_layer_types must say dense or sparse for {num_layers} layers, got {kinds!r}")
        return tuple(kind == "sparse" for kind in kinds)
    # What the configuration classes have where nothing is said.
    num_dense = {"deepseek_v3": 3, "glm4_moe_lite": 1}.get(raw["model_type"], 0)
    first = read_count(raw, "first_k_dense_replace", num_dense, least=0)
    step = read_count(raw, "moe_layer_freq", 1)
    return tuple(layer >= first and layer % step == 0 for layer in range(num_layers))


_READERS: dict[str, Callable[[Mapping[str, Any]], ExpertsConfig | None]] = {
    "qwen3_moe": _read_qwen3,
    "qwen3_5_moe_text": _read_qwen3,
    "qwen3_next": _read_qwen3,
    "mixtral": _read_mixtral,
    "deepseek_v2": _read_deepseek,
    "deepseek_v3": _read_deepseek,
    "gemma4_text": _read_gemma4,
    "glm4_moe_lite": _read_deepseek,
    "gpt_oss": _read_gpt_oss,
    "granitemoehybrid": _read_granite,
    "lfm2_moe": _read_lfm2,
    "nemotron_h": _read_nemotron,
}


def _check(config: ExpertsConfig) -> None:
    experts, top_k, groups, top_groups = config.num_experts, config.top_k, config.num_groups, config.top_groups
    if top_k > experts:
        raise ConfigError(f"num_experts_per_tok={top_k} is more than the {experts} experts of a layer")
    if experts % groups:
        raise ConfigError(f"n_group={groups} does not divide the {experts} experts of a layer")
    if top_groups > groups:
        raise ConfigError(f"topk_group={top_groups} is more than n_group={groups}")
    size = experts // groups
    if top_groups * size < top_k:
        raise ConfigError(
            f"topk_group={top_groups} of n_group={groups} leaves {top_groups * size} experts to choose from, and "
            f"num_experts_per_tok={top_k} asks for more"
        )
    if config.group_score == TWO_BEST and size < _TWO:
        raise ConfigError(f"n_group={groups} leaves one expert in a group, whose score is the sum of its two best")


def _num_experts(raw: Mapping[str, Any]) -> int:
    """Reads the number under the first name that is there: transformers renames it between versions."""
    names = ("num_experts", "num_local_experts", "n_routed_experts")
    return read_count(raw, next((name for name in names if raw.get(name) is not None), names[0]))


def _choice(raw: Mapping[str, Any], name: str, known: tuple[str, ...]) -> str:
    """Returns a field that must be one of `known`, the first one if it is missing."""
    value = raw.get(name)
    value = known[0] if value is None else value
    if value not in known:
        raise ConfigError(f"{name} of a {raw['model_type']} must be {' or '.join(known)}, got {value!r}")
    return value
