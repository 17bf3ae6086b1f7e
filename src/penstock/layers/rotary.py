"""Rotary position embeddings (Su et al. 2021, arXiv:2104.09864) and the methods by which checkpoints extend them.

The angles are computed as transformers' `modeling_rope_utils` defines them, in float32. An error in the table would
affect every token of the process, so every table is checked before it is used (`rotary_check`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from penstock.config.latent import yarn_amplitude
from penstock.config.rope import LONGROPE, PROPORTIONAL, RopeConfig
from penstock.layers.rotary_check import check_frequencies, check_table
from penstock.utils.errors import ConfigError

# Angles whose cos and sin are computed in one call. Torch's vector library divides longer calls among threads; with
# this size the table is the same for any number of threads.
_BLOCK_ANGLES = 2048


class RotaryTables:
    """The tables of a model's layers; layers with equal rotations share one."""

    def __init__(self, num_positions: int, device: torch.device) -> None:
        self._num_positions, self._device = num_positions, device
        self._made: list[tuple[RopeConfig | None, int, torch.Tensor]] = []

    def table(self, rope: RopeConfig | None, num_rotated: int) -> torch.Tensor:
        """Returns the table of `rotary_table`; without a rotation it has the width 0. Raises ConfigError like it."""
        for known, width, table in self._made:
            if (known, width) == (rope, num_rotated):
                return table
        table = torch.empty((self._num_positions, 0))
        if rope is not None:
            table = rotary_table(rope, num_rotated, self._num_positions)
        self._made.append((rope, num_rotated, table.to(self._device)))
        return self._made[-1][-1]


def rotary_table(rope: RopeConfig, head_dim: int, num_positions: int) -> torch.Tensor:
    """Returns [num_positions, head_dim] float32: the first half holds cos, the second half sin of every angle.

    Raises ConfigError for an unsupported rope type, and for a table that fails its check.
    """
    scale = _SCALINGS.get(rope.rope_type)
    if scale is None:
        raise ConfigError(f"rope type {rope.rope_type!r} is not supported; supported: {', '.join(_SCALINGS)}")
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    by_math = torch.tensor([rope.theta ** (-2 * i / head_dim) for i in range(len(exponents))])
    try:
        inv_freq, amplitude = scale(1.0 / rope.theta**exponents, rope, head_dim)
        expected, _ = scale(by_math, rope, head_dim)
    except KeyError as error:
        raise ConfigError(f"rope type {rope.rope_type!r} lacks its parameter {error.args[0]!r}") from None
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(f"rope type {rope.rope_type!r} cannot use its parameters: {error}") from None
    check_frequencies(inv_freq, expected)
    positions = torch.arange(num_positions, dtype=torch.float32)
    table = _rows(positions, inv_freq, amplitude)
    blocks = positions.split(_block_rows(inv_freq))
    check_table(
        table, inv_freq, amplitude, _block_rows(inv_freq), lambda number: _rows(blocks[number], inv_freq, amplitude)
    )
    return table


def _block_rows(inv_freq: torch.Tensor) -> int:
    return max(1, _BLOCK_ANGLES // len(inv_freq))


def _rows(positions: torch.Tensor, inv_freq: torch.Tensor, amplitude: float) -> torch.Tensor:
    """Returns the table's rows for these positions."""
    blocks = (positions[:, None] * inv_freq).split(_block_rows(inv_freq))
    cos, sin = torch.cat([each.cos() for each in blocks]), torch.cat([each.sin() for each in blocks])
    return torch.cat((cos * amplitude, sin * amplitude), dim=-1)


def _default(inv_freq: torch.Tensor, rope: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    return inv_freq, 1.0


def _linear(inv_freq: torch.Tensor, rope: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    return inv_freq / rope.scaling["factor"], 1.0


def _llama3(inv_freq: torch.Tensor, rope: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """Llama 3.1: long wavelengths are divided by `factor`, short ones kept, those between interpolated."""
    p: Mapping[str, Any] = rope.scaling
    context = p["original_max_position_embeddings"]
    wavelength = 2 * math.pi / inv_freq
    smooth = (context / wavelength - p["low_freq_factor"]) / (p["high_freq_factor"] - p["low_freq_factor"])
    between = (1 - smooth) * inv_freq / p["factor"] + smooth * inv_freq
    scaled = torch.where(wavelength > context / p["low_freq_factor"], inv_freq / p["factor"], inv_freq)
    is_between = (wavelength <= context / p["low_freq_factor"]) & (wavelength >= context / p["high_freq_factor"])
    return torch.where(is_between, between, scaled), 1.0


def _yarn(inv_freq: torch.Tensor, rope: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """YaRN (Peng et al. 2023, arXiv:2309.00071): interpolates low frequencies, keeps high ones, scales attention."""
    p: Mapping[str, Any] = rope.scaling
    factor, context = p["factor"], p["original_max_position_embeddings"]

    def dimension(rotations: float) -> float:
        return head_dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(p.get("beta_fast") or 32), dimension(p.get("beta_slow") or 1)
    if p.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)).clamp(0, 1)
    amplitude, has_both = p.get("attention_factor"), p.get("mscale") and p.get("mscale_all_dim")
    if amplitude is None:
        amplitude = yarn_amplitude(factor, p["mscale"] if has_both else 1.0)
        amplitude /= yarn_amplitude(factor, p["mscale_all_dim"]) if has_both else 1.0
        amplitude *= p.get("attn_factor") or 1.0  # as vLLM
    return inv_freq / factor * ramp + inv_freq * (1 - ramp), float(amplitude)


def _longrope(inv_freq: torch.Tensor, rope: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """LongRoPE (Ding et al. 2024, arXiv:2402.13753): each frequency has a factor, of one of two sets."""
    factors = torch.tensor(rope.scaling["long_factor" if rope.has_long_factors else "short_factor"])
    if factors.shape != inv_freq.shape:
        raise ValueError(f"{len(factors)} factors for {len(inv_freq)} frequencies")
    return inv_freq / factors, float(rope.scaling["attention_factor"])


def _proportional(inv_freq: torch.Tensor, rope: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """Gemma 4: a part of the frequencies, the highest, rotates; the angles of all other pairs are zero."""
    num_rotated = int(rope.scaling.get("partial_rotary_factor", 1.0) * head_dim // 2)
    kept = torch.arange(len(inv_freq)) < num_rotated
    return (inv_freq / rope.scaling.get("factor", 1.0)).where(kept, 0.0), 1.0


_Scaling = Callable[[torch.Tensor, RopeConfig, int], tuple[torch.Tensor, float]]
_SCALINGS: dict[str, _Scaling] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    LONGROPE: _longrope,
    PROPORTIONAL: _proportional,
}
