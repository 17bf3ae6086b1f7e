"""A gated short convolution in the place of attention, as in LFM2 (Liquid AI 2025, arXiv:2511.23404).

        x -> b, c, x -> b x -> convolution -> c (b x) -> out
                               (state)

What it stores is a state instead of keys and values (`kernels.recurrent`). Its channels, in heads of neighbours, are
divided among the ranks of a group.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from penstock.attention.forward_context import ForwardContext
from penstock.config.model import ModelConfig
from penstock.kernels.short_conv import ShortConv
from penstock.messages.kv_cache_spec import KVCacheSpec
from penstock.models.recurrent import check_ranks, on_states
from penstock.models.weights import Weights


class ShortConvLayer:
    """A rank's channels (`Attention`)."""

    def __init__(self, config: ModelConfig, weights: Weights, layer: int, rotary: torch.Tensor) -> None:
        sizes, share, hidden = config.conv, weights.share, config.hidden_size
        assert sizes is not None, config.model_type
        check_ranks(share, sizes.heads, "heads of channels of the model's convolutions")
        heads = share.part(sizes.heads)
        own = range(heads.start * sizes.width, heads.stop * sizes.width)
        names = ("b", "c", "x")
        self.inputs = weights.linear(
            dict.fromkeys(names, hidden), hidden, own=dict.fromkeys(names, own), stored_as="in_proj"
        )
        name, numbers = "conv.weight", replace(weights, dtype=torch.float32)
        conv = numbers.tensors({name: hidden}, 1, sizes.taps, own={name: own})
        self._convolve = ShortConv(sizes.of(heads), conv.flatten(1))
        self.out = weights.joining_linear("out_proj", hidden, [each * sizes.width for each in share.sizes(sizes.heads)])
        self._name = f"model.layers.{layer}.conv"
        spec = KVCacheSpec.states(len(heads), sizes.head_size, heads.start, sizes.heads, sizes.width)
        self.kv_cache_specs = {self._name: spec}

    def __call__(self, x: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        bcx = self.inputs(x)  # [T, H] -> [T, 3 own channels]
        return self.out(on_states(context, self._name, partial(self._convolve, bcx)))
