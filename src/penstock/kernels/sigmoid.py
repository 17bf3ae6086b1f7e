"""The logistic function of float32 numbers, each independent of its place in memory."""

from __future__ import annotations

import torch


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """Returns 1 / (1 + exp(-x)), as the softmax of x and zero.

    `torch.sigmoid` computes the last few elements of a tensor with another exponential than the others, so that a
    token's last bits depend on its batch; a softmax treats every row alike.
    """
    return torch.stack((x, torch.zeros_like(x)), -1).softmax(-1)[..., 0]
