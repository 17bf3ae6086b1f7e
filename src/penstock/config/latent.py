"""The sizes of multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1), read from `config.json`.

A checkpoint has it if `kv_lora_rank` is given, whatever its model type is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.utils.errors import ConfigError

_STEP = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig:
    """A token's latent has `rank` numbers, from which all heads' keys and values are made, and a rotated key part.

    `query_rank` is 0 if queries are made of the hidden state directly. A query or key of one head has `plain_size`
    numbers without and `rotary_size` with rotation. `has_rotary_pairs`: the checkpoint's rotated pairs are neighbours.
    """

    query_rank: int
    rank: int
    plain_size: int
    rotary_size: int
    value_size: int
    has_rotary_pairs: bool
    scale: float

    @property
    def stored_size(self) -> int:
        """Numbers that the cache keeps for a token: the rotated key part, then the latent."""
        return self.rotary_size + self.rank

    @property
    def expanded_size(self) -> int:
        """Numbers of one head that `kv_b_proj` makes of a latent: the key's part without rotation, then the value."""
        return self.plain_size + self.value_size


def read_latent(raw: Mapping[str, Any], rope: Mapping[str, Any]) -> LatentConfig | None:
    """Reads the contents of a `config.json` and its rope parameters; None if it has no latent attention.

    Raises ConfigError for sizes that cannot be served.
    """
    if raw.get("kv_lora_rank") is None:
        return None
    plain, rotary = _size(raw, "qk_nope_head_dim"), _size(raw, "qk_rope_head_dim")
    return LatentConfig(
        query_rank=0 if raw.get("q_lora_rank") is None else _size(raw, "q_lora_rank"),
        rank=_size(raw, "kv_lora_rank"),
        plain_size=plain,
        rotary_size=rotary,
        value_size=_size(raw, "v_head_dim"),
        has_rotary_pairs=bool(raw.get("rope_interleave", True)),
        scale=(plain + rotary) ** -0.5 * _yarn_factor(rope) ** 2,
    )


def _yarn_factor(rope: Mapping[str, Any]) -> float:
    """YaRN's factor of queries and of keys, where `mscale_all_dim` asks for it in all dimensions (`layers.rotary`)."""
    extended = rope.get("rope_type", rope.get("type", "default")) != "default"
    return yarn_amplitude(rope["factor"], rope["mscale_all_dim"]) if extended and rope.get("mscale_all_dim") else 1.0


def yarn_amplitude(factor: float, multiplier: float = 1.0) -> float:
    """The factor of YaRN's section 3.4 (arXiv:2309.00071), with DeepSeek's `mscale` as the multiplier."""
    return 0.1 * multiplier * math.log(factor) + 1.0 if factor > 1 else 1.0


def _size(raw: Mapping[str, Any], name: str) -> int:
    value = raw.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < _STEP or value % _STEP:
        raise ConfigError(f"{name} must be a positive multiple of {_STEP}, got {value!r}")
    return value
