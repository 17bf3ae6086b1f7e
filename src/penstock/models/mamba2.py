"""Mamba2 (Dao and Gu 2024, arXiv:2405.21060) in the place of attention, as in Granite 4.

        x -> values, keys, queries -> convolution, silu -> state space -> times silu(z) -> norm -> out
        x -> z, dt                                         (state)

What it stores is a state instead of keys and values (`kernels.recurrent`). Heads, each with its part of the state, are
divided among the ranks of a group, which compute the keys and queries of a group of heads more than once if they share
it. The norm is of the heads of all ranks.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from penstock.attention.forward_context import ForwardContext
from penstock.config.model import ModelConfig
from penstock.config.recurrent import MambaSizes
from penstock.kernels.mamba2 import Mamba2, MambaWeights
from penstock.kernels.rms_norm import rms_norm
from penstock.layers.linear import Gather
from penstock.messages.kv_cache_spec import KVCacheSpec
from penstock.models.recurrent import check_ranks, on_states
from penstock.models.weights import Weights


class Mamba2Layer:
    """A rank's heads (`Attention`)."""

    def __init__(self, config: ModelConfig, weights: Weights, layer: int, rotary: torch.Tensor) -> None:
        sizes, share = config.mamba, weights.share
        assert sizes is not None, config.model_type
        check_ranks(share, sizes.heads, "heads of the model's recurrent layers")
        heads = share.part(sizes.heads)
        own = range(heads.start * sizes.size, heads.stop * sizes.size)
        groups = range(heads.start // sizes.group, -(-heads.stop // sizes.group))
        keys = range(groups.start * sizes.keys, groups.stop * sizes.keys)
        rows = {"z": sizes.inner, "x": sizes.inner, "B": sizes.groups * sizes.keys, "C": sizes.groups * sizes.keys}
        parts = {"z": own, "x": own, "B": keys, "C": keys, "dt": heads}
        self.inputs = weights.linear({**rows, "dt": sizes.heads}, config.hidden_size, own=parts, stored_as="in_proj")
        self._run = Mamba2(sizes.of(heads), _read(sizes, weights, heads, (own, keys)))
        self._norm = weights.tensor("norm.weight", sizes.inner)
        self._group_norm = torch.ones(sizes.inner // sizes.groups, device=weights.device)
        self._eps, self._own = config.rms_norm_eps, slice(own.start, own.stop)
        widths = [each * sizes.size for each in share.sizes(sizes.heads)]
        self._gather = Gather(weights.group, widths)
        self.out = weights.joining_linear("out_proj", config.hidden_size, widths)
        self._name = f"model.layers.{layer}.mamba"
        spec = KVCacheSpec.states(len(heads), sizes.head_size, heads.start, sizes.heads, sizes.draft_inputs)
        self.kv_cache_specs = {self._name: spec}

    def __call__(self, x: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        given = self.inputs(x)  # [T, H] -> [T, 2 own features + keys and queries + own heads]
        gated = on_states(context, self._name, partial(self._run, given))  # [T, own features] float32
        whole = self._gather(gated)
        normed = rms_norm(whole.view(-1, len(self._group_norm)), self._group_norm, self._eps).view_as(whole)
        return self.out((normed.to(x.dtype) * self._norm)[:, self._own].contiguous())


def _read(sizes: MambaSizes, weights: Weights, heads: range, features: tuple[range, range]) -> MambaWeights:
    """Reads what belongs to these heads; `features` are those of their values, and of their groups' keys."""
    numbers, (own, keys) = replace(weights, dtype=torch.float32), features
    first = (sizes.inner, sizes.inner + sizes.groups * sizes.keys)
    channels = [own, *(range(start + keys.start, start + keys.stop) for start in first)]

    def of_channels(name: str, *width: int) -> torch.Tensor:
        return torch.cat([numbers.tensors({name: sizes.channels}, *width, own={name: part}) for part in channels])

    conv = of_channels("conv1d.weight", 1, sizes.taps).flatten(1)
    a_log, dt_bias, skip = (
        numbers.tensors({name: sizes.heads}, own={name: heads}) for name in ("A_log", "dt_bias", "D")
    )
    bias = of_channels("conv1d.bias") if sizes.has_bias else conv.new_zeros(len(conv))
    return MambaWeights(conv, bias, a_log, dt_bias, skip)
