"""The fields of recurrent layers, read from `config.json`.

Only this module knows which model types have recurrent layers, and how their fields are named.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from penstock.config.fields import read_count
from penstock.utils.errors import ConfigError

LINEAR = "linear_attention"
"""The name of a recurrent layer in `layer_types`."""

_WITH_DELTA = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
_WITH_CONV = ("lfm2", "lfm2_moe")
_WITH_MAMBA = ("granitemoehybrid", "nemotron_h")
_MOST_CHANNELS = 64  # of a short convolution that are a head


@dataclass(frozen=True, slots=True)
class DeltaSizes:
    """The sizes of a gated delta rule (`kernels.gated_delta`), or of some of its key heads with their value heads."""

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    taps: int

    def of(self, key_heads: range) -> DeltaSizes:
        """Returns the sizes of these key heads and their value heads."""
        return replace(self, key_heads=len(key_heads), value_heads=len(key_heads) * self.group)

    @property
    def group(self) -> int:
        """Value heads of a key head."""
        return self.value_heads // self.key_heads

    @property
    def unit(self) -> int:
        """Channels of a key head: its query, its key and its values."""
        return 2 * self.key_size + self.group * self.value_size

    @property
    def channels(self) -> int:
        return self.key_heads * self.unit

    @property
    def head_size(self) -> int:
        """Numbers of a key head's state."""
        return self.group * self.key_size * self.value_size + (self.taps - 1) * self.unit

    @property
    def draft_inputs(self) -> int:
        """Inputs of a key head that are kept of a token that is a draft."""
        return self.unit + 2 * self.group


@dataclass(frozen=True, slots=True)
class ConvSizes:
    """The sizes of a gated short convolution (`kernels.short_conv`), whose channels are divided into heads."""

    heads: int
    width: int  # channels of a head
    taps: int

    def of(self, heads: range) -> ConvSizes:
        """Returns the sizes of these heads."""
        return replace(self, heads=len(heads))

    @property
    def channels(self) -> int:
        return self.heads * self.width

    @property
    def head_size(self) -> int:
        """Numbers of a head's state."""
        return (self.taps - 1) * self.width


