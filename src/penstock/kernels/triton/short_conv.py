"""The gated short convolution of `penstock.kernels.short_conv`."""

from __future__ import annotations

import torch

from penstock.kernels.recurrent import StateRequests
from penstock.kernels.short_conv import ShortConv
from penstock.kernels.triton.recurrent import convolve_gated, keep_gated_drafts


def short_conv(layer: ShortConv, bcx: torch.Tensor, states: torch.Tensor, requests: StateRequests) -> torch.Tensor:
    """[T, 3 C] -> [T, C]. See `ShortConv`, which has checked the arguments."""
    out = convolve_gated(bcx, layer.channels, layer.conv, states, requests)
    keep_gated_drafts(bcx, requests)
    return out
