"""What the layers of one model have of different kinds or sizes, read from `config.json` (Gemma 4)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.config.fields import read_count
from penstock.config.rope import FULL
from penstock.utils.errors import ConfigError

GEMMA4 = ("gemma4_text", "gemma4_unified_text")


@dataclass(frozen=True, slots=True)
class KVHeads:
    """The heads of keys and values of a layer; its query heads have the same size."""

    count: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PerLayerInputs:
    """Every layer adds a function of the token itself: a vector of `size` from a table of `vocab_size` tokens."""

    size: int
    vocab_size: int


def read_full_heads(raw: Mapping[str, Any], layer_types: tuple[str, ...], others: KVHeads) -> KVHeads | None:
    """Returns the heads of layers without a window if they differ from those of the `others`.

    They are in fields of their own, or for each layer in `per_layer_config`, as transformers writes them since version
    5. Raises ConfigError if layers of one kind differ, or cannot divide the query heads among them.
    """
    if raw["model_type"] not in GEMMA4:
        return None
    given: Mapping[Any, dict[str, Any]] | None = raw.get("per_layer_config")
    if given is None:
        fields = {"head_dim": read_count(raw, "global_head_dim", 512)}
        if raw["attention_k_eq_v"] and raw.get("num_global_key_value_heads") is not None:
            fields["num_key_value_heads"] = raw["num_global_key_value_heads"]
        given = {layer: fields for layer, kind in enumerate(layer_types) if kind == FULL}
    # transformers pads the numbers of layers with zeros.
    by_layer = {int(layer): fields for layer, fields in given.items()}
    by_kind: dict[str, set[KVHeads]] = {}
    for layer, kind in enumerate(layer_types):
        fields = by_layer.get(layer, {})
        unknown = sorted(fields.keys() - {"head_dim", "num_key_value_heads"})
        if unknown:
            raise ConfigError(f"per_layer_config: layer {layer} has {', '.join(unknown)}, which Penstock does not read")
        heads = KVHeads(
            read_count(fields, "num_key_value_heads", others.count), read_count(fields, "head_dim", others.size)
        )
        by_kind.setdefault(kind, set()).add(heads)
    for kind, found in by_kind.items():
        if len(found) > 1 or (kind != FULL and found != {others}):
            raise ConfigError(f"per_layer_config gives layers of the kind {kind} different heads: use another model")
    (full,) = by_kind.get(FULL, {others})
    num_heads = read_count(raw, "num_attention_heads")
    if num_heads % full.count:
        raise ConfigError(
            f"num_attention_heads ({num_heads}) is not a multiple of the {full.count} heads of keys and values in "
            "layers without a window"
        )
    return None if full == others else full


def read_kv_sources(raw: Mapping[str, Any], layer_types: tuple[str, ...]) -> tuple[int, ...]:
    """Returns the layer whose keys and values each layer reads; nothing if each has its own.

    The last `num_kv_shared_layers` read those of the last other layer of their kind. Raises ConfigError if there is
    none.
    """
    num_shared = read_count(raw, "num_kv_shared_layers", 0, least=0) if raw["model_type"] in GEMMA4 else 0
    if not num_shared:
        return ()
    num_own = len(layer_types) - num_shared
    last = {kind: layer for layer, kind in enumerate(layer_types[: max(0, num_own)])}
    missing = set(layer_types) - last.keys()
    if missing:
        raise ConfigError(
            f"num_kv_shared_layers={num_shared} of {len(layer_types)} layers leaves no layer of the kind "
            f"{min(missing)} whose keys and values the others could read"
        )
    return tuple(layer if layer < num_own else last[kind] for layer, kind in enumerate(layer_types))


def read_per_layer_inputs(raw: Mapping[str, Any]) -> PerLayerInputs | None:
    size = read_count(raw, "hidden_size_per_layer_input", 0, least=0) if raw["model_type"] == "gemma4_text" else 0
    return PerLayerInputs(size=size, vocab_size=read_count(raw, "vocab_size_per_layer_input")) if size else None
