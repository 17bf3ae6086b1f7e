"""An EAGLE-3 head's `config.json`: the shape of its layer, and its inputs from the target.

Two layouts are supported: that of the paper's checkpoints, with all fields at the top level, and that of `speculators`,
with the layer's shape in `transformer_layer_config`. In the former the layer ids may be inside `eagle_config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.config.model import ModelConfig, parse_model_config, read_json, read_model_json
from penstock.config.options import read_object
from penstock.utils.errors import ConfigError

_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_NESTED = "transformer_layer_config"
# Options of later layouts that add norms, which these weights do not have.
_VARIANTS = ("norm_before_fc", "fc_norm", "norm_output")


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config:
    """`shape` is that of the head's one layer, with the target's vocabulary, dtype and number of positions.

    `aux_layers` are the target's layers, ascending, at whose inputs its residual stream is read; the target's number of
    layers means the output of the last.
    """

    shape: ModelConfig
    aux_layers: tuple[int, ...]
    target_hidden_size: int
    draft_vocab_size: int
    norm_before_residual: bool


def is_eagle3(path: Path) -> bool:
    """Returns whether the folder's config.json names an EAGLE-3 head. Raises ConfigError if it is not JSON."""
    raw = read_json(path / "config.json") or {}
    return "eagle3" in f"{raw.get('architectures')} {raw.get('speculators_model_type')}".lower()


def load_eagle3_config(path: Path, target: ModelConfig) -> Eagle3Config:
    """Reads `path/config.json`. Raises ConfigError naming the field that is invalid, or does not fit the target."""
    raw = read_model_json(path)
    file = path / "config.json"
    of_layer = read_object(f"{file}: {_NESTED}", raw.get(_NESTED) or raw)
    shape = parse_model_config(path, dict(of_layer), target.dtype).with_kv_cache(target.kv_cache_dtype)
    for name in _VARIANTS:
        if raw.get(name):
            raise ConfigError(f"{file} sets {name}, which is not supported")
    if shape.model_type != "llama" or shape.num_hidden_layers != 1:
        raise ConfigError(
            f"{file} describes {shape.num_hidden_layers} layers of model_type {shape.model_type!r}; an EAGLE-3 head "
            "has num_hidden_layers 1 and model_type 'llama'"
        )
    read_size = raw.get("target_hidden_size") or shape.hidden_size
    for name, its, wanted in (
        ("vocab_size", shape.vocab_size, target.vocab_size),
        ("target_hidden_size", read_size, target.hidden_size),
    ):
        if its != wanted:
            raise ConfigError(f"{file} has {name} {its!r} and the target model {wanted}: the head is another model's")
    draft_vocab_size = raw.get("draft_vocab_size") or shape.vocab_size
    if not isinstance(draft_vocab_size, int) or not 1 <= draft_vocab_size <= shape.vocab_size:
        raise ConfigError(f"{file}: draft_vocab_size must be 1 to {shape.vocab_size}, got {draft_vocab_size!r}")
    return Eagle3Config(
        shape=replace(shape, max_position_embeddings=target.max_position_embeddings),
        aux_layers=_parse_layer_ids(file, raw, target.num_hidden_layers),
        target_hidden_size=target.hidden_size,
        draft_vocab_size=draft_vocab_size,
        # The defaults of the two layouts.
        norm_before_residual=bool(raw.get("norm_before_residual", _NESTED in raw)),
    )


def _parse_layer_ids(file: Path, raw: Mapping[str, Any], num_layers: int) -> tuple[int, ...]:
    """Returns the named layers, by default the paper's choice of an early, a middle and a late one."""
    inner: Mapping[str, Any] = raw["eagle_config"] if isinstance(raw.get("eagle_config"), dict) else {}
    named: Any = raw.get(_LAYER_IDS) or inner.get(_LAYER_IDS)
    ids: Any = named or [2, num_layers // 2, num_layers - 3]
    found = [i for i in range(num_layers + 1) if isinstance(ids, list) and i in ids]
    if not isinstance(ids, list) or len(found) != len(ids):  # pyright: ignore[reportUnknownArgumentType]
        source = "has" if named else "does not say which layers it reads, and the usual choice is"
        raise ConfigError(
            f"{file} {source} {_LAYER_IDS} {ids!r}; it must list different layers from 0 to {num_layers}, the target "
            "model's number of layers"
        )
    return tuple(found)
