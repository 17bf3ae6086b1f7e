"""What the fields of a Nemotron-H mean: each of its layers is an attention, a Mamba2, an MLP or experts alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from penstock.config.recurrent import LINEAR
from penstock.config.rope import FULL
from penstock.utils.errors import ConfigError

NEMOTRON = "nemotron_h"
MLP, EXPERTS = "mlp", "moe"
FEED_FORWARD = (MLP, EXPERTS)
"""The kinds of layers that store nothing."""

_PATTERN = {"M": LINEAR, "*": FULL, "-": MLP, "E": EXPERTS}
_KINDS = {"mamba": LINEAR, "attention": FULL, **{kind: kind for kind in _PATTERN.values()}}


def nemotron_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields that its files have under names of their own: the kinds of all layers are in one list, or each
    is a letter of one word. Raises ConfigError for an unknown kind, and if there is no layer.
    """
    given = next((name for name in ("layers_block_type", "layer_types") if raw.get(name) is not None), None)
    given, known = ("hybrid_override_pattern", _PATTERN) if given is None else (given, _KINDS)
    kinds: Sequence[Any] = raw[given]
    if not isinstance(kinds, list | str) or not kinds:
        raise ConfigError(f"{given} must name the kinds of all layers, got {kinds!r}")
    unknown = next((kind for kind in kinds if not isinstance(kind, str) or kind not in known), None)
    if unknown is not None:
        raise ConfigError(f"{given} of a {NEMOTRON} may name {', '.join(known)}, got {unknown!r}")
    found: dict[str, Any] = {
        "layer_types": [known[kind] for kind in kinds],
        "num_hidden_layers": len(kinds),
        "rms_norm_eps": raw["layer_norm_epsilon"],
    }
    head_dim = raw.get("attention_head_dim")
    return found if head_dim is None else {**found, "head_dim": head_dim}
