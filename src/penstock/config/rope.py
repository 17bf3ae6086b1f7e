"""Which rotary embedding each layer has, read from `config.json`.

Three spellings are accepted: one `rope_parameters`, or `rope_scaling` with `rope_theta`, for all layers; one
`rope_parameters` for each kind of layer (`layer_types`); and a base for layers with a window (`rope_local_base_freq` of
Gemma 3, `local_rope_theta` of ModernBERT).
Only this module knows which model types rotate no keys in some layers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from penstock.config.fields import read_number
from penstock.utils.errors import ConfigError

FULL, SLIDING = "full_attention", "sliding_attention"
LONGROPE = "longrope"
# Rotates a part of the dimensions, but in pairs over the whole head.
PROPORTIONAL = "proportional"
# Other names of the same rules. With text alone, all three coordinates of a multimodal position are equal.
_ALIASES = {"su": LONGROPE, "mrope": "default"}
# In these, layers without a window have no rotation if others have a window.
_UNROTATED_FULL = ("cohere2", "exaone4")
_PARTIAL = ("glm4", "phi3", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: the base and, if the checkpoint extends its context, how.

    `scaling` holds the checkpoint's own parameters; `rope_type` names the rule ("default", "linear", "llama3", "yarn",
    "longrope", "proportional"). A "longrope" has two sets of factors: `for_length` adds to its parameters which of them
    is used.
    """

    theta: float
    rope_type: str
    scaling: Mapping[str, Any]

    def for_length(self, max_model_len: int) -> RopeConfig:
        """Returns the rotation of an engine with this longest context. All its tokens have one set of factors: if the
        set changed with the length of a sequence, cached keys would not be those of a longer one.
        """
        if self.rope_type != LONGROPE:
            return self
        is_long = max_model_len > self.scaling["original_max_position_embeddings"]
        return replace(self, scaling={**self.scaling, "is_long": is_long})

    @property
    def num_positions(self) -> int:
        """The context length that YaRN extends to; 0 for other rules, which do not state one."""
        given: Mapping[str, Any] = self.scaling if self.rope_type == "yarn" else {}
        return min(2**31 - 1, int(given.get("factor", 0) * given.get("original_max_position_embeddings", 0)))

    @property
    def has_long_factors(self) -> bool:
        return bool(self.scaling.get("is_long"))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRopes:
    rope: RopeConfig
    window_rope: RopeConfig | None  # of layers with a window, if it is another one
    unrotated_layers: tuple[int, ...]
    rotary_factor: float  # which part of a head is rotated


def read_ropes(raw: Mapping[str, Any], layer_types: tuple[str, ...]) -> LayerRopes:
    """Raises ConfigError for a partial rotation that the model type does not have."""
    given: dict[str, Any] = dict(raw.get("rope_parameters") or raw.get("rope_scaling") or {})
    if raw.get("rope_scaling") and not any(isinstance(each, dict) for each in given.values()):
        # The older field may have been added by hand to extend the context: it lacks what is not of its rule.
        given = {**{name: given.get(name) for name in ("rope_theta", "partial_rotary_factor")}, **raw["rope_scaling"]}
    by_type = {kind: dict(given[kind]) for kind in (FULL, SLIDING) if isinstance(given.get(kind), dict)}
    full = by_type.get(FULL, {} if by_type else given)
    window = None
    local = raw.get("rope_local_base_freq") or raw.get("local_rope_theta")
    if by_type:
        window = _rope(raw, {"rope_theta": local, **by_type.get(SLIDING, {})})
    elif local:
        window = _rope(raw, {"rope_theta": local})
    elif raw["model_type"] == "olmo3" and given:
        # Before `rope_parameters` had kinds, OLMo 3 extended the context of its full layers alone.
        window = _rope(raw, {"rope_theta": given.get("rope_theta")})
    rope = _rope(raw, full)
    factor = float(full.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0)
    if rope.rope_type == PROPORTIONAL:
        factor = 1.0
    if factor != 1.0 and raw["model_type"] not in _PARTIAL:
        raise ConfigError(f"partial_rotary_factor must be 1.0 for a {raw['model_type']}, got {factor}")
    return LayerRopes(
        rope=rope,
        window_rope=None if window == rope else window,
        unrotated_layers=_unrotated(raw, layer_types),
        rotary_factor=factor,
    )


def _rope(raw: Mapping[str, Any], parameters: dict[str, Any]) -> RopeConfig:
    theta = parameters.get("rope_theta") or raw.get("rope_theta") or raw.get("global_rope_theta") or 10000.0
    named = parameters.get("rope_type") or parameters.get("type") or "default"
    rope_type = LONGROPE if "long_factor" in parameters else _ALIASES.get(named, named)
    if rope_type == LONGROPE:
        parameters = _longrope(raw, parameters)
    return RopeConfig(theta=read_number({"rope_theta": theta}, "rope_theta"), rope_type=rope_type, scaling=parameters)


def _longrope(raw: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Adds the original context and the factor of cosines and sines (LongRoPE, arXiv:2402.13753, as transformers)."""
    longest = raw["max_position_embeddings"]
    # Phi-3 has the original context beside its rope parameters.
    original = given.get("original_max_position_embeddings") or raw.get("original_max_position_embeddings") or longest
    factor, amplitude = given.get("factor") or longest / original, given.get("attention_factor")
    if amplitude is None:
        amplitude = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    added = {"original_max_position_embeddings": original, "attention_factor": amplitude}
    return {**given, **added, "is_long": longest > original}


def smollm3_unrotated(raw: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Returns the layers of a SmolLM3 without rotation, which are also those with a window if there is one."""
    interval = raw["no_rope_layer_interval"]
    rotates: list[int] = raw.get("no_rope_layers") or [(layer + 1) % interval for layer in range(num_layers)]
    if len(rotates) < num_layers:
        raise ConfigError(f"no_rope_layers has {len(rotates)} layers of {num_layers}")
    return tuple(layer for layer, is_rotated in enumerate(rotates[:num_layers]) if not is_rotated)


def _unrotated(raw: Mapping[str, Any], layer_types: tuple[str, ...]) -> tuple[int, ...]:
    model_type = raw["model_type"]
    if model_type == "nemotron_h":
        return tuple(range(len(layer_types)))
    if model_type == "granitemoehybrid":
        return () if raw.get("position_embedding_type") == "rope" else tuple(range(len(layer_types)))
    if model_type == "smollm3":
        return smollm3_unrotated(raw, len(layer_types))
    if model_type not in _UNROTATED_FULL or (model_type == "exaone4" and not raw.get("sliding_window")):
        return ()
    return tuple(layer for layer, kind in enumerate(layer_types) if kind == FULL)