@dataclass(frozen=True, slots=True)
class MambaSizes:
    """The sizes of Mamba2 (`kernels.mamba2`), or of some of its heads: the first is number `offset` of its group."""

    heads: int
    group: int  # heads of a group, which share keys and queries
    size: int  # features of a head
    keys: int
    taps: int
    has_bias: bool = True  # of the convolution
    offset: int = 0

    def of(self, heads: range) -> MambaSizes:
        """Returns the sizes of these heads."""
        return replace(self, heads=len(heads), offset=heads.start % self.group)

    @property
    def groups(self) -> int:
        """How many groups the heads belong to."""
        return -(-(self.offset + self.heads) // self.group)

    @property
    def inner(self) -> int:
        """Features of all heads."""
        return self.heads * self.size

    @property
    def unit(self) -> int:
        """Channels of a head: its values, and its group's keys and queries."""
        return self.size + 2 * self.keys

    @property
    def channels(self) -> int:
        return self.inner + 2 * self.groups * self.keys

    @property
    def head_size(self) -> int:
        """Numbers of a head's state."""
        return self.keys * self.size + (self.taps - 1) * self.unit

    @property
    def draft_inputs(self) -> int:
        """Inputs of a head that are kept of a token that is a draft."""
        return self.unit + 1


def recurrent_kind(raw: Mapping[str, Any]) -> str | None:
    """Returns what the model type's `layer_types` call a recurrent layer; None if it has none."""
    if raw["model_type"] in _WITH_CONV:
        return "conv"
    return LINEAR if raw["model_type"] in (*_WITH_DELTA, *_WITH_MAMBA) else None


def recurrent_layer_types(raw: Mapping[str, Any], num_layers: int, attention: str) -> tuple[str, ...]:
    """Returns the kinds of layers of a model that does not name them: those listed or every so many have attention."""
    if raw["model_type"] in _WITH_MAMBA:
        return (LINEAR,) * num_layers
    if raw["model_type"] in _WITH_CONV:
        listed = raw.get("full_attn_idxs")
        return tuple(attention if listed is None or layer in listed else LINEAR for layer in range(num_layers))
    interval = read_count(raw, "full_attention_interval", 4)
    return tuple(LINEAR if (layer + 1) % interval else attention for layer in range(num_layers))


def read_delta(raw: Mapping[str, Any]) -> DeltaSizes | None:
    """Reads the contents of a `config.json`; None if the model type has no gated delta rule. Raises ConfigError for
    impossible numbers.
    """
    if raw["model_type"] not in _WITH_DELTA:
        return None
    sizes = DeltaSizes(
        key_heads=read_count(raw, "linear_num_key_heads", 16),
        value_heads=read_count(raw, "linear_num_value_heads", 32),
        key_size=read_count(raw, "linear_key_head_dim", 128),
        value_size=read_count(raw, "linear_value_head_dim", 128),
        taps=read_count(raw, "linear_conv_kernel_dim", 4),
    )
    if sizes.value_heads % sizes.key_heads:
        raise ConfigError(
            f"linear_num_value_heads ({sizes.value_heads}) is not a multiple of "
            f"linear_num_key_heads ({sizes.key_heads})"
        )
    return sizes


def read_conv(raw: Mapping[str, Any]) -> ConvSizes | None:
    """Reads the contents of a `config.json`; None if the model type has no short convolutions. Raises ConfigError for
    impossible numbers.
    """
    if raw["model_type"] not in _WITH_CONV:
        return None
    hidden = read_count(raw, "hidden_size")
    width = math.gcd(hidden, _MOST_CHANNELS)
    return ConvSizes(hidden // width, width, read_count(raw, "conv_L_cache", 3, least=2))


def read_mamba(raw: Mapping[str, Any]) -> MambaSizes | None:
    """Reads the contents of a `config.json`; None if the model type has no Mamba2 layers. Raises ConfigError for
    impossible numbers.
    """
    if raw["model_type"] not in _WITH_MAMBA:
        return None
    if raw["model_type"] == "nemotron_h":
        return _nemotron_mamba(raw)
    heads, groups = read_count(raw, "mamba_n_heads", 128), read_count(raw, "mamba_n_groups", 1)
    inner = read_count(raw, "mamba_expand", 2) * read_count(raw, "hidden_size")
    size = inner // heads if raw.get("mamba_d_head") in (None, "auto") else read_count(raw, "mamba_d_head")
    if size * heads != inner:
        raise ConfigError(
            f"mamba_n_heads ({heads}) times mamba_d_head ({size}) is not mamba_expand times hidden_size ({inner})"
        )
    if heads % groups:
        raise ConfigError(f"mamba_n_heads ({heads}) is not a multiple of mamba_n_groups ({groups})")
    keys, taps = read_count(raw, "mamba_d_state", 256), read_count(raw, "mamba_d_conv", 4, least=2)
    has_bias = raw.get("mamba_conv_bias") is not False
    return MambaSizes(heads, heads // groups, size, keys, taps, has_bias)


def _nemotron_mamba(raw: Mapping[str, Any]) -> MambaSizes:
    heads, groups = read_count(raw, "mamba_num_heads", 128), read_count(raw, "n_groups", 8)
    if heads % groups:
        raise ConfigError(f"mamba_num_heads ({heads}) is not a multiple of n_groups ({groups})")
    size, keys = read_count(raw, "mamba_head_dim", 64), read_count(raw, "ssm_state_size", 128)
    has_bias = raw.get("use_conv_bias") is not False
    return MambaSizes(heads, heads // groups, size, keys, read_count(raw, "conv_kernel", 4, least=2), has_bias)
